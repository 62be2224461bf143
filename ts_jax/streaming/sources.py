"""Jitted gradients of the segments of a prefix tree: shared prefix of a batch, prompt of a group, trajectory, turn.

`segment_forward` extends the parent's boundary state, once for all children.  A segment with scored tokens has
`source_gradient` (or `turn_gradient`, which extends the boundary state too): parameter gradients and the adjoint of the
parent's boundary state.  What children want of a segment's own boundary state runs through its backward pass once, after
the last child (`segment_gradient`), and so on up to the root.

The prompt's last token opens each trajectory's segment, because its hidden state predicts the first sampled token.
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
from ts_jax.kernels import logprob, products
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.objectives.terms import Scores, Terms
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
    teacher: [B, S] teacher log-probs of the targets, or None where the objective needs none.
    scores: what the objective's terms are functions of, [B, S] each.
  """

  tokens: Any
  positions: Any
  targets: Any
  weights: Any
  teacher: Any = None
  scores: Scores = Scores()

  @property
  def shape(self) -> tuple[int, int, int]:
    """(B, T, S)."""
    return (*self.tokens.shape, self.positions.shape[1])


class SourceResult(NamedTuple):
  """Gradients of S = sum of weighted log-probs.

  Attributes:
    gradient: parameter pytree, H.
    adjoint: of the parent's boundary state, in at least float32.
    log_probs: [B, S].
  """

  gradient: Any
  adjoint: llama.State
  log_probs: Array


@dataclasses.dataclass(frozen=True)
class SourceData:
  """A trajectory (or a turn of one) as the learner sees it: ids behind the prompt, and which of them are scored.

  Attributes:
    completion: [T] ids, observations included.
    mask: [T] scored.
    sampler_log_probs: [T], read where scored.
    policy_version: that sampled it.
    teacher_log_probs: [T], read where scored; None without a teacher.
    reference_log_probs: [T], read where scored; None without a reference model.
  """

  completion: np.ndarray
  mask: np.ndarray
  sampler_log_probs: np.ndarray
  policy_version: int
  teacher_log_probs: np.ndarray | None = None
  reference_log_probs: np.ndarray | None = None

  @classmethod
  def of(cls, trajectory: types.Trajectory) -> 'SourceData':
    """Reads a trajectory."""
    optional = lambda values: None if values is None else np.asarray(values, np.float64)
    return cls(np.asarray(trajectory.completion_ids, np.int32), np.asarray(trajectory.completion_mask, bool),
               np.asarray(trajectory.completion_log_probs, np.float64), trajectory.policy_version,
               optional(trajectory.completion_teacher_log_probs), optional(trajectory.completion_reference_log_probs))

  @property
  def tokens(self) -> int:
    """Length of the segment."""
    return len(self.completion)

  @property
  def scored(self) -> int:
    """L_i."""
    return int(self.mask.sum())


def join(parts: Sequence[SourceData]) -> SourceData:
  """Successive turns as one source."""
  columns = {f.name: [getattr(p, f.name) for p in parts] for f in dataclasses.fields(SourceData)}
  version = columns.pop('policy_version')[-1]
  return SourceData(policy_version=version, **{name: None if c[0] is None else np.concatenate(c) for name, c in columns.items()})


def scores_row(terms: Terms, width: int, source: SourceData | None = None, count: float = 0.0) -> Scores:
  """Padded scores of a source's scored tokens [width], those that the terms need; all zero without a source.

  Args:
    terms: of the objective.
    width: positions the output head runs on.
    source: a trajectory, or turns of one.
    count: u_t of each of its scored tokens.
  """
  def row(values):
    padded = np.zeros(width)
    if source is not None:
      padded[:source.scored] = values(source)
    return padded

  needed = dict(sampler=lambda s: s.sampler_log_probs[s.mask], reference=lambda s: s.reference_log_probs[s.mask])
  return Scores(counts=row(lambda _: count) if terms.needs_counts else None, **{name: row(needed[name]) for name in terms.needs})


