"""Granularities `forward` and `elastic`: turns run forward before completion, layers run backward once, at completion.

With a teacher the output head of a turn runs, forward and backward, as soon as the turn's scores are there.  Without one the
weights wait for the trajectory's length, and so does the head.
"""

from __future__ import annotations

import dataclasses
from typing import Iterator

import jax
import numpy as np

from ts_jax.models import llama, staged as staged_model
from ts_jax.streaming import open_trajectories, sources as sources_lib, staged

# Turns longer than this run forward in pieces, so that a trajectory needs no more spare room than one piece.
_PIECE_TOKENS = 128


def piece_lengths(buckets) -> tuple[int, ...]:
  """Padded lengths of what runs forward together."""
  return buckets.up_to(_piece(buckets))


def room(buckets, max_tokens: int) -> int:
  """Tokens that kept values of one trajectory have room for."""
  return buckets.pad(max_tokens) + _piece(buckets)


def _piece(buckets) -> int:
  return buckets.pad(min(_PIECE_TOKENS, buckets.lengths[-1]))


@dataclasses.dataclass
class _Open:
  """Inputs that have run forward, and with a teacher the turns whose head has run; `host`: the values, where they are not in `kept`."""

  kept: staged_model.Kept
  inputs: np.ndarray
  host: dict[str, np.ndarray] | None = None
  heads: list[sources_lib.SourceData] = dataclasses.field(default_factory=list)
  head: tuple | None = None  # (gradient, cotangent), summed
  log_probs: list[np.ndarray] = dataclasses.field(default_factory=list)


