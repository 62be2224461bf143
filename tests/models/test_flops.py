"""The operator ledger against counts by hand, against every product in the traced functions, and against XLA's own count."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ts_jax.kernels import logprob
from ts_jax.models import flops, llama, staged as staged_model
from ts_jax.models.config import ModelConfig
from ts_jax.streaming import sources, staged

# 2 heads of 4, one key/value head: layer projections 2 T (6*8 + 2*6*4 + 8*6 + 3*6*10) = 648 T.
BY_HAND = ModelConfig(vocab_size=11, width=6, ffn_width=10, layers=2, heads=2, kv_heads=1, head_dim=4)
SMALL = ModelConfig(vocab_size=640, width=128, ffn_width=320, layers=1, heads=4, kv_heads=2, head_dim=32)


def test_counts_by_hand():
  assert flops.product(2, 3, 5) == 60
  forward = flops.segment_forward(BY_HAND, 1, 5, 0)
  # 5 queries against 64 aligned keys: 2 * 2 heads * 5 * 4 * 64 for each of two products, in two layers.
  assert forward == flops.Flops(projections=2 * 648 * 5, attention=2 * 2 * (2 * 2 * 5 * 4 * 64))
  both = flops.segment_gradient(BY_HAND, 1, 5, 0)
  # Sums over 5 queries may touch two chunks of 64 positions: 128 rows.
  assert both.attention - forward.attention == 2 * 2 * (2 * 2 * 5 * 4 * 64 + 2 * 2 * 128 * 4 * 64)
  assert both.projections == 3 * forward.projections and both.head == both.recomputed == 0
  assert flops.head_gradient(BY_HAND, 3) == flops.Flops(head=3 * 2 * 3 * 6 * 11)
  assert flops.source_gradient(BY_HAND, 2, 5, 60, 3) == flops.segment_gradient(BY_HAND, 2, 5, 60) + flops.head_gradient(BY_HAND, 6)
  # Behind 60 tokens, 65 keys are needed and 128 multiplied.
  assert flops.segment_forward(BY_HAND, 2, 5, 60).attention == 2 * 2 * (2 * 2 * 2 * 5 * 4 * 128)
  # 300 queries go by blocks of 256 and 44, the first against 256 keys only.
  assert flops.segment_forward(BY_HAND, 1, 300, 0).attention == 2 * 2 * 2 * 2 * 4 * (256 * 256 + 44 * 320)


def test_recomputed_work_is_no_credit(monkeypatch):
  plain, again = (flops.segment_gradient(BY_HAND, 1, 5, 0, remat) for remat in (False, True))
  assert again.credited == plain.credited == plain.executed < again.executed
  assert again.recomputed == 2 * (648 * 5 - 2 * 5 * 10 * 6 + 2 * (2 * 2 * 5 * 4 * 64))
  monkeypatch.setattr(logprob, 'LOGITS_BUDGET_BYTES', 1)
  assert flops.head_gradient(BY_HAND, 3) == flops.Flops(head=3 * 2 * 3 * 6 * 2048, recomputed=2 * 3 * 6 * 2048)


def test_sums_and_active_mfu():
  one = flops.Flops(1, 2, 3, 4)
  assert one + one == one * 2 == flops.Flops(2, 4, 6, 8) and (one.credited, one.executed) == (6, 10)
  assert flops.active_mfu(600, 2.0, [100.0, 50.0]) == 2.0
  assert flops.average_active_mfu([100, 300], [1.0, 2.0], [100.0]) == 1.25
  for bad in (dict(step_s=0.0, peak_flops_per_s=[1.0]), dict(step_s=1.0, peak_flops_per_s=[]), dict(step_s=1.0, peak_flops_per_s=[0.0])):
    with pytest.raises(ValueError, match='must be positive'):
      flops.active_mfu(1, **bad)
  with pytest.raises(ValueError, match='one of each an update'):
    flops.average_active_mfu([1], [1.0, 2.0], [1.0])


def products(jaxpr) -> int:
  """FLOPs of every dot_general in a jaxpr, scans as often as they run."""
  total = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      (contracted, _), _ = eqn.params['dimension_numbers']
      left = eqn.invars[0].aval.shape
      total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
    times = eqn.params.get('length', 1) if eqn.primitive.name == 'scan' else 1
    total += times * sum(products(getattr(p, 'jaxpr', p)) for p in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda p: hasattr(p, 'eqns') or hasattr(p, 'jaxpr')) if hasattr(getattr(p, 'jaxpr', p), 'eqns'))
  return total


def traced(function, *args) -> int:
  return products(jax.make_jaxpr(function)(*args).jaxpr)


def boundary(config, past):
  shape = (config.layers, past, config.kv_heads, config.head_dim)
  return llama.Boundary(jnp.zeros(shape), jnp.zeros(shape), jnp.int32(past))


@functools.cache
def setting(layers=3, remat_tokens=2048):
  config = dataclasses.replace(SMALL, layers=layers)
  return config, sources.SourceFunctions(config, remat_tokens=remat_tokens), llama.init_params(config, jax.random.PRNGKey(0))


@pytest.mark.parametrize('rows, tokens, past, scored', [(1, 96, 0, 48), (2, 64, 80, 64), (1, 320, 64, 160)])
def test_every_product_of_the_learners_functions_is_in_the_ledger(rows, tokens, past, scored):
  config, functions, params = setting()
  behind = boundary(config, past)
  batch = sources.empty(rows, tokens, scored)
  assert traced(lambda: functions.source_gradient(params, behind, batch)) == flops.source_gradient(config, rows, tokens, past, scored).executed
  one = np.zeros((1, tokens), np.int32)
  forward = lambda: functions.segment_forward(params, behind, one, np.int32(tokens), past + tokens)
  assert traced(forward) == flops.segment_forward(config, 1, tokens, past).executed
  adjoint = jax.tree.map(jnp.zeros_like, boundary(config, past + tokens).state)
  assert traced(lambda: functions.segment_gradient(params, behind, one, adjoint)) == flops.segment_gradient(config, 1, tokens, past).executed


def test_checkpointed_layers_and_a_head_by_chunks(monkeypatch):
  config, functions, params = setting(remat_tokens=32)
  monkeypatch.setattr(logprob, 'LOGITS_BUDGET_BYTES', 1)
  jax.clear_caches()
  got = traced(lambda: functions.source_gradient(params, boundary(config, 64), sources.empty(1, 96, 48)))
  jax.clear_caches()
  targets = 2 * 48 * config.width  # the targets' own logits: one row of the head each, not a product with it
  assert got - targets == flops.source_gradient(config, 1, 96, 64, 48, remat=True).executed


def xla_flops(function, *args) -> float:
  """XLA's count of the compiled function; a loop's body counts once, so that there may be one layer only."""
  return jax.jit(function).lower(*args).compile().cost_analysis()['flops']


def test_xla_counts_the_same_and_a_little_that_is_no_product():
  config, functions, params = setting(layers=1)
  batch = sources.empty(1, 128, 64)
  got = xla_flops(lambda params, behind: functions.source_gradient(params, behind, batch), params, boundary(config, 64))
  want = flops.source_gradient(config, 1, 128, 64, 64).executed
  assert want < got < 1.04 * want


@pytest.mark.parametrize('keep', staged_model.KEEP)
def test_layers_backward_from_kept_values(keep):
  """Only XLA drops products of a part's forward pass that its pullback does not read."""
  config, functions, params = setting(layers=1)
  behind, row = boundary(config, 64), (np.zeros(64, np.int32), np.zeros(64, np.int32), np.zeros(64))
  got = xla_flops(lambda params, kept: staged.source_gradient(functions, params, kept, np.zeros((1, 128), np.int32), behind, *row),
                  params, staged.begin(functions, behind, 128, keep))
  want = (flops.kept_gradient(config, 128, 64, keep) + flops.head_gradient(config, 64)).executed
  assert want < got < 1.04 * want
