"""Prefix attention against full causal attention over the whole sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ts_jax.kernels import attention


def full(query, key, value):
  """Causal attention of one sequence [T, heads, d] with repeated key/value heads."""
  repeat = query.shape[1] // key.shape[1]
  key, value = (jnp.repeat(x, repeat, axis=1) for x in (key, value))
  scores = jnp.einsum('thd,shd->hts', query, key) / np.sqrt(query.shape[-1])
  scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
  return jnp.einsum('hts,shd->thd', jax.nn.softmax(scores), value)


@pytest.mark.parametrize('block', [4, 256])
@pytest.mark.parametrize('prefix, padded', [(0, 0), (7, 7), (7, 12)])
def test_segment_over_prefix_equals_the_tail_of_the_whole(prefix, padded, block, monkeypatch):
  monkeypatch.setattr(attention, 'QUERY_BLOCK', block)
  rng = np.random.default_rng(0)
  total, heads, kv_heads, dim = prefix + 9, 6, 2, 8
  q, k, v = (jnp.asarray(rng.normal(size=(total, h, dim)), jnp.float32) for h in (heads, kv_heads, kv_heads))
  pad = lambda x: jnp.pad(x[:prefix], ((0, padded - prefix), (0, 0), (0, 0)), constant_values=1e3)
  got = attention.prefix_attention(q[None, prefix:], k[None, prefix:], v[None, prefix:], pad(k), pad(v), jnp.int32(prefix))
  np.testing.assert_allclose(got[0], full(q, k, v)[prefix:], atol=2e-6)


def test_rows_of_a_batch_do_not_see_each_other():
  rng = np.random.default_rng(1)
  q, k, v, pk, pv = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 5, 4, 8), (3, 5, 2, 8), (3, 5, 2, 8), (6, 2, 8), (6, 2, 8)))
  together = attention.prefix_attention(q, k, v, pk, pv, jnp.int32(4))
  for row in range(3):
    alone = attention.prefix_attention(q[row:row + 1], k[row:row + 1], v[row:row + 1], pk, pv, jnp.int32(4))
    np.testing.assert_allclose(together[row], alone[0], atol=1e-6)


@pytest.mark.parametrize('cut, bucket', [(70, 128), (100, 192), (127, 64)])
def test_where_a_sequence_is_cut_changes_neither_its_bits_nor_the_adjoints_of_its_tail(cut, bucket):
  rng = np.random.default_rng(2)
  total, kv_heads, dim, padded_cut = 190, 2, 64, 128
  q, k, v, g = (jnp.asarray(rng.normal(size=(total, h, dim)), jnp.float32) for h in (6, kv_heads, kv_heads, 6))
  fill = lambda x, n: jnp.pad(x, ((0, n - len(x)), (0, 0), (0, 0)))
  nothing = jnp.zeros((0, kv_heads, dim))

  def run(first, size, prefix_keys, prefix_values):
    """(context, (dq, dk, dv)) of the tokens from `first` on, padded to `size`; padding has no cotangent."""
    own = tuple(fill(x[first:], size)[None] for x in (q, k, v))
    attend = jax.jit(lambda *own: attention.prefix_attention(*own, prefix_keys, prefix_values, jnp.int32(first)))
    out, pullback = jax.vjp(attend, *own)
    return [np.asarray(x)[0, cut - first:total - first] for x in (out, *pullback(fill(g[first:], size)[None]))]

  whole = run(0, 192, nothing, nothing)
  for got, expected in zip(run(cut, bucket, fill(k[:cut], padded_cut), fill(v[:cut], padded_cut)), whole):
    np.testing.assert_array_equal(got, expected)
