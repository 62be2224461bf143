"""Compiles every shape an update may need, so that nothing compiles once training runs."""

from __future__ import annotations

import itertools
from typing import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from ts_jax.kernels import fold
from ts_jax.models import llama
from ts_jax.objectives import policy_gradient
from ts_jax.objectives.objective import Objective
from ts_jax.streaming import sources as sources_lib, statistics
from ts_jax.streaming.buckets import Buckets
from ts_jax.streaming.open_trajectories import OpenTrajectories


def shapes(buckets: Buckets, max_tokens: int, rows: Iterable[int]) -> list[tuple[int, int, int]]:
  """(B, T, S) of every source batch of trajectories with at most `max_tokens` completion tokens, smallest first."""
  return [(b, t, s) for t in buckets.up_to(max_tokens) for s in (t // 2, t) for b in sorted(rows)]


def count(buckets: Buckets, prompt_tokens: Iterable[int], max_tokens: int, rows: Iterable[int],
          trajectories: OpenTrajectories | None = None) -> int:
  """Shapes `warm_up` will run, for its progress."""
  both = trajectories is not None and trajectories.leaves_some_whole
  behind = len(shapes(buckets, max_tokens, rows)) + both * len(shapes(buckets, max_tokens, (1,)))
  return len({buckets.pad(n - 1) for n in prompt_tokens}) * (1 + behind)


def warm_up(functions: sources_lib.SourceFunctions, params, buckets: Buckets, *, prompt_tokens: Iterable[int],
            max_tokens: int, rows: Iterable[int], accumulator: str, shared_tokens: int = 0,
            objective: Objective = policy_gradient.PolicyGradient(), trajectories: OpenTrajectories | None = None,
            several: bool = False, advance: Callable[[int], None] = lambda _: None) -> None:
  """Runs each jitted learner function once per shape.

  Args:
    functions: the student's.
    params: any parameters of the right shapes.
    buckets: allowed shapes.
    prompt_tokens: prompt lengths that will occur.
    max_tokens: longest completion, observations included.
    rows: row counts of packed sources.
    accumulator: 'float32' or 'exact'.
    shared_tokens: length of the shared prefix; 0 without one.
    objective: the lane's; its terms are the functions'.
    trajectories: the lane's, at granularities by turns.
    several: there are other lanes, which may give it what they summed of its groups.
    advance: told the number of shapes finished.
  """
  root = functions.root()
  if shared_tokens:
    root = _segment(functions, params, buckets, root, shared_tokens, shared_tokens, accumulator)
  boundaries = {}  # by capacity, which is what the shapes of everything behind a prompt depend on
  for own, total in sorted({(buckets.pad(n - 1 - shared_tokens), buckets.pad(n - 1)) for n in prompt_tokens}):
    boundaries[total] = _segment(functions, params, buckets, root, own, total, accumulator)
  for boundary in boundaries.values():
    advance(1)
    results = ()
    if trajectories is None or trajectories.leaves_some_whole:
      results = (functions.source_gradient(params, boundary, sources_lib.empty(*shape, objective.needs_teacher, functions.terms))
                 for shape in shapes(buckets, max_tokens, rows))
    for result in itertools.chain(results, () if trajectories is None else trajectories.warm_up(params, boundary)):
      jax.block_until_ready(result)
      advance(1)
    total = fold.fold(accumulator, fold.zeros(accumulator, result.gradient), result.gradient)
    if objective.needs_rewards:
      jax.block_until_ready(statistics.warm_up(objective, accumulator, result.gradient, result.adjoint, total, boundary.dtype, several))
    direct, *theirs = (fold.fold(accumulator, fold.zeros(accumulator, result.adjoint), result.adjoint) for _ in range(1 + several))
    for other in theirs:
      direct = fold.add(accumulator, direct, other)
    jax.block_until_ready(fold.value(accumulator, direct))


def _segment(functions: sources_lib.SourceFunctions, params, buckets: Buckets, parent: llama.Boundary, tokens: int, total: int,
             accumulator: str) -> llama.Boundary:
  """Runs a prompt segment of `tokens` tokens behind `parent` both ways; returns its boundary state, for `total` tokens."""
  ids = np.zeros((1, buckets.pad(tokens)), np.int32)
  boundary = functions.segment_forward(params, parent, ids, np.int32(tokens), buckets.pad(total))
  wide = jnp.promote_types(boundary.dtype, jnp.float32)
  adjoint = jax.tree.map(lambda x: jnp.zeros_like(x, wide), boundary.state)
  gradient, above = functions.segment_gradient(params, parent, ids, adjoint)
  if parent.room:
    fold.value(accumulator, fold.fold(accumulator, fold.zeros(accumulator, above), above), wide)
  jax.block_until_ready(gradient)
  return boundary
