"""One logical update: feeds rollout events to the scheduler, runs the lanes, and hands the batch to the barrier."""

from __future__ import annotations

import dataclasses
import functools
import operator
import queue
import time
from typing import Callable, Iterable, Protocol, Sequence

from ts_jax import types
from ts_jax.kernels import fold
from ts_jax.streaming import costs as costs_lib
from ts_jax.streaming import executor
from ts_jax.streaming import inputs as inputs_lib
from ts_jax.streaming import lane as lane_lib
from ts_jax.streaming import lengths as lengths_lib
from ts_jax.streaming import mismatch as mismatch_lib
from ts_jax.streaming import release_trace
from ts_jax.streaming import scheduler
from ts_jax.streaming import staleness as staleness_lib


class EventStream(Protocol):
  """Where rollout events (and spans, only observed) come from, and what lanes have finished: a `queue.Queue`, or anything like one."""

  def get(self, block: bool = True, timeout: float | None = None) -> types.RolloutEvent | types.Span | executor.Finished:
    """The next event, or what was `put`, once it is there.

    Raises:
      queue.Empty: nothing came within `timeout` seconds.
    """

  def put(self, item: executor.Finished) -> None:
    """Lets `get` return `item`, behind the events that are there already; called from any thread."""


@dataclasses.dataclass(frozen=True)
class UpdateResult:
  """What an update leaves for the barrier and the records.

  Attributes:
    batch: the logical batch, complete.
    sums: batch direction per lane of this process, before `normaliser`.
    normaliser: factor of the summed direction, known once every length is.
    spans: learner spans with readiness.
    mismatch: learner against sampler log-probs, of the sources that were computed.
    costs: what work takes, as far as it was measured.
    staleness: lags of the batch's tokens.
    skipped, wasted: sources never computed, and computed in vain, because their group was uniform.
    rollout_end_s: when the last reward arrived; learner_end_s: when the last group closed (run's clock).
  """

  batch: types.LogicalBatch
  sums: tuple[fold.Sum, ...]
  normaliser: float
  spans: tuple[types.Span, ...]
  mismatch: mismatch_lib.Mismatch
  costs: costs_lib.Costs
  staleness: staleness_lib.Staleness
  skipped: int
  wasted: int
  rollout_end_s: float
  learner_end_s: float


class _Batch:
  """Collects trajectories."""

  def __init__(self, update: int, policy_version: int, plans: Sequence[types.GroupPlan], lags: staleness_lib.Lags):
    self.update, self.version, self.plans, self.lags = update, policy_version, plans, lags
    self.trajectories: dict[tuple[int, int], types.Trajectory] = {}

  def complete(self) -> types.LogicalBatch:
    groups = tuple(
        types.Group(p.index, p.task_id, p.prompt_ids, tuple(self.trajectories[p.index, i] for i in range(p.size)))
        for p in self.plans)
    return types.LogicalBatch(self.update, self.version, groups)


