"""The cells of the study of Appendix F.5 of ThunderSyncRL: what they are, their calibration, and the three speedups of each."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Sequence

import jax
import numpy as np

from experiments import contenders, learner, release, replayed_schedule, synthetic, trainer as trainer_lib, wiring
from ts_jax import types
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.streaming import barrier
from ts_jax.theory import jobs as jobs_lib, release as law_lib, replay, sampling, waves

_STREAM = 'thundersync'


@dataclasses.dataclass(frozen=True)
class Cell(types.Record):
  """One configuration; `sweep` is 'batch' or 'horizon', the axis that it belongs to."""

  objective: str
  sweep: str
  batch: int
  turns: int
  ratio: float
  repetition: int

  @property
  def name(self) -> str:
    """Unique within a study."""
    return f'{self.objective}-{self.sweep}-{self.batch}-{self.turns}-{self.ratio:g}-{self.repetition}'


@dataclasses.dataclass(frozen=True)
class Calibration(types.Record):
  """Parameters of the release law of one objective and horizon, from traces of their own.

  Attributes:
    objective, turns: whose.
    service_s: of a trajectory in Sync, mean.
    exponent: gamma, growth of service with completion time.
    turn, closure: fractions of the streamed service that are released turn by turn, and when the group closes.
    work: streamed service over Sync's.
    suffix_s: P.
  """

  objective: str
  turns: int
  service_s: float
  exponent: float
  turn: float
  closure: float
  work: float
  suffix_s: float


@dataclasses.dataclass(frozen=True)
class Result(types.Record):
  """Speedups of a cell, and what they are made of; seconds.

  Attributes:
    cell: which.
    analytical: of the release law, from this cell's R, L and P (Equation 26).
    trace: of the releases replayed (Equation 14).
    measured: of the wall clock; None where the cell was not executed, and the trace is of a drawn workload.
    rollout_s, service_s, suffix_s: R, L (Sync's) and P.
    sync_step_s, step_s: measured.
  """

  cell: Cell
  analytical: float
  trace: float
  measured: float | None = None
  rollout_s: float = 0.0
  service_s: float = 0.0
  suffix_s: float = 0.0
  sync_step_s: float | None = None
  step_s: float | None = None


def cells(study) -> list[Cell]:
  """Every configuration, those of a horizon and objective behind each other."""
  grid = [('batch', b, study.turns_of_batches) for b in study.batches] + [('horizon', study.batch_of_turns, a) for a in study.turns]
  found = [Cell(objective, sweep, batch, turns, float(ratio), repetition)
           for objective in study.granularities
           for (sweep, batch, turns), ratio, repetition in itertools.product(grid, study.ratios, range(study.repetitions))]
  return sorted(found, key=lambda c: (c.objective, c.turns))


def executed(study, all_cells: Sequence[Cell]) -> set[Cell]:
  """Those whose wall clock is measured."""
  return set(all_cells[::study.executed_every])


def turn_tokens(study, finished: float) -> int:
  """Tokens of a turn of a trajectory that takes `finished` of a wave."""
  exponent = study.service_exponent
  return max(2, round(study.turn_tokens * (1 + exponent) * finished**exponent))


class Bench:
  """Sync and thundersync on a small random student, for one objective and horizon."""

  def __init__(self, config, objective: str, turns: int, cores: Sequence[int]):
    """Compiles every shape.

    Args:
      config: with a section `study`.
      objective: of `study.granularities`.
      turns: of every trajectory.
      cores: that rollout events are fed from.
    """
    config = config.copy_and_resolve_references()
    config.objective.name, config.schedule.granularity = objective, config.study.granularities[objective]
    self._study, self._objective, self._turns, self._cores = config.study, objective, turns, cores
    s = config.study
    self._model = ModelConfig(vocab_size=s.vocab_size, width=s.width, ffn_width=s.ffn_width, layers=s.layers, heads=s.heads, kv_heads=s.kv_heads,
                              head_dim=s.width // s.heads)
    # The learner reads a student's sizes only.
    student = wiring.Student(pathlib.Path('random'), self._model, tokenizer=None, template=None)
    params = llama.init_params(self._model, jax.random.PRNGKey(0))
    self._state = barrier.init(learner.optimizer(config), params)
    longest, prompt = turns * turn_tokens(s, 1.0), (1,) * (s.prompt_tokens + 1)
    self._learners = {}
    for name in ('sync', _STREAM):
      mine = contenders.with_schedule(config, name)
      policy = learner.with_memory(learner.policy(mine), mine, student, longest)
      lanes = learner.prepared_lanes(mine, student, policy, params, [prompt], longest, f'compile {name}, {objective}, {turns} turns')
      self._learners[name] = mine, lanes, policy

  def calibrate(self, seed: int = 0) -> Calibration:
    """Runs updates of two waves under both schedules, with rollout about as long as learning."""
    rng, count = np.random.default_rng([seed, self._turns]), 2 * self._study.capacity
    settling = self._draw(rng, count)[0]
    self.run('sync', settling, 0.0)
    sync, finished, streamed = [], [], []
    for _ in range(self._study.calibration_updates):
      batch, times = self._draw(rng, count)
      sync.append(self.run('sync', batch, 0.0))
      finished.append(times)
    own = [_by_trajectory(done) for done in sync]
    service_s = float(np.mean(own))
    self.run(_STREAM, settling, self._study.capacity * service_s)
    for done, times in zip(sync, finished):
      streamed.append(self.run(_STREAM, done.result.batch.trajectories, self._study.capacity * service_s))
    spans = [s for done in streamed for s in done.result.spans]
    seconds = lambda chosen: sum(s.end_s - s.start_s for s in chosen)
    early = seconds(s for s in spans if s.kind in ('turn', 'forward'))
    late = seconds(s for s in spans if s.kind == 'reduce' or s.work == 'backward')
    slope, _ = np.polyfit(np.log(np.concatenate(finished)), np.log(np.concatenate(own)), 1)
    return Calibration(self._objective, self._turns, service_s, max(0.0, float(slope)), early / seconds(spans), late / seconds(spans),
                       seconds(spans) / sum(_service_s(done) for done in sync), float(np.mean([d.end_s - d.barrier_s for d in streamed])))

  def execute(self, cell: Cell, found: Calibration, rng: np.random.Generator) -> Result:
    """Runs a cell under both schedules, one after the other."""
    batch, _ = self._draw(rng, cell.batch)
    wave_s = cell.ratio * self._study.capacity * found.service_s
    sync, stream = (self.run(name, batch, wave_s) for name in ('sync', _STREAM))
    service_s, took = _service_s(sync), [d.end_s - d.begin_s for d in (sync, stream)]
    update = _update(stream, cell.objective, self._study.granularities[cell.objective])
    traced = replay.replay(*release.recorded(update), lanes=1, rollout_s=update.rollout_s, suffix_s=update.suffix_s, sync_service_s=service_s)
    shape = waves.of_times(cell.batch, self._study.capacity, update.rollout_s, service_s, update.suffix_s)
    analytical = float(waves.speedup(law(found, self._study.group_size), shape))
    return Result(cell, analytical, traced.speedup, took[0] / took[1], update.rollout_s, service_s, update.suffix_s, *took)

  def run(self, name: str, batch: Sequence[types.Trajectory], scale: float) -> trainer_lib.Done:
    """One update at `scale` times a batch's times."""
    config, lanes, policy = self._learners[name]
    self._state, (done,) = replayed_schedule.run(config, lanes, policy, self._state, [batch], scale, self._cores)
    return done

  def _draw(self, rng: np.random.Generator, count: int) -> tuple[list[types.Trajectory], np.ndarray]:
    """(trajectories of successive waves that take 1 s each, part of its wave that each takes)."""
    size, finished = self._study.group_size, rng.uniform(size=count)
    prompts = [synthetic.ids(rng, self._model.vocab_size, self._study.prompt_tokens + 1) for _ in range(-(-count // size))]
    made = []
    for n, (u, start) in enumerate(zip(finished, np.arange(count) // self._study.capacity)):
      t = synthetic.trajectory(rng, self._model.vocab_size, prompts[n // size], self._turns, turn_tokens(self._study, u), group=n // size, index=n % size,
                               reward=float(rng.uniform(0.0, 1.5)))
      ends = start + u * np.arange(self._turns + 1) / self._turns
      turns = tuple(dataclasses.replace(turn, request_start_s=float(a), request_end_s=float(b), tool_start_s=float(b), tool_end_s=float(b))
                    for turn, a, b in zip(t.turns, ends, ends[1:]))
      made.append(dataclasses.replace(t, turns=turns, start_s=float(ends[0]), content_s=float(ends[-1]), reward_s=float(ends[-1])))
    return made, finished


def draw(cell: Cell, found: Calibration, study, rng: np.random.Generator) -> Result:
  """A cell that is not executed: the replay of a workload drawn from the calibrated law."""
  release_law = law(found, study.group_size)
  workload = sampling.sample(rng, release_law, cell.batch, study.capacity, cell.ratio)
  service_s, wave_s = float(workload.lane_service_s(1)[0]), cell.ratio * study.capacity * found.service_s
  traced = replay.replay(*jobs_lib.release(release_law.granularity, workload), suffix_s=found.suffix_s / wave_s, sync_service_s=service_s)
  shape = waves.of_times(cell.batch, study.capacity, traced.rollout_s, service_s, traced.suffix_s)
  return Result(cell, float(waves.speedup(release_law, shape)), traced.speedup, None, traced.rollout_s * wave_s, service_s * wave_s, found.suffix_s)


def law(found: Calibration, group_size: int) -> law_lib.ReleaseLaw:
  """The release law of a calibration."""
  return law_lib.ReleaseLaw(law_lib.Granularity(found.turn, found.closure, found.work), found.turns, group_size, found.exponent)


def _update(done: trainer_lib.Done, objective: str, granularity: str) -> release.Update:
  """What was executed, as `experiments.replay` sees a recorded update."""
  return release.Update(done.update, granularity, objective != 'opd', False, done.result.batch.trajectories, done.result.spans, {},
                        done.begin_s, done.result.rollout_end_s - done.begin_s, done.end_s - done.barrier_s, done.end_s - done.begin_s, 1)


def _service_s(done: trainer_lib.Done) -> float:
  return sum(s.end_s - s.start_s for s in done.result.spans)


def _by_trajectory(done: trainer_lib.Done) -> np.ndarray:
  """[trajectories] service of Sync; what belongs to a group is shared by its members."""
  trajectories = done.result.batch.trajectories
  sizes = np.bincount([t.group for t in trajectories])
  shared, own = np.zeros(len(sizes)), {}
  for s in done.result.spans:
    if s.kind in ('source', 'fold'):
      own[s.group, s.members[0]] = own.get((s.group, s.members[0]), 0.0) + s.end_s - s.start_s
    else:
      shared[s.group] += (s.end_s - s.start_s) / sizes[s.group]
  return np.array([own[t.group, t.index] + shared[t.group] for t in trajectories])
