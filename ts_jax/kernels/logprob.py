"""Log-probabilities of given tokens without a [tokens, vocabulary] array.

Two entry points: `token_log_probs` for values, differentiable; and `weighted_score`, the score of Equation 4 of
ThunderSyncRL, S = sum_t w_t log pi(a_t | h_t), whose gradient is formed in the same pass as its value because the
weights are known when the pass runs.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

Array = jax.Array

# Logits that may be alive at once.  64 MiB holds 341 tokens of a 49,152-word vocabulary in float32.
LOGITS_BUDGET_BYTES = 64 * 2**20
_VOCAB_CHUNK = 2048


def _wide(hidden: Array):
  return jnp.promote_types(hidden.dtype, jnp.float32)


def _pad_head(head: Array) -> tuple[Array, int]:
  """Head [V, D] cut into chunks [C, c, D]; the last chunk is padded with rows that take no probability."""
  chunks = -(-head.shape[0] // _VOCAB_CHUNK)
  padded = jnp.pad(head, ((0, chunks * _VOCAB_CHUNK - head.shape[0]), (0, 0)))
  return padded.reshape(chunks, _VOCAB_CHUNK, head.shape[1]), head.shape[0]


def _chunk_logits(hidden: Array, chunk: Array, start: Array, vocab: int, temperature: float) -> Array:
  logits = jnp.einsum('nd,vd->nv', hidden, chunk, preferred_element_type=_wide(hidden)) / temperature
  return jnp.where(start + jnp.arange(chunk.shape[0]) < vocab, logits, -jnp.inf)


def _log_normaliser(hidden: Array, head: Array, temperature: float) -> Array:
  """log sum_v exp(h . W_v / temperature) [N], one vocabulary chunk at a time."""
  chunks, vocab = _pad_head(head)

  def step(carry, xs):
    largest, total = carry
    chunk, start = xs
    logits = _chunk_logits(hidden, chunk, start, vocab, temperature)
    new = jnp.maximum(largest, logits.max(-1))
    return (new, total * jnp.exp(largest - new) + jnp.exp(logits - new[:, None]).sum(-1)), None

  # A finite start, not -inf: exp(-inf - -inf) would be NaN.
  start = (jnp.full(hidden.shape[0], jnp.finfo(_wide(hidden)).min), jnp.zeros(hidden.shape[0], _wide(hidden)))
  (largest, total), _ = jax.lax.scan(step, start, (chunks, jnp.arange(len(chunks)) * _VOCAB_CHUNK))
  return largest + jnp.log(total)


def _target_logits(hidden: Array, head: Array, targets: Array, temperature: float) -> Array:
  return jnp.einsum('nd,nd->n', hidden, head[targets], preferred_element_type=_wide(hidden)) / temperature


def _fits_budget(tokens: int, vocab: int, dtype) -> bool:
  return tokens * vocab * jnp.dtype(dtype).itemsize <= LOGITS_BUDGET_BYTES


def _dense_log_probs(hidden: Array, head: Array, targets: Array, temperature: float) -> tuple[Array, Array]:
  """(log-probs [N], probabilities [N, V]) where the logits fit the budget."""
  logits = jnp.einsum('nd,vd->nv', hidden, head, preferred_element_type=_wide(hidden)) / temperature
  largest = logits.max(-1, keepdims=True)
  exps = jnp.exp(logits - largest)
  total = exps.sum(-1, keepdims=True)
  chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)
  return (chosen - largest - jnp.log(total))[:, 0], exps / total


def _pullback(hidden: Array, head: Array, targets: Array, normaliser: Array, weights: Array,
              temperature: float) -> tuple[Array, Array]:
  """Gradient of sum_t w_t log p_t with respect to hidden [N, D] and head [V, D], one vocabulary chunk at a time."""
  chunks, vocab = _pad_head(head)
  scaled = (weights / temperature)[:, None]

  def step(grad_hidden, xs):
    chunk, start = xs
    probs = jnp.exp(_chunk_logits(hidden, chunk, start, vocab, temperature) - normaliser[:, None])
    onehot = targets[:, None] == start + jnp.arange(_VOCAB_CHUNK)
    grad_logits = (scaled * (onehot - probs)).astype(hidden.dtype)
    return grad_hidden + grad_logits @ chunk, grad_logits.T @ hidden

  grad_hidden, grad_chunks = jax.lax.scan(step, jnp.zeros_like(hidden), (chunks, jnp.arange(len(chunks)) * _VOCAB_CHUNK))
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
  return _target_logits(hidden, head, targets, temperature) - _log_normaliser(hidden, head, temperature)


def _token_log_probs_fwd(hidden, head, targets, temperature):
  normaliser = _log_normaliser(hidden, head, temperature)
  return _target_logits(hidden, head, targets, temperature) - normaliser, (hidden, head, targets, normaliser)


def _token_log_probs_bwd(temperature, residuals, cotangent):
  hidden, head, targets, normaliser = residuals
  return *_pullback(hidden, head, targets, normaliser, cotangent, temperature), None


token_log_probs.defvjp(_token_log_probs_fwd, _token_log_probs_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def weighted_score(hidden: Array, head: Array, targets: Array, weights: Array, teacher: Array | None = None,
                   temperature: float = 1.0) -> tuple[Array, Array]:
  """S = sum_t w_t log pi(a_t | h_t), with the log-probs beside it; for distillation, w_t times the detached advantage.

  Where the weight is 0 the token contributes exactly nothing, whatever its hidden state, target or teacher hold.

  Args:
    hidden: [N, D].
    head: [V, D].
    targets: [N] int.
    weights: [N], constants of the differentiation.
    teacher: [N] log-probs of the targets under a teacher, or None.  With it each weight is multiplied by
      A_t = teacher_t - sg[log pi(a_t | h_t)] (Equation 8); equal log-probs give exactly zero.
    temperature: positive Python float.

  Returns:
    (S scalar, log-probs [N]); only S carries a gradient.
  """
  log_probs = token_log_probs(hidden, head, targets, temperature)
  weights = _with_advantage(weights, teacher, jax.lax.stop_gradient(log_probs))
  return jnp.sum(jnp.where(weights != 0, weights * log_probs, 0)), log_probs


def _with_advantage(weights: Array, teacher: Array | None, log_probs: Array) -> Array:
  return weights if teacher is None else jnp.where(weights != 0, weights * (teacher - log_probs), 0)


def _weighted_score_fwd(hidden, head, targets, weights, teacher, temperature):
  chex.assert_rank([hidden, head], 2)
  chex.assert_shape([targets, weights], (hidden.shape[0],))
  hidden = jnp.where((weights != 0)[:, None], hidden, 0)  # 0 * NaN would be NaN
  if _fits_budget(hidden.shape[0], head.shape[0], _wide(hidden)):
    log_probs, probs = _dense_log_probs(hidden, head, targets, temperature)
    weights = _with_advantage(weights, teacher, log_probs)
    scaled = (weights / temperature)[:, None]
    onehot = targets[:, None] == jnp.arange(head.shape[0])
    grad_logits = (scaled * (onehot - probs)).astype(hidden.dtype)
    grads = grad_logits @ head, (grad_logits.T @ hidden).astype(head.dtype)
  else:
    normaliser = _log_normaliser(hidden, head, temperature)
    log_probs = _target_logits(hidden, head, targets, temperature) - normaliser
    weights = _with_advantage(weights, teacher, log_probs)
    grads = _pullback(hidden, head, targets, normaliser, weights, temperature)
  return (jnp.sum(jnp.where(weights != 0, weights * log_probs, 0)), log_probs), grads


def _weighted_score_bwd(temperature, grads, cotangent):
  del temperature
  scale, _ = cotangent
  return *jax.tree.map(lambda g: (scale * g).astype(g.dtype), grads), None, None, None


weighted_score.defvjp(_weighted_score_fwd, _weighted_score_bwd)
