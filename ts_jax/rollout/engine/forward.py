"""The engine's forward passes: one-token decoding of many rows, chunked prefill of one row, both over a slotted cache.

What makes them fast on a CPU, each measured: weights are separate arrays per layer (a scan over stacked weights copies
them), caches are donated and updated in place, keys lie as [slot, head, head_dim, position] and values as
[slot, head, position, head_dim] so that both attention products run along contiguous memory, and a few layers share
one compiled function (compilation takes a fraction of that of the whole graph, dispatch stays negligible).
"""

from __future__ import annotations

import functools
from typing import Any, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ts_jax.kernels import logprob
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.rollout.engine import sampling

Array = jax.Array
LayerCache = tuple[Array, Array]
_MASKED = -1e30


class Weights:
  """Parameters as the engine wants them: per-layer dictionaries, and the head as [vocab, width].

  Attributes:
    layers: one dictionary of device arrays per layer.
    embedding, head: [V, D]; the same array when tied.
    final_norm: {'scale': [D]}.
  """

  def __init__(self, config: ModelConfig, params: Mapping[str, Any]):
    """Splits `params` (contract of `models.llama`).

    Args:
      config: sizes.
      params: parameters with stacked layers, NumPy or JAX arrays.  Its 'layers' dictionaries are emptied leaf by leaf
        when they are plain dictionaries, so that host memory does not hold every layer twice.
    """
    layers: list[dict] = [{} for _ in range(config.layers)]
    for module in list(params['layers']):
      names = params['layers'][module]
      for name in list(names):
        stacked = np.asarray(names.pop(name) if isinstance(names, dict) else names[name])
        for i in range(config.layers):
          layers[i].setdefault(module, {})[name] = jnp.array(stacked[i], jnp.float32)
        del stacked
    self.layers = tuple(layers)
    # Copies: an alias of a memory-mapped file would change with it.
    self.embedding = jnp.array(params['embed']['embedding'], jnp.float32)
    self.head = jnp.array(np.asarray(params['head']['kernel']).T, jnp.float32) if 'head' in params else self.embedding
    self.final_norm = {'scale': jnp.array(params['final_norm']['scale'], jnp.float32)}
    jax.block_until_ready((self.layers, self.embedding, self.head, self.final_norm))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _decode_layers(config: ModelConfig, layers: tuple, x: Array, caches: list[LayerCache], slots: Array,
                   positions: Array) -> tuple[Array, list[LayerCache]]:
  """Some consecutive layers for one new token of each row.  x: [R, 1, D]; slots, positions: [R] int32."""
  rope = llama.rope_table(config, positions[:, None])
  group = config.heads // config.kv_heads
  block, rows, updated = llama.Block(config), x.shape[0], []
  for params, (keys, values) in zip(layers, caches):
    count, capacity = keys.shape[0], keys.shape[-1]

    def attend(query, key, value, keys=keys, values=values):
      in_bounds = dict(mode='promise_in_bounds', unique_indices=True)
      keys = keys.at[slots, :, :, positions].set(key[:, 0], **in_bounds)
      values = values.at[slots, :, positions, :].set(value[:, 0], **in_bounds)
      query = query.reshape(rows, config.kv_heads, group, config.head_dim) * config.head_dim**-0.5
      limits = positions
      if rows != count:  # attention runs over the cache where it lies: gathering rows of it would copy it
        query = jnp.zeros((count, *query.shape[1:]), query.dtype).at[slots].set(query, **in_bounds)
        limits = jnp.zeros(count, jnp.int32).at[slots].set(positions, **in_bounds)
      scores = jnp.einsum('shgd,shdc->shgc', query, keys)
      visible = jnp.arange(capacity)[None] <= limits[:, None]
      weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, _MASKED), axis=-1)
      context = jnp.einsum('shgc,shcd->shgd', weights, values)
      context = context[slots] if rows != count else context
      return context.reshape(rows, 1, config.heads, config.head_dim), (keys, values)

    x, cache = block.apply({'params': params}, x, rope, attend)
    updated.append(cache)
  return x, updated


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _prefill_layers(config: ModelConfig, layers: tuple, x: Array, caches: list[LayerCache], slot: Array,
                    start: Array) -> tuple[Array, list[LayerCache]]:
  """Some consecutive layers for a chunk of one row.  x: [1, T, D]; slot, start: scalar int32."""
  length = x.shape[1]
  positions = start + jnp.arange(length)
  rope = llama.rope_table(config, positions[None])
  group = config.heads // config.kv_heads
  block, updated = llama.Block(config), []
  for params, (keys, values) in zip(layers, caches):
    capacity = keys.shape[-1]

    def attend(query, key, value, keys=keys, values=values):
      keys = jax.lax.dynamic_update_slice(keys, key.transpose(0, 2, 3, 1), (slot, 0, 0, start))
      values = jax.lax.dynamic_update_slice(values, value.transpose(0, 2, 1, 3), (slot, 0, start, 0))
      row_keys = jax.lax.dynamic_index_in_dim(keys, slot, 0, keepdims=False)
      row_values = jax.lax.dynamic_index_in_dim(values, slot, 0, keepdims=False)
      query = query[0].reshape(length, config.kv_heads, group, config.head_dim).transpose(1, 2, 0, 3)
      query = query.reshape(config.kv_heads, group * length, config.head_dim) * config.head_dim**-0.5
      scores = jnp.einsum('htd,hdc->htc', query, row_keys).reshape(config.kv_heads, group, length, capacity)
      visible = jnp.arange(capacity)[None] <= positions[:, None]
      weights = jax.nn.softmax(jnp.where(visible, scores, _MASKED), axis=-1)
      context = jnp.einsum('htc,hcd->htd', weights.reshape(config.kv_heads, group * length, capacity), row_values)
      context = context.reshape(config.kv_heads, group, length, config.head_dim).transpose(2, 0, 1, 3)
      return context.reshape(1, length, config.heads, config.head_dim), (keys, values)

    x, cache = block.apply({'params': params}, x, rope, attend)
    updated.append(cache)
  return x, updated


