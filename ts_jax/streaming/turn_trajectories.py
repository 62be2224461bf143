"""Granularity `turn`: each turn is differentiated on arrival, deferred adjoints are replayed at completion.

The paper's mode for distillation (Section 4 and Appendix I.2 of ThunderSyncRL).  A turn's gradient includes the adjoint of
everything before it; what concerns earlier turns of the same trajectory is summed up and runs backward through them, last
turn first, once no further turn can come.  The layers run twice for every turn but the last.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.streaming import open_trajectories, sources as sources_lib


@functools.partial(jax.jit, donate_argnums=0)
def _add_front(total, more):
  """Adds adjoints of the first positions."""
  return jax.tree.map(lambda t, m: t.at[:, :m.shape[1]].add(m), total, more)


@functools.partial(jax.jit, donate_argnums=0)
def _scale(tree, factor):
  return jax.tree.map(lambda x: (factor * x).astype(x.dtype), tree)


def held_bytes(config: ModelConfig) -> int:
  """Memory of one open trajectory, which is that of its gradient above all."""
  shapes = jax.eval_shape(lambda key: llama.init_params(config, key), jax.random.PRNGKey(0))
  return sum(4 * x.size for x in jax.tree.leaves(shapes))


@dataclasses.dataclass
class _Open:
  """Turns that have been differentiated: their ids and scores, positions, and sums."""

  memory: llama.Boundary
  data: list[sources_lib.SourceData] = dataclasses.field(default_factory=list)
  starts: list[int] = dataclasses.field(default_factory=list)
  log_probs: list[np.ndarray] = dataclasses.field(default_factory=list)
  gradient: Any = None
  adjoint: Any = None


class TurnTrajectories(open_trajectories.OpenTrajectories):
  """Differentiates turns one by one."""

  span_kind = 'turn'

  def _steps(self, at):
    return self._running[at].scored(self._teacher)

  def advance(self, params, before, prompt, at):
    known, state = self._running[at], self._state(prompt, at)
    first, done = state.memory.length, len(state.data)
    self._check_length(at, len(known.ids()))
    for index in range(done, self._steps(at)):
      self._run(params, before, prompt, state, known.data(index, self._teacher))
    jax.block_until_ready((state.memory, state.gradient))
    return int(state.memory.length - first)

  def gradient(self, params, before, prompt, at, weight):
    self.advance(params, before, prompt, at)
    state = self._open.pop(at)
    adjoint = state.adjoint
    for index in reversed(range(len(state.data) - 1)):
      data, start = state.data[index], state.starts[index]
      if data.tokens:
        tokens = sources_lib.padded(self._inputs(before, state, index), self._buckets)
        gradient, above = self._functions.segment_gradient(params, self._behind(prompt, state.memory, start), tokens, adjoint)
        state.gradient, adjoint = open_trajectories.accumulate(state.gradient, gradient), self._at_capacity(prompt, above)
    past = prompt.keys.shape[1]
    result = (state.gradient, jax.tree.map(lambda a: a[:, :past], adjoint))
    if weight != 1:
      result = _scale(result, np.float64(weight))
    return sources_lib.SourceResult(*result, np.concatenate(state.log_probs)[None])

  def warm_up(self, params, prompt):
    capacity, total = self._capacity(prompt), None
    like = lambda length, dtype: tuple(jnp.zeros((x.shape[0], length, *x.shape[2:]), dtype) for x in (prompt.keys, prompt.values))
    adjoint = like(capacity, jnp.promote_types(prompt.keys.dtype, jnp.float32))
    for tokens, scored in self._scored_shapes():
      row = np.zeros((1, scored), np.int32)
      batch = sources_lib.SourceBatch(np.zeros((1, tokens), np.int32), row, row, np.zeros((1, scored)),
                                      np.zeros((1, scored)) if self._teacher else None)
      for past in self._pasts(prompt, capacity):
        memory = llama.Boundary(*like(past, prompt.keys.dtype), prompt.length)
        result, _ = self._functions.turn_gradient(params, memory, batch, np.int32(1), capacity)
        self._functions.segment_forward(params, memory, batch.tokens, np.int32(1), capacity)
        gradient, _ = self._functions.segment_gradient(params, memory, batch.tokens, adjoint)
        total = open_trajectories.accumulate(total, gradient)
      yield result._replace(adjoint=jax.tree.map(lambda a: a[:, :prompt.keys.shape[1]], result.adjoint))

  def _capacity(self, prompt: llama.Boundary) -> int:
    return prompt.keys.shape[1] + self.max_tokens

  def _at_capacity(self, prompt: llama.Boundary, adjoint):
    capacity = self._capacity(prompt)
    return jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, capacity - a.shape[1]), (0, 0), (0, 0))), adjoint)

  def _behind(self, prompt: llama.Boundary, memory: llama.Boundary, length: int) -> llama.Boundary:
    past = next(n for n in self._pasts(prompt, self._capacity(prompt)) if n >= length)
    return llama.Boundary(memory.keys[:, :past], memory.values[:, :past], jnp.int32(length))

  def _state(self, prompt: llama.Boundary, at: open_trajectories.At) -> _Open:
    """What has been done of this attempt; starts over where another attempt's turns were done."""
    state = self._open.get(at)
    if state is None or not self._running[at].begins_with(state.data, self._teacher):
      state = self._open[at] = _Open(prompt)
    return state

  def _inputs(self, before: int, state: _Open, index: int) -> np.ndarray:
    previous = next((d.completion[-1] for d in reversed(state.data[:index]) if d.tokens), before)
    return np.concatenate([[previous], state.data[index].completion[:-1]])

  def _run(self, params, before: int, prompt: llama.Boundary, state: _Open, data: sources_lib.SourceData) -> None:
    start, capacity = int(state.memory.length), self._capacity(prompt)
    state.data.append(data)
    state.starts.append(start)
    if not data.tokens:
      return
    inputs = self._inputs(before, state, len(state.data) - 1)
    boundary = self._behind(prompt, state.memory, start)
    if not data.scored:
      tokens = sources_lib.padded(inputs, self._buckets)
      state.memory = self._functions.segment_forward(params, boundary, tokens, np.int32(data.tokens), capacity)
      return
    batch = sources_lib.pack(int(inputs[0]), [data], [1.0], self._buckets, self._teacher)
    result, state.memory = self._functions.turn_gradient(params, boundary, batch, np.int32(data.tokens), capacity)
    state.gradient = open_trajectories.accumulate(state.gradient, result.gradient)
    state.adjoint = (self._at_capacity(prompt, result.adjoint) if state.adjoint is None
                     else _add_front(state.adjoint, result.adjoint))
    state.log_probs.append(np.asarray(result.log_probs)[0, :data.scored])

