"""The learner's scheduler: a pure state machine.

`advance(state, event) -> (state, assignments)` has no threads and no clock.  Around it, a shell owns the queue and the
lanes: it feeds events and runs what is assigned.  A schedule is a `Policy`; there is one machine for all of them.

Service order at a free lane: fold a held gradient whose reward arrived; close a group; then sources, `final` (all
rewards that advantages are relative to known) before `known` (its own reward known) before `content` (tokens fixed, verdict
pending), in readiness order; then, at granularities `turn` and `forward`, turns of running trajectories; then prompts nobody
asked for yet.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Sequence

from ts_jax import types
from ts_jax.objectives import policy_gradient
from ts_jax.objectives.objective import Objective


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


class Service(enum.IntEnum):
  """What was known when a source was started; lower is served first."""

  FINAL = 0
  KNOWN = 1
  CONTENT = 2


# How early work is released: when every reward of the batch is known (Sync), of the group, or when a trajectory's content is
# fixed; `turn` and `forward` begin with turns of running trajectories.
GRANULARITIES = ('batch', 'group', 'trajectory', 'turn', 'forward')


@dataclasses.dataclass(frozen=True)
class Policy:
  """A schedule, as the scheduler sees it.

  Attributes:
    granularity: when sources are released, see `GRANULARITIES`.
    direct: apply the advantage of `final` sources at once, without group statistics.  Off for the exact accumulator,
      where every source must take the same arithmetic path whatever its arrival.
    admission_cap: groups per lane that may hold statistics at once.
    pack_rows: how many `final` sources of a group may run as one batch, e.g. (4, 1); only with `direct`.
    pack_waste: largest padded cost of a pack relative to its members' own.
    objective: from rewards to coefficients; the lanes' own.
    kept_cap: running trajectories per lane that may hold work of their turns at once (a memory budget).
    reward_sums: distinct rewards per group (per lane, with the batch as population) that may have a sum of their own, where
      the objective is not affine.  A source with one more reward waits until its advantage is known.
  """

  granularity: str = 'trajectory'
  direct: bool = True
  admission_cap: int = 4
  pack_rows: tuple[int, ...] = (1,)
  pack_waste: float = 1.15
  objective: Objective = policy_gradient.PolicyGradient()
  kept_cap: int = 8
  reward_sums: int = 4

  def __post_init__(self):
    if self.granularity not in GRANULARITIES:
      raise ValueError(f'granularity {self.granularity!r} is unknown: use one of {GRANULARITIES}')
    if self.admission_cap < 1:
      raise ValueError(f'admission cap {self.admission_cap} must be at least 1')
    if self.reward_sums < 1:
      raise ValueError(f'reward_sums {self.reward_sums} must be at least 1')
    if not self.direct and max(self.pack_rows) > 1:
      raise ValueError(f'pack_rows {self.pack_rows} needs direct=True: packed rows share one sum')
    if self.by_turns and max(self.pack_rows) > 1:
      raise ValueError(f'granularity {self.granularity!r} needs pack_rows (1,), not {self.pack_rows}')
    if 1 not in self.pack_rows:
      raise ValueError(f'pack_rows {self.pack_rows} must contain 1')

  @property
  def by_turns(self) -> bool:
    """Turns of running trajectories are worked on."""
    return self.granularity in ('turn', 'forward')


@dataclasses.dataclass(frozen=True)
class Source:
  """One trajectory.  `cost` is its padded length in tokens, `order` its rank of readiness; while it runs, `steps` can be
  worked on, of which `worked` have been."""

  status: Status = Status.RUNNING
  reward: float | None = None
  scored: int = 0
  cost: int = 0
  order: int = -1
  steps: int = 0
  worked: int = 0


@dataclasses.dataclass(frozen=True)
class GroupState:
  """One group.  `lane` owns it from its first work on; `statistics`: its sums are allocated, `summed`: of which rewards."""

  sources: tuple[Source, ...]
  lane: int = -1
  statistics: bool = False
  summed: tuple[float, ...] = ()
  prompt_started: bool = False
  touched: bool = False
  closing: bool = False
  closed: bool = False

  @property
  def rewards(self) -> tuple[float | None, ...]:
    """Rewards so far, None where unknown."""
    return tuple(s.reward for s in self.sources)

  def final(self, objective: Objective) -> bool:
    """Everything the group itself has to wait for: all rewards, or for an objective without rewards all content."""
    if objective.needs_rewards:
      return all(s.reward is not None for s in self.sources)
    return all(s.status is not Status.RUNNING for s in self.sources)


@dataclasses.dataclass(frozen=True)
class State:
  """Everything the scheduler knows within one update."""

  policy: Policy
  groups: tuple[GroupState, ...]
  idle: tuple[int, ...]
  next_order: int = 0
  skipped: int = 0
  wasted: int = 0

  @property
  def batch_final(self) -> bool:
    """Every group is final."""
    return all(g.final(self.policy.objective) for g in self.groups)

  @property
  def rewards(self) -> tuple[float | None, ...]:
    """Rewards of the batch so far, None where unknown."""
    return tuple(r for g in self.groups for r in g.rewards)

  def final(self, group: int) -> bool:
    """The coefficients of a group's sources are known, and nothing more can come."""
    return self.batch_final if self.policy.objective.needs_batch else self.groups[group].final(self.policy.objective)

  def population(self, group: int) -> tuple[float | None, ...]:
    """The rewards that a group's advantages are relative to."""
    return self.rewards if self.policy.objective.needs_batch else self.groups[group].rewards

  @property
  def closed(self) -> bool:
    """The barrier may run: every group is closed."""
    return all(g.closed for g in self.groups)


