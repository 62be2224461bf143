"""Jitted gradients of objective sources over a shared prompt.

A group's tree has two levels here: the prompt, and one segment per trajectory.  The prompt's boundary state is computed
once; each trajectory's backward pass yields parameter gradients and the adjoint of that boundary state; the prompt's
own backward pass runs once, at closure, from the combined adjoint.

The prompt segment holds all prompt tokens but the last.  The last one opens each trajectory's segment, because its
hidden state predicts the first sampled token.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ts_jax import types
from ts_jax.kernels import logprob
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.streaming.buckets import Buckets

Array = jax.Array


@flax.struct.dataclass
class SourceBatch:
  """Padded trajectory segments of one group.

  Attributes:
    tokens: [B, T] int32 inputs: the last prompt token, then all but the last completion token.
    positions: [B, S] int32, index into T whose hidden state predicts a scored token (0 where padded).
    targets: [B, S] int32 scored tokens.
    weights: [B, S] w_it, times the row's coefficient; 0 where padded.
  """

  tokens: Any
  positions: Any
  targets: Any
  weights: Any

  @property
  def shape(self) -> tuple[int, int, int]:
    """(B, T, S)."""
    return (*self.tokens.shape, self.positions.shape[1])


class SourceResult(NamedTuple):
  """Gradients of S = sum of weighted log-probs.

  Attributes:
    gradient: parameter pytree, H.
    adjoint: (d keys, d values) of the prompt's boundary state, each [layers, P, kv_heads, head_dim].
    log_probs: [B, S].
  """

  gradient: Any
  adjoint: tuple[Array, Array]
  log_probs: Array


@dataclasses.dataclass(frozen=True)
class SourceData:
  """A trajectory as the learner sees it: completion ids and which of them are scored."""

  completion: np.ndarray
  mask: np.ndarray
  sampler_log_probs: np.ndarray
  policy_version: int

  @classmethod
  def of(cls, trajectory: types.Trajectory) -> 'SourceData':
    """Reads a trajectory."""
    return cls(np.asarray(trajectory.completion_ids, np.int32), np.asarray(trajectory.completion_mask, bool),
               np.asarray(trajectory.completion_log_probs, np.float32), trajectory.policy_version)

  @property
  def tokens(self) -> int:
    """Length of the segment."""
    return len(self.completion)

  @property
  def scored(self) -> int:
    """L_i."""
    return int(self.mask.sum())


def pack(prompt_ids: Sequence[int], sources: Sequence[SourceData], weights: Sequence[float], buckets: Buckets) -> SourceBatch:
  """Pads trajectories of one group into a batch.

  Args:
    prompt_ids: the group's prompt.
    sources: trajectories; each has at least one scored token.
    weights: weight of every scored token of each trajectory.
    buckets: allowed shapes.
  """
  rows = len(sources)
  length = buckets.pad(max(s.tokens for s in sources))
  scored = max(buckets.pad_scored(s.scored, length) for s in sources)
  batch = SourceBatch(np.zeros((rows, length), np.int32), np.zeros((rows, scored), np.int32),
                      np.zeros((rows, scored), np.int32), np.zeros((rows, scored), np.float64))
  for row, (source, weight) in enumerate(zip(sources, weights)):
    batch.tokens[row, 0] = prompt_ids[-1]
    batch.tokens[row, 1:source.tokens] = source.completion[:-1]
    at = np.flatnonzero(source.mask)
    batch.positions[row, :len(at)] = at
    batch.targets[row, :len(at)] = source.completion[at]
    batch.weights[row, :len(at)] = weight
  return batch


@dataclasses.dataclass(frozen=True)
class SourceFunctions:
  """The learner's jitted functions for one student; pure, all at the parameters given.

  Attributes:
    config: the student.
    temperature: sampling temperature of the policy.
    dtype: activation dtype name ('float32', 'bfloat16', 'float64').
    remat_tokens: segments of more padded tokens than this recompute layers in the backward pass.
  """

  config: ModelConfig
  temperature: float = 1.0
  dtype: str = 'float32'
  remat_tokens: int = 2048

  def prompt_forward(self, params, tokens: Array, length: Array) -> llama.Boundary:
    """Boundary state after a prompt segment [1, P] of which `length` tokens are real."""
    return _prompt_forward(self, params, tokens, length)

  def prompt_gradient(self, params, tokens: Array, length: Array, adjoint: tuple[Array, Array]):
    """Parameter gradient of a prompt segment from the adjoint of its boundary state."""
    return _prompt_gradient(self, params, tokens, length, adjoint)

  def segment_gradient(self, params, boundary: llama.Boundary, tokens: Array, adjoint: tuple[Array, Array]):
    """Deferred backward pass of a segment [1, T] that stands behind `boundary`, from the adjoint of its own keys and values.

    Args:
      params: parameters.
      boundary: the parent's boundary state.
      tokens: [1, T].
      adjoint: (d keys, d values), each [layers, T, kv_heads, head_dim]; zero where padded.

    Returns:
      (parameter gradient, adjoint of the parent's boundary state).
    """
    return _segment_gradient(self, params, boundary, tokens, adjoint)

  def source_gradient(self, params, boundary: llama.Boundary, batch: SourceBatch) -> SourceResult:
    """Gradient of the batch's weighted score with respect to parameters and boundary state (Equation 4)."""
    return _source_gradient(self, params, boundary, batch)


@functools.partial(jax.jit, static_argnums=0)
def _prompt_forward(self: SourceFunctions, params, tokens, length):
  start = llama.empty_boundary(self.config, self.dtype)
  _, own = llama.forward(self.config, params, tokens, start, dtype=self.dtype, remat=tokens.shape[1] > self.remat_tokens)
  return llama.extend(start, own, length, tokens.shape[1])


@functools.partial(jax.jit, static_argnums=0)
def _prompt_gradient(self: SourceFunctions, params, tokens, length, adjoint):
  def boundary(params):
    state = _prompt_forward(self, params, tokens, length)
    return state.keys, state.values

  primal, pullback = jax.vjp(boundary, params)
  return pullback(jax.tree.map(lambda a, p: a.astype(p.dtype), adjoint, primal))[0]


@functools.partial(jax.jit, static_argnums=0)
def _segment_gradient(self: SourceFunctions, params, boundary, tokens, adjoint):
  def own(params, memory):
    state = boundary.replace(keys=memory[0], values=memory[1])
    _, own = llama.forward(self.config, params, tokens, state, dtype=self.dtype, remat=tokens.shape[1] > self.remat_tokens)
    return own

  primal, pullback = jax.vjp(own, params, (boundary.keys, boundary.values))
  return pullback(jax.tree.map(lambda a, p: a[:, None].astype(p.dtype), adjoint, primal))


@functools.partial(jax.jit, static_argnums=0)
def _source_gradient(self: SourceFunctions, params, boundary, batch):
  rows, length, _ = batch.shape

  def score(params, memory):
    state = boundary.replace(keys=memory[0], values=memory[1])
    hidden, _ = llama.forward(self.config, params, batch.tokens, state, dtype=self.dtype,
                              remat=length > self.remat_tokens)
    chosen = jnp.take_along_axis(hidden, batch.positions[..., None], axis=1).reshape(-1, hidden.shape[-1])
    weights = batch.weights.reshape(-1).astype(jnp.promote_types(hidden.dtype, jnp.float32))
    return logprob.weighted_score(chosen, llama.head_matrix(params).astype(hidden.dtype), batch.targets.reshape(-1),
                                  weights, None, self.temperature)

  grads, log_probs = jax.grad(score, argnums=(0, 1), has_aux=True)(params, (boundary.keys, boundary.values))
  adjoint = jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), grads[1])
  return SourceResult(grads[0], adjoint, log_probs.reshape(rows, -1))
