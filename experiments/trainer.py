"""What every schedule shares: one update on a batch, the optimizer step, publication, records, checkpoints."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, NamedTuple, Protocol, Sequence

import jax
import numpy as np

from experiments import rollouts
from ts_jax import types
from ts_jax.streaming import barrier, costs, lane as lane_lib, layout as layout_lib, lengths, mismatch, remote, scheduler, staleness
from ts_jax.streaming import update as update_lib
from ts_jax.telemetry import checkpoints as checkpoints_lib, interruption


@dataclasses.dataclass(frozen=True)
class Done:
  """One update, done.

  Attributes:
    update: k.
    result: the learner's, without its sums.
    norm: of the direction, before clipping.
    begin_s, barrier_s, step_end_s, end_s: it began (where sampling goes ahead: the learner was free), everything was accumulated, the
      optimizer step was done, all of it was done; run's clock.
    publish_s: seconds of publication within it.
    ahead: its batch was sampled, in part, before it began.
    planned: (planned update, group) of its groups, where they are not those planned for it.
  """

  update: int
  result: update_lib.UpdateResult
  norm: float
  begin_s: float
  barrier_s: float
  step_end_s: float
  end_s: float
  publish_s: float
  ahead: bool
  planned: tuple[tuple[int, int], ...] = ()


class Journal(Protocol):
  """What is told of a run's progress."""

  def begin(self, update: int, total: int) -> None:
    """An update of `total` trajectories begins."""

  def __call__(self, event: rollouts.Event) -> None:
    """Takes one event or span."""

  def phase(self, name: str) -> None:
    """What the run does now."""

  def warn(self, message: str) -> None:
    """Tells the user."""

  def batch(self, update: int, planned: Sequence[tuple[int, int]]) -> None:
    """The step of an update is about to be taken, with a batch of (planned update, group) each."""

  def trained(self, done: Done) -> None:
    """An update is done."""


class Behind(NamedTuple):
  """What a checkpoint of `async` holds: the learner's state, and the parameters that the batch of the next update is sampled from."""

  params: Any
  opt_state: Any
  policy_version: int
  sampling: Any


def restored(config, checkpoints: checkpoints_lib.Checkpoints, like: barrier.LearnerState) -> tuple[int, barrier.LearnerState, Any]:
  """(next update, state, parameters that its batch is sampled from where those are other ones, else None) of the newest checkpoint.

  Args:
    config: the run's.
    checkpoints: not empty.
    like: a state of the same shapes.
  """
  if config.schedule.name != 'async':
    return *checkpoints.restore(like), None
  first, found = checkpoints.restore(Behind(*like, like.params))
  return first, barrier.LearnerState(*found[:3]), found.sampling


