"""A lane's open trajectories at granularity `forward`: which tokens have run forward, and what was kept of them."""

from __future__ import annotations

import dataclasses
from typing import Iterable

import jax
import numpy as np

from ts_jax import types
from ts_jax.models import llama, staged as staged_model
from ts_jax.streaming import sources as sources_lib, staged
from ts_jax.streaming.buckets import Buckets

# Turns longer than this run forward in pieces, so that a trajectory needs no more spare room than one piece.
_PIECE_TOKENS = 128


def _piece(buckets: Buckets) -> int:
  return buckets.pad(min(_PIECE_TOKENS, buckets.lengths[-1]))


def room(buckets: Buckets, max_tokens: int) -> int:
  """Tokens that kept values of one trajectory have room for."""
  return buckets.pad(max_tokens) + _piece(buckets)


@dataclasses.dataclass
class _Open:
  kept: staged_model.Kept
  inputs: np.ndarray  # those that have run forward


class OpenTrajectories:
  """Runs turns forward and, at completion, the backward pass; all at one policy version.

  What was kept is used only for tokens that turn out to be the trajectory's: an attempt that failed and was made again
  starts over.
  """

  def __init__(self, functions: sources_lib.SourceFunctions, buckets: Buckets, max_tokens: int, keep: str):
    """Begins without any.

    Args:
      functions: the student's.
      buckets: allowed shapes.
      max_tokens: longest completion.
      keep: see `models.staged`.
    """
    self._functions, self._buckets, self._keep = functions, buckets, keep
    self._piece = _piece(buckets)
    self.room = room(buckets, max_tokens)
    self._turns: dict[tuple[int, int], list[types.Turn]] = {}
    self._open: dict[tuple[int, int], _Open] = {}

  def clear(self) -> None:
    """Forgets everything (a new update)."""
    self._turns.clear()
    self._open.clear()

  def drop(self, group: int) -> None:
    """Forgets a closed group's trajectories."""
    for table in (self._turns, self._open):
      for at in [at for at in table if at[0] == group]:
        del table[at]

  def register(self, at: tuple[int, int], turn: types.Turn) -> None:
    """Takes one more turn."""
    turns = self._turns.setdefault(at, [])
    del turns[turn.index:]
    turns.append(turn)

  def forward(self, params, prompt_ids, prompt: llama.Boundary, at: tuple[int, int], turns: int) -> int:
    """Runs the first `turns` turns forward as far as they have not been; returns the tokens that ran.

    Raises:
      TsJaxError: the trajectory is longer than the longest that was announced.
    """
    ids = [i for t in self._turns[at][:turns] for i in t.context_ids + t.sampled.token_ids]
    return self._advance(params, np.asarray([prompt_ids[-1], *ids[:-1]], np.int32), prompt, at)

  def source_gradient(self, params, prompt: llama.Boundary, at: tuple[int, int], batch: sources_lib.SourceBatch,
                      tokens: int) -> sources_lib.SourceResult:
    """Gradient of a complete trajectory of `tokens` tokens, packed as one row."""
    self._advance(params, batch.tokens[0, :tokens], prompt, at)
    kept = self._open.pop(at).kept
    positions = np.where(batch.weights[0] != 0, batch.positions[0], kept.capacity).astype(np.int32)
    return staged.source_gradient(self._functions, params, kept, batch.tokens, prompt, positions, batch.targets[0], batch.weights[0])

  def warm_up(self, params, prompt: llama.Boundary, batches: Iterable[sources_lib.SourceBatch]) -> Iterable[sources_lib.SourceResult]:
    """Compiles pieces of every length, then yields the gradient of each (empty) batch of one row."""
    for length in self._buckets.up_to(self._piece):
      kept = staged.begin(self._functions, prompt, self.room, self._keep)
      past = kept.memory.keys.shape[1]
      staged.turn_forward(self._functions, params, kept, np.zeros((1, length), np.int32), np.int32(length), past)
    for batch in batches:
      yield self.source_gradient(params, prompt, (-1, -1), batch, 1)

  def _advance(self, params, inputs: np.ndarray, prompt: llama.Boundary, at: tuple[int, int]) -> int:
    if len(inputs) > self.room - self._piece:
      raise types.TsJaxError(f'trajectory {at[1]} of group {at[0]} has {len(inputs)} tokens behind its prompt, kept values have room for '
                             f'{self.room - self._piece}: lower the limits in config.agent, or set config.schedule.granularity=trajectory')
    state = self._open.get(at)
    if state is None or not np.array_equal(inputs[:len(state.inputs)], state.inputs):
      state = _Open(staged.begin(self._functions, prompt, self.room, self._keep), inputs[:0])
      self._open[at] = state
    first = len(state.inputs)
    for start in range(first, len(inputs), self._piece):
      piece = inputs[start:min(start + self._piece, len(inputs))]
      padded = np.zeros((1, self._buckets.pad(len(piece))), np.int32)
      padded[0, :len(piece)] = piece
      past = state.kept.memory.keys.shape[1]
      state.kept = staged.turn_forward(self._functions, params, state.kept, padded, np.int32(len(piece)), past)
      state.inputs = inputs[:start + len(piece)]
    jax.block_until_ready(state.kept.hidden)
    return len(inputs) - first
