"""The learner's side of an update without a rollout side: a finished batch, fed in any arrival order.

Used by the equivalence experiment and by the tests.
"""

from __future__ import annotations

import abc
import dataclasses
import queue
from typing import Sequence

import jax
import numpy as np

from ts_jax import types
from ts_jax.rollout import replay as replay_lib
from ts_jax.streaming import barrier, executor, lane as lane_lib, layout as layout_lib, scheduler, update as update_lib


def plans(batch: types.LogicalBatch) -> list[types.GroupPlan]:
  """The plans that a batch fulfils."""
  return [types.GroupPlan(g.index, g.task_id, g.prompt_ids, len(g.trajectories)) for g in batch.groups]


def shuffled_arrival(batch: types.LogicalBatch, rng: np.random.Generator) -> list[types.RolloutEvent]:
  """A random interleaving of the trajectories' events; each has its turns in order, then its content, then its reward."""
  waiting = {}
  for t in batch.trajectories:
    turns = [_fixed(t, turn) for turn in t.turns]
    waiting[t.key] = [types.RewardFixed(t), types.ContentFixed(t), *reversed(_with_scores(t, turns, rng))]
  keys = [key for key, events in waiting.items() for _ in events]
  return [waiting[keys[i]].pop() for i in rng.permutation(len(keys))]


def _fixed(t: types.Trajectory, turn: types.Turn) -> types.TurnFixed:
  """A turn as it is announced, before anybody has scored it."""
  return types.TurnFixed(*t.key, dataclasses.replace(turn, teacher_log_probs=None, reference_log_probs=None))


def _with_scores(t: types.Trajectory, fixed: Sequence[types.TurnFixed], rng: np.random.Generator) -> list[types.RolloutEvent]:
  """A trajectory's turns in order, each one's scores anywhere behind it."""
  events: list[types.RolloutEvent] = list(fixed)
  for event, turn in zip(fixed, t.turns):
    for scorer, log_probs in turn.scores.items():
      at = rng.integers(events.index(event) + 1, len(events) + 1)
      events.insert(at, types.TurnScored(t.update, t.group, t.index, turn.index, log_probs, scorer))
  return events


def recorded_arrival(batch: types.LogicalBatch) -> list[types.RolloutEvent]:
  """The events of a recorded batch in the order of their recorded times; a turn's scores come with the turn."""
  events: list[types.RolloutEvent] = []
  for moment in replay_lib.schedule(batch.trajectories, 1.0):
    t = moment.trajectory
    if moment.kind == 1:
      events.append(types.ContentFixed(t))
    elif moment.kind == 2:
      events.append(types.RewardFixed(t))
    else:
      turn = t.turns[moment.turn]
      events.append(_fixed(t, turn))
      events += [types.TurnScored(*t.key, turn.index, log_probs, scorer) for scorer, log_probs in turn.scores.items()]
  return events


class _Given(abc.ABC):
  """An event stream of events that are all there, and of what lanes finish among them."""

  def __init__(self, events: Sequence[types.RolloutEvent]):
    self._events = list(events)
    self._finished: queue.SimpleQueue[executor.Finished] = queue.SimpleQueue()
    self.put = self._finished.put

  def get(self, block: bool = True, timeout: float | None = None) -> types.RolloutEvent | executor.Finished:
    """As `queue.Queue.get`."""
    if self._events and (self._finished.empty() or self._event_first()):
      return self._events.pop(0)
    return self._finished.get(block, timeout)

  @abc.abstractmethod
  def _event_first(self) -> bool:
    """Shows an event where something is finished too."""


class OneByOne(_Given):
  """An event stream that shows the learner one more event after each piece of work.

  While lanes work at the same time it shows all it has.
  """

  def __init__(self, events: Sequence[types.RolloutEvent]):
    super().__init__(events)
    self._shown = False

  def _event_first(self) -> bool:
    self._shown = not self._shown
    return self._shown


class RandomlyLate(_Given):
  """An event stream that shows the learner the next event, or none yet, at each look: every interleaving is possible.

  While lanes work at the same time it shows all it has.
  """

  def __init__(self, events: Sequence[types.RolloutEvent], rng: np.random.Generator):
    super().__init__(events)
    self._rng = rng

  def _event_first(self) -> bool:
    return self._rng.random() < 0.5