class Trainer:
  """The learner's state and what an update does to it; a schedule in `schedules` decides when.

  Attributes:
    state: theta, optimizer state, version.
    next_update: k.
    updates: of the run.
    rollout, arrivals: the rollout side.
    params: theta, whole on every lane's device.
  """

  def __init__(self, config, optimizer: barrier.OptimizerConfig, state: barrier.LearnerState, lanes: Sequence[lane_lib.Lane],
               policy: scheduler.Policy, rollout: rollouts.Rollout, arrivals: rollouts.Arrivals, journal: Journal, *, first: int = 0,
               updates: int = 0, limits: mismatch.Limits | None = None, layout: layout_lib.Layout = layout_lib.Layout(),
               params: Any = None, others: remote.Others = remote.Others(), evaluate: Callable[[int], None] = lambda update: None,
               save: Callable[[int, NamedTuple], None] = lambda update, state: None, sampling: Any = None):
    """Starts nothing.

    Args:
      config: the run's.
      optimizer: its settings.
      state: at update `first`, cut as the layout says.
      lanes: the learner's.
      policy: what they run under.
      rollout: where trajectories come from.
      arrivals: where its events go.
      journal: is told of everything.
      first: update to begin with.
      updates: of the run; default `config.updates`.
      limits: of the mismatch between learner and sampler.
      layout: of the lanes.
      params: those of `state`, whole, where they are there already.
      others: processes of the learner beside this one; their lanes are among `lanes`.
      evaluate: called with the number of updates the policy has had, where one is due and the engines serve it.
      save: called with the next update and a state for a checkpoint.
      sampling: parameters that engines serve while the state is `first` (`async`, resumed); default those of `state`.
    """
    self.state, self.rollout, self.arrivals, self.next_update = state, rollout, arrivals, first
    self.first, self.updates = first, updates or config.updates
    self._config, self._optimizer, self._lanes, self._policy, self._journal = config, optimizer, lanes, policy, journal
    self._limits, self._evaluate, self._save = limits, evaluate, save
    self._published = first if sampling is None else first - 1
    self._sampling, self._keeps_sampling = sampling, config.schedule.name == 'async'
    self._costs, self._lengths = costs.Costs(), lengths.Lengths()
    self._layout, self._others = layout, others
    self.params = layout.whole(state.params) if params is None else params
    self._whole = True  # False while the barrier consumes the state

  def __enter__(self) -> 'Trainer':
    return self

  def __exit__(self, kind, value, traceback) -> None:
    if kind is not None and self._whole and self.next_update > self.first and not self._others.ended:
      self.save()

  def save(self) -> None:
    """Writes a checkpoint."""
    state = self.state
    if self._others:
      self._others.tell('gather')
      with self._others.together():
        state = barrier.on_host(state, self._layout)
    self._save(self.next_update, state if self._sampling is None else Behind(*state, self._sampling))

  def begin(self, update: int, plans: Sequence[types.GroupPlan]) -> None:
    """The learner is free for an update of as many trajectories as are planned: its time starts."""
    self._begin_s, self._publish_s = time.time(), 0.0
    self._journal.begin(update, sum(plan.size for plan in plans))

  def publish(self) -> None:
    """Brings the engines to the learner's parameters, unless they have them; trajectories that are being sampled go on under them."""
    if self._published == self.state.policy_version:
      return
    begin_s = time.time()
    self._journal.phase('publish')
    self.rollout.publish(self._layout.single(self.params), self.state.policy_version)
    self._published = self.state.policy_version
    self._publish_s += time.time() - begin_s
    self._journal(types.Span('publish', begin_s, time.time(), self.next_update - 1))

  def train(self, update: int, plans: Sequence[types.GroupPlan], events: update_lib.EventStream, *, ahead: bool = False,
            lags: staleness.Lags = staleness.Lags(), publish: bool = True, planned: Sequence[tuple[int, int]] = ()) -> Done:
    """One update: gradients of a batch at the parameters as they are, optimizer step, publication, record.

    Args:
      update: k.
      plans: the batch's groups.
      events: of its trajectories, as they come.
      ahead: it is complete already, its events were observed as they arrived.
      lags: of its tokens.
      publish: the new parameters at once.
      planned: where the batch is put together as groups are complete, (planned update, group) of each.
    """
    result = update_lib.run_update(
        update, self.state.policy_version, self.params, plans, events, self._lanes, self._policy, lags=lags,
        lengths=self._lengths, costs=self._costs,
        stall_timeout_s=self._config.rollout.stall_timeout_s, observe=self._observe_spans if ahead else self._journal)
    self._costs, self._lengths = result.costs, self._lengths.observe(result.batch)
    warning = self._limits.check(result.mismatch, update) if self._limits else ''
    if warning:
      self._journal.warn(warning)
    with interruption.delayed():  # a step that was taken is recorded
      self._journal.phase('optimizer')
      barrier_s = time.time()
      self._others.tell('step', result.normaliser)
      with self._others.together():
        direction = barrier.reduce_lanes(self._config.schedule.accumulator, result.sums, result.normaliser, self._layout)
        result = dataclasses.replace(result, sums=())  # two copies of the parameters' size
        if planned:
          self._journal.batch(update, planned)
        norm = self._step(direction)
        del direction
      self.next_update = update + 1
      step_end_s = time.time()
      self._journal(types.Span('optimizer', barrier_s, step_end_s, update))
      if publish:
        self.publish()
      done = Done(update, result, norm, self._begin_s, barrier_s, step_end_s, time.time(), self._publish_s, ahead,
                  tuple(planned))
      self._journal.trained(done)
    return done

  def evaluate_due(self) -> None:
    """Evaluates the learner's parameters, which the engines serve, where that is due."""
    every, done = self._config.evaluation.every, self.next_update
    if every and done % every == 0 and self.first < done < self.updates:
      self._evaluate(done)

  def save_due(self) -> None:
    """Writes a checkpoint where that is due."""
    every, done = self._config.checkpoint.every, self.next_update
    if every and done % every == 0 and done < self.updates:
      self.save()

  def _observe_spans(self, event: rollouts.Event) -> None:
    if isinstance(event, types.Span):
      self._journal(event)

  def _step(self, direction) -> float:
    if self._keeps_sampling:  # on the host: the step consumes the learner's own
      self._sampling = jax.tree.map(lambda x: np.array(x, copy=True), self._layout.single(self.params))
    self._whole, self.params = False, None
    self.state, norm = barrier.apply(self._optimizer, self.state, direction, self._layout)
    jax.block_until_ready(self.state.params)
    self._whole, self.params = True, self._layout.whole(self.state.params)
    return norm
