"""The schedules of a comparison: each with its settings and a lane of its own kind, run on equal workloads."""

from __future__ import annotations

import pathlib
from typing import Callable, Iterable, Sequence

from experiments import learner, ledger, memory, replayed_schedule, sampled_schedule, schedules, step_figures, trainer as trainer_lib, wiring
from ts_jax import types
from ts_jax.rollout import replay as replay_lib
from ts_jax.streaming import barrier, lane as lane_lib, scheduler
from ts_jax.telemetry import trace

Batches = list[list[types.Trajectory]]


def with_schedule(config, name: str, max_staleness: int = 0):
  """The config under a schedule; those that do not stream do their cheapest pass, whatever granularity is configured."""
  config = config.copy_and_resolve_references()
  config.schedule.update(name=name, max_staleness=max_staleness if name == 'fully_async' else 0)
  if name != 'thundersync':
    config.schedule.granularity = 'trajectory'
  return config


class _Watched(replayed_schedule.Updates):
  """Also looks at the accumulators, during the first update, which is not timed."""

  def __init__(self, lanes: Sequence[lane_lib.Lane]):
    super().__init__()
    self._lanes, self.accumulator_bytes = lanes, 0

  def __call__(self, event) -> None:
    if not self and isinstance(event, types.Span) and event.kind in trace.LEARNER:
      self.accumulator_bytes = max(self.accumulator_bytes, memory.accumulator_bytes(self._lanes))


class Contenders:
  """Every run starts from the student's parameters and a new optimizer state.

  Attributes:
    names: of the schedules.
  """

  def __init__(self, config, student: wiring.Student, names: Sequence[str], prompts: Iterable[Sequence[int]], max_tokens: int, max_staleness: int = 0):
    """Compiles every shape.

    Args:
      config: of a run; its schedule's granularity is that of 'thundersync'.
      student: the model.
      names: of `schedules.NAMES`.
      prompts: all prompts, ids.
      max_tokens: longest completion.
      max_staleness: of 'fully_async'; 0: its default.

    Raises:
      ConfigError: settings that do not go together.
    """
    self.names, self._student, self._max_staleness = tuple(names), student, max_staleness
    self._buckets, self._optimizer = learner.buckets(config), learner.optimizer(config)
    self._layout = learner.layout(config)
    prompts, params = set(map(tuple, prompts)), self._layout.whole(self._layout.place(student.params()))
    made: dict[bool, list[lane_lib.Lane]] = {}  # those that do not stream have one kind of lane
    self._learners: dict[str, tuple[scheduler.Policy, list[lane_lib.Lane]]] = {}
    for name in self.names:
      mine = with_schedule(config, name, max_staleness)
      schedules.max_staleness(mine)
      policy = learner.with_memory(learner.policy(mine), mine, student, max_tokens)
      streams = name == 'thundersync'
      if streams not in made:
        made[streams] = learner.prepared_lanes(mine, student, policy, params, prompts, max_tokens, f'compile {name}')
      self._learners[name] = policy, made[streams]

  def sampled(self, config, name: str, tasks: wiring.TaskSets, folder: pathlib.Path,
              cores: Sequence[int]) -> tuple[step_figures.Figures, list[trainer_lib.Done]]:
    """Runs `config.updates` updates on engines of their own; `cores` are those of engines, agents and tools.

    Raises:
      ConfigError: the rewards left the learner nothing to do.
    """
    run = lambda *args, updates: sampled_schedule.run(args[0], self._student, tasks, *args[1:], folder, cores, updates)
    return self._measured(config, name, run)

  def replayed(self, config, name: str, batches: Batches, scale: float,
               cores: Sequence[int]) -> tuple[step_figures.Figures, list[trainer_lib.Done]]:
    """Runs recorded batches at `scale` times their recorded times, fed from `cores`.

    Raises:
      ConfigError: the rewards left the learner nothing to do.
    """
    run = lambda *args, updates: replayed_schedule.run(*args, batches, scale, cores, updates)
    return self._measured(config, name, run)

  def balanced(self, config, batches: Batches, ratio: float, cores: Sequence[int]) -> Batches:
    """The batches with times at which each one's rollout takes `ratio` times the service that Sync needs for it."""
    _, done = self.replayed(config, 'sync', [batches[0], *batches], 0.0, cores)
    service = [sum(s.end_s - s.start_s for s in d.result.spans) for d in done[1:]]
    recorded = [max(t.reward_s for t in batch) - min(t.start_s for t in batch) for batch in batches]
    return [replay_lib.scaled(batch, ratio * s / r) for batch, s, r in zip(batches, service, recorded)]

  def _measured(self, config, name: str, run: Callable) -> tuple[step_figures.Figures, list[trainer_lib.Done]]:
    mine, (policy, lanes) = with_schedule(config, name, self._max_staleness), self._learners[name]
    memory.reset_peak()
    updates = _Watched(lanes)
    run(mine, lanes, policy, barrier.init(self._optimizer, self._student.params(), self._layout), updates=updates)
    if not any(d.result.spans for d in updates[1:]):
      raise types.ConfigError(f'the learner had nothing to do under {name!r}: the rewards of every group were equal. Take a student that solves '
                              'some of its tasks, more groups or trajectories in config.batch, or a term like config.objective.entropy')
    figures = step_figures.of(updates, lambda done: self._credited(config, done), peak_bytes=memory.peak_bytes(),
                              accumulator_bytes=updates.accumulator_bytes)
    return figures, list(updates)

  def _credited(self, config, done: trainer_lib.Done) -> int:
    counted = ledger.update_flops(done.result.spans, done.result.batch.trajectories, self._student.config, self._buckets, config.learner.remat_tokens)
    return counted.credited
