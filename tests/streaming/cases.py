"""A tiny student, its lane, and the schedules the streaming tests compare."""

from __future__ import annotations

import jax

from experiments import offline
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.streaming import forward_trajectories, lane as lane_lib, scheduler, sources, turn_trajectories
from ts_jax.streaming.buckets import Buckets

TINY = ModelConfig(vocab_size=67, width=24, ffn_width=40, layers=3, heads=4, kv_heads=2, head_dim=6)
BUCKETS = Buckets((24,))  # few shapes: compilation is what these tests spend their time on

SYNC = scheduler.Policy(granularity='batch', pack_rows=(2, 1))
STREAM = scheduler.Policy(pack_rows=(2, 1), admission_cap=2)
SYNC_EXACT = scheduler.Policy(granularity='batch', direct=False)
STREAM_EXACT = scheduler.Policy(direct=False, admission_cap=2)
FORWARD = scheduler.Policy(granularity='forward', admission_cap=2, kept_cap=3)
FORWARD_EXACT = scheduler.Policy(direct=False, granularity='forward', admission_cap=2, kept_cap=3)


def tiny_params(dtype, seed: int = 0, config: ModelConfig = TINY):
  return jax.tree.map(lambda x: x.astype(dtype), llama.init_params(config, jax.random.PRNGKey(seed), scale=0.3))


def make_lane(index=0, *, accumulator='float32', dtype='float32', config=TINY, buckets=BUCKETS, policy=STREAM, keep='all', shared=(),
              device=None, on_device=None):
  functions = sources.SourceFunctions(config, dtype=dtype, terms=policy.objective.terms)
  settings = functions, buckets, 20, policy.objective.needs_teacher
  trajectories = {'forward': lambda: forward_trajectories.ForwardTrajectories(*settings, keep, on_device),
                  'elastic': lambda: forward_trajectories.ForwardTrajectories(*settings, keep, on_device, elastic=True),
                  'turn': lambda: turn_trajectories.TurnTrajectories(*settings)}.get(policy.granularity, lambda: None)()
  return lane_lib.Lane(index, functions, buckets, accumulator=accumulator, reward_centre=0.75, objective=policy.objective,
                       trajectories=trajectories, shared_prefix=shared, device=device)


def direction(batch, params, policy, *, lanes=1, spread=False, order_seed=0, accumulator='float32', **settings):
  shared = lane_lib.shared_prefix([g.prompt_ids for g in batch.groups], at_least=1) if settings.pop('share', False) else ()
  devices = jax.devices()
  made = [make_lane(i, policy=policy, accumulator=accumulator, shared=shared, device=devices[i] if spread else None, **settings)
          for i in range(lanes)]
  return offline.batch_direction(batch, params, made, policy, accumulator, order_seed)
