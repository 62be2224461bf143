"""A tiny student, its lane, and the schedules the streaming tests compare."""

from __future__ import annotations

import jax

from experiments import offline
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.objectives import policy_gradient
from ts_jax.streaming import lane as lane_lib, open_trajectories, scheduler, sources
from ts_jax.streaming.buckets import Buckets

TINY = ModelConfig(vocab_size=67, width=24, ffn_width=40, layers=3, heads=4, kv_heads=2, head_dim=6)
BUCKETS = Buckets((24,))  # few shapes: compilation is what these tests spend their time on

SYNC = scheduler.Policy(streaming=False, pack_rows=(2, 1))
STREAM = scheduler.Policy(pack_rows=(2, 1), admission_cap=2)
SYNC_EXACT = scheduler.Policy(streaming=False, direct=False)
STREAM_EXACT = scheduler.Policy(direct=False, admission_cap=2)
FORWARD = scheduler.Policy(forward=True, admission_cap=2, kept_cap=3)
FORWARD_EXACT = scheduler.Policy(direct=False, forward=True, admission_cap=2, kept_cap=3)


def tiny_params(dtype, seed: int = 0, config: ModelConfig = TINY):
  return jax.tree.map(lambda x: x.astype(dtype), llama.init_params(config, jax.random.PRNGKey(seed), scale=0.3))


def make_lane(*, accumulator='float32', dtype='float32', config=TINY, buckets=BUCKETS, objective=policy_gradient.Objective(),
              keep=None):
  functions = sources.SourceFunctions(config, dtype=dtype)
  trajectories = open_trajectories.OpenTrajectories(functions, buckets, 20, keep) if keep else None
  return lane_lib.Lane(0, functions, buckets, accumulator=accumulator, reward_centre=0.75,
                       objective=objective, trajectories=trajectories)


def direction(batch, params, policy, *, accumulator='float32', order_seed=0, dtype='float32', buckets=BUCKETS, keep=None):
  lane = make_lane(accumulator=accumulator, dtype=dtype, buckets=buckets, objective=policy.objective,
                   keep=keep or ('all' if policy.forward else None))
  return offline.batch_direction(batch, params, lane, policy, accumulator, order_seed)
