"""Causal attention of a segment over itself and over a cached prefix.

A token's result does not depend on where its sequence is cut into segments, nor on padding, beyond what the matrix
products of the backend do with another number of rows.  On a CPU that makes the forward pass of a split sequence equal
to the unsplit one bit for bit, which matters more than it seems: the gradient of a language model amplifies float32
rounding of the forward pass fiftyfold.  Three things bring it about.  A segment's keys lie at their absolute positions,
directly behind the prefix's last real one, so sums over keys run in the order of the whole sequence; the number of keys
is padded to a multiple of `KEY_ALIGNMENT`, because products over other numbers round differently; and the adjoints of
keys and values are sums over queries by chunks of absolute positions, so that a cut moves terms, not their order.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from ts_jax.kernels import products

Array = jax.Array

QUERY_BLOCK = 256
KEY_ALIGNMENT = 64
SUM_CHUNK = 64


def prefix_attention(query: Array, key: Array, value: Array, prefix_key: Array, prefix_value: Array,
                     prefix_length: Array) -> Array:
  """Softmax attention with grouped key/value heads; scores in at least float32.

  Trailing padding of a segment needs no mask: causality already hides it from every earlier token.  Query heads of one
  key/value head are stacked along the rows of a single matrix product; on a CPU this is four times faster, gradient
  included, than contracting them as a batch dimension.  Long segments go by blocks of queries, each against the keys
  up to its own end: no product is formed only to be masked.

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

  def behind_prefix(prefix, own):
    room = ((0, 0), (0, aligned(past + length) - past), (0, 0), (0, 0))
    whole = jnp.pad(jnp.broadcast_to(prefix, (batch, *prefix.shape)), room)
    return jax.lax.dynamic_update_slice_in_dim(whole, own, prefix_length, axis=1).transpose(0, 2, 1, 3)

  keys, values = behind_prefix(prefix_key, key), behind_prefix(prefix_value, value)  # [B, K, aligned P + T, d]
  blocks = []
  for start in range(0, length, QUERY_BLOCK):
    stop = min(start + QUERY_BLOCK, length)
    seen = aligned(past + stop)
    rows = query[:, start:stop].reshape(batch, stop - start, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    visible = jnp.arange(seen) <= prefix_length + jnp.arange(start, stop)[:, None]
    scores = _scores(rows * dim**-0.5, keys[:, :, :seen], prefix_length + start)
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(wide).min)).astype(query.dtype)
    context = _context(weights, values[:, :, :seen], prefix_length + start)
    blocks.append(context.transpose(0, 3, 1, 2, 4).reshape(batch, stop - start, heads, dim))
  return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)


def summed_rows(queries: int) -> int:
  """Rows that sums over `queries` run over, wherever the chunks of absolute positions cut them."""
  return -(-(queries + SUM_CHUNK - 1) // SUM_CHUNK) * SUM_CHUNK


def aligned(keys: int) -> int:
  """Keys that products run over where `keys` are needed."""
  return -(-keys // KEY_ALIGNMENT) * KEY_ALIGNMENT


@jax.custom_vjp
def _scores(rows: Array, keys: Array, first: Array) -> Array:
  """Products [B, K, G, T, S] of query rows [B, K, G, T, d] at positions from `first` on with keys [B, K, S, d]."""
  del first
  return _stacked('bkmd,bksd->bkms', rows, keys, jnp.promote_types(rows.dtype, jnp.float32))


def _scores_bwd(residuals, cotangent):
  rows, keys, first = residuals
  cotangent = cotangent.astype(rows.dtype)
  return _stacked_back('bkms,bksd->bkmd', cotangent, keys), _sum_over_queries(cotangent, rows, first), None


_scores.defvjp(lambda rows, keys, first: (_scores(rows, keys, first), (rows, keys, first)), _scores_bwd)


@jax.custom_vjp
def _context(weights: Array, values: Array, first: Array) -> Array:
  """Weighted sums [B, K, G, T, d] of values [B, K, S, d]."""
  del first
  return _stacked('bkms,bksd->bkmd', weights, values)


def _context_bwd(residuals, cotangent):
  weights, values, first = residuals
  return _stacked_back('bkmd,bksd->bkms', cotangent, values), _sum_over_queries(weights, cotangent, first), None


_context.defvjp(lambda weights, values, first: (_context(weights, values, first), (weights, values, first)), _context_bwd)


def _stacked(spec: str, rows: Array, matrix: Array, dtype=None) -> Array:
  """A product of [B, K, G, T, x] with [B, K, y, z] whose rows m are the queries of all G heads."""
  batch, kv_heads, group, length, width = rows.shape
  flat = rows.reshape(batch, kv_heads, group * length, width)
  return jnp.einsum(spec, flat, matrix, preferred_element_type=dtype).reshape(batch, kv_heads, group, length, -1)


def _stacked_back(spec: str, rows: Array, matrix: Array) -> Array:
  """`_stacked` in the backward pass."""
  return products.summed(spec.replace('m', 'gt'), rows, matrix) if products.in_float64(rows) else _stacked(spec, rows, matrix)


def _sum_over_queries(weights: Array, rows: Array, first: Array) -> Array:
  """sum over heads g and queries t of weights[.., g, t, s] rows[.., g, t, d], as [B, K, S, d].

  One product for every `SUM_CHUNK` absolute positions, then a sum over them: cutting the sequence elsewhere changes
  which segment forms a term, not the terms nor, within a segment, their order.
  """
  if products.in_float64(rows):  # whose rounding leaves next to nothing of the order
    return products.summed('bkgts,bkgtd->bksd', weights, rows)
  batch, kv_heads, group, length, _ = weights.shape
  room = summed_rows(length)

  def chunks(x):  # [B, K, C, G * chunk, .]
    placed = jnp.zeros((batch, kv_heads, group, room, x.shape[-1]), x.dtype)
    placed = jax.lax.dynamic_update_slice_in_dim(placed, x, first % SUM_CHUNK, axis=3)
    placed = placed.reshape(batch, kv_heads, group, -1, SUM_CHUNK, x.shape[-1])
    return placed.transpose(0, 1, 3, 2, 4, 5).reshape(batch, kv_heads, room // SUM_CHUNK, group * SUM_CHUNK, -1)

  wide = jnp.promote_types(rows.dtype, jnp.float32)
  parts = jnp.einsum('bkcms,bkcmd->bkcsd', chunks(weights), chunks(rows), preferred_element_type=wide)
  return parts[:, :, ::-1].sum(2).astype(rows.dtype)  # as autodiff would add blocks: the last one first
