"""The independent reference of the equivalence checks: full sequences, no prefix sharing, no padding, plain autodiff.

Written from the equations with its own forward pass; shares no code with ts_jax.streaming, ts_jax.kernels or
ts_jax.models.llama beyond the parameter names.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


def logits(config, params, tokens, rotary=None):
  """Logits [T, V] of one sequence [T], layer by layer.

  `rotary` is the dtype of the rotary angles (default: that of the parameters).  Checkpoints define them in float32
  whatever the precision of the rest: at position 300 a float32 angle differs from the exact one by 1e-5, and that is a
  property of the model, not an error of its gradient.
  """
  dtype = params['embed']['embedding'].dtype
  length = len(tokens)
  half = config.head_dim // 2
  exponents = jnp.arange(0, config.head_dim, 2, dtype=rotary or dtype) / config.head_dim
  angles = jnp.arange(length, dtype=rotary or dtype)[:, None] / config.rope_base**exponents
  cos, sin = jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)
  mask = np.tril(np.ones((length, length), bool))

  def norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.rms_eps) * scale

  def turn(x):  # [T, heads, head_dim]
    a, b = x[..., :half], x[..., half:]
    c, s = cos[:, None], sin[:, None]
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)

  def layer(x, p):
    y = norm(x, p['attn_norm']['scale'])
    q = turn((y @ p['q']['kernel']).reshape(length, config.heads, config.head_dim))
    k = turn((y @ p['k']['kernel']).reshape(length, config.kv_heads, config.head_dim))
    v = (y @ p['v']['kernel']).reshape(length, config.kv_heads, config.head_dim)
    k, v = (jnp.repeat(t, config.heads // config.kv_heads, axis=1) for t in (k, v))
    scores = jnp.einsum('thd,shd->hts', q, k) / np.sqrt(config.head_dim)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    x = x + jnp.einsum('hts,shd->thd', weights, v).reshape(length, -1) @ p['o']['kernel']
    y = norm(x, p['mlp_norm']['scale'])
    gate = y @ p['gate']['kernel']
    return x + (gate * jax.nn.sigmoid(gate) * (y @ p['up']['kernel'])) @ p['down']['kernel'], None

  x, _ = jax.lax.scan(layer, params['embed']['embedding'][jnp.asarray(tokens)], params['layers'])
  x = norm(x, params['final_norm']['scale'])
  return x @ (params['head']['kernel'] if 'head' in params else params['embed']['embedding'].T)


@functools.partial(jax.jit, static_argnums=(0, 6))
def _score_gradient(config, params, tokens, positions, targets, coefficient, rotary):
  """Gradient of coefficient * sum_t log pi(target_t) for one sequence."""
  def score(p):
    table = jax.nn.log_softmax(logits(config, p, tokens, rotary), axis=-1)
    return coefficient * jnp.sum(table[positions, targets])

  return jax.grad(score)(params)


def grpo_direction(config, params, batch, epsilon=1e-6, rotary=None):
  """Ascent direction of a batch: mean over trajectories of A_i / L_i sum_t grad log pi (Equations 4 to 6, Appendix D.1)."""
  total = jax.tree.map(jnp.zeros_like, params)
  for group in batch.groups:
    rewards = np.array([t.reward for t in group.trajectories], np.float64)
    if np.ptp(rewards) == 0:
      continue
    advantages = (rewards - rewards.mean()) / (np.sqrt(np.mean((rewards - rewards.mean()) ** 2)) + epsilon)
    for trajectory, advantage in zip(group.trajectories, advantages):
      tokens = np.array(trajectory.prompt_ids + trajectory.completion_ids)
      at = np.flatnonzero((False,) * len(trajectory.prompt_ids) + trajectory.completion_mask)
      if not len(at):
        continue
      coefficient = advantage / len(rewards) / len(batch.groups) / len(at)
      gradient = _score_gradient(config, params, tokens[:-1], at - 1, tokens[at], coefficient, rotary)
      total = jax.tree.map(jnp.add, total, gradient)
  return total
