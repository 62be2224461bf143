"""Matrix products of the backward pass whose rounding is kept small where the backend's is not.

The CPU backend adds up to 512 terms of a float32 product one after another.  A gradient that runs through two hundred such
products picks up 1e-6 of rounding, and a sum over the vocabulary, whose mass sits in a few terms, 3e-6 at once.  Cut into
shorter sums, the same products lose half of it and more.  Under `jax.default_matmul_precision('highest')` they are summed in
float64 and rounded once, which takes longer and leaves less rounding.  Elsewhere, and in other precisions, products
stay whole: what 'highest' means there is the backend's.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp

Array = jax.Array

PRECISIONS = ('default', 'highest')
_SHORT = 96
_LONG = 1024
_SLICE = 128


def at_precision(function: Callable[..., Any]) -> Callable[..., Any]:
  """Traces a function under the `precision` of its first argument; 'default' leaves JAX's own setting."""
  @functools.wraps(function)
  def run(settings, *args, **kwargs):
    with contextlib.nullcontext() if settings.precision == 'default' else jax.default_matmul_precision(settings.precision):
      return function(settings, *args, **kwargs)
  return run


def in_float64(x: Array) -> bool:
  """Products of `x` are to be summed in float64, by `summed`."""
  return _cut(x) and jax.config.jax_default_matmul_precision == 'highest'


def summed(spec: str, left: Array, right: Array) -> Array:
  """An einsum of float32 arrays with sums in float64."""
  with jax.enable_x64(True):
    left, right = (jax.lax.convert_element_type(x, jnp.float64) for x in (left, right))
    return jax.lax.convert_element_type(jnp.einsum(spec, left, right), jnp.float32)


def product(left: Array, right: Array) -> Array:
  """left [N, K] times right [K, M] in the backward pass, where its sums are short enough."""
  return summed('nk,km->nm', left, right) if in_float64(left) else left @ right


def _cut(x: Array) -> bool:
  return x.dtype == jnp.float32 and jax.default_backend() == 'cpu'


@jax.custom_vjp
def dense(x: Array, kernel: Array) -> Array:
  """x [..., K] times kernel [K, N]; the backward pass sums over N in short pieces, or in float64."""
  return jnp.einsum('...k,kn->...n', x, kernel)


def _dense_bwd(residuals, cotangent):
  x, kernel = residuals
  flat = lambda y: y.reshape(-1, y.shape[-1])
  if in_float64(cotangent):
    dx = summed('...n,kn->...k', cotangent, kernel)
  else:
    dx = _pieces(cotangent, kernel.T, _SHORT if _cut(cotangent) else kernel.shape[1])
  return dx, product(flat(x).T, flat(cotangent)).astype(kernel.dtype)


dense.defvjp(lambda x, kernel: (dense(x, kernel), (x, kernel)), _dense_bwd)


def over_vocabulary(y: Array, matrix: Array) -> Array:
  """y [N, V] times matrix [V, D], a long sum."""
  if in_float64(y):
    return summed('nv,vd->nd', y, matrix)
  long = matrix.shape[0] // _LONG * _LONG if _cut(y) else 0
  if not long:
    return y @ matrix

  def step(total, start):
    take = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start, _LONG, axis)
    return total + _pieces(take(y, 1), take(matrix, 0), _SLICE), None

  total, _ = jax.lax.scan(step, jnp.zeros((y.shape[0], matrix.shape[1]), y.dtype), jnp.arange(0, long, _LONG))
  return total if long == matrix.shape[0] else total + _pieces(y[:, long:], matrix[long:], _SLICE)


def _pieces(y: Array, matrix: Array, width: int) -> Array:
  """y [..., N] times matrix [N, K], as a sum of products over `width` terms."""
  total = None
  for start in range(0, matrix.shape[0], width):
    part = jnp.einsum('...n,nk->...k', y[..., start:start + width], matrix[start:start + width])
    total = part if total is None else total + part
  return total
