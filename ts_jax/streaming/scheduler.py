"""The learner's scheduler: a state machine without threads, clock or randomness.

`advance(state, event) -> (state, assignments)`.  Around it, a shell owns the queue and the lanes: it feeds events and runs what
is assigned.  A schedule is a `Policy`; there is one machine for all of them.  Like a donated buffer, a state that was
passed in is gone: it is changed in place, which is what makes an event cost microseconds whatever the size of the batch.

Groups are dealt out to lanes at the start, by predicted work.  Service order at a free lane: fold a held gradient whose
reward arrived; hand over what belongs to another lane's group; close a group; then sources, `final` (all rewards that
advantages are relative to known) before `known` (its own reward known) before `content` (tokens fixed, verdict pending), in
readiness order; then, at granularities that begin with them, turns of running trajectories; then prompts nobody asked for yet;
then whole trajectories of the lane that has most work left.
"""

from __future__ import annotations

import bisect
from collections import deque
import dataclasses
import enum
import heapq
from typing import Sequence

from ts_jax import types
from ts_jax.objectives.objective import Objective
from ts_jax.streaming import costs as costs_lib
from ts_jax.streaming.policy import ELASTIC, GRANULARITIES, Policy
from ts_jax.streaming.work import (Assignment, CloseGroup, ContentReady, Event, FoldHeld, HandOver, PromptForward, RewardReady, Service,
                                   SourceWork, TurnReady, TurnWork, Work, WorkDone)

__all__ = ['ELASTIC', 'GRANULARITIES', 'Assignment', 'CloseGroup', 'ContentReady', 'Event', 'FoldHeld', 'GroupState', 'HandOver', 'Policy',
           'PromptForward', 'RewardReady', 'SchedulerError', 'Service', 'Source', 'SourceWork', 'State', 'Status', 'TurnReady', 'TurnWork',
           'Work', 'WorkDone', 'advance', 'deal', 'start']


class SchedulerError(RuntimeError):
  """An event that cannot happen in this state: a second reward, a second close, work nobody assigned."""


class Status(enum.Enum):
  """Life of one source."""

  RUNNING = 'running'  # the agent is still at it
  READY = 'ready'  # content fixed, not started
  IN_LANE = 'in_lane'
  HELD = 'held'  # differentiated before its reward was known
  DONE = 'done'  # folded
  SKIPPED = 'skipped'  # contributes nothing: no scored token, or advantage known to be zero


_SERVICES = tuple(Service)
_WORTH = 0.45  # least saving at completion, over what early work takes, at which `elastic` does it


class Source:
  """One trajectory.

  Attributes:
    status: where it is in its life.
    reward: None until it is known.
    cost: padded length in tokens; order: rank of readiness.
    steps: while it runs, how many can be worked on; worked: how many have been.
    tokens, worked_tokens: of these.
  """

  __slots__ = ('status', 'reward', 'cost', 'order', 'steps', 'worked', 'tokens', 'worked_tokens')

  def __init__(self):
    self.status, self.reward = Status.RUNNING, None
    self.cost = self.steps = self.worked = self.tokens = self.worked_tokens = 0
    self.order = -1


class GroupState:
  """One group.

  Attributes:
    number, sources: which, and its trajectories.
    lane: owns it.
    statistics: lanes that hold sums of it; summed: of which rewards.
    helpers: lanes that work for it without owning it, and have to hand over.
    coefficients: of its sources, once they are known.
  """

  __slots__ = ('number', 'sources', 'lane', 'statistics', 'summed', 'helpers', 'coefficients', 'prompt_started', 'touched', 'queued', 'closed',
               'unrewarded', 'running', 'unfinished')

  def __init__(self, number: int, size: int, lane: int):
    self.number, self.sources, self.lane = number, [Source() for _ in range(size)], lane
    self.statistics: list[int] = []
    self.summed: list[float] = []
    self.helpers: list[int] = []
    self.coefficients: Sequence[float] | None = None
    self.prompt_started = self.touched = self.queued = self.closed = False
    self.unrewarded = self.running = self.unfinished = size

  @property
  def rewards(self) -> tuple[float | None, ...]:
    """Rewards so far, None where unknown."""
    return tuple(s.reward for s in self.sources)

  def final(self, objective: Objective) -> bool:
    """Everything the group itself has to wait for: all rewards, or for an objective without rewards all content."""
    return not (self.unrewarded if objective.needs_rewards else self.running)