def pack(before: int, sources: Sequence[SourceData], weights: Sequence[float], buckets: Buckets, teacher: bool = False,
         terms: Terms = Terms(), counts: Sequence[float] | None = None) -> SourceBatch:
  """Pads siblings into a batch.

  Args:
    before: the id before each source: the last of the prompt.
    sources: trajectories of a group.
    weights: weight of every scored token of each.
    buckets: allowed shapes.
    teacher: carry the teacher's log-probs, which every source then has.
    terms: of the objective, whose scores every source then has.
    counts: u_t of every scored token of each (default 0).
  """
  rows = len(sources)
  length = buckets.pad(max(s.tokens for s in sources))
  scored = max(buckets.pad_scored(s.scored, length) for s in sources)
  batch = SourceBatch(np.zeros((rows, length), np.int32), np.zeros((rows, scored), np.int32),
                      np.zeros((rows, scored), np.int32), np.zeros((rows, scored), np.float64),
                      np.zeros((rows, scored), np.float64) if teacher else None)
  for row, (source, weight) in enumerate(zip(sources, weights)):
    batch.tokens[row, 0] = before
    batch.tokens[row, 1:source.tokens] = source.completion[:-1]
    at = np.flatnonzero(source.mask)
    batch.positions[row, :len(at)] = at
    batch.targets[row, :len(at)] = source.completion[at]
    batch.weights[row, :len(at)] = weight
    if teacher:
      batch.teacher[row, :len(at)] = source.teacher_log_probs[at]
  rows_of_scores = [scores_row(terms, scored, *of) for of in zip(sources, counts or [0.0] * rows)]
  return batch.replace(scores=jax.tree.map(lambda *columns: np.stack(columns), *rows_of_scores))


def empty(rows: int, length: int, scored: int, teacher: bool = False, terms: Terms = Terms()) -> SourceBatch:
  """A batch without a token, to compile for."""
  row = lambda dtype=np.int32: np.zeros((rows, scored), dtype)
  return SourceBatch(np.zeros((rows, length), np.int32), row(), row(), row(np.float64), row(np.float64) if teacher else None,
                     jax.tree.map(lambda x: np.stack([x] * rows), scores_row(terms, scored)))


def padded(ids: Sequence[int], buckets: Buckets) -> np.ndarray:
  """A segment's ids as one padded row [1, T]."""
  row = np.zeros((1, buckets.pad(len(ids))), np.int32)
  row[0, :len(ids)] = ids
  return row


@dataclasses.dataclass(frozen=True)
class SourceFunctions:
  """The learner's jitted functions for one student; pure, all at the parameters given.

  Attributes:
    config: the student.
    temperature: sampling temperature of the policy.
    dtype: activation dtype name ('float32', 'bfloat16', 'float64').
    remat_tokens: segments of more padded tokens than this recompute layers in the backward pass.
    terms: token-local terms beside the score.
    precision: of matrix products, one of `kernels.products.PRECISIONS`.
  """

  config: ModelConfig
  temperature: float = 1.0
  dtype: str = 'float32'
  remat_tokens: int = 2048
  terms: Terms = Terms()
  precision: str = 'default'

  def root(self) -> llama.Boundary:
    """The boundary state before the first token."""
    return llama.empty_boundary(self.config, self.dtype)

  def segment_forward(self, params, boundary: llama.Boundary, tokens: Array, length: Array, capacity: int) -> llama.Boundary:
    """Boundary state after a segment [1, T], of which `length` tokens are real, behind `boundary`, with `capacity` positions."""
    return _segment_forward(self, params, boundary, tokens, length, capacity)

  def segment_gradient(self, params, boundary: llama.Boundary, tokens: Array, adjoint: llama.State):
    """Backward pass of a segment that scores nothing itself, from what its children want of its boundary state.

    Args:
      params: parameters.
      boundary: the parent's boundary state.
      tokens: [1, T].
      adjoint: of the segment's own boundary state.

    Returns:
      (parameter gradient, adjoint of the parent's boundary state: what `adjoint` holds of it, and what this segment adds).
    """
    return _segment_gradient(self, params, boundary, tokens, adjoint)

  def source_gradient(self, params, boundary: llama.Boundary, batch: SourceBatch) -> SourceResult:
    """Gradient of the batch's weighted score with respect to parameters and boundary state (Equations 4 and 8)."""
    return _source_gradient(self, params, boundary, batch)

  def inner_gradient(self, params, boundary: llama.Boundary, batch: SourceBatch, adjoint: llama.State) -> SourceResult:
    """As `source_gradient` for one row with children behind it, which want `adjoint` of its boundary state (`segment_gradient`)."""
    return _inner_gradient(self, params, boundary, batch, adjoint)

  def turn_gradient(self, params, boundary: llama.Boundary, batch: SourceBatch, length: Array,
                    capacity: int) -> tuple[SourceResult, llama.Boundary]:
    """As `source_gradient` for one row, with the boundary state behind its first `length` tokens beside it."""
    return _turn_gradient(self, params, boundary, batch, length, capacity)


