"""Replay: recorded trajectories as rollout events, at their recorded (or scaled) times, instead of an engine."""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import threading
import time
from typing import Callable, NamedTuple, Sequence

from ts_jax import types

EmitEvent = Callable[[types.RolloutEvent], None]
_TURN_TIMES = ('request_start_s', 'request_end_s', 'tool_start_s', 'tool_end_s')


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


def renamed(trajectory: types.Trajectory, update: int, policy_version: int) -> types.Trajectory:
  """A recorded trajectory as one of `update`, with every token sampled from `policy_version`."""
  turns = tuple(dataclasses.replace(t, sampled=of_version(t.sampled, policy_version)) for t in trajectory.turns)
  return dataclasses.replace(trajectory, update=update, policy_version=policy_version, turns=turns)


def scaled(trajectories: Sequence[types.Trajectory], scale: float) -> list[types.Trajectory]:
  """Recorded trajectories of one update with every time after its start multiplied by `scale`."""
  origin = min(t.start_s for t in trajectories)
  moved = lambda record, names: {name: origin + (getattr(record, name) - origin) * scale for name in names}
  found = []
  for t in trajectories:
    turns = tuple(dataclasses.replace(u, **moved(u, _TURN_TIMES)) for u in t.turns)
    found.append(dataclasses.replace(t, turns=turns, **moved(t, ('start_s', 'content_s', 'reward_s'))))
  return found


def of_version(sampled: types.SampledTokens, version: int) -> types.SampledTokens:
  """A reply as one of `version` alone."""
  return dataclasses.replace(sampled, version_start=version, version_end=version, version_tokens=())