class _LaneState:
  """One lane's queues; entries that a later event has overtaken are dropped when they come up."""

  __slots__ = ('number', 'work', 'folds', 'hand_overs', 'closable', 'ready', 'waiting', 'begun', 'fresh', 'prompts', 'open', 'held', 'kept', 'backlog', 'changed')

  def __init__(self, number: int, groups: Sequence[int]):
    self.number = number
    self.work: Work | None = None
    self.folds: deque[tuple[GroupState, int]] = deque()
    self.hand_overs: deque[GroupState] = deque()
    self.closable: deque[GroupState] = deque()
    self.ready: tuple[list[tuple[int, int, int]], ...] = ([], [], [])  # by service: heaps of (order, group, index)
    self.waiting: dict[int, list[tuple[int, int, int]]] = {}  # by group without sums: (service, order, index)
    self.begun: list[tuple[float, int, int]] = []  # heaps of (rank, group, index)
    self.fresh: list[tuple[float, int, int]] = []
    self.prompts = deque(groups)
    self.open = 0  # groups with sums here
    self.held = 0  # gradients that wait for their verdict
    self.kept = 0  # trajectories with work of turns here
    self.backlog = 0  # cost of sources that are ready
    self.changed = True  # there may be something to do that there was not


class State:
  """Everything the scheduler knows within one update.

  Attributes:
    policy: the schedule.
    groups: of the update.
    idle: lanes without work, ascending.
    skipped: sources never computed, wasted: computed in vain, because their population turned out uniform.
    costs: what work takes, as far as it was measured.
  """

  def __init__(self, policy: Policy, groups: Sequence[GroupState], lanes: int, hosts: Sequence[int], prompt_costs: Sequence[int],
               costs: costs_lib.Costs):
    """See `start`."""
    self.policy, self.groups, self.costs = policy, groups, costs
    self._elastic = policy.granularity == ELASTIC
    self.idle = list(range(lanes))
    self.skipped = self.wasted = 0
    self._objective = policy.objective
    self._needs_rewards, self._needs_batch = policy.objective.needs_rewards, policy.objective.needs_batch
    self._affine = policy.objective.affine
    self._hosts, self._prompt_costs = hosts, prompt_costs
    self._lanes = [_LaneState(n, [g.number for g in groups if g.lane == n]) for n in range(lanes)]
    self._next_order = self._backlog = 0
    self._unfinal = self._unclosed = len(groups)
    for group in groups:
      if not self._needs_rewards:  # coefficients are known from the start
        group.coefficients = self._coefficients(group)

  @property
  def rewards(self) -> tuple[float | None, ...]:
    """Rewards of the batch so far, None where unknown."""
    return tuple(r for g in self.groups for r in g.rewards)

  @property
  def closed(self) -> bool:
    """The barrier may run: every group is closed."""
    return not self._unclosed

  def final(self, group: int) -> bool:
    """The coefficients of a group's sources are known, and nothing more can come."""
    return not self._unfinal if self._needs_batch else self.groups[group].final(self._objective)

  def population(self, group: int) -> tuple[float | None, ...]:
    """The rewards that a group's advantages are relative to."""
    return self.rewards if self._needs_batch else self.groups[group].rewards

  def take(self, event: Event) -> None:
    """Takes one event."""
    match event:
      case WorkDone():
        self._done(event)
      case TurnReady():
        self._turn(event)
      case ContentReady():
        self._content(event)
      case RewardReady():
        self._reward(event)
      case _:
        raise SchedulerError(f'unknown event {event!r}')

  def assign(self) -> list[Assignment]:
    """Gives idle lanes work."""
    issued = []
    for number in tuple(self.idle):
      lane = self._lanes[number]
      work = self._choose(lane) if lane.changed else None
      lane.changed = False
      if work is None and self._backlog and len(self._lanes) > 1:
        work = self._steal(lane)
      if work is not None:
        self.idle.remove(number)
        lane.work = work
        issued.append(Assignment(number, work))
    return issued

  # What events change.

  def _source(self, event: TurnReady | ContentReady | RewardReady) -> tuple[GroupState, Source]:
    try:
      group = self.groups[event.group]
      self._lanes[group.lane].changed = True
      return group, group.sources[event.index]
    except IndexError as e:
      raise SchedulerError(f'{event} names a trajectory that was never registered') from e

  def _turn(self, event: TurnReady) -> None:
    group, source = self._source(event)
    if source.status is not Status.RUNNING:
      raise SchedulerError(f'{event}: its content was fixed before')
    source.steps, source.tokens = event.steps, event.tokens
    self._queue_turns(group, event.index)

  def _content(self, event: ContentReady) -> None:
    group, source = self._source(event)
    if source.status is not Status.RUNNING:
      raise SchedulerError(f'{event}: its content was fixed before')
    source.cost, source.order = event.cost, self._next_order
    self._next_order += 1
    group.running -= 1
    if event.scored:
      source.status = Status.READY
      self._add_backlog(group, event.cost)
      self._queue(group, event.index)
    else:
      source.status = Status.SKIPPED
      self._forget_turns(group, source)
      group.unfinished -= 1
    if not self._needs_rewards and not group.running:
      self._group_final(group)
    elif not group.unfinished:
      self._close_if_done(group)

  def _reward(self, event: RewardReady) -> None:
    group, source = self._source(event)
    if source.status is Status.RUNNING:
      raise SchedulerError(f'{event}: rewarded before its content was fixed')
    if source.reward is not None:
      raise SchedulerError(f'{event}: rewarded before with {source.reward}')
    source.reward = event.reward
    group.unrewarded -= 1
    if not (self.policy.direct or self._affine):
      self._check_sums(group)
    if source.status is Status.READY:
      self._queue(group, event.index)
    elif source.status is Status.HELD:
      self._lanes[group.lane].folds.append((group, event.index))
    if self._needs_rewards and not group.unrewarded:
      self._group_final(group)

  def _check_sums(self, group: GroupState) -> None:
    """Every reward has a sum; which of them had one would depend on their order otherwise."""
    distinct, sums = set(self.population(group.number)) - {None}, self.policy.reward_sums
    if len(distinct) > sums:
      raise types.TsJaxError(f'group {group.number} brings the {len(distinct)} distinct rewards {sorted(distinct)}, and there are sums for '
                             f"{sums}: raise config.objective.max_distinct_rewards (memory of the parameters' size for each), or use the "
                             'float32 accumulator, where further ones wait for their advantage')

  def _done(self, event: WorkDone) -> None:
    lane, work = self._lanes[event.lane], event.work
    if lane.work is None or (lane.work is not work and lane.work != work):
      raise SchedulerError(f'lane {event.lane} reports {work}, which it was not assigned')
    lane.work, lane.changed = None, True
    bisect.insort(self.idle, event.lane)
    group = self.groups[work.group]
    if event.seconds and self._elastic:
      self._measure(group, work, event.seconds)
    match work:
      case SourceWork():
        for index in work.indices:
          source = group.sources[index]
          if work.service is Service.CONTENT:
            self._held(group, index)
          else:
            source.status = Status.DONE
            group.unfinished -= 1
      case FoldHeld():
        group.sources[work.index].status = Status.DONE
        group.unfinished -= 1
      case TurnWork():
        self._worked(lane, group, work)
      case HandOver():
        group.helpers.remove(event.lane)
        self._drop_statistics(group, lane)
        group.queued = bool(group.helpers)
      case CloseGroup():
        self._drop_statistics(group, lane)
        group.closed = True
        self._unclosed -= 1
        return
    if not group.unfinished:
      self._close_if_done(group)

  def _held(self, group: GroupState, index: int) -> None:
    """A gradient was computed before its reward was known."""
    source, lane = group.sources[index], self._lanes[group.lane]
    if self.final(group.number) and self._objective.is_zero(self.population(group.number)):
      source.status = Status.DONE
      group.unfinished -= 1
      return
    source.status = Status.HELD
    lane.held += 1
    if source.reward is not None:
      lane.folds.append((group, index))

  def _worked(self, lane: _LaneState, group: GroupState, work: TurnWork) -> None:
    source = group.sources[work.index]
    if source.status is Status.SKIPPED:
      return
    if not source.worked and source.status in (Status.RUNNING, Status.READY):
      lane.kept += 1
    source.worked, source.worked_tokens = work.steps, work.tokens
    self._queue_turns(group, work.index)

  def _measure(self, group: GroupState, work: Work, seconds: float) -> None:
    match work:
      case TurnWork() if work.tokens > group.sources[work.index].worked_tokens:
        self.costs = self.costs.observe('early', self.policy.piece(work.tokens - group.sources[work.index].worked_tokens), seconds)
      case SourceWork() if len(work.indices) == 1:
        source = group.sources[work.indices[0]]
        if work.whole:
          self.costs = self.costs.observe('whole', source.cost, seconds)
        else:  # what had not run forward did first
          rest = self.costs.predict('early', self.policy.piece(max(source.tokens - source.worked_tokens, 0)))
          self.costs = self.costs.observe('late', source.cost, max(seconds - rest, 0.0))

  def _group_final(self, group: GroupState) -> None:
    """A group's last reward (content) is known: settles what that decides."""
    self._unfinal -= 1
    if self._needs_batch:
      if not self._unfinal:
        for g in self.groups:
          self._settle(g)
          self._queue_all(g)
      elif self.policy.granularity == 'group':
        self._queue_all(group)
      return
    self._settle(group)
    if self.policy.granularity != 'batch':
      self._queue_all(group)
    elif not self._unfinal:
      for g in self.groups:
        self._queue_all(g)

  def _queue_all(self, group: GroupState) -> None:
    self._lanes[group.lane].changed = True
    for index, source in enumerate(group.sources):
      if source.status is Status.READY:
        self._queue(group, index)

  def _settle(self, group: GroupState) -> None:
    """Skips what is known to contribute nothing; releases gradients that waited for their advantage."""
    objective, population = self._objective, self.population(group.number)
    group.coefficients = self._coefficients(group)
    uniform, lane = objective.is_zero(population), self._lanes[group.lane]
    for index, source in enumerate(group.sources):
      # In a mixed group a single zero advantage may be dropped only where its sum is not part of exact statistics.
      zero = (uniform or (self.policy.direct and group.coefficients[index] == 0)) and not objective.terms.needs_counts
      if source.status is Status.READY and zero:
        source.status = Status.SKIPPED
        self._add_backlog(group, -source.cost)
        self._forget_turns(group, source)
        group.unfinished -= 1
        self.skipped += 1
      elif source.status is Status.HELD and uniform:
        source.status = Status.DONE
        lane.held -= 1
        group.unfinished -= 1
      elif source.status is Status.HELD and source.reward is not None:
        lane.folds.append((group, index))
    self._close_if_done(group)

  def _coefficients(self, group: GroupState) -> list[float]:
    return [float(c) for c in self._objective.source_coefficients(group.rewards, self.population(group.number))]

  def _close_if_done(self, group: GroupState) -> None:
    """Everything of a group is done or skipped, and nothing more can come: what helpers hold goes to its lane, then it closes."""
    if group.unfinished or group.queued or group.closed or not self.final(group.number):
      return
    if not group.touched:
      group.closed = True
      self._unclosed -= 1
      return
    group.queued = True
    for helper in group.helpers:
      self._lanes[helper].hand_overs.append(group)
      self._lanes[helper].changed = True
    if not group.helpers:
      self._lanes[group.lane].closable.append(group)
      self._lanes[group.lane].changed = True

  # Queues.

  def _service(self, group: GroupState, source: Source) -> Service:
    if not self._needs_rewards or self.final(group.number):
      return Service.FINAL
    return Service.CONTENT if source.reward is None else Service.KNOWN

  def _released(self, group: GroupState) -> bool:
    match self.policy.granularity:
      case 'batch':
        return not self._unfinal
      case 'group':
        return group.final(self._objective)
    return True

  def _queue(self, group: GroupState, index: int) -> None:
    """A ready source, under what is known of it by now."""
    if self._released(group):
      source = group.sources[index]
      heapq.heappush(self._lanes[group.lane].ready[self._service(group, source)], (source.order, group.number, index))

  def _add_backlog(self, group: GroupState, cost: int) -> None:
    self._lanes[group.lane].backlog += cost
    self._backlog += cost

  def _queue_turns(self, group: GroupState, index: int) -> None:
    source, lane = group.sources[index], self._lanes[group.lane]
    if self.policy.by_turns and source.status is Status.RUNNING and source.steps > source.worked:
      heapq.heappush(lane.begun if source.worked else lane.fresh, (self._waiting(source), group.number, index))

  def _waiting(self, source: Source) -> float:
    """Rank of a running trajectory: the one with most to do first; for `elastic`, with least padding."""
    if not self._elastic:
      return source.worked - source.steps
    new = source.tokens - source.worked_tokens
    return -new / self._padded(source) if new > 0 else 0.0

  def _padded(self, source: Source) -> int:
    """Padded tokens of running a trajectory's turns forward now; one that is begun runs its last ones apart, padded once more."""
    return self.policy.piece(source.tokens - source.worked_tokens) + (0 if source.worked else self.policy.piece_lengths[0])

  def _forget_turns(self, group: GroupState, source: Source) -> None:
    """A source leaves the lane's memory of early work."""
    if source.worked:
      self._lanes[group.lane].kept -= 1

  @staticmethod
  def _drop_statistics(group: GroupState, lane: _LaneState) -> None:
    """The lane has no sums of the group any more: another group may have some."""
    if lane.number in group.statistics:
      group.statistics.remove(lane.number)
      lane.open -= 1

  @staticmethod
  def _return_waiting(lane: _LaneState, number: int) -> None:
    """Sources of a group that waited for sums go back to their queues."""
    for service, order, index in lane.waiting.pop(number, ()):
      heapq.heappush(lane.ready[service], (order, number, index))

  # What a free lane does.

  def _choose(self, lane: _LaneState) -> Work | None:
    work = self._next_fold(lane) if lane.folds else None
    if work is not None:
      return work
    if lane.hand_overs:
      return HandOver(lane.hand_overs.popleft().number)
    if lane.closable:
      return self._close(lane.closable.popleft())
    work = self._next_source(lane)
    if work is None and self.policy.by_turns:
      work = self._next_turn(lane)
    return self._next_prompt(lane) if work is None and lane.prompts else work

  def _next_fold(self, lane: _LaneState) -> FoldHeld | None:
    """A held gradient whose reward is there, and a sum for it, or its advantage."""
    while lane.folds:
      group, index = lane.folds.popleft()
      source = group.sources[index]
      if source.status is not Status.HELD:
        continue
      known = not self._affine and self.policy.direct and self.final(group.number)
      if not known and not self._has_sum(lane, group, source.reward):
        continue  # until its advantage is known
      source.status = Status.IN_LANE
      lane.held -= 1
      if known:
        return FoldHeld(group.number, index, source.reward, group.coefficients[index])
      self._add_sum(lane, group, source.reward)
      return FoldHeld(group.number, index, source.reward)
    return None

  def _close(self, group: GroupState) -> CloseGroup:
    rewards, objective = self.population(group.number), self._objective
    if objective.is_zero(rewards) and not objective.terms.needs_counts:
      self.wasted += sum(s.status is Status.DONE for s in group.sources)
    return CloseGroup(group.number, rewards)

  def _next_source(self, lane: _LaneState) -> SourceWork | None:
    while True:
      work = self._next_ready(lane)
      if work is not None or not lane.waiting or lane.open >= self.policy.admission_cap:
        return work
      # There is room for sums again: for those of the group that would have been served first.
      self._return_waiting(lane, min(lane.waiting, key=lambda g: min(lane.waiting[g])))

  def _next_ready(self, lane: _LaneState) -> SourceWork | None:
    for service in _SERVICES:
      queue = lane.ready[service]
      if service is Service.CONTENT and lane.held:
        continue  # one gradient may wait for its verdict; a second would need another copy of the parameters
      while queue:
        order, number, index = heapq.heappop(queue)
        group = self.groups[number]
        if not self._still_ready(group, index, service):
          continue
        direct = self._direct(service)
        if not direct and not self._may_sum(lane, group):
          lane.waiting.setdefault(number, []).append((service, order, index))
        elif direct or self._has_sum(lane, group, group.sources[index].reward):
          return self._start(lane, group, index, service)
    return None

  def _still_ready(self, group: GroupState, index: int, service: Service) -> bool:
    """A queued source is still to be started, and what is known of it is what it was queued under."""
    source = group.sources[index]
    return source.status is Status.READY and self._service(group, source) is service

  def _direct(self, service: Service) -> bool:
    """Sources that are started so go straight into the batch, not into statistics."""
    return service is Service.FINAL and (self.policy.direct or not self._needs_rewards)

  def _may_sum(self, lane: _LaneState, group: GroupState) -> bool:
    """The group has sums on the lane, or there is room for them.  With the batch as population they are the lane's, not the group's."""
    return self._needs_batch or lane.number in group.statistics or lane.open < self.policy.admission_cap

  def _has_sum(self, lane: _LaneState, group: GroupState, reward: float | None) -> bool:
    """A gradient with this reward has, or may have, a sum to go to."""
    if self._affine or reward is None:
      return True
    summed = self._summed(lane, group)
    return reward in summed or len(summed) < self.policy.reward_sums

  def _summed(self, lane: _LaneState, group: GroupState) -> set[float]:
    return {r for g in self.groups if g.lane == lane.number for r in g.summed} if self._needs_batch else set(group.summed)

  def _add_sum(self, lane: _LaneState, group: GroupState, reward: float | None) -> None:
    """The group has sums on the lane from now on; where rewards have sums of their own, one of this reward."""
    if lane.number not in group.statistics:
      group.statistics.append(lane.number)
      lane.open += 1
      self._return_waiting(lane, group.number)
    if not self._affine and reward is not None and reward not in group.summed:
      group.summed.append(reward)

  def _start(self, lane: _LaneState, group: GroupState, index: int, service: Service) -> SourceWork:
    """Takes ready sources into a lane."""
    direct = self._direct(service)
    indices = self._pack(group, index) if direct and lane.number == group.lane else (index,)
    whole = len(indices) > 1 or self._in_one_pass(group.sources[index])
    for i in indices:
      source = group.sources[i]
      source.status = Status.IN_LANE
      self._add_backlog(group, -source.cost)
      self._forget_turns(group, source)
    group.touched = True
    group.prompt_started |= lane.number == group.lane
    if direct:
      return SourceWork(group.number, indices, service, coefficients=tuple(group.coefficients[i] for i in indices), whole=whole)
    reward = group.sources[index].reward
    self._add_sum(lane, group, reward)
    return SourceWork(group.number, indices, service, reward=reward, whole=whole)

  def _in_one_pass(self, source: Source) -> bool:
    """A completed source by itself is differentiated in one pass."""
    if not self._elastic:
      return not self.policy.by_turns
    if source.worked:
      return False
    if not source.tokens:
      return True
    # Running it forward in pieces may save more padding than it costs.
    pieces = self.costs.predict('early', self.policy.piece(source.tokens)) + self.costs.predict('late', source.cost)
    return self.costs.predict('whole', source.cost) <= pieces

  def _pack(self, group: GroupState, first: int) -> tuple[int, ...]:
    """The largest permitted pack around `first` whose padding stays within `pack_waste`."""
    if max(self.policy.pack_rows) == 1 or group.sources[first].worked:
      return (first,)
    cost = group.sources[first].cost
    ready = [(abs(s.cost - cost), s.order, i) for i, s in enumerate(group.sources)
             if s.status is Status.READY and i != first and not s.worked]
    ready.sort()
    for rows in sorted(self.policy.pack_rows, reverse=True):
      chosen = (first, *(i for _, _, i in ready[:rows - 1]))
      costs = [group.sources[i].cost for i in chosen]
      if len(chosen) == rows and rows * max(costs) <= self.policy.pack_waste * sum(costs):
        return tuple(sorted(chosen))
    return (first,)

  def _next_turn(self, lane: _LaneState) -> TurnWork | None:
    """The running trajectory with most to do, among those that were begun or may be."""
    while True:
      for queue in (lane.begun, lane.fresh):
        while queue and not self._current(queue[0], queue is lane.begun):
          heapq.heappop(queue)
      queues = [q for q in (lane.begun, lane.fresh) if q and (q is lane.begun or lane.kept < self.policy.kept_cap)]
      if not queues:
        return None
      _, number, index = heapq.heappop(min(queues, key=lambda q: q[0]))
      group, source = self.groups[number], self.groups[number].sources[index]
      if not self._elastic or self._worth(source):
        group.prompt_started = group.touched = True
        return TurnWork(number, index, source.steps, source.tokens)
      # Otherwise it comes back with its next turn.

  def _worth(self, source: Source) -> bool:
    """Running a trajectory's turns forward now leaves enough less for its completion."""
    new = source.tokens - source.worked_tokens
    return new > 0 and self.costs.saved(new, source.tokens) >= _WORTH * self.costs.predict('early', self._padded(source))

  def _current(self, entry: tuple[float, int, int], begun: bool) -> bool:
    """A queued turn is still what there is to do for its trajectory."""
    waiting, number, index = entry
    source = self.groups[number].sources[index]
    return source.status is Status.RUNNING and self._waiting(source) == waiting and bool(source.worked) == begun

  def _next_prompt(self, lane: _LaneState) -> PromptForward | None:
    while lane.prompts:
      group = self.groups[lane.prompts[0]]
      if self.policy.granularity == 'batch' and self._unfinal:
        return None
      lane.prompts.popleft()
      if not group.prompt_started and not self.final(group.number):
        group.prompt_started = group.touched = True
        return PromptForward(group.number)
    return None

  def _steal(self, lane: _LaneState) -> SourceWork | None:
    """A whole trajectory of the lane that has most work left, where that is more than computing the group's prompt again.

    Only what has a sum to go to: the batch's, or where every source goes through statistics, the thief's own.  What was begun
    early stays where it was.
    """
    busy = [v for v in self._lanes if v.work is not None and v.backlog and self._hosts[v.number] == self._hosts[lane.number]]
    for victim in sorted(busy, key=lambda v: (-v.backlog, v.number)):
      # Rather of a group whose prompt is here already; then a long one; then one that would have been served late.
      found = [(lane.number in self.groups[number].helpers, self.groups[number].sources[index].cost, order, number, index, service)
               for service in (Service.FINAL, Service.KNOWN) for order, number, index in victim.ready[service]
               if self._may_take(lane, victim, number, index, service)]
      if found:
        known, _, _, number, index, service = max(found)
        if not known:
          self.groups[number].helpers.append(lane.number)
        return self._start(lane, self.groups[number], index, service)
    return None

  def _may_take(self, lane: _LaneState, victim: _LaneState, number: int, index: int, service: Service) -> bool:
    """A queued source of another lane's may be started here."""
    group = self.groups[number]
    if not self._still_ready(group, index, service) or self._has_early_work(victim, number, index):
      return False
    if not self._direct(service) and (self.policy.direct or not self._affine or not self._may_sum(lane, group)):
      return False
    return lane.number in group.helpers or victim.backlog > self._prompt_costs[number]

  def _has_early_work(self, lane: _LaneState, number: int, index: int) -> bool:
    """Turns of a trajectory were worked on, or are being worked on."""
    now = isinstance(lane.work, TurnWork) and (lane.work.group, lane.work.index) == (number, index)
    return now or self.groups[number].sources[index].worked > 0


