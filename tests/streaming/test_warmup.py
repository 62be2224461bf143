"""Nothing compiles once training runs."""

import numpy as np

from experiments import offline
from tests.streaming import cases
from ts_jax.streaming import buckets as buckets_lib, forward_trajectories, lane as lane_lib, scheduler, sources, staged, warmup


def test_no_compilation_after_warm_up():
  buckets = buckets_lib.Buckets((12, 24))
  functions = sources.SourceFunctions(cases.TINY)
  params = cases.tiny_params('float32')
  batch = offline.random_batch(np.random.default_rng(0), groups=4)
  policy = scheduler.Policy(pack_rows=(2, 1))
  steps = []
  warmup.warm_up(functions, params, buckets, prompt_tokens=[len(g.prompt_ids) for g in batch.groups],
                 max_tokens=max(len(t.completion_ids) for t in batch.trajectories), rows=policy.pack_rows, accumulator='float32',
                 advance=steps.append)
  assert sum(steps) == warmup.count(buckets, [len(g.prompt_ids) for g in batch.groups], 20, policy.pack_rows)
  jitted = (sources._source_gradient, sources._segment_forward, sources._segment_gradient)
  before = [f._cache_size() for f in jitted]
  for order in range(3):
    cases.direction(batch, params, policy, order_seed=order, buckets=buckets)
  assert [f._cache_size() for f in jitted] == before


def test_shapes_cover_half_and_whole_scored_positions():
  assert warmup.shapes(buckets_lib.Buckets((8, 16)), 10, (1,)) == [(1, 8, 4), (1, 8, 8), (1, 16, 8), (1, 16, 16)]


def test_no_compilation_after_warm_up_when_turns_run_forward():
  buckets, longest = buckets_lib.Buckets((12, 24)), 20
  functions, params = sources.SourceFunctions(cases.TINY), cases.tiny_params('float32')
  trajectories = forward_trajectories.ForwardTrajectories(functions, buckets, longest)
  batch = offline.random_batch(np.random.default_rng(0), groups=2)
  warmup.warm_up(functions, params, buckets, prompt_tokens=[len(g.prompt_ids) for g in batch.groups], max_tokens=longest, rows=(1,),
                 accumulator='float32', trajectories=trajectories)
  jitted = (staged.begin, staged.turn_forward, staged.source_gradient, sources._segment_forward, sources._segment_gradient)
  before = [f._cache_size() for f in jitted]
  learner = lane_lib.Lane(0, functions, buckets, accumulator='float32', reward_centre=0.75, trajectories=trajectories)
  for order in range(3):
    offline.batch_direction(batch, params, [learner], cases.FORWARD, 'float32', order)
  assert [f._cache_size() for f in jitted] == before