class Replayer:
  """Feeds recorded updates to an event sink, from a thread of its own.

  Updates may overlap.  A later one finds as many slots as its trajectories used at once when they were recorded, and waits for
  those that earlier ones still hold: so a replay samples no faster than the recording, whatever the schedule submits.
  """

  def __init__(self, emit_event: EmitEvent, scale: float = 1.0, emit_span: Callable[[types.Span], None] = lambda _: None):
    """Args: where events and spans go; factor on recorded delays (0: at once)."""
    self._emit_event, self._emit_span, self._scale = emit_event, emit_span, scale
    self._changed = threading.Condition()
    self._due: list[tuple[float, int, Callable[[], None]]] = []  # heap of (when, number, what)
    self._number = itertools.count()
    self._stopped = False
    self._busy_until_s: list[float] = []  # of trajectories submitted before
    self._published: list[tuple[float, int]] = []
    self._thread: threading.Thread | None = None

  def publish(self, version: int) -> None:
    """From now on trajectories that were submitted with `newer_too` have their requests answered by `version`."""
    self._published.append((time.time(), version))

  def submit_update(self, update: int, policy_version: int, trajectories: Sequence[types.Trajectory], newer_too: bool = False) -> None:
    """Starts feeding; trajectories are renamed to `update` and `policy_version`, their times to this run's clock.

    Args:
      update: logical update.
      policy_version: of every token.
      trajectories: recorded.
      newer_too: a reply is of the version that was published when its request started, if that is newer.
    """
    moments = schedule(trajectories, self._scale)
    begin, origin = time.time(), min(t.start_s for t in trajectories)
    shifts = self._shifts(trajectories, begin, origin)
    feeds = {t.key: _Feed(t, update, policy_version, lambda at, shift=shifts[t.key]: shift + (at - origin) * self._scale, newer_too)
             for t in trajectories}
    with self._changed:
      for m in moments:
        feed = feeds[m.trajectory.key]
        heapq.heappush(self._due, (shifts[feed.recorded.key] + m.delay_s, next(self._number), lambda m=m, feed=feed: self._emit(feed, m)))
      self._stopped = False
      if self._thread is None:
        self._thread = threading.Thread(target=self._run, name='replay', daemon=True)
        self._thread.start()
      self._changed.notify()

  def close(self) -> None:
    """Stops feeding."""
    with self._changed:
      self._stopped = True
      self._due.clear()
      self._changed.notify()
    if self._thread is not None:
      self._thread.join()
      self._thread = None

  def _shifts(self, trajectories: Sequence[types.Trajectory], begin: float, origin: float) -> dict[tuple[int, int, int], float]:
    """When the update's clock starts for each trajectory: now, or later where it waits for a slot."""
    ends = [t.content_s for t in trajectories]
    slots = max(sum(t.start_s <= other.start_s < t.content_s for t in trajectories) for other in trajectories) or len(ends)
    free = sorted(self._busy_until_s)[-slots:]
    free = [0.0] * (slots - len(free)) + free
    shifts = {}
    for t in sorted(trajectories, key=lambda t: (t.start_s, t.key)):
      at = begin + (t.start_s - origin) * self._scale
      late = max(0.0, heapq.heappop(free) - at)
      shifts[t.key] = begin + late
      heapq.heappush(free, begin + late + (t.content_s - origin) * self._scale)
    self._busy_until_s = [s for s in free if s > begin]
    return shifts

  def _run(self) -> None:
    while True:
      with self._changed:
        while not self._stopped and (not self._due or self._due[0][0] > time.time()):
          self._changed.wait(max(0.0, self._due[0][0] - time.time()) if self._due else None)
        if self._stopped:
          return
        _, _, emit = heapq.heappop(self._due)
      emit()

  def _version(self, feed: '_Feed', at_s: float) -> int:
    """Policy version of a request that started at `at_s`."""
    before = bisect.bisect_right(self._published, (at_s, 2**62))
    return max(feed.policy_version, self._published[before - 1][1]) if feed.newer_too and before else feed.policy_version

  def _emit(self, feed: '_Feed', moment: Moment) -> None:
    shift, recorded, at = feed.shift, feed.recorded, (feed.update, feed.recorded.group, feed.recorded.index)
    if moment.kind == 0:
      turn = recorded.turns[moment.turn]
      shifted = dict(request_start_s=shift(turn.request_start_s), request_end_s=shift(turn.request_end_s))
      turn = dataclasses.replace(turn, tool_start_s=shift(turn.tool_start_s), tool_end_s=shift(turn.tool_end_s), **shifted,
                                 sampled=of_version(turn.sampled, self._version(feed, shifted['request_start_s'])))
      feed.turns.append(turn)
      self._emit_event(types.TurnFixed(*at, dataclasses.replace(
          turn, action=None, observation='', tool_start_s=turn.request_end_s, tool_end_s=turn.request_end_s, teacher_log_probs=None,
          reference_log_probs=None)))
      for scorer, log_probs in turn.scores.items():  # when they arrived is not recorded: as early as can be
        self._emit_event(types.TurnScored(*at, turn.index, log_probs, scorer))
      return
    oldest = min((t.sampled.version_start for t in feed.turns), default=feed.policy_version)
    trajectory = dataclasses.replace(
        recorded, update=feed.update, policy_version=oldest, turns=tuple(feed.turns), start_s=shift(recorded.start_s),
        content_s=shift(recorded.content_s), reward_s=shift(recorded.reward_s))
    if moment.kind == 1:
      self._emit_event(types.ContentFixed(dataclasses.replace(trajectory, reward=None, tests_passed=())))
      for turn in feed.turns:
        self._emit_span(types.Span('engine', turn.request_start_s, turn.request_end_s, *at, turn.index, tokens=len(turn.sampled.token_ids),
                                   version=turn.sampled.version_start))
        if turn.tool_end_s > turn.tool_start_s:
          self._emit_span(types.Span('tool', turn.tool_start_s, turn.tool_end_s, *at, turn.index))
    else:
      self._emit_event(types.RewardFixed(trajectory))
      self._emit_span(types.Span('verify', trajectory.content_s, trajectory.reward_s, *at))


@dataclasses.dataclass
class _Feed:
  """One trajectory that is being fed: as it was recorded, its new names and clock, and its turns so far."""

  recorded: types.Trajectory
  update: int
  policy_version: int
  shift: Callable[[float], float]
  newer_too: bool
  turns: list[types.Turn] = dataclasses.field(default_factory=list)