def run_update(update: int, policy_version: int, params, plans: Sequence[types.GroupPlan], events: EventStream,
               lanes: Sequence[lane_lib.Lane], policy: scheduler.Policy, *, lags: staleness_lib.Lags = staleness_lib.Lags(),
               lengths: lengths_lib.Lengths = lengths_lib.Lengths(), costs: costs_lib.Costs = costs_lib.Costs(), stall_timeout_s: float = 600.0,
               observe: Callable[[types.RolloutEvent | types.Span], None] = lambda _: None) -> UpdateResult:
  """Runs the learner's side of one update until every group is closed.

  Args:
    update: k.
    policy_version: version of `params`.
    params: theta_k, read only; whole, where each lane can have its own copy (see `layout`).
    plans: the update's groups, index order.
    events: rollout events of this update.
    lanes: the learner lanes, by index; they run at the same time where each has a device of its own, else in turn.
    policy: the schedule.
    lags: how far behind `policy_version` the version of a token may, and must, be.
    lengths: of trajectories, from earlier updates; groups are dealt out to lanes by them.
    costs: what work takes, from earlier updates.
    stall_timeout_s: longest wait without any event before the update is given up.
    observe: called with every event and every learner span, for progress and traces.

  Raises:
    TsJaxError: the rollout side failed or stalled.
    PolicyVersionError: a trajectory with a token of another version arrived.
    BaseException: what ended a lane's work.
  """
  inputs = inputs_lib.Inputs(plans)
  for lane in lanes:
    lane.begin(update, params, inputs)
  record = _Batch(update, policy_version, plans, lags)
  trace = release_trace.ReleaseTrace(update, policy_version, plans, policy.objective, time.time())
  state, assignments = scheduler.start(policy, [p.size for p in plans], len(lanes), lengths.predict(plans),
                                       [lanes[0].prompt_cost(p.index) for p in plans], [lane.host for lane in lanes], costs)
  spans: list[types.Span] = []
  handed_over: dict[int, list[tuple[int, lane_lib.Parts]]] = {}  # by group, with the lane
  learner_end_s = time.time()

  def take(event: types.RolloutEvent | types.Span) -> list[scheduler.Assignment]:
    nonlocal state
    observe(event)
    trace.take(event)
    issued = []
    for scheduled in _translate(event, update, inputs, lanes[0], record, policy):
      state, more = scheduler.advance(state, scheduled)
      issued += more
    return issued

  def keep(done: Iterable[types.Span]) -> None:
    for span in done:
      span = trace.describe(span)
      spans.append(span)
      observe(span)

  with executor.Executor(update, lanes, events.put) as running:
    while not state.closed or len(record.trajectories) < sum(p.size for p in plans):
      for assignment in assignments:
        work = assignment.work
        parts = handed_over.pop(work.group, ()) if isinstance(work, scheduler.CloseGroup) else ()
        running.submit(assignment, [part for _, part in sorted(parts, key=operator.itemgetter(0))])
      try:
        event = events.get(timeout=stall_timeout_s)
      except queue.Empty:
        assignments = []
        if running.busy:
          continue
        waiting = [(p.index, i) for p in plans for i in range(p.size) if (p.index, i) not in record.trajectories]
        raise types.TsJaxError(
            f'update {update}: nothing arrived from the rollout side for {stall_timeout_s:.0f} s; {len(waiting)} '
            f'trajectories have not finished, the first is {waiting[:1]}. See the engine log in the run directory; '
            'config.rollout.stall_timeout_s sets the limit') from None
      if isinstance(event, executor.Finished):
        result = running.take(event)
        keep(result.spans)
        if result.parts is not None:
          handed_over.setdefault(event.assignment.work.group, []).append((event.assignment.lane, result.parts))
        done = scheduler.WorkDone(event.assignment.lane, event.assignment.work, _own_seconds(result.spans))
        state, assignments = scheduler.advance(state, done)
        learner_end_s = time.time()
      else:
        assignments = take(event)
  rest = [lane.rest() for lane in lanes]
  keep(lanes[0].finish_statistics([r.statistics for r in rest if r.statistics is not None], state.rewards))
  keep(lanes[0].finish_shared_prefix([r.adjoint for r in rest if r.adjoint is not None]))
  batch = record.complete()
  rollout_end_s = max(t.reward_s for t in batch.trajectories)
  learner_end_s = max([learner_end_s, rollout_end_s, *(s.end_s for s in spans)])
  tokens = sum(t.scored_tokens for t in batch.trajectories)
  mismatch = functools.reduce(operator.add, (lane.mismatch for lane in lanes))
  staleness = staleness_lib.Staleness.of(batch.trajectories, policy_version)
  sums = tuple(s for s in [lane.finish() for lane in lanes] if s is not None)  # a lane of another process leaves its own there
  return UpdateResult(batch, sums, policy.objective.normaliser(tokens), tuple(spans), mismatch, state.costs,
                      staleness, state.skipped, state.wasted, rollout_end_s, learner_end_s)


def _own_seconds(spans: Iterable[types.Span]) -> float:
  """Of turns and sources themselves, see `scheduler.WorkDone`."""
  return sum(s.end_s - s.start_s for s in spans if s.kind not in ('prompt', 'fold', 'reduce'))


def _translate(event: types.RolloutEvent | types.Span, update: int, inputs: inputs_lib.Inputs, lane: lane_lib.Lane, record: _Batch,
               policy: scheduler.Policy) -> list[scheduler.Event]:
  """Rollout events as the scheduler's; records what is fixed on the way, for whatever `lane` comes to work on it."""
  match event:
    case types.RolloutFailed():
      raise types.TsJaxError(f'update {event.update}: {event.message}')
    case types.TurnFixed() if policy.by_turns:
      inputs.fix_turn((event.group, event.index), event.turn)
      return [_turn_ready(event, lane, policy)]
    case types.TurnScored() if policy.by_turns:
      inputs.score_turn((event.group, event.index), event.turn, event.log_probs, event.scorer)
      return [_turn_ready(event, lane, policy)]
    case types.Span() | types.TurnFixed() | types.TurnScored():
      return []
  trajectory = event.trajectory
  if trajectory.update != update:
    raise types.TsJaxError(f'update {update} received trajectory {trajectory.key} of another update')
  at = (trajectory.group, trajectory.index)
  if isinstance(event, types.ContentFixed):
    record.lags.check(trajectory, record.version)
    inputs.register(trajectory)
    data = inputs.data[at]
    needed = ['teacher'] * policy.objective.needs_teacher + ['reference'] * ('reference' in policy.objective.terms.needs)
    for scorer in needed:
      if data.scored and getattr(data, f'{scorer}_log_probs') is None:
        raise types.TsJaxError(f'trajectory {trajectory.key} has no {scorer} log-probs, which the objective needs: was it recorded '
                               f'without a {scorer}?')
    return [scheduler.ContentReady(*at, scored=data.scored, cost=lane.cost(*at) if data.scored else 0)]
  record.trajectories[at] = trajectory
  return [scheduler.RewardReady(*at, reward=trajectory.reward)] if policy.objective.needs_rewards else []


def _turn_ready(event: types.TurnFixed | types.TurnScored, lane: lane_lib.Lane, policy: scheduler.Policy) -> scheduler.TurnReady:
  at = event.group, event.index
  return scheduler.TurnReady(*at, lane.steps(*at), lane.early_tokens(*at) if policy.granularity == scheduler.ELASTIC else 0)
