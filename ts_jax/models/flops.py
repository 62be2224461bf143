"""The operator ledger of the learner: matrix-product FLOPs of what it executes, and active MFU from them.

Appendix B of ThunderSyncRL.  A product (m x k)(k x n) counts 2mkn; norms, softmax and rotary embedding count nothing.  Shapes are
those that reach a kernel, so padding of a segment to its bucket, of keys to their alignment and of a vocabulary to its chunks
counts as executed.  What is computed a second time in a backward pass (checkpointed layers, attention scores of kept values,
logits by chunks) is kept apart and not credited.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Sequence

import jax.numpy as jnp

from ts_jax.kernels import attention, logprob
from ts_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Flops:
  """FLOPs of some learner work.

  Attributes:
    projections: of queries, keys, values and the output, and the gated MLP's three.
    attention: query-key and attention-value products.
    head: vocabulary projection.
    recomputed: what a backward pass computed again; elapsed time, but no credit.
  """

  projections: int = 0
  attention: int = 0
  head: int = 0
  recomputed: int = 0

  @property
  def credited(self) -> int:
    """F_train of Equation 10."""
    return self.projections + self.attention + self.head

  @property
  def executed(self) -> int:
    """All products that ran."""
    return self.credited + self.recomputed

  def __add__(self, other: 'Flops') -> 'Flops':
    return Flops(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

  def __mul__(self, times: int) -> 'Flops':
    return Flops(*(times * a for a in dataclasses.astuple(self)))


def product(m: int, k: int, n: int) -> int:
  """FLOPs of (m x k)(k x n)."""
  return 2 * m * k * n


def segment_forward(config: ModelConfig, rows: int, tokens: int, past: int) -> Flops:
  """Layers forward, nothing of the head.

  Args:
    config: the student.
    rows: B, sibling segments that ran as one batch.
    tokens: T, padded length.
    past: P, positions that the parent's boundary state has room for (`Boundary.room`).
  """
  return Flops(config.layers * _layer(config, rows * tokens), config.layers * _attention_forward(config, rows, tokens, past))


def segment_gradient(config: ModelConfig, rows: int, tokens: int, past: int, remat: bool = False) -> Flops:
  """Layers forward and backward: parameter gradients and the parent's adjoint; arguments as `segment_forward`.

  Args:
    remat: layers were recomputed from their inputs.
  """
  forward = segment_forward(config, rows, tokens, past)
  backward = _layers_backward(config, rows, tokens, past)
  return forward + backward + Flops(recomputed=_layers_again(config, rows, tokens, past) if remat else 0)


def head_gradient(config: ModelConfig, positions: int) -> Flops:
  """Output head, forward and backward, at `positions` hidden states (scored tokens, padded)."""
  if logprob.fits_budget(positions, config.vocab_size, jnp.float32):
    return Flops(head=3 * product(positions, config.width, config.vocab_size))
  vocab = math.ceil(config.vocab_size / logprob.VOCAB_CHUNK) * logprob.VOCAB_CHUNK
  once = product(positions, config.width, vocab)
  return Flops(head=3 * once, recomputed=once)


def source_gradient(config: ModelConfig, rows: int, tokens: int, past: int, scored: int, remat: bool = False) -> Flops:
  """A source's whole service: layers and head, forward and backward.

  Args:
    config, rows, tokens, past, remat: as for `segment_gradient`.
    scored: S, padded scored positions of a row.
  """
  return segment_gradient(config, rows, tokens, past, remat) + head_gradient(config, rows * scored)


def kept_gradient(config: ModelConfig, tokens: int, past: int, keep: str = 'all') -> Flops:
  """Layers backward from kept values (granularity `forward`); their forward pass is `segment_forward`'s, when turns arrived.

  Args:
    config, tokens, past: as for `segment_forward`, of the whole trajectory.
    keep: 'all', or 'inputs' of layers, which then run forward again.
  """
  again = config.layers * _scores(config, 1, tokens, past) if keep == 'all' else _layers_again(config, 1, tokens, past)
  return _layers_backward(config, 1, tokens, past) + Flops(recomputed=again)


def active_mfu(credited: int, step_s: float, peak_flops_per_s: Sequence[float]) -> float:
  """Trainer active MFU of an update (Equation 10).

  Args:
    credited: F_train, FLOPs that the learner's work of this update counts.
    step_s: complete wall time of the update, rollout waiting included.
    peak_flops_per_s: peak rate of each trainer device.

  Raises:
    ValueError: a time or rate that is not positive.
  """
  if not step_s > 0 or not peak_flops_per_s or not min(peak_flops_per_s) > 0:
    raise ValueError(f'step_s={step_s} and peak_flops_per_s={list(peak_flops_per_s)} must be positive, with a rate for each trainer device')
  return credited / (step_s * sum(peak_flops_per_s))


def average_active_mfu(credited: Sequence[int], step_s: Sequence[float], peak_flops_per_s: Sequence[float]) -> float:
  """Mean over updates of each one's own active MFU (Equation 11); leave warm-up updates out.

  Raises:
    ValueError: no updates, or lengths that differ.
  """
  if not credited or len(credited) != len(step_s):
    raise ValueError(f'{len(credited)} FLOP counts and {len(step_s)} step times: give one of each an update, and at least one')
  return sum(active_mfu(f, t, peak_flops_per_s) for f, t in zip(credited, step_s)) / len(credited)


def _layer(config: ModelConfig, positions: int) -> int:
  """Projections of one layer, forward."""
  heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
  mixed = product(positions, config.width, heads + 2 * kv) + product(positions, heads, config.width)
  return mixed + 3 * product(positions, config.width, config.ffn_width)


def _layers_backward(config: ModelConfig, rows: int, tokens: int, past: int) -> Flops:
  """Input and weight gradients of all layers."""
  return Flops(2 * config.layers * _layer(config, rows * tokens), config.layers * _attention_backward(config, rows, tokens, past))


def _layers_again(config: ModelConfig, rows: int, tokens: int, past: int) -> int:
  """Layers forward from their inputs for a backward pass, which does not read what the last product of each gives."""
  unread = product(rows * tokens, config.ffn_width, config.width)
  return config.layers * (_layer(config, rows * tokens) - unread + _attention_forward(config, rows, tokens, past))


def _blocks(tokens: int, past: int) -> list[tuple[int, int]]:
  """(queries, keys) of the products that attention of a segment consists of."""
  starts = range(0, tokens, attention.QUERY_BLOCK)
  stops = [min(start + attention.QUERY_BLOCK, tokens) for start in starts]
  return [(stop - start, attention.aligned(past + stop)) for start, stop in zip(starts, stops)]


def _scores(config: ModelConfig, rows: int, tokens: int, past: int) -> int:
  """Query-key products of one layer; as many as attention-value products."""
  return sum(product(rows * config.heads * queries, config.head_dim, keys) for queries, keys in _blocks(tokens, past))


def _attention_forward(config: ModelConfig, rows: int, tokens: int, past: int) -> int:
  return 2 * _scores(config, rows, tokens, past)


def _attention_backward(config: ModelConfig, rows: int, tokens: int, past: int) -> int:
  """Each of the two products has two in the backward pass; those summed over queries run over chunks of them."""
  sums = sum(product(rows * config.heads * attention.summed_rows(queries), config.head_dim, keys)
             for queries, keys in _blocks(tokens, past))
  return 2 * (_scores(config, rows, tokens, past) + sums)