@dataclasses.dataclass(frozen=True)
class TurnReady:
  """`steps` of a running trajectory can be worked on (fewer than before where a failed attempt is made again)."""

  group: int
  index: int
  steps: int


@dataclasses.dataclass(frozen=True)
class ContentReady:
  """Tokens and mask of a trajectory are fixed."""

  group: int
  index: int
  scored: int
  cost: int


@dataclasses.dataclass(frozen=True)
class RewardReady:
  """The reward of a trajectory is fixed."""

  group: int
  index: int
  reward: float


@dataclasses.dataclass(frozen=True)
class PromptForward:
  """Compute a group's boundary state ahead of its first source."""

  group: int


@dataclasses.dataclass(frozen=True)
class TurnWork:
  """Work on the turns of a running trajectory that are there, up to `steps`."""

  group: int
  index: int
  steps: int


@dataclasses.dataclass(frozen=True)
class SourceWork:
  """Differentiate sources.  FINAL with `coefficients`: fold into the batch; otherwise into the group's statistics."""

  group: int
  indices: tuple[int, ...]
  service: Service
  coefficients: tuple[float, ...] | None = None
  reward: float | None = None


@dataclasses.dataclass(frozen=True)
class FoldHeld:
  """Fold a gradient whose reward was pending when it was computed; with a `coefficient` into the batch."""

  group: int
  index: int
  reward: float
  coefficient: float | None = None


@dataclasses.dataclass(frozen=True)
class CloseGroup:
  """Reduce a group's statistics and run its prompt's backward pass (nothing but clean-up where all of it is zero).

  `rewards`: those that its advantages are relative to.
  """

  group: int
  rewards: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class HandOver:
  """Give what was summed of a group's sources to the lane that owns the group."""

  group: int


Work = PromptForward | TurnWork | SourceWork | FoldHeld | CloseGroup | HandOver


@dataclasses.dataclass(frozen=True)
class WorkDone:
  """A lane finished what it was assigned."""

  lane: int
  work: Work


@dataclasses.dataclass(frozen=True)
class Assignment:
  """Work for a lane."""

  lane: int
  work: Work


Event = TurnReady | ContentReady | RewardReady | WorkDone


