"""Where a run's trajectories come from, agents on engines or a recording, and how they reach the learner."""

from __future__ import annotations

import dataclasses
import queue
from typing import Any, Callable, Protocol, Sequence

from experiments import wiring
from ts_jax import types
from ts_jax.agents import pool
from ts_jax.models.config import ModelConfig
from ts_jax.rollout import publication, replay as replay_lib
from ts_jax.streaming import executor
from ts_jax.telemetry import rundir

Event = types.RolloutEvent | types.Span
Groups = Sequence[int] | None  # of an update; None for all


class Rollout(Protocol):
  """What a schedule needs of the rollout side.  Its events go to an `Arrivals`."""

  def plans(self, update: int) -> list[types.GroupPlan]:
    """The groups of an update."""

  def kept(self, update: int, oldest: int, newest: int) -> list[types.Trajectory]:
    """Trajectories of an interrupted update that are finished, of versions `oldest` to `newest` only."""

  def submit(self, update: int, version: int, *, groups: Groups = None, newer_too: bool = False) -> None:
    """Starts trajectories of an update; those that are `kept` arrive at once.

    Args:
      update: that they are planned for.
      version: of the engines.
      groups: only these.
      newer_too: weights are published while they are sampled; what is kept may be older.
    """

  def publish(self, params: Any, version: int) -> None:
    """Makes `params` the policy of the engines; trajectories that are being sampled go on under it."""


class Sampled:
  """Agents sample on engines."""

  def __init__(self, config, student: ModelConfig, tasks: wiring.TaskSets, publisher: publication.Publisher, agents: pool.AgentPool,
               run: rundir.RunDirectory, emit: Callable[[Event], None]):
    """Args: the run's config, the student's sizes, its tasks, publisher, agents and directory; where kept trajectories go."""
    self._config, self._student, self._tasks = config, student, tasks
    self._publisher, self._agents, self._run, self._emit = publisher, agents, run, emit

  def plans(self, update: int) -> list[types.GroupPlan]:
    """See `Rollout`."""
    return [plan for plan, _ in wiring.plan_update(self._config, self._tasks, update)]

  def kept(self, update: int, oldest: int, newest: int) -> list[types.Trajectory]:
    """See `Rollout`."""
    return [t for t in self._run.read_trajectories(update) if all(oldest <= v <= newest for v in (t.policy_version, *t.versions))]

  def submit(self, update: int, version: int, *, groups: Groups = None, newer_too: bool = False) -> None:
    """See `Rollout`."""
    planned = wiring.plan_update(self._config, self._tasks, update)
    chosen = planned if groups is None else [planned[g] for g in groups]
    wanted = {plan.index for plan, _ in chosen}
    kept = [t for t in self.kept(update, 0 if newer_too else version, version) if t.group in wanted]
    for trajectory in kept:  # an interrupted update goes on where it was
      self._emit(types.ContentFixed(dataclasses.replace(trajectory, reward=None, tests_passed=())))
      self._emit(types.RewardFixed(trajectory))
    self._agents.submit_update(update, version, chosen, skip={(t.group, t.index) for t in kept}, newer_too=newer_too)

  def publish(self, params: Any, version: int) -> None:
    """See `Rollout`."""
    self._publisher.publish(params, self._student, version)


class Replayed:
  """Recorded updates, at their recorded times."""

  def __init__(self, replayer: replay_lib.Replayer, recorded: Callable[[int], Sequence[types.Trajectory]]):
    """Args: the replayer, and the recorded trajectories of each update."""
    self._replayer, self._recorded = replayer, recorded

  def plans(self, update: int) -> list[types.GroupPlan]:
    """See `Rollout`."""
    return replay_lib.plans(self._recorded(update))

  def kept(self, update: int, oldest: int, newest: int) -> list[types.Trajectory]:
    """Nothing: a replay starts an interrupted update anew."""
    del update, oldest, newest
    return []

  def submit(self, update: int, version: int, *, groups: Groups = None, newer_too: bool = False) -> None:
    """See `Rollout`."""
    self._replayer.submit_update(update, version, [t for t in self._recorded(update) if groups is None or t.group in groups], newer_too)

  def publish(self, params: Any, version: int) -> None:
    """See `Rollout`."""
    del params
    self._replayer.publish(version)


class Arrivals:
  """What the rollout side sends, in order.

  A schedule that samples the batch it learns from takes it as an event stream.  The others `gather` it into groups, also while the
  learner works on another batch: see `Complete`.
  """

  def __init__(self, observe: Callable[[Event], None], stall_timeout_s: float = 600.0):
    """Args: what is told of gathered events; longest wait for any."""
    self._queue: queue.Queue[Event] = queue.Queue()
    self._observe, self._stall_timeout_s = observe, stall_timeout_s
    self._rewarded: dict[tuple[int, int], dict[int, types.Trajectory]] = {}
    self.put = self._queue.put_nowait

  def get(self, block: bool = True, timeout: float | None = None) -> Event | executor.Finished:
    """As `queue.Queue.get`; events of evaluations are left out."""
    while True:
      event = self._queue.get(block, timeout)
      if isinstance(event, types.RolloutFailed) or _update_of(event) >= 0:
        return event

  def gather(self, wait: bool = False) -> None:
    """Takes everything that has arrived, at least one event with `wait`.

    Raises:
      TsJaxError: the rollout side failed, or is silent.
    """
    while True:
      try:
        event = self.get(wait, self._stall_timeout_s)
      except queue.Empty:
        if not wait:
          return
        raise types.TsJaxError(f'nothing arrived from the rollout side for {self._stall_timeout_s:.0f} s, and no batch is complete. See the '
                               'engine log in the run directory; config.rollout.stall_timeout_s sets the limit') from None
      wait = False
      self._observe(event)
      if isinstance(event, types.RolloutFailed):
        raise types.TsJaxError(f'update {event.update}: {event.message}')
      if isinstance(event, types.RewardFixed):
        t = event.trajectory
        self._rewarded.setdefault((t.update, t.group), {})[t.index] = t

  def complete(self, update: int, plan: types.GroupPlan) -> bool:
    """Every trajectory of a group has been rewarded."""
    return len(self._rewarded.get((update, plan.index), ())) == plan.size

  def look(self, update: int, plan: types.GroupPlan) -> list[types.Trajectory]:
    """A complete group."""
    members = self._rewarded[update, plan.index]
    return [members[i] for i in range(plan.size)]

  def take(self, update: int, plan: types.GroupPlan) -> list[types.Trajectory]:
    """Hands over a complete group."""
    members = self.look(update, plan)
    del self._rewarded[update, plan.index]
    return members


def _update_of(event: Event) -> int:
  return event.trajectory.update if isinstance(event, (types.ContentFixed, types.RewardFixed)) else event.update


class Complete:
  """The event stream of a batch that is complete, in the order of its groups: its bits do not depend on how it arrived.

  What lanes have finished comes behind it.

  Whenever the learner looks, what has arrived for later batches is gathered.
  """

  def __init__(self, trajectories: Sequence[types.Trajectory], arrivals: Arrivals):
    """Args: the batch; where later ones arrive."""
    self._arrivals = arrivals
    self._finished: queue.SimpleQueue[executor.Finished] = queue.SimpleQueue()
    self.put = self._finished.put
    self._events = [event for t in reversed(trajectories) for event in (types.RewardFixed(t), types.ContentFixed(t))]  # last first

  def get(self, block: bool = True, timeout: float | None = None) -> types.RolloutEvent | executor.Finished:
    """As `queue.Queue.get`."""
    self._arrivals.gather()
    return self._events.pop() if self._events else self._finished.get(block, timeout)
