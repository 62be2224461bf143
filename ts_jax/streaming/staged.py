"""Granularity `forward`: a turn's forward pass when it arrives, one backward pass when its trajectory is complete.

Differentiating a turn on arrival and replaying its deferred adjoints later costs the layers twice.  Here each token's
layers run once forward (`turn_forward`) and once backward (`complete`); the output head runs where its weights are known:
on arrival for distillation, at completion for GRPO, whose weights wait for the trajectory's length.  Everything is exact:
the forward pass of a split sequence has the bits of the whole one, and the backward pass is the whole trajectory's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ts_jax.kernels import logprob, products
from ts_jax.models import llama, staged
from ts_jax.objectives.terms import Scores
from ts_jax.streaming import sources

Array = jax.Array


class HeadResult(NamedTuple):
  """What the output head contributes.

  Attributes:
    gradient: of the final norm and the head ('head', or 'embed' where tied).
    cotangent: [1, C, D] of the last layer's output.
    log_probs: [S].
  """

  gradient: Any
  cotangent: Array
  log_probs: Array


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def begin(functions: sources.SourceFunctions, prompt: llama.Boundary, capacity: int, keep: str | None) -> staged.Kept:
  """An open trajectory behind its prompt, see `models.staged.begin`."""
  return staged.begin(functions.config, prompt, capacity, keep)


@functools.partial(jax.jit, static_argnums=(0, 5, 6), donate_argnums=2)
@products.at_precision
def turn_forward(functions: sources.SourceFunctions, params, kept: staged.Kept, tokens: Array, count: Array,
                 past: int, keep: str) -> staged.Kept:
  """Appends a turn's tokens [1, T], of which `count` are real; consumes `kept`.  `past` bounds the memory's length."""
  kept, values = staged.extend(functions.config, params, kept, tokens, count, past, keep)
  return staged.with_values(kept, values, count)


@functools.partial(jax.jit, static_argnums=(0, 5, 6), donate_argnums=2)
@products.at_precision
def turn_forward_apart(functions: sources.SourceFunctions, params, kept: staged.Kept, tokens: Array, count: Array,
                       past: int, keep: str) -> tuple[staged.Kept, dict[str, Array]]:
  """As `turn_forward`; the turn's values are returned instead of put with the others."""
  return staged.extend(functions.config, params, kept, tokens, count, past, keep)


@functools.partial(jax.jit, static_argnums=0)
@products.at_precision
def head_gradient(functions: sources.SourceFunctions, params, hidden: Array, positions: Array, targets: Array, weights: Array,
                  teacher: Array | None = None, scores: Scores = Scores()) -> HeadResult:
  """Output head, forward and backward.

  Args:
    functions: the student's.
    params: parameters.
    hidden: [1, C, D], `Kept.hidden`.
    positions: [S], index into C whose hidden state predicts a scored token; the C-th where padded.
    targets: [S] scored tokens.
    weights: [S], 0 where padded.
    teacher: [S] teacher log-probs for distillation (Equation 8), or None.
    scores: [S] each, what the objective's terms are functions of.
  """
  chosen = hidden[0].at[positions].get(mode='fill', fill_value=0)
  name = 'head' if 'head' in params else 'embed'

  def score(top, chosen):
    normal = llama.final_norm(functions.config, top, chosen)
    wide = jnp.promote_types(normal.dtype, jnp.float32)
    return logprob.weighted_score(normal, llama.head_matrix(top).astype(normal.dtype), targets, weights.astype(wide),
                                  None if teacher is None else teacher.astype(wide), functions.temperature,
                                  jax.tree.map(lambda x: x.astype(wide), scores), functions.terms)

  top = {k: params[k] for k in ('final_norm', name)}
  (gradient, dchosen), log_probs = jax.grad(score, argnums=(0, 1), has_aux=True)(top, chosen)
  return HeadResult(gradient, jnp.zeros_like(hidden).at[0, positions].add(dchosen, mode='drop'), log_probs)


@functools.partial(jax.jit, static_argnums=0)
@products.at_precision
def source_gradient(functions: sources.SourceFunctions, params, kept: staged.Kept, tokens: Array, prompt: llama.Boundary,
                    positions: Array, targets: Array, weights: Array, scores: Scores = Scores()) -> sources.SourceResult:
  """A complete trajectory's score gradient from kept values: output head, then layers backward.

  Args:
    functions: the student's.
    params: parameters.
    kept: the trajectory, all turns forward; may have more room than needed.
    tokens: [1, T] inputs, padded; T at most the room.
    prompt: the prompt's boundary state.
    positions, targets, weights, scores: [S], as for `head_gradient`.
  """
  head = head_gradient(functions, params, kept.hidden[:, :tokens.shape[1]], positions, targets, weights, scores=scores)
  return sources.SourceResult(*complete(functions, params, kept, tokens, prompt, head.gradient, head.cotangent), head.log_probs[None])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5)
@products.at_precision
def complete(functions: sources.SourceFunctions, params, kept: staged.Kept, tokens: Array, prompt: llama.Boundary, head: Any,
             cotangent: Array):
  """Backward pass of the layers over all turns, once no further turn can come.

  Args:
    functions, params, kept, tokens, prompt: as for `source_gradient`.
    head: gradient of the final norm and the head, summed over turns; consumed.
    cotangent: [1, C, D] of the last layer's output.

  Returns:
    (gradient of all parameters, adjoint of the prompt's boundary state).
  """
  table = head['embed']['embedding'] if 'embed' in head else jnp.zeros_like(params['embed']['embedding'])
  gradient, adjoint = staged.backward(functions.config, params, kept, tokens, prompt.state,
                                      cotangent[:, :tokens.shape[1]], table)
  return {**head, **gradient}, jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), adjoint)