def start(policy: Policy, group_sizes: Sequence[int], lanes: int = 1) -> tuple[State, list[Assignment]]:
  """Registers an update's groups; returns the first state and what lanes may do already."""
  groups = tuple(GroupState(tuple(Source() for _ in range(size))) for size in group_sizes)
  return _dispatch(State(policy, groups, tuple(range(lanes))))


def advance(state: State, event: Event) -> tuple[State, list[Assignment]]:
  """Takes one event.

  Raises:
    SchedulerError: the event contradicts what happened before.
  """
  if state.closed:
    raise SchedulerError(f'{event} arrived after the batch was closed')
  match event:
    case TurnReady():
      state = _turn(state, event)
    case ContentReady():
      state = _content(state, event)
    case RewardReady():
      state = _reward(state, event)
    case WorkDone():
      state = _done(state, event)
    case _:
      raise SchedulerError(f'unknown event {event!r}')
  return _dispatch(_settle(state))


def _with_source(state: State, group: int, index: int, **changes) -> State:
  g = state.groups[group]
  sources = (*g.sources[:index], dataclasses.replace(g.sources[index], **changes), *g.sources[index + 1:])
  return _with_group(state, group, sources=sources)


def _with_group(state: State, group: int, **changes) -> State:
  groups = (*state.groups[:group], dataclasses.replace(state.groups[group], **changes), *state.groups[group + 1:])
  return dataclasses.replace(state, groups=groups)


def _source(state: State, event: TurnReady | ContentReady | RewardReady) -> Source:
  try:
    return state.groups[event.group].sources[event.index]
  except IndexError as e:
    raise SchedulerError(f'{event} names a trajectory that was never registered') from e


def _turn(state: State, event: TurnReady) -> State:
  source = _source(state, event)
  if source.status is not Status.RUNNING:
    raise SchedulerError(f'{event}: its content was fixed before')
  return _with_source(state, event.group, event.index, steps=event.steps)


def _content(state: State, event: ContentReady) -> State:
  if _source(state, event).status is not Status.RUNNING:
    raise SchedulerError(f'{event}: its content was fixed before')
  status = Status.READY if event.scored else Status.SKIPPED
  state = _with_source(state, event.group, event.index, status=status, scored=event.scored, cost=event.cost,
                       order=state.next_order)
  return dataclasses.replace(state, next_order=state.next_order + 1)


def _reward(state: State, event: RewardReady) -> State:
  source = _source(state, event)
  if source.status is Status.RUNNING:
    raise SchedulerError(f'{event}: rewarded before its content was fixed')
  if source.reward is not None:
    raise SchedulerError(f'{event}: rewarded before with {source.reward}')
  state = _with_source(state, event.group, event.index, reward=event.reward)
  if not (state.policy.direct or state.policy.objective.affine):
    _check_sums(state, event.group)
  return state


def _check_sums(state: State, group: int) -> None:
  """Every reward has a sum; which of them had one would depend on their order otherwise."""
  distinct, sums = set(state.population(group)) - {None}, state.policy.reward_sums
  if len(distinct) > sums:
    raise types.TsJaxError(f'group {group} brings the {len(distinct)} distinct rewards {sorted(distinct)}, and there are sums for {sums}: '
                           "raise config.objective.max_distinct_rewards (memory of the parameters' size for each), or use the float32 "
                           'accumulator, where further ones wait for their advantage')


def _done(state: State, event: WorkDone) -> State:
  work, group = event.work, state.groups[event.work.group]
  if event.lane in state.idle or group.lane != event.lane:
    raise SchedulerError(f'lane {event.lane} reports {work}, which it was not assigned')
  state = dataclasses.replace(state, idle=(*state.idle, event.lane))
  match work:
    case SourceWork():
      for index in work.indices:
        if group.sources[index].status is not Status.IN_LANE:
          raise SchedulerError(f'{work}: source {index} was not in a lane')
        status = Status.HELD if work.service is Service.CONTENT else Status.DONE
        state = _with_source(state, work.group, index, status=status)
    case FoldHeld():
      state = _with_source(state, work.group, work.index, status=Status.DONE)
    case TurnWork():
      state = _with_source(state, work.group, work.index, worked=work.steps)
    case CloseGroup():
      if group.closed or not group.closing:
        raise SchedulerError(f'group {work.group} was closed twice')
      state = _with_group(state, work.group, closed=True, statistics=False)
  return state


