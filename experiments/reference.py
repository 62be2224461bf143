"""The independent reference of the equivalence checks: full sequences, no prefix sharing, plain autodiff.

Written from the equations with its own forward pass; shares no code with ts_jax.streaming, ts_jax.kernels or
ts_jax.models.llama beyond the parameter names.

In float32 its rounding follows the student's as far as the forward pass goes (same formulas, sequences padded to the same
multiples): a gradient amplifies the rounding of the forward pass fiftyfold, and a comparison with another order of sums
would measure the precision of the backend's matrix products and nothing else.  Its backward pass is evaluated in float64,
operation by operation: what remains of the difference is the rounding of the student's own backward pass.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

# Sequences are padded at the end to a multiple of this: on a CPU, products of other sizes round differently.
BLOCK = 64


def _precise(operation):
  """The operation, with a backward pass evaluated in float64 at the values of the forward pass and rounded once."""
  wide = lambda x: x.astype(jnp.float64)

  @jax.custom_vjp
  def apply(*args):
    return operation(*args)

  def backward(args, cotangent):
    return tuple(g.astype(x.dtype) for g, x in zip(jax.vjp(operation, *map(wide, args))[1](wide(cotangent)), args))

  apply.defvjp(lambda *args: (operation(*args), args), backward)
  return apply


def logits(config, params, tokens, positions, rotary):
  """Logits [S, V] at `positions` of one sequence [T], layer by layer; rotary angles in the dtype `rotary`."""
  dtype = params['embed']['embedding'].dtype
  length, half = len(tokens), config.head_dim // 2
  exponents = jnp.arange(0, config.head_dim, 2, dtype=rotary) / config.head_dim
  angles = jnp.arange(length, dtype=rotary)[:, None, None] / config.rope_base**exponents
  cos, sin = jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)

  @_precise
  def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.rms_eps) * scale

  product = _precise(lambda x, kernel: jnp.einsum('tk,kn->tn', x, kernel))
  dense = lambda x, p: product(x, p['kernel'])
  turn = lambda x: rotate(x, cos, sin)

  @_precise
  def rotate(x, cos, sin):  # [T, heads, head_dim]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  @_precise
  def attend(q, k, v):  # by blocks of queries; heads that share a key/value head are rows of one product
    context, group = [], config.heads // config.kv_heads
    for start in range(0, length, BLOCK):
      stop = min(start + BLOCK, length)
      rows = q[start:stop].reshape(-1, config.kv_heads, group, config.head_dim).transpose(1, 2, 0, 3)
      rows = rows.reshape(config.kv_heads, -1, config.head_dim)
      scores = jnp.einsum('kmd,skd->kms', rows, k) / config.head_dim**0.5
      causal = np.tile(np.arange(length) <= np.arange(start, stop)[:, None], (group, 1))
      weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
      seen = jnp.einsum('kms,skd->kmd', weights, v).reshape(config.kv_heads, group, -1, config.head_dim)
      context.append(seen.transpose(2, 0, 1, 3).reshape(-1, config.heads * config.head_dim))
    return jnp.concatenate(context)

  gated = _precise(lambda gate, up: jax.nn.silu(gate) * up)

  def layer(x, p):
    y = norm(x, p['attn_norm']['scale'])
    q = turn(dense(y, p['q']).reshape(length, config.heads, config.head_dim))
    k = turn(dense(y, p['k']).reshape(length, config.kv_heads, config.head_dim))
    v = dense(y, p['v']).reshape(length, config.kv_heads, config.head_dim)
    x = x + dense(attend(q, k, v), p['o'])
    y = norm(x, p['mlp_norm']['scale'])
    return x + dense(gated(dense(y, p['gate']), dense(y, p['up'])), p['down']), None

  x, _ = jax.lax.scan(layer, params['embed']['embedding'][tokens], params['layers'])
  head = params['head']['kernel'].T if 'head' in params else params['embed']['embedding']
  scores = _precise(lambda hidden, head: jnp.einsum('td,vd->tv', hidden, head))
  return scores(norm(x, params['final_norm']['scale'])[positions], head)


@functools.partial(jax.jit, static_argnums=(0, 6))
def _weighted_gradient(config, params, tokens, positions, targets, weights, rotary):
  """Autodiff up to the logits, then d log softmax by its formula."""
  scores, pullback = jax.vjp(lambda p: logits(config, p, tokens, positions, rotary), params)
  onehot = targets[:, None] == jnp.arange(scores.shape[1])
  cotangent = weights[:, None] * (onehot - jax.nn.softmax(scores.astype(jnp.float64), axis=-1))
  gradient, = pullback(cotangent.astype(scores.dtype))
  return gradient, jax.nn.log_softmax(scores, axis=-1)[jnp.arange(len(targets)), targets]


def weighted_gradient(config, params, trajectory, weights, rotary=None):
  """Gradient of sum_t w_t log pi(a_t | h_t) of a whole trajectory.

  Args:
    config: the student's sizes.
    params: parameters.
    trajectory: a types.Trajectory.
    weights: [L] of its scored tokens, in order.
    rotary: dtype of the rotary angles (default: that of the parameters).  Checkpoints define them in float32 whatever the
      precision of the rest: at position 300 a float32 angle differs from the exact one by 1e-5, and that is a property of
      the model, not an error of its gradient.

  Returns:
    (gradient, log-probs of the scored tokens [L]).
  """
  tokens = np.array(trajectory.prompt_ids + trajectory.completion_ids, np.int32)
  at = np.flatnonzero((False,) * len(trajectory.prompt_ids) + trajectory.completion_mask).astype(np.int32)
  inputs = np.concatenate([tokens[:-1], np.zeros(-(len(tokens) - 1) % BLOCK, np.int32)])
  room = (0, -len(at) % 16)  # few distinct shapes: each is compiled
  with jax.enable_x64(True):
    gradient, log_probs = _weighted_gradient(
        config, params, inputs, np.pad(at - 1, room), np.pad(tokens[at], room), np.pad(np.asarray(weights, np.float64), room),
        rotary or str(params['embed']['embedding'].dtype))
  return gradient, log_probs[:len(at)]


def add_to(total, gradient, scale):
  """total += scale * gradient, in float64 on the host."""
  jax.tree.map(lambda t, g: np.add(t, scale * np.asarray(g, np.float64), out=t), total, jax.device_get(gradient))


def sequences(trajectory):
  """The trajectory as sequences to run: itself, or where its history was rewritten each turn alone behind all it was sampled from."""
  if not trajectory.branches:
    return [trajectory]
  return [dataclasses.replace(trajectory, prompt_ids=before, turns=(dataclasses.replace(turn, index=0, keeps=None),))
          for before, turn in zip(trajectory.paths(), trajectory.turns)]


def direction(config, params, batch, advantages, token_weight, rotary=None):
  """Ascent direction 1/m sum_i A_i sum_t w_i grad log pi, summed over groups (Equations 4 to 6).

  Args:
    config, params, rotary: as for `weighted_gradient`.
    batch: a types.LogicalBatch.
    advantages: rewards of a group [m] -> [m]; not asked for groups of equal rewards, whose direction is zero.
    token_weight: a trajectory -> weight of each of its scored tokens.

  Returns:
    numpy float64 arrays; sums over trajectories carry no float32 rounding.
  """
  total = jax.tree.map(lambda x: np.zeros(x.shape), params)
  for group in batch.groups:
    rewards = np.array([t.reward for t in group.trajectories], np.float64)
    if np.ptp(rewards) == 0:
      continue
    for trajectory, advantage in zip(group.trajectories, advantages(rewards)):
      for sequence in sequences(trajectory):
        if sequence.scored_tokens:
          weights = np.full(sequence.scored_tokens, token_weight(trajectory))
          add_to(total, weighted_gradient(config, params, sequence, weights, rotary)[0], advantage / len(rewards))
  return total


def grpo_direction(config, params, batch, epsilon=1e-6, rotary=None):
  """GRPO: standardised rewards, mean over trajectories of their token means (Appendix D.1)."""
  def advantages(rewards):
    return (rewards - rewards.mean()) / (np.sqrt(np.mean((rewards - rewards.mean()) ** 2)) + epsilon)

  return direction(config, params, batch, advantages, lambda t: 1 / (len(batch.groups) * t.scored_tokens), rotary)


def opd_direction(config, params, batch, rotary=None):
  """Distillation: mean over the scored tokens of a batch of A_t grad log pi (Equations 8 and 9); turns carry teacher log-probs."""
  total, tokens = jax.tree.map(lambda x: np.zeros(x.shape), params), sum(t.scored_tokens for t in batch.trajectories)
  for trajectory in (s for t in batch.trajectories for s in sequences(t)):
    if trajectory.scored_tokens:
      teacher = np.asarray(trajectory.completion_teacher_log_probs)[np.asarray(trajectory.completion_mask)]
      add_to(total, opd_gradient(config, params, trajectory, teacher, rotary), 1 / tokens)
  return total


def opd_gradient(config, params, trajectory, teacher_log_probs, rotary=None):
  """Unnormalised ascent direction of one trajectory, sum_t A_t grad log pi, A = teacher - student log-prob (Equation 8).

  Args:
    config, params, trajectory, rotary: as for `weighted_gradient`.
    teacher_log_probs: [L] of its scored tokens.
  """
  _, student = weighted_gradient(config, params, trajectory, np.zeros(len(teacher_log_probs)), rotary)
  return weighted_gradient(config, params, trajectory, np.asarray(teacher_log_probs) - np.asarray(student), rotary)[0]


def token_objective(scores, targets, weights, terms, counts=None, teacher=None, sampler=None, reference=None, temperature=1.0):
  """The explicit objective that token-local terms add up to, to be differentiated by autodiff over the full logits.

  Args:
    scores: logits [S, V].
    targets: [S].
    weights: [S], w_t.
    terms: coefficients by the names importance_cap, kl, kl_estimator, entropy (see objectives.terms.Terms).
    counts: [S], u_t, for KL and entropy.
    teacher: [S] log-probs of the targets for distillation, or None.
    sampler, reference: [S] log-probs of the targets, where a term needs them.
    temperature: sampling temperature.

  Returns:
    scalar, to be ascended.
  """
  everything = jax.nn.log_softmax(scores / temperature, axis=-1)
  student = everything[jnp.arange(len(targets)), targets]
  fixed = jax.lax.stop_gradient(student)
  factor = weights
  if teacher is not None:
    factor = factor * (teacher - fixed)
  if terms.importance_cap is not None:
    factor = factor * jnp.minimum(jnp.exp(fixed) / jnp.exp(sampler), terms.importance_cap)
  total = jnp.sum(factor * student)
  if terms.kl:
    estimate = {'k1': student - reference, 'k2': (student - reference)**2 / 2,
                'k3': jnp.exp(reference) / jnp.exp(student) - 1 - (reference - student)}[terms.kl_estimator]
    total = total - terms.kl * jnp.sum(counts * estimate)
  if terms.entropy:
    total = total - terms.entropy * jnp.sum(counts * jnp.sum(jnp.exp(everything) * everything, axis=-1))
  return total


@functools.partial(jax.jit, static_argnums=(0, 5, 8))
def _terms_gradient(config, params, tokens, positions, targets, terms, columns, temperature, rotary):
  def objective(params):
    scores = logits(config, params, tokens, positions, rotary)
    log_probs = jax.nn.log_softmax(scores / temperature, axis=-1)[jnp.arange(len(targets)), targets]
    return token_objective(scores, targets, terms=terms, temperature=temperature, **columns), log_probs

  return jax.grad(objective, has_aux=True)(params)


def terms_gradient(config, params, trajectory, terms, columns, temperature=1.0, rotary=None):
  """Gradient of `token_objective` over a whole trajectory, by autodiff from the parameters to the objective.

  Args:
    config, params, trajectory, rotary: as for `weighted_gradient`.
    terms: hashable, see `token_objective`.
    columns: arrays [L] by name (weights, counts, teacher, sampler, reference), those that the terms need.
    temperature: sampling temperature.

  Returns:
    (gradient, log-probs of the scored tokens [L]).
  """
  tokens = np.array(trajectory.prompt_ids + trajectory.completion_ids, np.int32)
  at = np.flatnonzero((False,) * len(trajectory.prompt_ids) + trajectory.completion_mask).astype(np.int32)
  inputs = np.concatenate([tokens[:-1], np.zeros(-(len(tokens) - 1) % BLOCK, np.int32)])
  room = (0, -len(at) % 16)
  dtype = params['embed']['embedding'].dtype
  columns = {name: np.pad(np.asarray(column, dtype), room) for name, column in columns.items()}  # a weight or count of 0: nothing
  gradient, log_probs = _terms_gradient(config, params, inputs, np.pad(at - 1, room), np.pad(tokens[at], room), terms, columns,
                                        temperature, rotary or str(dtype))
  return gradient, log_probs[:len(at)]


def terms_direction(config, params, batch, coefficients, token_weight, terms, *, count=lambda group: 1 / len(group.trajectories),
                    rotary=None):
  """Ascent direction of an objective with token-local terms: each trajectory's total objective, differentiated and summed.

  Args:
    config, params, batch, rotary: as for `direction`.
    coefficients: [groups][m], advantage over group size.
    token_weight: a trajectory -> weight of each of its scored tokens.
    terms: hashable, see `token_objective`.
    count: a group -> coefficient of KL and entropy.

  Turns carry the reference's log-probs where terms need them; those of a teacher, where there are any, make it a distillation.
  """
  total = jax.tree.map(lambda x: np.zeros(x.shape), params)
  for group, of_group in zip(batch.groups, coefficients):
    pieces = ((t, s, c) for t, c in zip(group.trajectories, of_group) for s in sequences(t))
    for whole, t, coefficient in pieces:
      if t.scored_tokens:
        scored = lambda values: np.asarray(values)[np.asarray(t.completion_mask)]
        weight = np.full(t.scored_tokens, token_weight(whole))
        columns = {'weights': coefficient * weight, 'counts': count(group) * weight, 'sampler': scored(t.completion_log_probs)}
        for name, values in (('teacher', t.completion_teacher_log_probs), ('reference', t.completion_reference_log_probs)):
          if values is not None:
            columns[name] = scored(values)
        add_to(total, terms_gradient(config, params, t, terms, columns, rotary=rotary)[0], 1)
  return total
