"""Log-probabilities of given tokens without a [tokens, vocabulary] array.

Two entry points: `token_log_probs` for values, differentiable; and `weighted_score`, the score of Equation 4 of
ThunderSyncRL, S = sum_t w_t log pi(a_t | h_t), with or without further token-local terms, whose gradient is formed in the
same pass as its value because the weights are known when the pass runs.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp

from ts_jax.kernels import products

Array = jax.Array

# Logits that may be alive at once.  64 MiB holds 341 tokens of a 49,152-word vocabulary in float32.
LOGITS_BUDGET_BYTES = 64 * 2**20
VOCAB_CHUNK = 2048


class TokenTerms(Protocol):
  """Token-local terms of an objective as this kernel needs them; hashable.  See `ts_jax.objectives.terms.Terms`."""

  def check(self, scores: Any):
    """Raises ValueError where a score is missing."""

  def active(self, weights: Array, scores: Any) -> Array:
    """[N] bool, tokens that contribute."""

  def local(self, weights: Array, log_probs: Array, scores: Any) -> tuple[Array, Array]:
    """(values [N], their derivatives [N] with respect to the log-probs)."""

  def entropy_weights(self, scores: Any) -> Array | None:
    """[N] multipliers of the entropy of each token's distribution, or None."""


def _wide(hidden: Array):
  return jnp.promote_types(hidden.dtype, jnp.float32)


def _pad_head(head: Array) -> tuple[Array, int]:
  """Head [V, D] cut into chunks [C, c, D]; the last chunk is padded with rows that take no probability."""
  chunks = -(-head.shape[0] // VOCAB_CHUNK)
  padded = jnp.pad(head, ((0, chunks * VOCAB_CHUNK - head.shape[0]), (0, 0)))
  return padded.reshape(chunks, VOCAB_CHUNK, head.shape[1]), head.shape[0]


def _chunk_logits(hidden: Array, chunk: Array, start: Array, vocab: int, temperature: float) -> Array:
  logits = jnp.einsum('nd,vd->nv', hidden, chunk, preferred_element_type=_wide(hidden)) / temperature
  return jnp.where(start + jnp.arange(chunk.shape[0]) < vocab, logits, -jnp.inf)


def _log_normaliser(hidden: Array, head: Array, temperature: float, with_entropy: bool = False) -> tuple[Array, Array | None]:
  """(log sum_v exp(h . W_v / temperature) [N], entropy of the distribution [N] or None), one vocabulary chunk at a time."""
  chunks, vocab = _pad_head(head)

  def step(carry, xs):
    largest, total, moment = carry  # of l = logits: max l, sum exp(l - max), sum exp(l - max) (l - max)
    chunk, start = xs
    logits = _chunk_logits(hidden, chunk, start, vocab, temperature)
    new = jnp.maximum(largest, logits.max(-1))
    shrink, exps = jnp.exp(largest - new), jnp.exp(logits - new[:, None])
    if with_entropy:
      moment = shrink * (moment + total * (largest - new)) + _times(exps, logits - new[:, None]).sum(-1)
    return (new, total * shrink + exps.sum(-1), moment), None

  # A finite start, not -inf: exp(-inf - -inf) would be NaN.
  zeros = jnp.zeros(hidden.shape[0], _wide(hidden))
  start = (jnp.full(hidden.shape[0], jnp.finfo(_wide(hidden)).min), zeros, zeros if with_entropy else None)
  (largest, total, moment), _ = jax.lax.scan(step, start, (chunks, jnp.arange(len(chunks)) * VOCAB_CHUNK))
  return largest + jnp.log(total), jnp.log(total) - moment / total if with_entropy else None


def _times(probs: Array, logs: Array) -> Array:
  """probs * logs, 0 where the probability is 0 (and its logarithm perhaps -inf)."""
  return jnp.where(probs > 0, probs * logs, 0)


def _target_logits(hidden: Array, head: Array, targets: Array, temperature: float) -> Array:
  return jnp.einsum('nd,nd->n', hidden, head[targets], preferred_element_type=_wide(hidden)) / temperature


def fits_budget(tokens: int, vocab: int, dtype) -> bool:
  """The logits are formed at once; else by chunks of the vocabulary, and again in the backward pass."""
  return tokens * vocab * jnp.dtype(dtype).itemsize <= LOGITS_BUDGET_BYTES


def _dense_log_probs(hidden: Array, head: Array, targets: Array, temperature: float,
                     with_entropy: bool) -> tuple[Array, Array, Array | None, Array | None]:
  """(log-probs [N], probabilities [N, V], logarithms of these, entropies [N]) where the logits fit the budget."""
  logits = jnp.einsum('nd,vd->nv', hidden, head, preferred_element_type=_wide(hidden)) / temperature
  largest = logits.max(-1, keepdims=True)
  exps = jnp.exp(logits - largest)
  total = exps.sum(-1, keepdims=True)
  chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)
  log_probs, probs = (chosen - largest - jnp.log(total))[:, 0], exps / total
  if not with_entropy:
    return log_probs, probs, None, None
  logs = logits - largest - jnp.log(total)
  return log_probs, probs, logs, -_times(probs, logs).sum(-1)