def batch_direction(batch: types.LogicalBatch, params, lanes: Sequence[lane_lib.Lane], policy: scheduler.Policy, accumulator: str,
                    order_seed: int = 0):
  """Runs one update's learner side.

  Args:
    batch: a complete batch.
    params: theta_k.
    lanes: built for `accumulator`.
    policy: the schedule.
    accumulator: 'float32' or 'exact'.
    order_seed: decides the arrival order and what the learner sees when.

  Returns:
    (direction, UpdateResult).
  """
  rng = np.random.default_rng(order_seed)
  return direction_of(batch, RandomlyLate(shuffled_arrival(batch, rng), rng), params, lanes, policy, accumulator)


def direction_of(batch: types.LogicalBatch, events: update_lib.EventStream, params, lanes: Sequence[lane_lib.Lane], policy: scheduler.Policy,
                 accumulator: str, layout: layout_lib.Layout = layout_lib.Layout()):
  """As `batch_direction`, with the batch's events as they come; the direction is cut as the layout says."""
  result = update_lib.run_update(batch.update, batch.policy_version, params, plans(batch), events, lanes, policy)
  return barrier.reduce_lanes(accumulator, result.sums, result.normaliser, layout), result


def random_batch(rng: np.random.Generator, *, groups: int = 3, size: int = 4, rewards: Sequence[float] = (0.0, 0.5, 1.5),
                 max_turns: int = 3, scored_rate: float = 0.8, vocab: int = 67, teacher: bool = False,
                 shared: int = 0, reference: bool = False) -> types.LogicalBatch:
  """A batch with random prompts, turn structure, masks (some trajectories without a scored token) and rewards.

  With `teacher` its turns carry teacher log-probs, with `reference` those of a reference model, and random ones of the sampler;
  `shared` ids begin every prompt.
  """
  made = []
  log_probs = lambda action: tuple(float(x) for x in rng.normal(-3.0, 1.0, len(action)).clip(max=0))
  common = tuple(int(i) for i in rng.integers(0, vocab, shared))
  for g in range(groups):
    # Few distinct lengths: an unpadded reference compiles once for each.
    prompt = common + tuple(int(i) for i in rng.integers(0, vocab, rng.choice((2, 9))))
    members = []
    for i in range(size):
      cuts = np.sort(rng.integers(0, 5, 2 * rng.integers(0, max_turns)))
      ids = tuple(int(x) for x in rng.integers(0, vocab, rng.choice((5, 12, 20))))
      pieces = [ids[a:b] for a, b in zip((0, *cuts), (*cuts, len(ids)))]  # action, observation, action, ...
      turns = []
      for t, action in enumerate(pieces[::2]):
        context = pieces[2 * t - 1] if t else ()
        mask = tuple(bool(x) for x in rng.random(len(action)) < scored_rate)
        scores = log_probs(action) if teacher else None
        sampler, frozen = (log_probs(action), log_probs(action)) if reference else ((-1.0,) * len(action), None)
        sampled = types.SampledTokens(action, sampler, 0, 0, types.FinishReason.STOP)
        turns.append(types.Turn(t, context, sampled, mask, teacher_log_probs=scores, reference_log_probs=frozen))
      members.append(types.Trajectory(0, g, i, f'task{g}', 0, prompt, tuple(turns), types.TerminalReason.DONE,
                                      float(rng.choice(rewards))))
    made.append(types.Group(g, f'task{g}', prompt, tuple(members)))
  return types.LogicalBatch(0, 0, tuple(made))


def flat(tree) -> np.ndarray:
  """All leaves as one float64 vector."""
  return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def relative_error(got, expected) -> float:
  """|got - expected| / |expected| over whole pytrees, in float64."""
  expected = flat(expected)
  return float(np.linalg.norm(flat(got) - expected) / np.linalg.norm(expected))


def bits(tree) -> bytes:
  """The bits of all leaves."""
  return b''.join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))