@functools.partial(jax.jit, static_argnums=(0, 5))
@products.at_precision
def _segment_forward(self: SourceFunctions, params, boundary, tokens, length, capacity):
  _, own = llama.forward(self.config, params, tokens, boundary, dtype=self.dtype, remat=tokens.shape[1] > self.remat_tokens)
  return llama.extend(boundary, own, length, capacity)


@functools.partial(jax.jit, static_argnums=0)
@products.at_precision
def _segment_gradient(self: SourceFunctions, params, boundary, tokens, adjoint):
  def own(params, state):
    return llama.forward(self.config, params, tokens, boundary.with_state(state), dtype=self.dtype, remat=tokens.shape[1] > self.remat_tokens)[1]

  primal, pullback = jax.vjp(own, params, boundary.state)
  gradient, parent = pullback(llama.own_adjoint(adjoint, boundary, primal))
  return gradient, llama.parent_adjoint(parent, adjoint, boundary)


@functools.partial(jax.jit, static_argnums=0)
@products.at_precision
def _source_gradient(self: SourceFunctions, params, boundary, batch):
  return _scored_gradient(self, params, boundary, batch)[0]


@functools.partial(jax.jit, static_argnums=(0, 5))
@products.at_precision
def _turn_gradient(self: SourceFunctions, params, boundary, batch, length, capacity):
  result, own = _scored_gradient(self, params, boundary, batch)
  return result, llama.extend(boundary, own, length, capacity)


@functools.partial(jax.jit, static_argnums=0)
@products.at_precision
def _inner_gradient(self: SourceFunctions, params, boundary, batch, adjoint):
  def run(params, state):
    value, (log_probs, own) = _score(self, params, boundary.with_state(state), batch)
    return (value, own), log_probs

  (value, own), pullback, log_probs = jax.vjp(run, params, boundary.state, has_aux=True)
  gradient, parent = pullback((jnp.ones_like(value), llama.own_adjoint(adjoint, boundary, own)))
  return SourceResult(gradient, llama.parent_adjoint(parent, adjoint, boundary), log_probs.reshape(1, -1))


def _scored_gradient(self: SourceFunctions, params, boundary, batch):
  score = lambda params, state: _score(self, params, boundary.with_state(state), batch)
  grads, (log_probs, own) = jax.grad(score, argnums=(0, 1), has_aux=True)(params, boundary.state)
  adjoint = jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), grads[1])
  return SourceResult(grads[0], adjoint, log_probs.reshape(batch.shape[0], -1)), own


def _score(self: SourceFunctions, params, boundary, batch):
  """(sum of weighted log-probs, (log-probs, what the segments' own tokens add to the boundary state))."""
  hidden, own = llama.forward(self.config, params, batch.tokens, boundary, dtype=self.dtype, remat=batch.shape[1] > self.remat_tokens)
  chosen = jnp.take_along_axis(hidden, batch.positions[..., None], axis=1).reshape(-1, hidden.shape[-1])
  wide = jnp.promote_types(hidden.dtype, jnp.float32)
  flat = lambda x: x.reshape(-1).astype(wide)
  value, log_probs = logprob.weighted_score(
      chosen, llama.head_matrix(params).astype(hidden.dtype), batch.targets.reshape(-1), flat(batch.weights),
      None if batch.teacher is None else flat(batch.teacher), self.temperature, jax.tree.map(flat, batch.scores), self.terms)
  return value, (log_probs, own)
