"""Token-local terms in the kernel against autodiff of the explicit objective over the full logits."""

import functools
import itertools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments import reference
from ts_jax.kernels import logprob
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.objectives.terms import Scores, Terms

N, D, V, CHUNK = 11, 5, 37, 16  # the last vocabulary chunk is padded
CAP = 1.1
QUICK = (('xla_backend_optimization_level', 0),)  # compilation is what the combinations spend their time on
PATHS = {'dense': 2**20, 'chunked': 0}
COMBINATIONS = [Terms(cap, kl, estimator, entropy) for cap, (kl, estimator), entropy in itertools.product(
    (None, CAP), ((0.0, 'k3'), (0.3, 'k1'), (0.3, 'k2'), (0.3, 'k3')), (0.0, 0.2))]


@pytest.fixture(autouse=True)
def small_chunks_in_float64(monkeypatch):
  monkeypatch.setattr(logprob, 'VOCAB_CHUNK', CHUNK)
  with jax.enable_x64(True):
    yield


@functools.lru_cache(maxsize=None)
def kernel(path, terms, temperature, differentiate=True, options=None):
  """(hidden, head, targets, weights, teacher, scores) -> ((S, log-probs), (d hidden, d head)), by one path."""
  def score(hidden, head, targets, weights, teacher, scores):
    with mock.patch.object(logprob, 'LOGITS_BUDGET_BYTES', PATHS[path]):
      return logprob.weighted_score(hidden, head, targets, weights, teacher, temperature, scores=scores, terms=terms)

  return jax.jit(jax.value_and_grad(score, argnums=(0, 1), has_aux=True) if differentiate else score,
                 compiler_options=options and dict(options))


@functools.lru_cache(maxsize=None)
def explicit(terms, temperature):
  def objective(hidden, head, targets, weights, teacher, scores):
    return reference.token_objective(hidden @ head.T, targets, weights, terms, teacher=teacher, temperature=temperature,
                                     **scores._asdict())

  return jax.jit(jax.value_and_grad(objective, argnums=(0, 1)), compiler_options=dict(QUICK))


def draw(seed, terms, zero_weights=0.3, zero_counts=0.3, distil=False):
  """Random arguments of a kernel; scores lie on both sides of the policy's, so that the cap is reached and not reached."""
  rng = np.random.default_rng(seed)
  hidden, head = 1.5 * rng.normal(size=(N, D)), rng.normal(size=(V, D))
  targets = rng.integers(0, V, N)
  policy = np.asarray(jax.nn.log_softmax(hidden @ head.T))[np.arange(N), targets]
  weights = rng.normal(size=N) * (rng.random(N) >= zero_weights)
  counts = rng.random(N) * (rng.random(N) >= zero_counts)
  near = lambda: jnp.asarray(policy + 0.5 * rng.normal(size=N))
  teacher, sampler, ref = near(), near(), near()
  scores = Scores(sampler if 'sampler' in terms.needs else None, ref if 'reference' in terms.needs else None,
                  jnp.asarray(counts) if terms.needs_counts else None)
  return [*map(jnp.asarray, (hidden, head, targets, weights)), teacher if distil else None, scores]


def run(path, terms, temperature, args, **how):
  return kernel(path, terms, temperature, **how)(*args)


def assert_close(got, expected):
  assert np.linalg.norm(got - expected) <= 1e-10 * np.linalg.norm(expected)