def _grad_logits(onehot: Array, probs: Array, logs: Array | None, scaled: Array, entropy: tuple[Array, Array] | None) -> Array:
  """Gradient of sum_t w_t log p_t + e_t H_t with respect to logits [N, c].

  Args:
    onehot, probs, logs: [N, c] of the targets, the probabilities and their logarithms (read for the entropy only).
    scaled: [N, 1] w_t / temperature.
    entropy: (H_t [N], e_t / temperature [N]), or None.
  """
  gradient = scaled * (onehot - probs)
  if entropy is None:
    return gradient
  value, weight = entropy
  return gradient - weight[:, None] * _times(probs, logs + value[:, None])


def _pullback(hidden: Array, head: Array, targets: Array, normaliser: Array, weights: Array, temperature: float,
              entropy: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
  """Gradient of `_grad_logits`'s sum with respect to hidden [N, D] and head [V, D], one vocabulary chunk at a time."""
  chunks, vocab = _pad_head(head)
  scaled = (weights / temperature)[:, None]

  def step(grad_hidden, xs):
    chunk, start = xs
    logs = _chunk_logits(hidden, chunk, start, vocab, temperature) - normaliser[:, None]
    onehot = targets[:, None] == start + jnp.arange(VOCAB_CHUNK)
    grad_logits = _grad_logits(onehot, jnp.exp(logs), logs, scaled, entropy).astype(hidden.dtype)
    return grad_hidden + products.product(grad_logits, chunk), products.product(grad_logits.T, hidden)

  grad_hidden, grad_chunks = jax.lax.scan(step, jnp.zeros_like(hidden), (chunks, jnp.arange(len(chunks)) * VOCAB_CHUNK))
  return grad_hidden, grad_chunks.reshape(-1, head.shape[1])[:vocab].astype(head.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_log_probs(hidden: Array, head: Array, targets: Array, temperature: float = 1.0) -> Array:
  """log softmax(hidden . head^T / temperature) at the targets.

  Args:
    hidden: [N, D].
    head: [V, D].
    targets: [N] int.
    temperature: positive Python float.

  Returns:
    [N] in at least float32.
  """
  return _target_logits(hidden, head, targets, temperature) - _log_normaliser(hidden, head, temperature)[0]


def _token_log_probs_fwd(hidden, head, targets, temperature):
  normaliser, _ = _log_normaliser(hidden, head, temperature)
  return _target_logits(hidden, head, targets, temperature) - normaliser, (hidden, head, targets, normaliser)


def _token_log_probs_bwd(temperature, residuals, cotangent):
  hidden, head, targets, normaliser = residuals
  return *_pullback(hidden, head, targets, normaliser, cotangent, temperature), None


token_log_probs.defvjp(_token_log_probs_fwd, _token_log_probs_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 7))
def weighted_score(hidden: Array, head: Array, targets: Array, weights: Array, teacher: Array | None = None,
                   temperature: float = 1.0, scores: Any = None, terms: TokenTerms | None = None) -> tuple[Array, Array]:
  """S = sum_t w_t log pi(a_t | h_t), with the log-probs beside it; for distillation, w_t times the detached advantage.

  With `terms`, S is the sum of all of them; each is differentiated as it is written, in the same pass.  A token that none
  counts (w_t = 0, and u_t = 0 where a term reads it) contributes exactly nothing, whatever its hidden state or scores hold.

  Args:
    hidden: [N, D].
    head: [V, D].
    targets: [N] int.
    weights: [N], constants of the differentiation.
    teacher: [N] log-probs of the targets under a teacher, or None.  With it each weight is multiplied by
      A_t = teacher_t - sg[log pi(a_t | h_t)] (Equation 8); equal log-probs give exactly zero.
    temperature: positive Python float.
    scores: what `terms` are functions of, a pytree of [N] arrays, constants of the differentiation.
    terms: an `objectives.terms.Terms`, or None for the weighted log-probs alone.

  Returns:
    (S scalar, log-probs [N]); only S carries a gradient.  Where it is taken, the log-probs of tokens that contribute nothing
    are those of a hidden state of 0.

  Raises:
    ValueError: `terms` need a score that is None.
  """
  entropy_weights = _entropy_weights(scores, terms)
  normaliser, entropy = _log_normaliser(hidden, head, temperature, entropy_weights is not None)
  log_probs = _target_logits(hidden, head, targets, temperature) - normaliser
  values, _ = _local(_with_advantage(weights, teacher, log_probs), log_probs, scores, terms)
  return _total(values, entropy, entropy_weights), log_probs


def _with_advantage(weights: Array, teacher: Array | None, log_probs: Array) -> Array:
  return weights if teacher is None else jnp.where(weights != 0, weights * (teacher - log_probs), 0)


def _entropy_weights(scores: Any, terms: TokenTerms | None) -> Array | None:
  if terms is None:
    return None
  terms.check(scores)
  return terms.entropy_weights(scores)


def _local(weights: Array, log_probs: Array, scores: Any, terms: TokenTerms | None) -> tuple[Array, Array]:
  if terms is None:
    return jnp.where(weights != 0, weights * log_probs, 0), weights
  return terms.local(weights, log_probs, scores)


def _total(values: Array, entropy: Array | None, entropy_weights: Array | None) -> Array:
  total = jnp.sum(values)
  return total if entropy is None else total + jnp.sum(jnp.where(entropy_weights != 0, entropy_weights * entropy, 0))


def _weighted_score_fwd(hidden, head, targets, weights, teacher, temperature, scores, terms):
  chex.assert_rank([hidden, head], 2)
  chex.assert_shape([targets, weights, *jax.tree.leaves((teacher, scores))], (hidden.shape[0],))
  entropy_weights = _entropy_weights(scores, terms)
  with_entropy = entropy_weights is not None
  active = weights != 0 if terms is None else terms.active(weights, scores)
  hidden = jnp.where(active[:, None], hidden, 0)  # 0 * NaN would be NaN
  dense = fits_budget(hidden.shape[0], head.shape[0], _wide(hidden))
  if dense:
    log_probs, probs, logs, entropy = _dense_log_probs(hidden, head, targets, temperature, with_entropy)
  else:
    normaliser, entropy = _log_normaliser(hidden, head, temperature, with_entropy)
    log_probs = _target_logits(hidden, head, targets, temperature) - normaliser
  values, weights = _local(_with_advantage(weights, teacher, log_probs), log_probs, scores, terms)
  spread = (entropy, entropy_weights / temperature) if with_entropy else None
  if dense:
    onehot = targets[:, None] == jnp.arange(head.shape[0])
    grad_logits = _grad_logits(onehot, probs, logs, (weights / temperature)[:, None], spread).astype(hidden.dtype)
    grads = products.over_vocabulary(grad_logits, head), products.product(grad_logits.T, hidden).astype(head.dtype)
  else:
    grads = _pullback(hidden, head, targets, normaliser, weights, temperature, spread)
  return (_total(values, entropy, entropy_weights), log_probs), grads


def _weighted_score_bwd(temperature, terms, grads, cotangent):
  del temperature, terms
  scale, _ = cotangent
  return *jax.tree.map(lambda g: (scale * g).astype(g.dtype), grads), None, None, None, None


weighted_score.defvjp(_weighted_score_fwd, _weighted_score_bwd)
