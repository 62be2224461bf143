"""What Appendix G of ThunderSyncRL measures of replayed updates: first directions and parameter gaps, in float32 and bfloat16."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Callable, Iterator, Sequence

import jax
import numpy as np

from experiments import replayed_updates, wiring
from ts_jax import types
from ts_jax.streaming import scheduler

STREAMED = tuple(g for g in scheduler.GRANULARITIES if g != 'batch')
_COORDINATES = 3000


@dataclasses.dataclass
class Errors:
  """Figures of one objective.

  Attributes:
    float32, cosine: by granularity, relative error and 1 - cosine of the first float32 direction g_0 against Sync's.
    gap: by granularity, Equation 30 after each update in float32.
    bfloat16: by granularity (Sync's is 'batch'), relative error of the first bfloat16 direction against Sync's in float32.
    bfloat16_gap: streamed against Sync, both bfloat16, after each update.
    precision_gap: Sync in bfloat16 against Sync in float32, after each update.
    samples: coordinates of g_0, drawn with a chance proportional to their size: 'sync', 'streamed', 'sync_bfloat16',
      'streamed_bfloat16', each [coordinates].
  """

  float32: dict[str, float] = dataclasses.field(default_factory=dict)
  cosine: dict[str, float] = dataclasses.field(default_factory=dict)
  gap: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  bfloat16: dict[str, float] = dataclasses.field(default_factory=dict)
  bfloat16_gap: list[float] = dataclasses.field(default_factory=list)
  precision_gap: list[float] = dataclasses.field(default_factory=list)
  samples: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def count(batches: Sequence[types.LogicalBatch]) -> int:
  """Updates that `measure` runs."""
  return (1 + len(STREAMED) + 2) * len(batches) + len(STREAMED) - 1


def measure(config, student: wiring.Student, batches: Sequence[types.LogicalBatch], folder: pathlib.Path,
            advance: Callable[[], None] = lambda: None) -> Errors:
  """Replays all batches under Sync and every streamed granularity in float32, under Sync and the config's granularity in bfloat16.

  Args:
    config: the run's; its granularity is the one of the figure, others give g_0 alone in bfloat16.
    student: theta_0.
    batches: recorded, see `replayed_updates.recorded_batches`.
    folder: where parameters of all updates have room for a while (4 bytes a parameter and update).
    advance: told of each update done.
  """
  first = jax.device_get(student.params())
  measurement = _Measurement(config, student, batches, advance, first, replayed_updates.History(folder, len(batches), first))
  measurement.float32()
  measurement.bfloat16()
  return measurement.errors


@dataclasses.dataclass
class _Measurement:
  """Replays one schedule after another.

  Attributes:
    first: theta_0.
    history: Sync's parameters after each update, in the precision that is replayed.
    moved: how far Sync had moved the parameters after each update.
    direction: Sync's float32 g_0, and `size` its norm.
  """

  config: Any
  student: wiring.Student
  batches: Sequence[types.LogicalBatch]
  advance: Callable[[], None]
  first: Any
  history: replayed_updates.History
  errors: Errors = dataclasses.field(default_factory=Errors)
  moved: list[float] = dataclasses.field(default_factory=list)
  direction: Any = None
  size: float = 0.0

  def float32(self) -> None:
    """Sync, then each streamed granularity against it."""
    for k, step in self._steps('batch', 'float32'):
      self._keep(k, step)
      if k == 0:
        self.direction, self.size = jax.device_get(step.direction), replayed_updates.norm(step.direction)
        self._sample = _Sample(self.direction)
        self.errors.samples['sync'] = self._sample.of(self.direction)
    for granularity in STREAMED:
      gaps = self.errors.gap[granularity] = []
      for k, step in self._steps(granularity, 'float32'):
        gaps.append(self._gap(k, step))
        if k == 0:
          self.errors.float32[granularity] = self._error(step)
          self.errors.cosine[granularity] = one_minus_cosine(step.direction, self.direction)
          if granularity == self._chosen:
            self.errors.samples['streamed'] = self._sample.of(step.direction)

  def bfloat16(self) -> None:
    """Sync against Sync in float32, whose place in the history it takes; then streamed granularities against it."""
    moved_float32, self.moved = self.moved, []
    for k, step in self._steps('batch', 'bfloat16'):
      self.errors.precision_gap.append(replayed_updates.parameter_gap(step.params, self.history.read(k), moved_float32[k]))
      self._keep(k, step)
      if k == 0:
        self.errors.bfloat16['batch'] = self._error(step)
        self.errors.samples['sync_bfloat16'] = self._sample.of(step.direction)
    for granularity in STREAMED:
      chosen = granularity == self._chosen
      for k, step in self._steps(granularity, 'bfloat16', len(self.batches) if chosen else 1):
        if chosen:
          self.errors.bfloat16_gap.append(self._gap(k, step))
        if k == 0:
          self.errors.bfloat16[granularity] = self._error(step)
          if chosen:
            self.errors.samples['streamed_bfloat16'] = self._sample.of(step.direction)

  @property
  def _chosen(self) -> str:
    return self.config.schedule.granularity

  def _steps(self, granularity: str, dtype: str, updates: int | None = None) -> Iterator[tuple[int, replayed_updates.Step]]:
    replay = replayed_updates.Replay(replayed_updates.under(self.config, granularity, dtype=dtype), self.student, self.batches)
    for k, step in enumerate(replay.steps(updates or len(self.batches))):
      yield k, step
      self.advance()

  def _keep(self, k: int, step: replayed_updates.Step) -> None:
    self.history.write(k, step.params)
    self.moved.append(replayed_updates.distance(step.params, self.first))

  def _gap(self, k: int, step: replayed_updates.Step) -> float:
    return replayed_updates.parameter_gap(step.params, self.history.read(k), self.moved[k])

  def _error(self, step: replayed_updates.Step) -> float:
    return replayed_updates.distance(step.direction, self.direction) / self.size


def one_minus_cosine(a, b) -> float:
  """From the difference of unit vectors: 1 - dot would cancel to the rounding of the dot product."""
  left, right = replayed_updates.norm(a), replayed_updates.norm(b)
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return 0.5 * float(sum(np.sum(np.square(np.divide(x, left, dtype=np.float64) - np.divide(y, right, dtype=np.float64))) for x, y in pairs))


class _Sample:
  """Coordinates of a pytree, drawn with a chance proportional to their size: most are next to nothing."""

  def __init__(self, tree):
    rng = np.random.default_rng(0)
    leaves = [np.abs(np.asarray(x)).ravel() for x in jax.tree.leaves(tree)]
    weights = np.array([x.sum(dtype=np.float64) for x in leaves])
    counts = rng.multinomial(_COORDINATES, weights / weights.sum())
    self._at = []
    for leaf, n in zip(leaves, counts):
      total = np.cumsum(leaf, dtype=np.float64)
      self._at.append(np.searchsorted(total, rng.random(n) * total[-1], side='right').clip(max=leaf.size - 1))

  def of(self, tree) -> np.ndarray:
    """Their values [coordinates]."""
    return np.concatenate([np.asarray(x).ravel()[at] for x, at in zip(jax.tree.leaves(tree), self._at)])