class ForwardTrajectories(open_trajectories.OpenTrajectories):
  """Keeps what one backward pass needs: on the device, or where there is no room for more in host memory."""

  span_kind = 'forward'

  def __init__(self, functions, buckets, max_tokens, teacher=False, keep='all', on_device=None, elastic=False):
    """As the base class.

    Args:
      functions, buckets, max_tokens, teacher: as there.
      keep: see `models.staged`.
      on_device: trajectories that keep values on the device, None for all.
      elastic: turns that are there run forward together, which pads them less.
    """
    super().__init__(functions, buckets, max_tokens, teacher)
    self._keep, self._piece, self._on_device, self._elastic = keep, _piece(buckets), on_device, elastic
    self._room = room(buckets, max_tokens)
    self.leaves_some_whole = elastic

  def _steps(self, known):
    return len(known.turns) + (known.scored(self._scorers) if self._teacher else 0)

  def last_turn(self, known):
    return len(known.turns) - 1

  def advance(self, params, before, prompt, at, known):
    inputs = np.asarray([before, *known.ids()[:-1]], np.int32)
    self._check_length(at, len(inputs))
    state = self._state(prompt, at, known, inputs)
    first = len(state.inputs)
    for start, stop in self._pieces(known, first):
      piece = inputs[start:stop]
      behind = int(prompt.length) + start
      past = next(n for n in self._pasts(prompt, state.kept.memory.room) if n >= behind)
      tokens = sources_lib.padded(piece, self._buckets)
      settings = self._functions, params, state.kept, tokens, np.int32(len(piece)), past, self._keep
      if state.host is None:
        state.kept = staged.turn_forward(*settings)
      else:
        state.kept, values = staged.turn_forward_apart(*settings)
        for name, value in values.items():
          state.host[name][:, :, start:start + len(piece)] = np.asarray(value)[:, :, :len(piece)]
      state.inputs = inputs[:stop]
    if self._teacher:
      for index in range(len(state.heads), known.scored(self._scorers)):
        self._head(params, state, known.data(index, self._scorers))
    jax.block_until_ready((state.kept.hidden, state.head))
    return len(inputs) - first

  def _pieces(self, known: open_trajectories.Turns, first: int) -> Iterator[tuple[int, int]]:
    """Inputs that run forward together, from `first` on: unless elastic never of two turns, so that shapes, and with them bits, do
    not depend on how many turns had arrived."""
    lengths = [len(t.context_ids) + len(t.sampled.token_ids) for t in known.turns]
    end = 0
    for length in [sum(lengths)] if self._elastic else lengths:
      begin, end = end, end + length
      for start in range(max(begin, first), end, self._piece):
        yield start, min(start + self._piece, end)

  def gradients(self, params, before, prompt, at, known, passes):
    self.advance(params, before, prompt, at, known)
    state = self._open.pop(at)
    tokens = sources_lib.padded(state.inputs, self._buckets)
    if state.host is not None:
      hidden = state.kept.hidden
      fetch = lambda x: jax.device_put(x[:, :, :tokens.shape[1]], hidden.sharding if hidden.committed else None)
      state.kept = state.kept.replace(values={n: fetch(x) for n, x in state.host.items()})
    if self._teacher:
      result = staged.complete(self._functions, params, state.kept, tokens, prompt, *state.head)
      return [sources_lib.SourceResult(*result, np.concatenate(state.log_probs)[None])]
    whole = sources_lib.join([known.data(i, self._scorers) for i in range(len(known.turns))])
    scored = np.flatnonzero(whole.mask)
    rows = (self._scored_row(scored, whole, tokens.shape[1], *weights) for weights in passes)
    return [staged.source_gradient(self._functions, params, state.kept, tokens, prompt, *row) for row in rows]

  def warm_up(self, params, prompt):
    for length in self._buckets.up_to(self._piece):
      for past in self._pasts(prompt, prompt.room + self._room):
        run = lambda function, keep: function(self._functions, params, staged.begin(self._functions, prompt, self._room, keep),
                                              np.zeros((1, length), np.int32), np.int32(length), past, self._keep)
        run(staged.turn_forward, self._keep)
        if self._on_device is not None:
          run(staged.turn_forward_apart, None)
    kept = staged.begin(self._functions, prompt, self._room, self._keep)
    for tokens, scored in self._scored_shapes():
      if self._on_device is not None:  # values fetched from host memory have no spare room
        fetched = kept.replace(values={n: x[:, :, :tokens] for n, x in kept.values.items()})
        jax.block_until_ready(self._run_complete(params, fetched, prompt, tokens, scored))
      yield self._run_complete(params, kept, prompt, tokens, scored)

  def _run_complete(self, params, kept: staged_model.Kept, prompt: llama.Boundary, tokens: int, scored: int) -> sources_lib.SourceResult:
    zeros = np.zeros((1, tokens), np.int32)
    row = np.full(scored, self._room, np.int32), np.zeros(scored, np.int32), np.zeros(scored)
    scores = sources_lib.scores_row(self._functions.terms, scored)
    if not self._teacher:
      return staged.source_gradient(self._functions, params, kept, zeros, prompt, *row, scores)
    head = None
    for _ in range(2):
      result = staged.head_gradient(self._functions, params, kept.hidden, *row, np.zeros(scored), scores)
      head = open_trajectories.accumulate(head, (result.gradient, result.cotangent))
    return sources_lib.SourceResult(*staged.complete(self._functions, params, kept, zeros, prompt, *head), np.zeros((1, 1)))

  def _state(self, prompt: llama.Boundary, at: open_trajectories.At, known: open_trajectories.Turns, inputs: np.ndarray) -> _Open:
    """What has been done of this attempt; starts over where another attempt's turns were done."""
    state = self._open.get(at)
    if state is None or not (np.array_equal(inputs[:len(state.inputs)], state.inputs)
                             and known.begins_with(state.heads, self._scorers)):
      self._open.pop(at, None)
      elsewhere = self._on_device is not None and sum(s.host is None for s in self._open.values()) >= self._on_device
      kept = staged.begin(self._functions, prompt, self._room, None if elsewhere else self._keep)
      state = self._open[at] = _Open(kept, inputs[:0], self._host_values(prompt) if elsewhere else None)
    return state

  def _host_values(self, prompt: llama.Boundary) -> dict[str, np.ndarray]:
    shapes = staged_model.value_shapes(self._functions.config, self._room, self._keep)
    return {name: np.zeros(shape, prompt.dtype) for name, shape in shapes.items()}

  def _scored_row(self, positions: np.ndarray, data: sources_lib.SourceData, length: int, weight: float, count: float):
    """Padded (positions, targets, weights, scores) of the output head; padded positions point behind what is kept."""
    scored = self._buckets.pad_scored(len(positions), length)
    row = np.full(scored, self._room, np.int32), np.zeros(scored, np.int32), np.zeros(scored)
    for padded, values in zip(row, (positions, data.completion[data.mask], weight)):
      padded[:len(positions)] = values
    return *row, sources_lib.scores_row(self._functions.terms, scored, data, count)

  def _head(self, params, state: _Open, data: sources_lib.SourceData) -> None:
    start = sum(d.tokens for d in state.heads)
    state.heads.append(data)
    at = np.flatnonzero(data.mask)
    if not len(at):
      return
    *row, scores = self._scored_row(start + at, data, self._buckets.pad(len(at)), 1.0, 1.0)
    teacher = np.zeros(len(row[0]))
    teacher[:len(at)] = data.teacher_log_probs[at]
    result = staged.head_gradient(self._functions, params, state.kept.hidden, *row, teacher, scores)
    state.head = open_trajectories.accumulate(state.head, (result.gradient, result.cotangent))
    state.log_probs.append(np.asarray(result.log_probs)[:len(at)])
