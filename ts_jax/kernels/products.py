"""Matrix products whose rounding is kept small where the backend's is not.

The CPU backend adds up to 512 terms of a float32 product one after another.  A gradient that runs through two hundred such
products picks up 1e-6 of rounding, and a sum over the vocabulary, whose mass sits in a few terms, 3e-6 at once.  Cut into
shorter sums, the same products lose half of it and more.  Elsewhere, and in other precisions, they stay whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

_SHORT = 96
_LONG = 1024
_SLICE = 128


def _cut(x: Array) -> bool:
  return x.dtype == jnp.float32 and jax.default_backend() == 'cpu'


@jax.custom_vjp
def dense(x: Array, kernel: Array) -> Array:
  """x [..., K] times kernel [K, N]; the backward pass sums over N in short pieces."""
  return jnp.einsum('...k,kn->...n', x, kernel)


def _dense_bwd(residuals, cotangent):
  x, kernel = residuals
  flat = lambda y: y.reshape(-1, y.shape[-1])
  width = _SHORT if _cut(cotangent) else kernel.shape[1]
  dx = _pieces(cotangent, kernel.T, width)
  return dx, (flat(x).T @ flat(cotangent)).astype(kernel.dtype)


dense.defvjp(lambda x, kernel: (dense(x, kernel), (x, kernel)), _dense_bwd)


def over_vocabulary(y: Array, matrix: Array) -> Array:
  """y [N, V] times matrix [V, D], a long sum."""
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
