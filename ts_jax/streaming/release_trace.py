"""What an update knows of its learner spans beside their times: task, policy version, turns, and when inputs were fixed."""

from __future__ import annotations

import dataclasses
from typing import Sequence

from ts_jax import types
from ts_jax.objectives.objective import Objective

_At = tuple[int, int]  # (group, index)


class ReleaseTrace:
  """Collects rollout events; completes the spans that a lane returns.

  Readiness is when the last input was fixed, on the run's clock: of a turn its tokens or scores, of a source its content, of a
  held gradient its reward, of a group's reduction and of its prompt's backward pass the group's last reward (content, for an
  objective without rewards), of a prompt's forward pass the start of the update.
  """

  def __init__(self, update: int, policy_version: int, plans: Sequence[types.GroupPlan], objective: Objective,
               start_s: float):
    self._update, self._version, self._objective, self._start_s = update, policy_version, objective, start_s
    self._tasks = {p.index: p.task_id for p in plans}
    self._turns: dict[_At, dict[int, types.Turn]] = {}
    self._scores_s: dict[_At, dict[str, dict[int, float]]] = {}  # by scorer and turn
    self._score_span_s: dict[tuple[str, int, int, int], float] = {}  # a scorer's span precedes its scores
    self._described: dict[_At, int] = {}
    self._content_s: dict[_At, float] = {}
    self._reward_s: dict[_At, float] = {}

  def take(self, event: types.RolloutEvent | types.Span) -> None:
    """One more event of the update."""
    match event:
      case types.Span():
        if event.kind in types.SCORERS and event.update == self._update:
          self._score_span_s[event.kind, event.group, event.index, event.turn] = event.end_s
      case types.TurnFixed():
        self._turns.setdefault((event.group, event.index), {})[event.turn.index] = event.turn
      case types.TurnScored():
        at = event.group, event.index
        known_s = self._score_span_s.get((event.scorer, *at, event.turn), -1.0)
        self._scores_s.setdefault(at, {}).setdefault(event.scorer, {})[event.turn] = known_s
      case types.ContentFixed():
        self._content_s[event.trajectory.group, event.trajectory.index] = event.trajectory.content_s
      case types.RewardFixed():
        self._reward_s[event.trajectory.group, event.trajectory.index] = event.trajectory.reward_s

  def describe(self, span: types.Span) -> types.Span:
    """A learner span with what the lane does not know."""
    fields = dict(task=self._tasks.get(span.group, ''), version=self._version, ready_s=self._ready_s(span))
    if span.kind in ('turn', 'forward'):
      at = span.group, span.index
      done, self._described[at] = self._described.get(at, -1), span.turn
      fields |= dict(scored=sum(sum(t.scored_mask) for i, t in self._turns.get(at, {}).items() if done < i <= span.turn))
    return dataclasses.replace(span, **fields)

  def _ready_s(self, span: types.Span) -> float:
    members = [(span.group, i) for i in span.members]
    match span.kind:
      case 'turn' | 'forward':
        at = span.group, span.index
        times = [t.request_end_s for i, t in self._turns.get(at, {}).items() if i <= span.turn]
        # Running forward takes the output heads of turns along that were scored by then.
        times += [s for scores in self._scores_s.get(at, {}).values() for i, s in scores.items() if i <= span.turn]
        return max(times, default=-1.0)
      case 'fold' if span.work == 'held':
        return self._latest(self._reward_s, members)
      case 'source' | 'fold':
        return self._latest(self._content_s, members)
      case 'prompt' if span.work == 'forward':
        return self._start_s
    fixed = self._reward_s if self._objective.needs_rewards else self._content_s
    return self._latest(fixed, [at for at in fixed if span.group in (at[0], -1)])

  @staticmethod
  def _latest(times: dict[_At, float], of: Sequence[_At]) -> float:
    return max((times[at] for at in of if at in times), default=-1.0)
