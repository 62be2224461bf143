"""Random logical batches and a synchronous way to push one through the learner."""

from __future__ import annotations

import queue

import jax
import numpy as np

from ts_jax import types
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.streaming import barrier, lane as lane_lib, scheduler, sources, update
from ts_jax.streaming.buckets import Buckets

TINY = ModelConfig(vocab_size=67, width=24, ffn_width=40, layers=3, heads=4, kv_heads=2, head_dim=6)
BUCKETS = Buckets((24,))  # few shapes: compilation is what these tests spend their time on


def tiny_params(dtype, seed: int = 0, config: ModelConfig = TINY):
  return jax.tree.map(lambda x: x.astype(dtype), llama.init_params(config, jax.random.PRNGKey(seed), scale=0.3))


def random_batch(rng: np.random.Generator, *, groups: int = 3, size: int = 4, rewards=(0.0, 0.5, 1.5), max_turns: int = 3,
                 scored_rate: float = 0.8, vocab: int = 67) -> types.LogicalBatch:
  """Groups with random prompts, turn structure, masks (some trajectories without a scored token) and rewards."""
  made = []
  for g in range(groups):
    # Few distinct lengths: the unpadded reference compiles once for each.
    prompt = tuple(int(i) for i in rng.integers(0, vocab, rng.choice((2, 9))))
    members = []
    for i in range(size):
      cuts = np.sort(rng.integers(0, 5, 2 * rng.integers(0, max_turns)))
      ids = tuple(int(x) for x in rng.integers(0, vocab, rng.choice((5, 12, 20))))
      pieces = [ids[a:b] for a, b in zip((0, *cuts), (*cuts, len(ids)))]  # action, observation, action, ...
      turns = []
      for t, action in enumerate(pieces[::2]):
        context = pieces[2 * t - 1] if t else ()
        mask = tuple(bool(x) for x in rng.random(len(action)) < scored_rate)
        sampled = types.SampledTokens(action, (-1.0,) * len(action), 0, 0, types.FinishReason.STOP)
        turns.append(types.Turn(t, context, sampled, mask))
      members.append(types.Trajectory(0, g, i, f'task{g}', 0, prompt, tuple(turns), types.TerminalReason.DONE,
                                      float(rng.choice(rewards))))
    made.append(types.Group(g, f'task{g}', prompt, tuple(members)))
  return types.LogicalBatch(0, 0, tuple(made))


def plans(batch: types.LogicalBatch) -> list[types.GroupPlan]:
  return [types.GroupPlan(g.index, g.task_id, g.prompt_ids, len(g.trajectories)) for g in batch.groups]


def arrival(batch: types.LogicalBatch, rng: np.random.Generator) -> list[types.RolloutEvent]:
  """A random order of content and reward events, each reward after its content."""
  order = [t for t in batch.trajectories for _ in range(2)]
  order = [order[i] for i in rng.permutation(len(order))]
  seen, events = set(), []
  for t in order:
    events.append(types.RewardFixed(t) if t.key in seen else types.ContentFixed(t))
    seen.add(t.key)
  return events


class Trickle:
  """An event stream that gives the learner one event, or none, at each look: every interleaving is possible."""

  def __init__(self, events, rng):
    self._events, self._rng = list(events), rng

  def get(self, block=True, timeout=None):
    del timeout
    if not self._events or (not block and self._rng.random() < 0.5):
      raise queue.Empty
    return self._events.pop(0)


def make_lane(*, accumulator='float32', dtype='float32', config=TINY, buckets=BUCKETS):
  functions = sources.SourceFunctions(config, dtype=dtype)
  return lane_lib.Lane(0, functions, buckets, accumulator=accumulator, reward_centre=0.75)


def direction(batch, params, policy, *, accumulator='float32', order_seed=0, dtype='float32', config=TINY,
              buckets=BUCKETS):
  """Runs one update's learner side and returns the batch direction."""
  rng = np.random.default_rng(order_seed)
  lane = make_lane(accumulator=accumulator, dtype=dtype, config=config, buckets=buckets)
  result = update.run_update(batch.update, batch.policy_version, params, plans(batch), Trickle(arrival(batch, rng), rng), lane, policy)
  return barrier.reduce_lanes(accumulator, result.sums), result


def relative_error(a, b) -> float:
  """|a - b| / |b| over whole pytrees, in float64."""
  a, b = (np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(t)]) for t in (a, b))
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


SYNC = scheduler.Policy(streaming=False, pack_rows=(4, 2, 1))
STREAM = scheduler.Policy(pack_rows=(2, 1), admission_cap=2)
SYNC_EXACT = scheduler.Policy(streaming=False, direct=False)
STREAM_EXACT = scheduler.Policy(direct=False, admission_cap=2)