def poison(args, terms):
  """NaN wherever nothing may be read: weights and counts decide."""
  hidden, head, targets, weights, teacher, scores = args
  unweighted = weights == 0
  uncounted = scores.counts == 0 if terms.needs_counts else True
  put = lambda x, where: None if x is None else jnp.where(where, jnp.nan, x)
  hidden = jnp.where((unweighted & uncounted)[:, None], jnp.nan, hidden)
  return [hidden, head, targets, weights, put(teacher, unweighted),
          scores._replace(sampler=put(scores.sampler, unweighted), reference=put(scores.reference, uncounted))]


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('distil', [False, True], ids=['rewards', 'teacher'])
@pytest.mark.parametrize('terms', COMBINATIONS, ids=str)
def test_every_combination_equals_autodiff_of_the_explicit_objective(terms, distil, path):
  temperature = (1.0, 0.7, 1.6)[COMBINATIONS.index(terms) % 3]

  @settings(max_examples=6, deadline=None, derandomize=True, database=None)
  @given(seed=st.integers(0, 10**6), zero_weights=st.sampled_from([0.0, 0.4, 1.0]), zero_counts=st.sampled_from([0.0, 0.4, 1.0]))
  def check(seed, zero_weights, zero_counts):
    args = draw(seed, terms, zero_weights, zero_counts, distil)
    (value, log_probs), grads = run(path, terms, temperature, args, options=QUICK)
    expected_value, expected = explicit(terms, temperature)(*args)
    np.testing.assert_allclose(value, expected_value, rtol=1e-10, atol=1e-10)
    for got, want in zip(grads, expected):
      assert_close(got, want)
    (poisoned_value, _), poisoned = run(path, terms, temperature, poison(args, terms), options=QUICK)
    np.testing.assert_array_equal(poisoned_value, value)
    for got, want in zip(poisoned, grads):
      np.testing.assert_array_equal(got, want)

  check()


@pytest.mark.parametrize('terms', [Terms(CAP, 0.3, 'k3', 0.2), Terms()], ids=str)
def test_the_value_alone_equals_the_value_beside_the_gradient(terms):
  args = draw(0, terms, distil=True)
  expected, _ = run('dense', terms, 0.7, args)
  value, log_probs = run('dense', terms, 0.7, poison(args, terms), differentiate=False)
  np.testing.assert_allclose(value, expected[0], rtol=1e-12)
  np.testing.assert_allclose(log_probs[args[3] != 0], expected[1][args[3] != 0], rtol=1e-12)


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('terms', [Terms(), Terms(CAP), Terms(CAP, 0.3, 'k2'), Terms(CAP, 0.3, 'k3')], ids=str)
def test_equal_teacher_and_student_give_exactly_zero(terms, dtype, path):
  hidden, head, targets, weights, teacher, scores = jax.tree.map(
      lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, draw(1, terms, distil=True))
  args = hidden, head, targets, weights
  (_, student), _ = run(path, terms, 0.7, (*args, teacher, scores))
  same = scores._replace(reference=student if terms.kl else None)
  (value, _), grads = run(path, terms, 0.7, (*args, student, same))
  assert value == 0 and not any(g.any() for g in grads)
  _, grads = run(path, terms, 0.7, (*args, student + 1e-3, same))
  assert all(g.any() for g in grads)


@pytest.mark.parametrize('path', PATHS)
def test_importance_weights_are_detached_and_stop_at_the_cap(path):
  terms = Terms(importance_cap=2.0)
  hidden, head, targets, weights, _, _ = draw(2, Terms(), zero_weights=0.0)
  (_, log_probs), _ = run(path, Terms(), 1.0, (hidden, head, targets, weights, None, Scores()))
  ratios = np.where(np.arange(N) % 2, 1.5, 1e3)
  ratios[-1] = np.inf  # a sampler that gave the token no probability
  _, got = run(path, terms, 1.0, (hidden, head, targets, weights, None, Scores(log_probs - np.log(ratios))))
  _, expected = run(path, Terms(), 1.0, (hidden, head, targets, weights * np.where(np.arange(N) % 2, 1.5, 2.0), None, Scores()))
  for g, e in zip(got, expected):
    assert_close(g, e)


@pytest.mark.parametrize('path', PATHS)
def test_a_token_of_zero_advantage_still_has_its_entropy_and_kl(path):
  for terms in (Terms(entropy=0.1), Terms(kl=0.1)):
    hidden, head, targets, weights, teacher, scores = draw(3, terms, zero_counts=0.0)
    _, (grad_hidden, _) = run(path, terms, 1.0, (hidden, head, targets, 0 * weights, teacher, scores))
    assert np.all(np.linalg.norm(grad_hidden, axis=-1) > 0)