@jax.jit
def _lookup(embedding: Array, tokens: Array) -> Array:
  return embedding[tokens]


@functools.partial(jax.jit, static_argnums=0)
def _sample(config: ModelConfig, final_norm, head: Array, x: Array, draw: sampling.Draw) -> tuple[Array, Array]:
  hidden = llama.final_norm(config, {'final_norm': final_norm}, x[:, 0])
  return sampling.sample(head @ hidden.T, draw)  # [V, R]: reductions over the vocabulary vectorise across rows


@functools.partial(jax.jit, static_argnums=(0, 5))
def _score(config: ModelConfig, final_norm, head: Array, x: Array, targets: Array, temperature: float) -> Array:
  hidden = llama.final_norm(config, {'final_norm': final_norm}, x[0])
  return logprob.token_log_probs(hidden, head, targets, temperature)


class Forward:
  """Runs decode steps and prefill chunks of one model over caches it is handed."""

  def __init__(self, config: ModelConfig, layers_per_call: int = 5):
    """Args: config: sizes; layers_per_call: layers compiled into one function."""
    self._config = config
    size = next(n for n in range(min(layers_per_call, config.layers), 0, -1) if config.layers % n == 0)
    self._spans = [(i, i + size) for i in range(0, config.layers, size)]

  def decode(self, weights: Weights, caches: list[LayerCache], tokens: np.ndarray, slots: np.ndarray,
             positions: np.ndarray, draw: sampling.Draw) -> tuple[np.ndarray, np.ndarray]:
    """One token for each of R distinct slots; `caches` (one pair per layer) is updated in place.

    Args:
      weights: the policy.
      caches: donated; the list's entries are replaced.
      tokens: [R] last token of each row, not yet in the cache.
      slots: [R] distinct slot indices, ascending.
      positions: [R] position of `tokens`.
      draw: [R] sampling inputs.

    Returns:
      (token [R] int32, its log-probability [R] float32).
    """
    x = _lookup(weights.embedding, tokens[:, None])
    for a, b in self._spans:
      x, caches[a:b] = _decode_layers(self._config, weights.layers[a:b], x, caches[a:b], slots, positions)
    sampled = _sample(self._config, weights.final_norm, weights.head, x, draw)
    return np.asarray(sampled[0]), np.asarray(sampled[1])

  def prefill(self, weights: Weights, caches: list[LayerCache], tokens: np.ndarray, slot: int, start: int) -> Array:
    """Puts a chunk of one row into the cache; `caches` is updated in place.

    Args:
      weights: the policy.
      caches: donated; the list's entries are replaced.
      tokens: [T] chunk; trailing padding writes keys beyond the real ones, which nobody reads before overwriting them.
      slot: row.
      start: position of tokens[0]; start + T must not pass the capacity.

    Returns:
      Hidden states before the final norm, [1, T, D].
    """
    x = _lookup(weights.embedding, tokens[None])
    for a, b in self._spans:
      x, caches[a:b] = _prefill_layers(self._config, weights.layers[a:b], x, caches[a:b], np.int32(slot), np.int32(start))
    return x

  def score(self, weights: Weights, x: Array, targets: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities [T] float32 of `targets` [T], each given the prefix that ends in its row of `x` [1, T, D]."""
    return np.asarray(_score(self._config, weights.final_norm, weights.head, x, targets, temperature))
