"""Accumulators of gradients: float sums, or exact sums that do not depend on arrival order.

The `exact` kind adds fixed-point integers: int64 on a grid of 2^-48, range +-32768, resolution 3.6e-15.  Integer
addition is associative, so every arrival order, lane split and schedule gives the same bits, and the sum itself carries
no rounding at all; each contribution is rounded once, to the grid.  A running bound on the largest entry makes
overflow, infinities and NaN visible: `check` raises instead of letting an integer wrap.

All functions are jitted and donate the accumulator, so a fold happens in place.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array
Tree = Any

KINDS = ('float32', 'exact')
GRID_BITS = 48
RANGE = 2.0 ** (63 - GRID_BITS)


@flax.struct.dataclass
class Sum:
  """A running sum of pytrees.

  Attributes:
    leaves: the sum; int64 multiples of 2^-48 (exact) or floats.
    bound: upper bound on the absolute value of any entry, scalar; NaN once anything non-finite was folded.
  """

  leaves: Tree
  bound: Array


def precision(kind: str):
  """The context in which sums of a kind are computed."""
  if kind not in KINDS:
    raise ValueError(f'accumulator kind {kind!r} is unknown: use one of {KINDS}')
  return jax.enable_x64(True) if kind == 'exact' else contextlib.nullcontext()


def _enter(kind: str, x: Array) -> Array:
  return jnp.round(x * 2.0**GRID_BITS).astype(jnp.int64) if kind == 'exact' else x


def _leave(kind: str, x: Array) -> Array:
  return x.astype(jnp.float64) * 2.0**-GRID_BITS if kind == 'exact' else x


def _scaled(kind: str, scale: Array, x: Array) -> Array:
  x = x.astype(jnp.float64) if kind == 'exact' else x
  return scale.astype(x.dtype) * x


def _largest(tree: Tree) -> Array:
  tops = [jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in jax.tree.leaves(tree)]  # keeps NaN and inf
  return functools.reduce(jnp.maximum, tops)


def _contribution(kind: str, scale: Array, tree: Tree) -> tuple[Tree, Array]:
  bound = jnp.abs(scale).astype(jnp.float32) * _largest(tree) if kind == 'exact' else jnp.float32(0)
  return jax.tree.map(lambda x: _enter(kind, _scaled(kind, scale, x)), tree), bound


@functools.partial(jax.jit, static_argnums=0, keep_unused=True)  # what is dropped does not decide where the result is
def _zeros(kind, like):
  dtype = jnp.int64 if kind == 'exact' else None
  return Sum(jax.tree.map(lambda x: jnp.zeros(x.shape, dtype or x.dtype), like), jnp.float32(0))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _fold(kind, total, tree, scale):
  added, bound = _contribution(kind, scale, tree)
  return Sum(jax.tree.map(jnp.add, total.leaves, added), total.bound + bound)


@functools.partial(jax.jit, static_argnums=0)
def _begin(kind, tree, scales):
  return tuple(Sum(*_contribution(kind, s, tree)) for s in scales)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _fold_pair(kind, pair, tree, scales):
  added = [_contribution(kind, s, tree) for s in scales]
  return tuple(Sum(jax.tree.map(jnp.add, t.leaves, a), t.bound + b) for t, (a, b) in zip(pair, added))


def _reduced(kind, pair, shift, scale):
  """scale * (first - shift * second) in float."""
  def combine(a, b):
    a, b = _leave(kind, a), _leave(kind, b)
    return scale.astype(a.dtype) * (a - shift.astype(b.dtype) * b)

  return jax.tree.map(combine, pair[0].leaves, pair[1].leaves)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _fold_reduced(kind, total, pair, shift, scale):
  added, bound = _contribution(kind, jnp.ones_like(scale), _reduced(kind, pair, shift, scale))
  return Sum(jax.tree.map(jnp.add, total.leaves, added), total.bound + bound)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _fold_sum(kind, total, other, scale):
  added, bound = _contribution(kind, scale, jax.tree.map(functools.partial(_leave, kind), other.leaves))
  return Sum(jax.tree.map(jnp.add, total.leaves, added), total.bound + bound)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _value_reduced(kind, pair, shift, scale, dtype):
  return jax.tree.map(lambda x: x.astype(dtype), _reduced(kind, pair, shift, scale))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _add(kind, total, other):
  del kind
  return Sum(jax.tree.map(jnp.add, total.leaves, other.leaves), total.bound + other.bound)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _value(kind, total, dtype):
  return jax.tree.map(lambda x: _leave(kind, x).astype(dtype), total.leaves)


def _scalar(kind: str, x: float, like: Tree) -> Array:
  wide = any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(like))
  return jnp.asarray(x, jnp.float64 if kind == 'exact' or wide else jnp.float32)


def zeros(kind: str, like: Tree) -> Sum:
  """An empty sum shaped like the float pytree `like`, and where it is."""
  with precision(kind):
    return _zeros(kind, like)


def fold(kind: str, total: Sum, tree: Tree, scale: float = 1.0) -> Sum:
  """total + scale * tree; consumes `total`."""
  with precision(kind):
    return _fold(kind, total, tree, _scalar(kind, scale, tree))


def fold_pair(kind: str, pair: tuple[Sum, Sum] | None, tree: Tree, weight: float) -> tuple[Sum, Sum]:
  """(first + weight * tree, second + tree): the pair (G1, G2) in one pass over `tree`.  None starts a pair."""
  with precision(kind):
    scales = (_scalar(kind, weight, tree), _scalar(kind, 1.0, tree))
    return _begin(kind, tree, scales) if pair is None else _fold_pair(kind, pair, tree, scales)


def fold_reduced(kind: str, total: Sum, pair: tuple[Sum, Sum], shift: float, scale: float) -> Sum:
  """total + scale * (first - shift * second); consumes `total`."""
  with precision(kind):
    return _fold_reduced(kind, total, pair, _scalar(kind, shift, pair[0].leaves), _scalar(kind, scale, pair[0].leaves))


def value_reduced(kind: str, pair: tuple[Sum, Sum], shift: float, scale: float, dtype=jnp.float32) -> Tree:
  """scale * (first - shift * second) as floats of `dtype`."""
  with precision(kind):
    return _value_reduced(kind, pair, _scalar(kind, shift, pair[0].leaves), _scalar(kind, scale, pair[0].leaves), dtype)


def fold_sum(kind: str, total: Sum, other: Sum, scale: float) -> Sum:
  """total + scale * other, rounded once; consumes `total`."""
  with precision(kind):
    return _fold_sum(kind, total, other, _scalar(kind, scale, other.leaves))


def add(kind: str, total: Sum, other: Sum) -> Sum:
  """Sum of two sums (lanes meeting at the barrier), where `total` is; consumes `total`."""
  with precision(kind):
    return _add(kind, total, place(kind, other, total.bound))


def place(kind: str, total: Sum, like: Array) -> Sum:
  """The sum, where `like` is."""
  if total.bound.devices() == like.devices():
    return total
  with precision(kind):
    return jax.device_put(total, like.sharding)


def value(kind: str, total: Sum, dtype=jnp.float32) -> Tree:
  """The sum as floats of `dtype`."""
  with precision(kind):
    return _value(kind, total, dtype)


def check(kind: str, total: Sum, what: str) -> None:
  """Raises OverflowError if an exact sum may have left its range or met a non-finite entry."""
  if kind == 'exact' and not float(total.bound) < RANGE:
    raise OverflowError(
        f'{what}: a gradient entry may reach {float(total.bound):.3g}, beyond the exact accumulator range of {RANGE:.0f} '
        '(or is not finite); scale the objective down or use the float32 accumulator')
