"""Consecutive updates of a student on recorded batches, under one schedule after another (Appendix G of ThunderSyncRL)."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
from typing import Any, Iterator, NamedTuple, Sequence

import jax
import numpy as np

from experiments import learner, offline, recording, wiring
from ts_jax import types
from ts_jax.models import llama
from ts_jax.rollout import replay as replay_lib
from ts_jax.streaming import barrier, lane as lane_lib

_MOST_RECORDED = 4  # batches recorded for each that is wanted, before giving up


def recorded_batches(config, folder: pathlib.Path, updates: int) -> list[types.LogicalBatch]:
  """The first `updates` recorded batches whose direction is not exactly zero, as updates 0, 1, ... of a run.

  Args:
    config: the run's.
    folder: of the recording; what is missing there is sampled.
    updates: batches wanted.

  Raises:
    ConfigError: the recording has no teacher scores, which the objective needs.
    TsJaxError: too few batches with a reward difference.
  """
  objective = learner.objective(config)
  for recorded in range(updates, _MOST_RECORDED * updates + 1, max(1, updates // 2)):
    run = recording.record(config, folder, recorded)
    batches = [recording.batch(run, k) for k in range(recorded)]
    if objective.needs_teacher and any(t.completion_teacher_log_probs is None for b in batches for t in b.trajectories):
      raise types.ConfigError(f'{folder} was recorded without a teacher, objective {config.objective.name!r} needs its scores: name another '
                              '--recording')
    usable = [b for b in batches if not all(objective.is_zero([t.reward for t in g.trajectories]) for g in b.groups)]
    if len(usable) >= updates:
      return [_as_update(k, b) for k, b in enumerate(usable[:updates])]
  raise types.TsJaxError(f'{len(usable)} of {recorded} batches in {folder} hold a group with a reward difference, fewer than '
                         f'config.updates={updates}: use easier tasks, larger groups, or a trained student (config.model.source)')


def _as_update(k: int, batch: types.LogicalBatch) -> types.LogicalBatch:
  groups = tuple(dataclasses.replace(g, trajectories=tuple(
      replay_lib.renamed(t, k, k) for t in g.trajectories)) for g in batch.groups)
  return types.LogicalBatch(k, k, groups)


def under(config, granularity: str, accumulator: str = 'float32', dtype: str = 'float32', lanes: int = 1):
  """The config with this schedule, precision of activations and number of lanes; granularity 'batch' is Sync."""
  changed, sync = config.copy_and_resolve_references(), granularity == 'batch'
  changed.schedule.update(name='sync' if sync else 'thundersync', granularity='trajectory' if sync else granularity,
                          accumulator=accumulator, max_staleness=0, lanes=lanes)
  changed.model.dtype = dtype
  return changed


@dataclasses.dataclass(frozen=True)
class RandomStudent(wiring.Student):
  """A student of other sizes and random parameters, which reads the same ids."""

  @functools.cached_property
  def _params(self):
    return jax.device_get(llama.init_params(self.config, jax.random.PRNGKey(0), scale=0.1))

  def params(self):
    return jax.tree.map(jax.numpy.array, self._params)


def small_student(student: wiring.Student, layers: int, width: int) -> RandomStudent:
  """A random student with the vocabulary of `student`, for what is too often repeated for the student itself."""
  sizes = dataclasses.replace(student.config, width=width, ffn_width=3 * width // 2, layers=layers, heads=4, kv_heads=2, head_dim=width // 4)
  return RandomStudent(student.folder, sizes, student.tokenizer, student.template)


class Step(NamedTuple):
  """One update: its direction before clipping, and the parameters behind it, valid until the next step."""

  direction: Any
  params: Any


class Replay:
  """A student's updates on recorded batches under one schedule."""

  def __init__(self, config, student: wiring.Student, batches: Sequence[types.LogicalBatch]):
    """Args: the schedule's config (see `under`), the student, and its batches."""
    prompts = {g.prompt_ids for b in batches for g in b.groups}
    longest = max(t.longest_completion for b in batches for t in b.trajectories)
    self._config, self._student, self._batches = config, student, batches
    self._policy = learner.with_memory(learner.policy(config), config, student, longest)
    self._layout = learner.layout(config)
    self._lanes = learner.lanes(config, student, self._policy, longest, lane_lib.shared_prefix(sorted(prompts)))

  def steps(self, updates: int, order: int | None = None) -> Iterator[Step]:
    """Yields the first `updates` updates from the student's own parameters.

    Args:
      updates: how many.
      order: seed of a random arrival order and of what the learner sees when; None: the recorded completion order.
    """
    optimizer, kind = learner.optimizer(self._config), self._config.schedule.accumulator
    state = barrier.init(optimizer, self._student.params(), self._layout)
    for batch in self._batches[:updates]:
      if order is None:
        events = offline.OneByOne(offline.recorded_arrival(batch))
      else:
        rng = np.random.default_rng((order, batch.update))
        events = offline.RandomlyLate(offline.shuffled_arrival(batch, rng), rng)
      whole = self._layout.whole(state.params)
      direction, _ = offline.direction_of(batch, events, whole, self._lanes, self._policy, kind, self._layout)
      del whole
      state, _ = barrier.apply(optimizer, state, direction, self._layout)
      yield Step(direction, state.params)
      del direction


def distance(a, b) -> float:
  """Euclidean distance of two pytrees (or lists of the same leaves), in float64, leaf by leaf."""
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return float(np.sqrt(sum(np.sum(np.square(np.subtract(x, y, dtype=np.float64))) for x, y in pairs)))


def norm(tree) -> float:
  """Euclidean norm of a pytree, in float64."""
  return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree))))


def parameter_gap(ours, sync, moved: float) -> float:
  """Equation 30: the distance of two schedules' parameters relative to how far Sync has moved them."""
  return distance(ours, sync) / moved


class History:
  """Parameters after each update of one replay, in a file: those of ten updates need not fit the memory."""

  def __init__(self, folder: pathlib.Path, updates: int, params):
    """Makes room for `updates` pytrees like `params` in a file of `folder` that has no name: it goes with the process."""
    self._shapes = [x.shape for x in jax.tree.leaves(params)]
    self._ends = np.cumsum([np.prod(s, dtype=int) for s in self._shapes])
    self._file = tempfile.TemporaryFile(dir=folder)
    self._rows = np.memmap(self._file, np.float32, 'w+', shape=(updates, int(self._ends[-1])))

  def write(self, update: int, params) -> None:
    """Keeps the parameters behind `update`, in place of earlier ones."""
    for row, leaf in zip(self.read(update), jax.tree.leaves(params), strict=True):
      row[...] = leaf

  def read(self, update: int) -> list[np.ndarray]:
    """Their leaves, as views of the file."""
    parts = np.split(self._rows[update], self._ends[:-1])
    return [p.reshape(s) for p, s in zip(parts, self._shapes)]
