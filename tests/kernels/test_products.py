"""Backward products against float64, under both precisions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ts_jax.kernels import attention, products


def value(rng, *shape):
  return rng.normal(size=shape).astype(np.float32)


def dense(x, kernel):
  return products.dense(x, kernel)


def attend(query, key, value):
  return attention.prefix_attention(query, key, value, key[0, :5], value[0, :5], jnp.int32(5))


CASES = {
    'dense': (dense, ((40, 300), (300, 1500))),
    'attention': (attend, ((1, 90, 6, 16), (1, 90, 2, 16), (1, 90, 2, 16))),
}


def gradients(function, precision, args, cotangent):
  with jax.default_matmul_precision(precision):
    out, pullback = jax.jit(functools.partial(jax.vjp, function))(*args)
    return pullback(jnp.asarray(cotangent, out.dtype).reshape(out.shape))


def error(got, exact) -> float:
  return float(np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize('case', CASES)
def test_the_highest_precision_rounds_products_of_the_backward_pass_once(case):
  function, shapes = CASES[case]
  rng = np.random.default_rng(0)
  args = tuple(value(rng, *s) for s in shapes)
  out = jax.eval_shape(function, *args)
  cotangent = value(rng, *out.shape)
  with jax.enable_x64(True):
    exact = gradients(function, 'default', tuple(jnp.asarray(a, jnp.float64) for a in args), cotangent)
  errors = {}
  for precision in products.PRECISIONS:
    got = gradients(function, precision, args, cotangent)
    assert all(g.dtype == jnp.float32 for g in got)
    errors[precision] = max(error(g, np.asarray(e)) for g, e in zip(got, exact))
  assert errors['highest'] < 3e-7 and errors['highest'] < errors['default'] < 1e-6, errors


@pytest.mark.parametrize('function', [products.over_vocabulary, products.product])
def test_products_of_the_head_too(function):
  rng = np.random.default_rng(1)
  left, right = np.exp(3 * value(rng, 20, 5000)), value(rng, 5000, 64)  # a few terms carry the sum, as probabilities do
  exact = left.astype(np.float64) @ right.astype(np.float64)
  default = function(left, right)
  with jax.default_matmul_precision('highest'):
    highest = function(left, right)
  assert error(highest, exact) < 4e-8 < error(default, exact) < 2e-6


def test_the_precision_is_that_of_the_first_argument_and_otherwise_jaxs_own():
  class Settings:
    precision = 'highest'

  asked = products.at_precision(lambda settings, x: products.in_float64(x))
  x = jnp.zeros(1)
  assert asked(Settings, x) and not products.in_float64(x)
  Settings.precision = 'default'
  assert not asked(Settings, x)
  with jax.default_matmul_precision('highest'):
    assert asked(Settings, x)
