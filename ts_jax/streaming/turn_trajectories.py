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
from ts_jax.objectives.terms import Terms
from ts_jax.streaming import open_trajectories, sources as sources_lib


@functools.partial(jax.jit, donate_argnums=0)
def _scale(tree, factor):
  return jax.tree.map(lambda x: (factor * x).astype(x.dtype), tree)


def held_bytes(config: ModelConfig, passes: int = 1) -> int:
  """Memory of one open trajectory, which is that of its gradients above all: one for each of its `unit_passes`."""
  shapes = jax.eval_shape(lambda key: llama.init_params(config, key), jax.random.PRNGKey(0))
  return passes * sum(4 * x.size for x in jax.tree.leaves(shapes))


@dataclasses.dataclass
class _Open:
  """Turns that have been differentiated: their ids and scores, positions, and sums of (gradient, adjoint)."""

  memory: llama.Boundary
  data: list[sources_lib.SourceData] = dataclasses.field(default_factory=list)
  starts: list[int] = dataclasses.field(default_factory=list)
  log_probs: list[np.ndarray] = dataclasses.field(default_factory=list)
  sums: dict[tuple[float, float], tuple[Any, Any]] = dataclasses.field(default_factory=dict)


def unit_passes(terms: Terms, teacher: bool) -> tuple[tuple[float, float], ...]:
  """The (w_t, u_t) at which a turn is differentiated; whatever weights the trajectory turns out to have combine them.

  Terms that do not carry the advantage need a sum of their own, unless advantages are known with the turn (a teacher's).
  """
  if teacher:
    return ((1.0, 1.0),)
  return ((1.0, 0.0), (0.0, 1.0)) if terms.needs_counts else ((1.0, 0.0),)


class TurnTrajectories(open_trajectories.OpenTrajectories):
  """Differentiates turns one by one."""

  span_kind = 'turn'

  def __init__(self, functions, buckets, max_tokens, teacher=False):
    super().__init__(functions, buckets, max_tokens, teacher)
    self._units = unit_passes(functions.terms, teacher)

  def _steps(self, known):
    return known.scored(self._scorers)

  def last_turn(self, known):
    return known.scored(self._scorers) - 1

  def advance(self, params, before, prompt, at, known):
    state = self._state(prompt, at, known)
    first, done = state.memory.length, len(state.data)
    self._check_length(at, len(known.ids()))
    for index in range(done, self._steps(known)):
      self._run(params, before, prompt, state, known.data(index, self._scorers))
    jax.block_until_ready((state.memory, [gradient for gradient, _ in state.sums.values()]))
    return int(state.memory.length - first)

  def gradients(self, params, before, prompt, at, known, passes):
    self.advance(params, before, prompt, at, known)
    state = self._open.pop(at)
    units = [self._replayed(params, before, prompt, state, *state.sums.pop(unit)) for unit in self._units]
    log_probs, results = np.concatenate(state.log_probs)[None], []
    for weights in passes:
      parts = [_scale(unit, np.float64(w)) if w != 1 else unit for unit, w in zip(units, weights) if w]
      results.append(sources_lib.SourceResult(*functools.reduce(open_trajectories.accumulate, parts), log_probs))
    return results

  def _replayed(self, params, before: int, prompt: llama.Boundary, state: _Open, gradient: Any, adjoint: Any) -> tuple[Any, Any]:
    """(gradient, adjoint of the prompt) with what later turns want of earlier ones run backward through those."""
    for index in reversed(range(len(state.data) - 1)):
      data, start = state.data[index], state.starts[index]
      if data.tokens:
        tokens = sources_lib.padded(self._inputs(before, state, index), self._buckets)
        more, above = self._functions.segment_gradient(params, self._behind(prompt, state.memory, start), tokens, adjoint)
        gradient, adjoint = open_trajectories.accumulate(gradient, more), llama.resize(above, self._capacity(prompt))
    return gradient, llama.resize(adjoint, prompt.room)

  def warm_up(self, params, prompt):
    capacity, total = self._capacity(prompt), None
    wide = jnp.promote_types(prompt.dtype, jnp.float32)
    adjoint = jax.tree.map(lambda x: jnp.zeros_like(x, wide), llama.resize(prompt.state, capacity))
    for tokens, scored in self._scored_shapes():
      batch = sources_lib.empty(1, tokens, scored, self._teacher, self._functions.terms)
      for past in self._pasts(prompt, capacity):
        memory = prompt.with_state(llama.resize(prompt.state, past))
        result, _ = self._functions.turn_gradient(params, memory, batch, np.int32(1), capacity)
        self._functions.segment_forward(params, memory, batch.tokens, np.int32(1), capacity)
        gradient, _ = self._functions.segment_gradient(params, memory, batch.tokens, adjoint)
        total = open_trajectories.accumulate(total, gradient)
      yield result._replace(adjoint=llama.resize(result.adjoint, prompt.room))

  def _capacity(self, prompt: llama.Boundary) -> int:
    return prompt.room + self.max_tokens

  def _behind(self, prompt: llama.Boundary, memory: llama.Boundary, length: int) -> llama.Boundary:
    past = next(n for n in self._pasts(prompt, self._capacity(prompt)) if n >= length)
    return llama.Boundary(*llama.resize(memory.state, past), jnp.int32(length))

  def _state(self, prompt: llama.Boundary, at: open_trajectories.At, known: open_trajectories.Turns) -> _Open:
    """What has been done of this attempt; starts over where another attempt's turns were done."""
    state = self._open.get(at)
    if state is None or not known.begins_with(state.data, self._scorers):
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
    for unit in self._units:
      weight, count = unit
      batch = sources_lib.pack(int(inputs[0]), [data], [weight], self._buckets, self._teacher, self._functions.terms, [count])
      result, memory = self._functions.turn_gradient(params, boundary, batch, np.int32(data.tokens), capacity)
      gradient, adjoint = state.sums.get(unit, (None, None))
      state.sums[unit] = (open_trajectories.accumulate(gradient, result.gradient),
                          open_trajectories.accumulate(adjoint, llama.resize(result.adjoint, capacity)))
    state.memory = memory
    state.log_probs.append(np.asarray(result.log_probs)[0, :data.scored])

