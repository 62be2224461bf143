"""Accumulators: exactness, order, range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ts_jax.kernels import fold


def trees(rng, count):
  return [{'a': jnp.asarray(rng.normal(size=7) * 10.0 ** rng.integers(-6, 2), jnp.float32),
           'b': jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)} for _ in range(count)]


def bits(total):
  return b''.join(np.asarray(x).tobytes() for x in jax.tree.leaves(total.leaves))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 8))
def test_exact_sums_have_the_same_bits_in_any_order_and_split(seed, count):
  rng = np.random.default_rng(seed)
  items, scales = trees(rng, count), rng.normal(size=count)

  def total(order):
    acc = fold.zeros('exact', items[0])
    for i in order:
      acc = fold.fold('exact', acc, items[i], scales[i])
    return acc

  forward = total(range(count))
  cut = rng.integers(0, count + 1)
  order = rng.permutation(count)
  assert bits(total(order)) == bits(forward)
  assert bits(fold.add('exact', total(order[:cut]), total(order[cut:]))) == bits(forward)
  with jax.enable_x64(True):
    exact = sum(np.asarray(t['a'], np.float64) * s for t, s in zip(items, scales))
    np.testing.assert_allclose(fold.value('exact', forward, jnp.float64)['a'], exact, atol=count * 2.0**-48)


def test_a_small_term_survives_large_ones_that_cancel():
  big, small = {'x': jnp.float32([256.0])}, {'x': jnp.float32([1e-5])}
  acc = fold.zeros('exact', big)
  for tree, scale in ((big, 100.0), (small, 1.0), (big, -100.0)):
    acc = fold.fold('exact', acc, tree, scale)
  assert abs(float(fold.value('exact', acc)['x'][0]) - 1e-5) < 1e-12


@pytest.mark.parametrize('value', [np.nan, np.inf, 4e4])
def test_what_does_not_fit_the_range_is_reported(value):
  acc = fold.fold('exact', fold.zeros('exact', {'x': jnp.zeros(3)}), {'x': jnp.float32([0, value, 1])})
  with pytest.raises(OverflowError, match='batch: .*range of 32768'):
    fold.check('exact', acc, 'batch')


@pytest.mark.parametrize('kind', fold.KINDS)
def test_pair_reduces_to_the_weighted_combination(kind):
  rng = np.random.default_rng(3)
  items, rewards = trees(rng, 5), [0.0, 0.5, 1.5, 0.5, 0.0]
  pair = None
  for tree, reward in zip(items, rewards):
    pair = fold.fold_pair(kind, pair, tree, reward - 0.75)
  shift, scale = 0.5 - 0.75, 3.0
  expected = sum(scale * (r - 0.5) * np.asarray(t['a'], np.float64) for t, r in zip(items, rewards))
  np.testing.assert_allclose(fold.value_reduced(kind, pair, shift, scale)['a'], expected, rtol=2e-5, atol=1e-6)
  total = fold.fold_reduced(kind, fold.fold(kind, fold.zeros(kind, items[0]), items[0]), pair, shift, scale)
  np.testing.assert_allclose(fold.value(kind, total)['a'], expected + np.asarray(items[0]['a']), rtol=2e-5, atol=1e-6)


def test_unknown_kind_is_refused():
  with pytest.raises(ValueError, match="'bf16' is unknown"):
    fold.zeros('bf16', {'x': jnp.zeros(1)})
