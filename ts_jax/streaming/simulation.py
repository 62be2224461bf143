"""An update simulated: the scheduler itself, on recorded or invented arrivals, with work that takes as long as a model says.

No device, no clock: every policy can be tried on the same update, to the bit.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from typing import Callable, Mapping, Sequence

from ts_jax.streaming import costs as costs_lib, scheduler


@dataclasses.dataclass(frozen=True)
class Arrival:
  """One trajectory as the learner sees it arrive.  Times in seconds after the update's start.

  Attributes:
    group, index: which.
    turns: (when it was fixed, tokens) of each turn.
    content_s: when the trajectory ended, reward_s: when it was rewarded.
    reward: of it.
  """

  group: int
  index: int
  turns: tuple[tuple[float, int], ...]
  content_s: float
  reward_s: float
  reward: float

  @property
  def tokens(self) -> int:
    """Behind the prompt."""
    return sum(n for _, n in self.turns)


@dataclasses.dataclass(frozen=True)
class Service:
  """What work takes, in seconds.

  Attributes:
    whole, early, late: per padded token, of one pass over a source, of turns run forward, of what is left of those at completion.
    turn_early, turn_late: the same at granularity `turn`, which differentiates twice.
    packed: seconds per padded token of rows that run together, over those of one row.
    fold_s: adds a gradient of the parameters' size to one sum.
    prompt_s: a prompt forward; as long again, twice, backward.
    pad: padded length of a number of tokens.
  """

  whole: float = 4e-3
  early: float = 1e-3
  late: float = 3e-3
  turn_early: float = 4e-3
  turn_late: float = 3e-3
  packed: Mapping[int, float] = dataclasses.field(default_factory=dict)
  fold_s: float = 0.0
  prompt_s: float = 0.0
  pad: Callable[[int], int] = lambda tokens: tokens


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A simulated update.

  Attributes:
    rollout_s: when the last reward was known.
    end_s: when the last group was closed.
    busy_s: of each lane.
    wasted, skipped: sources, as the scheduler counts them.
    works: how many items of each type were done.
    costs: learned by the end.
  """

  rollout_s: float
  end_s: float
  busy_s: tuple[float, ...]
  wasted: int
  skipped: int
  works: Mapping[str, int]
  costs: costs_lib.Costs

  @property
  def step_s(self) -> float:
    """max(R, c_n), without the serial suffix P."""
    return max(self.rollout_s, self.end_s)


def simulate(arrivals: Sequence[Arrival], service: Service, policy: scheduler.Policy, lanes: int = 1,
             costs: costs_lib.Costs = costs_lib.Costs()) -> Outcome:
  """Runs an update under a policy.

  Args:
    arrivals: its trajectories; groups and their members are numbered from 0.
    service: what work takes.
    policy: the schedule.
    lanes: number of lanes.
    costs: known before.
  """
  return _Simulation(arrivals, service, policy, lanes).run(costs)


class _Simulation:
  """The shell around the scheduler, with a clock of its own."""

  def __init__(self, arrivals: Sequence[Arrival], service: Service, policy: scheduler.Policy, lanes: int):
    self._of = {(a.group, a.index): a for a in arrivals}
    self._service, self._policy, self._lanes = service, policy, lanes
    self._number = itertools.count()
    self._queue: list[tuple[float, int, scheduler.Event]] = []
    self._prompts: set[tuple[int, int]] = set()  # (lane, group)
    self._worked: dict[tuple[int, int], int] = {}  # turns
    self._summed: set[int] = set()

  def run(self, costs: costs_lib.Costs) -> Outcome:
    sizes = [0] * (1 + max(g for g, _ in self._of))
    for at, a in sorted(self._of.items()):
      sizes[at[0]] += 1
      if self._policy.by_turns:
        tokens = 0
        for n, (ready, own) in enumerate(a.turns):
          tokens += own
          self._push(min(ready, a.content_s), scheduler.TurnReady(*at, n + 1, tokens))
      self._push(a.content_s, scheduler.ContentReady(*at, scored=1, cost=self._service.pad(a.tokens)))
      if self._policy.objective.needs_rewards:
        self._push(a.reward_s, scheduler.RewardReady(*at, a.reward))
    now, busy, works = 0.0, [0.0] * self._lanes, {}
    state, issued = scheduler.start(self._policy, sizes, self._lanes, costs=costs)
    while True:
      for assignment in issued:
        own, beside = self._work(assignment.work), self._beside(assignment.lane, assignment.work)
        busy[assignment.lane] += own + beside
        name = type(assignment.work).__name__
        works[name] = works.get(name, 0) + 1
        self._push(now + own + beside, scheduler.WorkDone(assignment.lane, assignment.work, own))
      if state.closed:
        break
      now, _, event = heapq.heappop(self._queue)
      state, issued = scheduler.advance(state, event)
    rollout = max(a.reward_s if self._policy.objective.needs_rewards else a.content_s for a in self._of.values())
    return Outcome(rollout, now, tuple(busy), state.wasted, state.skipped, works, state.costs)

  def _push(self, at: float, event: scheduler.Event) -> None:
    heapq.heappush(self._queue, (at, next(self._number), event))

  def _work(self, work: scheduler.Work) -> float:
    """Seconds of turns and sources themselves."""
    match work:
      case scheduler.TurnWork():
        rate = self._service.turn_early if self._policy.granularity == 'turn' else self._service.early
        return rate * self._advance((work.group, work.index), work.steps)
      case scheduler.SourceWork():
        return self._source(work)
    return 0.0

  def _beside(self, lane: int, work: scheduler.Work) -> float:
    """Seconds of prompts and folds."""
    fold_s, prompt_s = self._service.fold_s, self._service.prompt_s
    match work:
      case scheduler.PromptForward() | scheduler.TurnWork():
        return self._prompt(lane, work.group)
      case scheduler.SourceWork(coefficients=None):
        self._summed.add(work.group)
        return self._prompt(lane, work.group) + (0.0 if work.service is scheduler.Service.CONTENT else 2 * fold_s)
      case scheduler.SourceWork():
        return self._prompt(lane, work.group) + fold_s
      case scheduler.FoldHeld():
        return fold_s * (2 if work.coefficient is None else 1)
      case scheduler.CloseGroup():
        return 2 * prompt_s + fold_s * (1 + 2 * (work.group in self._summed))
    return 0.0

  def _prompt(self, lane: int, group: int) -> float:
    if (lane, group) in self._prompts:
      return 0.0
    self._prompts.add((lane, group))
    return self._service.prompt_s

  def _advance(self, at: tuple[int, int], steps: int) -> int:
    """Padded tokens of turns up to `steps` that have not been worked on."""
    done = self._worked.get(at, 0)
    self._worked[at] = steps
    turns = [n for _, n in self._of[at].turns[done:steps]]
    return self._policy.piece(sum(turns)) if self._policy.granularity == scheduler.ELASTIC else sum(map(self._service.pad, turns))

  def _source(self, work: scheduler.SourceWork) -> float:
    service, members = self._service, [(work.group, i) for i in work.indices]
    padded = max(service.pad(self._of[at].tokens) for at in members)
    if self._policy.granularity == 'turn':
      return service.turn_early * self._advance(members[0], len(self._of[members[0]].turns)) + service.turn_late * padded
    if not work.whole:
      return service.early * self._advance(members[0], len(self._of[members[0]].turns)) + service.late * padded
    return service.whole * padded * len(members) * service.packed.get(len(members), 1.0)
