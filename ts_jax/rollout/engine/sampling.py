"""Drawing one token per row, reproducibly: the noise depends on the request's seed and the position, on nothing else."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
_BLOCK = 256


class Draw(NamedTuple):
  """Sampling inputs, one entry per row.

  Attributes:
    seeds: [R] uint32 request seeds, low words.
    seeds_high: [R] uint32, high words.
    positions: [R] int32 absolute position of the token to draw.
    temperatures: [R] float32; 0 takes the most likely token.
  """

  seeds: Array
  seeds_high: Array
  positions: Array
  temperatures: Array


def sample(logits: Array, draw: Draw) -> tuple[Array, Array]:
  """Samples from softmax(logits / temperature) by the Gumbel-max trick in two levels.

  The vocabulary is cut into blocks; one draw picks the block by its log-sum-exp, a second the token inside it: the same
  distribution as a draw over the whole vocabulary with 2% of its noise (the noise used to cost as much as the head).
  Unlike an inverse-CDF draw, a perturbation of the logits by rounding changes the token with a probability of the same
  order as the rounding.

  Args:
    logits: [V, R] float32 (vocabulary first: its reductions then vectorise across rows).
    draw: sampling inputs.

  Returns:
    (token [R] int32, log-probability [R] float32 under the temperature-scaled distribution; under temperature 1 for a
    greedy row).
  """
  vocab, rows = logits.shape
  greedy = draw.temperatures <= 0
  scaled = logits / jnp.where(greedy, 1.0, draw.temperatures)
  if vocab % _BLOCK:
    scaled = jnp.pad(scaled, ((0, -vocab % _BLOCK), (0, 0)), constant_values=-jnp.inf)
  blocks = scaled.reshape(-1, _BLOCK, rows)
  peak = blocks.max(axis=1)
  # A block of padding only has a peak of -inf; -inf - -inf would be NaN.
  mass = jnp.log(jnp.exp(blocks - jnp.where(jnp.isneginf(peak), 0.0, peak)[:, None]).sum(axis=1)) + peak
  normaliser = jax.nn.logsumexp(mass, axis=0)

  def noise(low, high, position):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(low), high), position)
    return jax.random.gumbel(key, (blocks.shape[0] + _BLOCK,))

  gumbel = jax.vmap(noise)(draw.seeds, draw.seeds_high, draw.positions).T
  gumbel = jnp.where(greedy, 0.0, gumbel)
  block = jnp.argmax(jnp.where(greedy, peak, mass) + gumbel[:blocks.shape[0]], axis=0)
  inner = blocks[block, :, jnp.arange(rows)]
  offset = jnp.argmax(inner + gumbel[blocks.shape[0]:].T, axis=1)
  log_prob = jnp.take_along_axis(inner, offset[:, None], axis=1)[:, 0] - normaliser
  return (block * _BLOCK + offset).astype(jnp.int32), log_prob