@pytest.mark.parametrize('path', PATHS)
def test_entropy_of_peaked_and_of_uniform_distributions(path):
  terms, ones = Terms(entropy=1.0), jnp.ones(N)
  _, head, targets, weights, _, _ = draw(4, terms)
  (value, _), _ = run(path, terms, 1.0, (jnp.zeros((N, D)), head, targets, 0 * weights, None, Scores(counts=ones)))
  np.testing.assert_allclose(value, N * np.log(V), rtol=1e-14)
  (value, _), grads = run(path, terms, 1.0, (1e4 * jnp.ones((N, D)), head, targets, 0 * weights, None, Scores(counts=ones)))
  assert 0 <= value < 1e-10 and all(np.isfinite(g).all() for g in grads)


def test_parameter_gradient_equals_the_independent_full_sequence_one():
  config = ModelConfig(vocab_size=V, width=12, ffn_width=20, layers=1, heads=2, kv_heads=1, head_dim=6)
  params = jax.tree.map(lambda x: x.astype(jnp.float64), llama.init_params(config, jax.random.PRNGKey(0), scale=0.3))
  rng = np.random.default_rng(7)
  mask = (True, True, False, True, False, True, True)
  trajectory = types.SimpleNamespace(prompt_ids=(3, 9, 4), completion_ids=tuple(rng.integers(0, V, len(mask)).tolist()),
                                     completion_mask=mask)
  at, count = 3 + np.flatnonzero(mask), sum(mask)
  columns = dict(weights=rng.normal(size=count), counts=rng.random(count), sampler=-3.6 + 0.3 * rng.normal(size=count),
                 reference=-3.6 + 0.3 * rng.normal(size=count), teacher=-3.6 + 0.3 * rng.normal(size=count))
  columns['weights'][0] = columns['counts'][-1] = 0
  terms = Terms(CAP, 0.3, 'k3', 0.2)

  def score(params):
    tokens = jnp.asarray(trajectory.prompt_ids + trajectory.completion_ids)
    hidden, _ = llama.forward(config, params, tokens[None, :-1], llama.empty_boundary(config, jnp.float64), dtype=jnp.float64)
    scores = Scores(columns['sampler'], columns['reference'], columns['counts'])
    return logprob.weighted_score(hidden[0, at - 1], llama.head_matrix(params), tokens[at], columns['weights'], columns['teacher'], 0.7,
                                  scores=scores, terms=terms)

  def assert_equal_trees(got, expected):
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))
    assert norm(jax.tree.map(jnp.subtract, got, expected)) <= 1e-10 * norm(expected)

  got, log_probs = jax.jit(jax.grad(score, has_aux=True), compiler_options=dict(QUICK))(params)
  expected, expected_log_probs = reference.terms_gradient(config, params, trajectory, terms, columns, 0.7)
  assert_equal_trees(got, expected)
  np.testing.assert_allclose(log_probs, expected_log_probs, rtol=1e-10)
  plain, _ = reference.terms_gradient(config, params, trajectory, Terms(), {'weights': columns['weights']})
  assert_equal_trees(plain, reference.weighted_gradient(config, params, trajectory, columns['weights'])[0])


def test_terms_state_the_scores_they_need():
  assert Terms().needs == Terms(entropy=0.1).needs == frozenset()
  assert Terms(importance_cap=2.0, entropy=0.1).needs == {'sampler'}
  assert Terms(1.0, 0.1).needs == {'sampler', 'reference'}
  assert hash(Terms(kl=0.1)) == hash(Terms(kl=0.1)) and Terms(kl=0.1) != Terms(kl=0.1, kl_estimator='k1')


@pytest.mark.parametrize('terms, missing', [(Terms(importance_cap=1.0), 'sampler'), (Terms(kl=0.1), 'reference'),
                                            (Terms(entropy=0.1), 'counts'), (Terms(kl=0.1), 'counts')], ids=str)
def test_missing_scores_are_refused(terms, missing):
  *args, scores = draw(5, terms)
  with pytest.raises(ValueError, match=f'needs {missing}'):
    run('dense', terms, 1.0, (*args, scores._replace(**{missing: None})))
  with pytest.raises(ValueError, match='needs'):
    run('dense', terms, 1.0, (*args, None))


@pytest.mark.parametrize('wrong', [dict(importance_cap=0.0), dict(importance_cap=float('inf')), dict(kl=-0.1), dict(kl=float('nan')),
                                   dict(entropy=-0.1), dict(kl_estimator='k4')], ids=str)
def test_impossible_terms_are_refused(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    Terms(**wrong)
