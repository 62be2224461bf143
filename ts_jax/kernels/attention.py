"""Causal attention of a segment over itself and over a cached prefix."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

Array = jax.Array


def prefix_attention(query: Array, key: Array, value: Array, prefix_key: Array, prefix_value: Array,
                     prefix_length: Array) -> Array:
  """Softmax attention with grouped key/value heads; scores in at least float32.

  Trailing padding of a segment needs no mask: causality already hides it from every earlier token.  Query heads of one
  key/value head are stacked along the rows of a single matrix product; on a CPU this is four times faster, gradient
  included, than contracting them as a batch dimension.

  Args:
    query: [B, T, H, d].
    key, value: [B, T, K, d], K divides H.
    prefix_key, prefix_value: [P, K, d], shared by all rows; positions at or after `prefix_length` are ignored.  P may
      be 0.
    prefix_length: scalar int.

  Returns:
    [B, T, H, d] in the dtype of `query`.
  """
  chex.assert_rank([query, key, value, prefix_key, prefix_value, prefix_length], [4, 4, 4, 3, 3, 0])
  chex.assert_equal_shape([key, value])
  batch, length, heads, dim = query.shape
  kv_heads, past = key.shape[2], prefix_key.shape[0]
  group = heads // kv_heads
  wide = jnp.promote_types(query.dtype, jnp.float32)

  def with_prefix(prefix, own):
    whole = jnp.concatenate([jnp.broadcast_to(prefix, (batch, *prefix.shape)), own], axis=1)
    return whole.transpose(0, 2, 1, 3)  # [B, K, P + T, d]

  keys, values = with_prefix(prefix_key, key), with_prefix(prefix_value, value)
  rows = (query * dim**-0.5).reshape(batch, length, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
  rows = rows.reshape(batch, kv_heads, group * length, dim)

  source = jnp.arange(past + length)
  visible = jnp.where(source < past, source < prefix_length, source - past <= jnp.arange(length)[:, None])
  scores = jnp.einsum('bkmd,bksd->bkms', rows, keys, preferred_element_type=wide)
  scores = scores.reshape(batch, kv_heads, group, length, past + length)
  weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(wide).min)).astype(query.dtype)
  context = jnp.einsum('bkms,bksd->bkmd', weights.reshape(batch, kv_heads, group * length, past + length), values)
  context = context.reshape(batch, kv_heads, group, length, dim).transpose(0, 3, 1, 2, 4)
  return context.reshape(query.shape)
