"""What Appendix G of ThunderSyncRL measures of replayed updates: first directions and parameter gaps, in float32 and bfloat16."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from typing import Callable, Sequence

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
  errors, chosen = Errors(), config.schedule.granularity

  def steps(granularity: str, dtype: str, updates: int = len(batches)):
    replay = replayed_updates.Replay(replayed_updates.under(config, granularity, dtype=dtype), student, batches)
    for k, step in enumerate(replay.steps(updates)):
      yield k, step
      advance()

  with tempfile.TemporaryDirectory(dir=folder) as scratch:
    first = jax.device_get(student.params())
    history = replayed_updates.History(pathlib.Path(scratch), len(batches), first)
    moved = []
    for k, step in steps('batch', 'float32'):
      history.write(k, step.params)
      moved.append(replayed_updates.distance(step.params, first))
      if k == 0:
        sync = jax.device_get(step.direction)
        chance = _Sample(sync)
        errors.samples['sync'] = chance.of(sync)
    size = replayed_updates.norm(sync)
    for granularity in STREAMED:
      errors.gap[granularity] = []
      for k, step in steps(granularity, 'float32'):
        errors.gap[granularity].append(replayed_updates.parameter_gap(step.params, history.read(k), moved[k]))
        if k == 0:
          errors.float32[granularity] = replayed_updates.distance(step.direction, sync) / size
          errors.cosine[granularity] = one_minus_cosine(step.direction, sync)
          if granularity == chosen:
            errors.samples['streamed'] = chance.of(step.direction)
    moved_float32, moved = moved, []
    for k, step in steps('batch', 'bfloat16'):
      errors.precision_gap.append(replayed_updates.parameter_gap(step.params, history.read(k), moved_float32[k]))
      history.write(k, step.params)
      moved.append(replayed_updates.distance(step.params, first))
      if k == 0:
        errors.bfloat16['batch'] = replayed_updates.distance(step.direction, sync) / size
        errors.samples['sync_bfloat16'] = chance.of(step.direction)
    for granularity in STREAMED:
      for k, step in steps(granularity, 'bfloat16', len(batches) if granularity == chosen else 1):
        if granularity == chosen:
          errors.bfloat16_gap.append(replayed_updates.parameter_gap(step.params, history.read(k), moved[k]))
        if k == 0:
          errors.bfloat16[granularity] = replayed_updates.distance(step.direction, sync) / size
          if granularity == chosen:
            errors.samples['streamed_bfloat16'] = chance.of(step.direction)
  return errors


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
