"""Compiles every shape an update may need, so that nothing compiles once training runs."""

from __future__ import annotations

from typing import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ts_jax.kernels import fold
from ts_jax.streaming import sources as sources_lib
from ts_jax.streaming.buckets import Buckets
from ts_jax.streaming.open_trajectories import OpenTrajectories


def shapes(buckets: Buckets, max_tokens: int, rows: Iterable[int]) -> list[tuple[int, int, int]]:
  """(B, T, S) of every source batch of trajectories with at most `max_tokens` completion tokens, smallest first."""
  return [(b, t, s) for t in buckets.up_to(max_tokens) for s in (t // 2, t) for b in sorted(rows)]


def count(buckets: Buckets, prompt_tokens: Iterable[int], max_tokens: int, rows: Iterable[int]) -> int:
  """Shapes `warm_up` will run, for its progress."""
  return len({buckets.pad(n - 1) for n in prompt_tokens}) * (1 + len(shapes(buckets, max_tokens, rows)))


def warm_up(functions: sources_lib.SourceFunctions, params, buckets: Buckets, *, prompt_tokens: Iterable[int],
            max_tokens: int, rows: Iterable[int], accumulator: str, trajectories: OpenTrajectories | None = None,
            advance: Callable[[int], None] = lambda _: None) -> None:
  """Runs each jitted learner function once per shape.

  Args:
    functions: the student's.
    params: any parameters of the right shapes.
    buckets: allowed shapes.
    prompt_tokens: prompt lengths that will occur.
    max_tokens: longest completion, observations included.
    rows: row counts of packed sources.
    accumulator: 'float32' or 'exact'.
    trajectories: the lane's, at granularity `forward`.
    advance: told the number of shapes finished.
  """
  for length in sorted({buckets.pad(n - 1) for n in prompt_tokens}):
    tokens = np.zeros((1, length), np.int32)
    boundary = functions.prompt_forward(params, tokens, np.int32(length))
    adjoint = (jnp.zeros_like(boundary.keys), jnp.zeros_like(boundary.values))
    gradient = functions.prompt_gradient(params, tokens, np.int32(length), adjoint)
    jax.block_until_ready(gradient)
    advance(1)
    batches = _empty_batches(shapes(buckets, max_tokens, rows))
    if trajectories is None:
      results = (functions.source_gradient(params, boundary, batch) for batch in batches)
    else:
      results = trajectories.warm_up(params, boundary, batches)
    for result in results:
      jax.block_until_ready(result)
      advance(1)
    tree = {'params': result.gradient, 'boundary': result.adjoint}
    pair = fold.fold_pair(accumulator, fold.fold_pair(accumulator, None, tree, 0.0), tree, 0.0)
    total = fold.fold(accumulator, fold.zeros(accumulator, gradient), gradient)
    part = lambda name: tuple(s.replace(leaves=s.leaves[name]) for s in pair)
    fold.value_reduced(accumulator, part('boundary'), 0.0, 0.0)
    jax.block_until_ready(fold.fold_reduced(accumulator, total, part('params'), 0.0, 0.0))
    direct = fold.fold(accumulator, fold.zeros(accumulator, result.adjoint), result.adjoint)
    jax.block_until_ready(fold.value(accumulator, direct))


def _empty_batches(wanted: Iterable[tuple[int, int, int]]) -> Iterator[sources_lib.SourceBatch]:
  for rows, width, scored in wanted:
    yield sources_lib.SourceBatch(np.zeros((rows, width), np.int32), np.zeros((rows, scored), np.int32),
                                  np.zeros((rows, scored), np.int32), np.zeros((rows, scored), np.float64))
