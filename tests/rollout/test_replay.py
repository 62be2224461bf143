"""Replay: recorded order and times, scaled, under this run's names."""

import dataclasses
import queue
import time

import numpy as np
import pytest

from experiments import offline
from ts_jax import types
from ts_jax.rollout import replay


def recorded():
  made = []
  for n, t in enumerate(offline.random_batch(np.random.default_rng(0), groups=2, size=2).trajectories):
    made.append(types.Trajectory.from_json({**t.to_json(), 'start_s': 100.0, 'content_s': 100.0 + (4 - n) * 0.05,
                                            'reward_s': 100.0 + (4 - n) * 0.05 + 0.12}))
  return made


def play(trajectories, scale):
  events = queue.Queue()
  player = replay.Replayer(lambda e: events.put((time.time(), e)), scale)
  begin = time.time()
  player.submit_update(7, 3, trajectories)
  got = []
  while sum(isinstance(e, types.RewardFixed) for _, e in got) < len(trajectories):
    got.append(events.get(timeout=5))
  player.close()
  return begin, got


@pytest.mark.parametrize('scale', [0.0, 1.0, 2.0])
def test_events_come_in_order_at_scaled_times(scale):
  trajectories = recorded()
  begin, got = play(trajectories, scale)
  contents = [e.trajectory for _, e in got if isinstance(e, types.ContentFixed)]
  rewards = [e.trajectory for _, e in got if isinstance(e, types.RewardFixed)]
  assert all((t.update, t.policy_version) == (7, 3) for t in contents + rewards)
  for key in {(t.group, t.index) for t in trajectories}:
    mine = [e for _, e in got if (getattr(e, 'trajectory', e).group, getattr(e, 'trajectory', e).index) == key]
    turns = [e.turn.index for e in mine if isinstance(e, types.TurnFixed)]
    assert turns == list(range(len(turns))) and [type(e) for e in mine[len(turns):]] == [types.ContentFixed, types.RewardFixed]
  assert all(t.reward is None for t in contents) and sorted(t.reward for t in rewards) == sorted(t.reward for t in trajectories)
  if scale:
    assert [(t.group, t.index) for t in contents] == [(1, 1), (1, 0), (0, 1), (0, 0)]  # the reverse of their numbers
    for at, event in got:
      if isinstance(event, types.TurnFixed):
        continue
      due = event.trajectory.content_s if isinstance(event, types.ContentFixed) else event.trajectory.reward_s
      assert -0.01 <= at - due < 0.5
    assert max(t.reward_s for t in rewards) - begin == pytest.approx(0.32 * scale, abs=0.2)


def test_turns_are_told_when_their_tokens_were_fixed_and_their_scores_at_once():
  t = recorded()[0]
  turns = tuple(dataclasses.replace(
      u, action='ls', observation='x', request_start_s=100.01 + 0.05 * i, request_end_s=100.02 + 0.05 * i, tool_start_s=100.03 + 0.05 * i,
      tool_end_s=100.06 + 0.05 * i, teacher_log_probs=tuple(2 * p for p in u.sampled.log_probs) if i != 1 else None)
      for i, u in enumerate((t.turns * 3)[:3]))
  turns = tuple(dataclasses.replace(u, index=i) for i, u in enumerate(turns))
  t = dataclasses.replace(t, turns=turns)
  _, got = play([t], 2.0)
  events = [e for _, e in got]
  assert [(type(e).__name__, getattr(e.turn, 'index', e.turn)) for e in events[:-2]] == [
      ('TurnFixed', 0), ('TurnScored', 0), ('TurnFixed', 1), ('TurnFixed', 2), ('TurnScored', 2)]
  assert [type(e) for e in events[-2:]] == [types.ContentFixed, types.RewardFixed]
  assert events[-2].trajectory.turns[2].teacher_log_probs == turns[2].teacher_log_probs
  origin = events[-2].trajectory.start_s
  for at, event in got[:-2]:
    assert (event.update, event.group, event.index) == (7, t.group, t.index)
    n = event.turn if isinstance(event, types.TurnScored) else event.turn.index
    if isinstance(event, types.TurnScored):
      assert event.log_probs == turns[n].teacher_log_probs
    else:  # as it was told while sampling
      fixed = event.turn
      assert (fixed.sampled, fixed.context_ids) == (replay.of_version(turns[n].sampled, 3), turns[n].context_ids)
      assert (fixed.action, fixed.observation, fixed.teacher_log_probs) == (None, '', None) and fixed.tool_start_s == fixed.tool_end_s
    assert -0.01 <= at - (origin + 2.0 * (0.02 + 0.05 * n)) < 0.05  # the request's end; the tool's came 0.08 later


def test_plans_are_those_of_the_recording():
  assert [(p.index, p.size) for p in replay.plans(recorded())] == [(0, 2), (1, 2)]


def test_incomplete_recordings_and_negative_scales_are_refused():
  unfinished = types.Trajectory.from_json({**recorded()[0].to_json(), 'reward': None})
  with pytest.raises(types.ConfigError, match='no reward or no times'):
    replay.schedule([unfinished], 1.0)
  with pytest.raises(types.ConfigError, match='-1.0 is negative'):
    replay.schedule(recorded(), -1.0)


def test_close_stops_in_the_middle():
  events = queue.Queue()
  player = replay.Replayer(events.put, 100.0)
  player.submit_update(0, 0, recorded())
  begin = time.time()
  player.close()
  assert time.time() - begin < 1.0
  while not events.empty():  # recorded without times, turns are due at once
    assert isinstance(events.get(), types.TurnFixed)


def test_updates_overlap_on_the_slots_of_the_recording_and_carry_what_is_published_meanwhile():
  made = []
  for n, t in enumerate(offline.random_batch(np.random.default_rng(3), groups=2, size=2, max_turns=2).trajectories):
    start = 100.0 + 0.2 * (n // 2)  # two slots: the second pair begins where the first ends
    turns = tuple(dataclasses.replace(u, request_start_s=start + 0.1 * i, request_end_s=start + 0.1 * i + 0.05)
                  for i, u in enumerate(t.turns))
    made.append(dataclasses.replace(t, turns=turns, start_s=start, content_s=start + 0.2, reward_s=start + 0.2))
  rewarded = queue.Queue()
  player = replay.Replayer(lambda e: rewarded.put(e.trajectory) if isinstance(e, types.RewardFixed) else None)
  player.publish(0)
  player.submit_update(0, 0, made, newer_too=True)
  player.submit_update(1, 0, made, newer_too=True)
  time.sleep(0.45)
  published_s = time.time()
  player.publish(1)
  got = [rewarded.get(timeout=5) for _ in range(8)]
  player.close()
  assert [t.update for t in got] == [0] * 4 + [1] * 4
  first, second = got[:4], got[4:]
  begin = min(t.start_s for t in first)
  assert sorted(round(t.start_s - begin, 2) for t in second) == [0.4, 0.4, 0.6, 0.6]  # no faster than it was recorded
  for t in got:
    for turn in t.turns:
      assert turn.sampled.versions == (int(turn.request_start_s > published_s),) * len(turn.sampled.token_ids)
    assert t.policy_version == min(u.sampled.version_start for u in t.turns)
