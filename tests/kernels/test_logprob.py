"""Token log-probs and scores against plain log-softmax, value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ts_jax.kernels import logprob
from ts_jax.objectives.terms import Scores, Terms

N, D, V = 37, 16, 5003  # V is no multiple of the vocabulary chunk


@pytest.fixture(scope='module')
def inputs():
  k = jax.random.split(jax.random.PRNGKey(0), 4)
  weights = jax.random.normal(k[3], (N,)).at[:5].set(0.0)
  return (3 * jax.random.normal(k[0], (N, D)), jax.random.normal(k[1], (V, D)), jax.random.randint(k[2], (N,), 0, V), weights)


def reference(hidden, head, targets, temperature):
  return jax.nn.log_softmax(hidden @ head.T / temperature)[jnp.arange(N), targets]


@pytest.mark.parametrize('temperature', [1.0, 0.7])
@pytest.mark.parametrize('budget', [logprob.LOGITS_BUDGET_BYTES, 0], ids=['dense', 'chunked'])
def test_value_and_gradient_equal_log_softmax(inputs, temperature, budget, monkeypatch):
  monkeypatch.setattr(logprob, 'LOGITS_BUDGET_BYTES', budget)
  hidden, head, targets, weights = inputs
  with jax.enable_x64(True):
    wide = jnp.asarray(hidden, jnp.float64), jnp.asarray(head, jnp.float64)
    expected = np.asarray(reference(*wide, targets, temperature))
    expected_grads = jax.grad(lambda h, w: jnp.sum(weights * reference(h, w, targets, temperature)), argnums=(0, 1))(*wide)
  np.testing.assert_allclose(logprob.token_log_probs(hidden, head, targets, temperature), expected, atol=2e-5)

  def score(h, w):
    return logprob.weighted_score(h, w, targets, weights, None, temperature)

  def separate(h, w):
    return jnp.sum(weights * logprob.token_log_probs(h, w, targets, temperature))

  (value, log_probs), grads = jax.value_and_grad(score, argnums=(0, 1), has_aux=True)(hidden, head)
  np.testing.assert_allclose(log_probs[5:], expected[5:], atol=2e-5)
  np.testing.assert_allclose(value, np.sum(weights * expected), rtol=1e-5)
  for got in (grads, jax.grad(separate, argnums=(0, 1))(hidden, head)):
    for g, e in zip(got, expected_grads):
      assert np.linalg.norm(g - e) <= 2e-6 * np.linalg.norm(e)


def test_extreme_logits_stay_finite(inputs):
  hidden, head, targets, _ = inputs
  values = logprob.token_log_probs(1e3 * hidden, head, targets)
  assert np.all(np.isfinite(values)) and np.all(values <= 0)


def test_nan_where_the_weight_is_zero_changes_nothing(inputs):
  hidden, head, targets, weights = inputs
  poisoned = hidden.at[:5].set(jnp.nan)
  gradient = jax.grad(lambda h, w: logprob.weighted_score(h, w, targets, weights)[0], argnums=(0, 1))
  for clean, other in zip(gradient(hidden, head), gradient(poisoned, head)):
    np.testing.assert_array_equal(clean, other)


@pytest.mark.parametrize('terms', [None, Terms(entropy=0.01)], ids=['plain', 'entropy'])
def test_gradient_at_4096_tokens_needs_a_tenth_of_the_logits(terms):
  tokens, vocab, width = 4096, 49152, 576  # SmolLM2
  shapes = jax.ShapeDtypeStruct((tokens, width), jnp.float32), jax.ShapeDtypeStruct((vocab, width), jnp.float32)

  def score(hidden, head):
    ones = jnp.ones(tokens)
    return logprob.weighted_score(hidden, head, jnp.zeros(tokens, int), ones, scores=Scores(counts=ones), terms=terms)[0]

  gradient = jax.jit(jax.grad(score, argnums=(0, 1)))
  temporary = gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
  assert temporary <= 0.1 * tokens * vocab * 4