def deal(predicted: Sequence[float], lanes: int) -> list[int]:
  """The lane of each group: longest predicted work first, to the lane with least so far.

  Args:
    predicted: work of each group, any unit.
    lanes: number of lanes.
  """
  load, owner = [0.0] * lanes, [0] * len(predicted)
  for number in sorted(range(len(predicted)), key=lambda n: (-predicted[n], n)):
    owner[number] = min(range(lanes), key=lambda n: (load[n], n))
    load[owner[number]] += predicted[number]
  return owner


def start(policy: Policy, group_sizes: Sequence[int], lanes: int = 1, predicted: Sequence[float] | None = None,
          prompt_costs: Sequence[int] | None = None, hosts: Sequence[int] | None = None,
          costs: costs_lib.Costs = costs_lib.Costs()) -> tuple[State, list[Assignment]]:
  """Registers an update's groups; returns the first state and what lanes may do already.

  Args:
    policy: the schedule.
    group_sizes: trajectories of each group.
    lanes: number of lanes.
    predicted: work of each group, any unit; by default its size.
    prompt_costs: padded tokens of each group's prompt, what a lane pays to work on another one's group; by default 0.
    hosts: of each lane; a lane takes work from lanes of its own host only.  By default they have one.
    costs: what work takes, from earlier updates.
  """
  owner = deal(group_sizes if predicted is None else predicted, lanes)
  groups = [GroupState(n, size, owner[n]) for n, size in enumerate(group_sizes)]
  state = State(policy, groups, lanes, hosts or [0] * lanes, prompt_costs or [0] * len(groups), costs)
  return state, state.assign()


def advance(state: State, event: Event) -> tuple[State, list[Assignment]]:
  """Takes one event; consumes `state`.

  Raises:
    SchedulerError: the event contradicts what happened before.
  """
  if state.closed:
    raise SchedulerError(f'{event} arrived after the batch was closed')
  state.take(event)
  return state, state.assign() if state.idle else []
