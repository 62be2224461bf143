"""Nothing compiles once training runs."""

import numpy as np
import pytest

from experiments import offline
from tests.streaming import cases
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.objectives.terms import Terms
from ts_jax.streaming import buckets as buckets_lib, lane as lane_lib, scheduler, sources, staged, warmup


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


GRPO, OPD, ENTROPY = policy_gradient.PolicyGradient(), distillation.Distillation(), policy_gradient.PolicyGradient(terms=Terms(entropy=0.1))


@pytest.mark.parametrize('granularity, objective, on_device', [
    *((g, o, None) for o in (GRPO, OPD) for g in ('turn', 'forward', 'elastic')), ('forward', ENTROPY, 1)])
def test_no_compilation_after_warm_up_when_turns_are_worked_on(granularity, objective, on_device):
  buckets, params, teacher = buckets_lib.Buckets((24,)), cases.tiny_params('float32'), objective.needs_teacher
  policy = scheduler.Policy(granularity, admission_cap=2, kept_cap=3, objective=objective, piece_lengths=(24,),
                            pack_rows=(2, 1) if granularity == 'elastic' else (1,))
  batch = offline.random_batch(np.random.default_rng(0), groups=2, teacher=teacher, shared=9)
  shared = lane_lib.shared_prefix([g.prompt_ids for g in batch.groups], at_least=1)
  learner = cases.make_lane(policy=policy, buckets=buckets, shared=shared, on_device=on_device)
  warmup.warm_up(sources.SourceFunctions(cases.TINY, terms=objective.terms), params, buckets,
                 prompt_tokens=[len(g.prompt_ids) for g in batch.groups], max_tokens=20,
                 rows=policy.pack_rows, accumulator='float32', shared_tokens=len(shared), objective=objective,
                 trajectories=learner.trajectories)
  jitted = (staged.begin, staged.turn_forward, staged.turn_forward_apart, staged.source_gradient, staged.head_gradient, staged.complete,
            sources._turn_gradient, sources._source_gradient, sources._segment_forward, sources._segment_gradient)
  before = [f._cache_size() for f in jitted]
  for order in range(3):
    offline.batch_direction(batch, params, [learner], policy, 'float32', order)
  assert [f._cache_size() for f in jitted] == before
