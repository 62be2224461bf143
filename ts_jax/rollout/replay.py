"""Replay: recorded trajectories as rollout events, at their recorded (or scaled) times, instead of an engine."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Callable, NamedTuple, Sequence

from ts_jax import types

EmitEvent = Callable[[types.RolloutEvent], None]


class Moment(NamedTuple):
  """One event to come: `kind` 0 for a turn's tokens (and scores), 1 for a trajectory's content, 2 for its reward."""

  delay_s: float
  kind: int
  trajectory: types.Trajectory
  turn: int = -1


def schedule(trajectories: Sequence[types.Trajectory], scale: float) -> list[Moment]:
  """The events of an update, in order; delays are seconds after its start.

  Args:
    trajectories: of one update; their times are seconds on the recording run's clock.
    scale: multiplies every delay.

  Raises:
    ConfigError: a trajectory has no reward or no times, so it was never complete.
  """
  if scale < 0:
    raise types.ConfigError(f'replay scale {scale} is negative: use 0 for as fast as possible')
  for t in trajectories:
    if t.reward is None or not t.start_s <= t.content_s <= t.reward_s:
      raise types.ConfigError(f'recorded trajectory {t.key} has no reward or no times: replay a run whose updates completed')
  begin = min(t.start_s for t in trajectories)
  delay = lambda at: max(0.0, at - begin) * scale
  moments = [Moment(delay(min(u.request_end_s, t.content_s)), 0, t, i) for t in trajectories for i, u in enumerate(t.turns)]
  moments += [Moment(delay(t.content_s), 1, t) for t in trajectories] + [Moment(delay(t.reward_s), 2, t) for t in trajectories]
  return sorted(moments, key=lambda m: (m.delay_s, m.kind, m.trajectory.key, m.turn))


def plans(trajectories: Sequence[types.Trajectory]) -> list[types.GroupPlan]:
  """The group plans of recorded trajectories (one update)."""
  groups: dict[int, list[types.Trajectory]] = {}
  for t in trajectories:
    groups.setdefault(t.group, []).append(t)
  return [types.GroupPlan(g, members[0].task_id, members[0].prompt_ids, len(members)) for g, members in sorted(groups.items())]


class Replayer:
  """Feeds one recorded update at a time to an event sink, from a thread of its own."""

  def __init__(self, emit_event: EmitEvent, scale: float = 1.0, emit_span: Callable[[types.Span], None] = lambda _: None):
    """Args: where events and spans go; factor on recorded delays (0: at once)."""
    self._emit_event, self._emit_span, self._scale = emit_event, emit_span, scale
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None

  def submit_update(self, update: int, policy_version: int, trajectories: Sequence[types.Trajectory]) -> None:
    """Starts feeding; trajectories are renamed to `update` and `policy_version`, their times to this run's clock."""
    self.close()
    self._stop.clear()
    moments = schedule(trajectories, self._scale)
    self._thread = threading.Thread(target=self._feed, args=(update, policy_version, moments), name='replay', daemon=True)
    self._thread.start()

  def close(self) -> None:
    """Stops feeding."""
    self._stop.set()
    if self._thread is not None:
      self._thread.join()
      self._thread = None

  def _feed(self, update: int, policy_version: int, moments) -> None:
    begin = time.time()
    origin = min(m.trajectory.start_s for m in moments)
    shift = lambda t: begin + (t - origin) * self._scale
    for moment in moments:
      recorded = moment.trajectory
      if self._stop.wait(max(0.0, begin + moment.delay_s - time.time())):
        return
      turns = tuple(dataclasses.replace(
          turn, request_start_s=shift(turn.request_start_s), request_end_s=shift(turn.request_end_s),
          tool_start_s=shift(turn.tool_start_s), tool_end_s=shift(turn.tool_end_s)) for turn in recorded.turns)
      trajectory = dataclasses.replace(
          recorded, update=update, policy_version=policy_version, turns=turns, start_s=shift(recorded.start_s),
          content_s=shift(recorded.content_s), reward_s=shift(recorded.reward_s))
      if moment.kind == 0:
        turn, at = turns[moment.turn], (update, trajectory.group, trajectory.index)
        self._emit_event(types.TurnFixed(*at, dataclasses.replace(
            turn, action=None, observation='', tool_start_s=turn.request_end_s, tool_end_s=turn.request_end_s, teacher_log_probs=None,
            reference_log_probs=None)))
        for scorer, log_probs in turn.scores.items():  # when they arrived is not recorded: as early as can be
          self._emit_event(types.TurnScored(*at, turn.index, log_probs, scorer))
      elif moment.kind == 1:
        self._emit_event(types.ContentFixed(dataclasses.replace(trajectory, reward=None, tests_passed=())))
        for turn in turns:
          at = (update, trajectory.group, trajectory.index, turn.index)
          self._emit_span(types.Span('engine', turn.request_start_s, turn.request_end_s, *at, tokens=len(turn.sampled.token_ids),
                                     version=policy_version))
          if turn.tool_end_s > turn.tool_start_s:
            self._emit_span(types.Span('tool', turn.tool_start_s, turn.tool_end_s, *at))
      else:
        self._emit_event(types.RewardFixed(trajectory))
        self._emit_span(types.Span('verify', trajectory.content_s, trajectory.reward_s, update, trajectory.group, trajectory.index))