def _settle(state: State) -> State:
  """Skips what is known to contribute nothing; closes groups no lane has touched."""
  for number, group in enumerate(state.groups):
    objective = state.policy.objective
    if group.closed or group.closing or not state.final(number):
      continue
    coefficients, uniform = _coefficients(state, number), objective.is_zero(state.population(number))
    for index, source in enumerate(group.sources):
      # In a mixed group a single zero advantage may be dropped only where its sum is not part of exact statistics.
      zero = (uniform or (state.policy.direct and coefficients[index] == 0)) and not objective.terms.needs_counts
      if source.status is Status.READY and zero:
        state = _with_source(state, number, index, status=Status.SKIPPED)
        state = dataclasses.replace(state, skipped=state.skipped + 1)
      elif source.status is Status.HELD and uniform:
        state = _with_source(state, number, index, status=Status.DONE)
    group = state.groups[number]
    if not group.touched and all(s.status is Status.SKIPPED for s in group.sources):
      state = _with_group(state, number, closed=True)
  return state


def _coefficients(state: State, group: int):
  return state.policy.objective.source_coefficients(state.groups[group].rewards, state.population(group))


def _dispatch(state: State) -> tuple[State, list[Assignment]]:
  assignments = []
  for lane in sorted(state.idle):
    work = _choose(state, lane)
    if work is None:
      continue
    state = _assign(state, lane, work)
    assignments.append(Assignment(lane, work))
  return state, assignments


def _assign(state: State, lane: int, work: Work) -> State:
  state = dataclasses.replace(state, idle=tuple(i for i in state.idle if i != lane))
  state = _with_group(state, work.group, lane=lane, touched=True)
  match work:
    case PromptForward() | TurnWork():
      return _with_group(state, work.group, prompt_started=True)
    case SourceWork():
      for index in work.indices:
        state = _with_source(state, work.group, index, status=Status.IN_LANE)
      if work.coefficients is None:
        state = _with_sum(_with_group(state, work.group, statistics=True), work.group, work.reward)
      return _with_group(state, work.group, prompt_started=True)
    case FoldHeld():
      state = _with_source(state, work.group, work.index, status=Status.IN_LANE)
      return state if work.coefficient is not None else _with_sum(state, work.group, work.reward)
    case CloseGroup():
      computed = sum(s.status is Status.DONE for s in state.groups[work.group].sources)
      objective = state.policy.objective
      wasted = computed if objective.is_zero(work.rewards) and not objective.terms.needs_counts else 0
      return dataclasses.replace(_with_group(state, work.group, closing=True), wasted=state.wasted + wasted)
  raise SchedulerError(f'unknown work {work!r}')


def _with_sum(state: State, group: int, reward: float | None) -> State:
  """The reward has a sum of its own, where rewards have."""
  summed = state.groups[group].summed
  if state.policy.objective.affine or reward is None or reward in summed:
    return state
  return _with_group(state, group, summed=(*summed, reward))


def _has_sum(state: State, lane: int, group: int, reward: float | None) -> bool:
  """A gradient with this reward has, or may have, a sum to go to."""
  if state.policy.objective.affine or reward is None:
    return True
  mine = [g for g in state.groups if g.lane == lane] if state.policy.objective.needs_batch else [state.groups[group]]
  summed = {r for g in mine for r in g.summed}
  return reward in summed or len(summed) < state.policy.reward_sums


def _next_fold(state: State, lane: int, mine: list[tuple[int, GroupState]]) -> FoldHeld | None:
  """A held gradient whose reward is there, and a sum for it, or its advantage."""
  for number, group in mine:
    for index, source in enumerate(group.sources):
      if source.status is not Status.HELD or source.reward is None:
        continue
      if not state.policy.objective.affine and state.policy.direct and state.final(number):
        return FoldHeld(number, index, source.reward, float(_coefficients(state, number)[index]))
      if _has_sum(state, lane, number, source.reward):
        return FoldHeld(number, index, source.reward)
  return None


def _choose(state: State, lane: int) -> Work | None:
  mine = [(n, g) for n, g in enumerate(state.groups) if g.lane in (lane, -1) and not g.closed and not g.closing]
  fold = _next_fold(state, lane, mine)
  if fold is not None:
    return fold
  for number, group in mine:
    if group.touched and state.final(number) and all(s.status in (Status.DONE, Status.SKIPPED) for s in group.sources):
      return CloseGroup(number, state.population(number))
  if state.policy.granularity == 'batch' and not state.batch_final:
    return None
  best = _best_source(state, lane, mine)
  if best is not None:
    return best
  if state.policy.by_turns:
    turn = _next_turn(state, lane, mine)
    if turn is not None:
      return turn
  for number, group in mine:
    if not group.prompt_started and not state.final(number):
      return PromptForward(number)
  return None


def _next_turn(state: State, lane: int, mine: list[tuple[int, GroupState]]) -> TurnWork | None:
  """The running trajectory with most steps waiting, among those that were begun or may be."""
  holding = sum(s.worked > 0 and s.status in (Status.RUNNING, Status.READY) for g in state.groups if g.lane == lane for s in g.sources)
  waiting = [(s.worked - s.steps, number, index) for number, group in mine for index, s in enumerate(group.sources)
             if s.status is Status.RUNNING and s.steps > s.worked and (s.worked or holding < state.policy.kept_cap)]
  if not waiting:
    return None
  _, number, index = min(waiting)
  return TurnWork(number, index, state.groups[number].sources[index].steps)


def _best_source(state: State, lane: int, mine: list[tuple[int, GroupState]]) -> SourceWork | None:
  open_groups = sum(g.statistics for g in state.groups if g.lane == lane)
  holding = any(s.status is Status.HELD for _, g in mine for s in g.sources)
  best, best_rank = None, None
  objective = state.policy.objective
  for number, group in mine:
    final = state.final(number)
    if state.policy.granularity == 'group' and not group.final(objective):
      continue
    known = final or not objective.needs_rewards  # the coefficients, whatever else comes
    direct = known and (state.policy.direct or not objective.needs_rewards)
    # With the batch as population the sums are the lane's, not the group's.
    admitted = direct or group.statistics or objective.needs_batch or open_groups < state.policy.admission_cap
    for index, source in enumerate(group.sources):
      if source.status is not Status.READY or not admitted or not (direct or _has_sum(state, lane, number, source.reward)):
        continue
      service = Service.FINAL if known else Service.CONTENT if source.reward is None else Service.KNOWN
      if service is Service.CONTENT and holding:
        continue  # one gradient may wait for its verdict; a second would need another copy of the parameters
      rank = (service, source.order)
      if best_rank is None or rank < best_rank:
        best, best_rank = (number, index, service, direct), rank
  if best is None:
    return None
  number, index, service, direct = best
  group = state.groups[number]
  if not direct:
    return SourceWork(number, (index,), service, reward=group.sources[index].reward)
  indices = _pack(state.policy, group, index)
  coefficients = _coefficients(state, number)
  return SourceWork(number, indices, service, coefficients=tuple(float(coefficients[i]) for i in indices))


def _pack(policy: Policy, group: GroupState, first: int) -> tuple[int, ...]:
  """The largest permitted pack around `first` whose padding stays within `pack_waste`."""
  ready = [i for i, s in enumerate(group.sources) if s.status is Status.READY and i != first]
  ready.sort(key=lambda i: (abs(group.sources[i].cost - group.sources[first].cost), group.sources[i].order))
  for rows in sorted(policy.pack_rows, reverse=True):
    chosen = (first, *ready[:rows - 1])
    costs = [group.sources[i].cost for i in chosen]
    if len(chosen) == rows and rows * max(costs) <= policy.pack_waste * sum(costs):
      return tuple(sorted(chosen))
  return (first,)
