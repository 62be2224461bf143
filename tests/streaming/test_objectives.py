"""Estimators that are not affine, batch baselines and token-local terms, streamed, against independent full sequences."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments import offline, reference
from tests.streaming import cases
from ts_jax import types
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.objectives.terms import Terms
from ts_jax.streaming import open_trajectories, scheduler, sources

EPSILON = 1e-3
WEIGHTED, COUNTED = Terms(importance_cap=1.1), Terms(1.1, 0.3, 'k3', 0.2)


def others(r, x):
  at = int(np.flatnonzero(r == x)[0])
  return np.delete(r, at)


ESTIMATORS = {  # advantage of reward x among the rewards r
    'standardised': lambda x, r: (x - r.mean()) / (np.sqrt(np.mean((r - r.mean())**2)) + EPSILON),
    'mean': lambda x, r: x - r.mean(),
    'leave_one_out': lambda x, r: x - others(r, x).mean(),
    'leave_one_out_std': lambda x, r: (x - others(r, x).mean()) / (others(r, x).std() + EPSILON),
}


def advantages(objective, batch):
  """[groups][m]."""
  groups = [np.array([t.reward for t in g.trajectories]) for g in batch.groups]
  everything = np.concatenate(groups)

  def one(x, r):
    value = ESTIMATORS[objective.estimator](x, r) if np.ptp(r) else 0.0
    return value if objective.advantage_clip is None else min(max(value, -objective.advantage_clip), objective.advantage_clip)

  return [np.array([one(x, everything if objective.baseline == 'batch' else g) for x in g]) for g in groups]


def expected(objective, params, batch):
  """The direction by the formulas of the objective."""
  groups, tokens = len(batch.groups), sum(t.scored_tokens for t in batch.trajectories)
  if objective.needs_teacher:
    ones = [np.ones(len(g.trajectories)) for g in batch.groups]
    return reference.terms_direction(cases.TINY, params, batch, ones, lambda t: 1 / tokens, objective.terms, count=lambda g: 1.0)
  weight = {'sequence': lambda t: 1 / (groups * t.scored_tokens), 'trajectory': lambda t: 1 / groups,
            'constant': lambda t: 1 / (groups * objective.constant),
            'token': lambda t: len(batch.groups[t.group].trajectories) / tokens}[objective.aggregation]
  coefficients = [a / len(a) for a in advantages(objective, batch)]
  if objective.terms == Terms():
    total = jax.tree.map(lambda x: np.zeros(x.shape), params)
    for t, c in zip(batch.trajectories, np.concatenate(coefficients)):
      if t.scored_tokens:
        gradient, _ = reference.weighted_gradient(cases.TINY, params, t, np.full(t.scored_tokens, weight(t)))
        reference.add_to(total, gradient, c)
    return total
  return reference.terms_direction(cases.TINY, params, batch, coefficients, weight, objective.terms)


@pytest.fixture(scope='module')
def params64():
  with jax.enable_x64(True):
    yield cases.tiny_params('float64')


def policy(objective, granularity, exact=False, cap=2, reward_sums=4, packed=True):
  rows = (1,) if granularity in ('turn', 'forward') or exact or not packed else (2, 1)
  return scheduler.Policy(granularity, direct=not exact, admission_cap=cap, kept_cap=cap, pack_rows=rows, objective=objective,
                          reward_sums=reward_sums)


def check(params, objective, how, seed, lanes, **settings):
  exact = not how.direct
  batch = offline.random_batch(np.random.default_rng(seed), teacher=objective.needs_teacher, reference=objective.terms != Terms(),
                               shared=7, **settings)
  with jax.enable_x64(True):
    want = expected(objective, params, batch)
    got, _ = cases.direction(batch, params, how, dtype='float64', order_seed=seed, lanes=lanes, share=True,
                             accumulator='exact' if exact else 'float32')
    if not any(np.any(x) for x in jax.tree.leaves(want)):
      assert not any(np.any(x) for x in jax.tree.leaves(got))
    else:
      assert offline.relative_error(got, want) <= (1e-6 if exact else 1e-10)  # exact sums are read as float32


OBJECTIVES = st.builds(
    lambda estimator, aggregation, baseline, clip: policy_gradient.PolicyGradient(estimator, aggregation, EPSILON, 40, baseline, clip),
    st.sampled_from(policy_gradient.ESTIMATORS), st.sampled_from(policy_gradient.AGGREGATIONS),
    st.sampled_from(policy_gradient.BASELINES), st.sampled_from([None, 0.8]))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(objective=OBJECTIVES, seed=st.integers(0, 10**6), granularity=st.sampled_from(scheduler.GRANULARITIES), exact=st.booleans(),
       lanes=st.integers(1, 2), cap=st.integers(1, 3), reward_sums=st.integers(1, 3), few=st.booleans())
def test_any_estimator_and_baseline_gives_the_full_sequence_gradient(params64, objective, seed, granularity, exact, lanes, cap, reward_sums,
                                                                     few):
  how = policy(objective, granularity, exact, cap, 3 if exact else reward_sums)
  check(params64, objective, how, seed, lanes, rewards=(0.7, 0.7, 1.5) if few else (0.0, 0.5, 1.5))


WITH_TERMS = {
    'grpo': policy_gradient.PolicyGradient(epsilon=EPSILON), 'clipped': policy_gradient.PolicyGradient(epsilon=EPSILON, advantage_clip=0.8),
    'batch': policy_gradient.PolicyGradient('mean', 'token', baseline='batch'), 'opd': distillation.Distillation()}


# Few shapes, because each set of terms compiles its own: one row, at most half of the tokens scored as a rule.
@settings(max_examples=20, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(WITH_TERMS)), seed=st.integers(0, 10**6), granularity=st.sampled_from(scheduler.GRANULARITIES),
       exact=st.booleans(), lanes=st.integers(1, 2))
def test_terms_beside_any_objective_give_the_full_sequence_gradient(params64, name, seed, granularity, exact, lanes):
  objective = dataclasses.replace(WITH_TERMS[name], terms=COUNTED)
  check(params64, objective, policy(objective, granularity, exact, packed=False), seed, lanes, scored_rate=0.4)


def test_importance_weights_alone_need_no_sums_of_their_own(params64):
  objective = dataclasses.replace(WITH_TERMS['grpo'], terms=WEIGHTED)
  check(params64, objective, policy(objective, 'turn'), 5, 1, scored_rate=0.4)


@pytest.mark.parametrize('name, granularities', [
    ('clipped', ('batch', 'trajectory', 'forward')), ('batch', ('group', 'trajectory', 'turn')), ('both', ('trajectory',)),
    ('terms', ('trajectory', 'turn', 'forward'))])
def test_exact_sums_have_equal_bits_for_every_order_and_number_of_lanes(name, granularities):
  objective = {'clipped': WITH_TERMS['clipped'], 'batch': WITH_TERMS['batch'],
               'both': policy_gradient.PolicyGradient('leave_one_out_std', epsilon=EPSILON, baseline='batch', advantage_clip=2.0),
               'terms': dataclasses.replace(WITH_TERMS['batch'], terms=COUNTED)}[name]
  batch = offline.random_batch(np.random.default_rng(11), size=3, shared=7, reference=name == 'terms', scored_rate=0.4)
  params = cases.tiny_params('float32')
  # `turn` and `forward` group a trajectory's sums in their own ways; each has one result.
  for together in ({'batch', 'group', 'trajectory'}, {'turn'}, {'forward'}):
    seen = set()
    for granularity in sorted(together & set(granularities)):
      for order, lanes in ((0, 1), (1, 2), (2, 3)):
        got, _ = cases.direction(batch, params, policy(objective, granularity, exact=True), accumulator='exact', order_seed=order,
                                 lanes=lanes, share=True, spread=granularity == 'trajectory' and name != 'terms')
        seen.add(offline.bits(got))
    assert len(seen) <= 1


def with_rewards(batch, rewards):
  """The batch with these rewards, group by group."""
  groups = tuple(types.Group(g.index, g.task_id, g.prompt_ids, tuple(
      types.Trajectory.from_json({**t.to_json(), 'reward': rewards[g.index][t.index]}) for t in g.trajectories)) for g in batch.groups)
  return types.LogicalBatch(batch.update, batch.policy_version, groups)


@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize('granularity', ['batch', 'trajectory'])
@pytest.mark.parametrize('objective', [
    policy_gradient.PolicyGradient(advantage_clip=1.0), policy_gradient.PolicyGradient('leave_one_out_std'),
    policy_gradient.PolicyGradient(baseline='batch'),
    policy_gradient.PolicyGradient('mean', baseline='batch', advantage_clip=1.0)], ids=str)
def test_equal_rewards_give_exactly_zero(objective, granularity, exact):
  batch = with_rewards(offline.random_batch(np.random.default_rng(3), groups=2), [[0.7] * 4] * 2)
  got, result = cases.direction(batch, cases.tiny_params('float32'), policy(objective, granularity, exact),
                                accumulator='exact' if exact else 'float32')
  assert not any(np.any(x) for x in jax.tree.leaves(got)) and result.skipped + result.wasted > 0


@pytest.mark.parametrize('granularity, exact', [('batch', False), ('trajectory', False), ('trajectory', True), ('forward', False)])
def test_a_uniform_group_keeps_its_place_where_its_direction_is_not_zero(params64, granularity, exact):
  made = offline.random_batch(np.random.default_rng(3), groups=2, reference=True, shared=7, scored_rate=0.4)
  batch = with_rewards(made, [[0.7] * 4, [0.7, 0.7, 0.7, 1.5]])
  for objective in (policy_gradient.PolicyGradient('mean', baseline='batch'),
                    policy_gradient.PolicyGradient(epsilon=EPSILON, terms=COUNTED)):
    with jax.enable_x64(True):
      got, result = cases.direction(batch, params64, policy(objective, granularity, exact, packed=granularity == 'batch'),
                                    dtype='float64', share=True, accumulator='exact' if exact else 'float32')
      assert offline.relative_error(got, expected(objective, params64, batch)) <= (1e-6 if exact else 1e-10)
    assert result.skipped == result.wasted == 0


def test_sums_by_reward_keep_the_digits_of_near_equal_rewards(params64):
  batch = with_rewards(offline.random_batch(np.random.default_rng(3), groups=1, size=8, scored_rate=1.0), [[0.7] * 7 + [0.7 + 1e-3]])
  objective = policy_gradient.PolicyGradient(advantage_clip=100.0)
  with jax.enable_x64(True):
    want = jax.tree.map(np.asarray, reference.grpo_direction(cases.TINY, params64, batch))
  got, _ = cases.direction(batch, cases.tiny_params('float32'), policy(objective, 'trajectory', exact=True), accumulator='exact')
  assert offline.relative_error(got, want) <= 1e-5  # ten times closer than (r - c) H is held to


def test_more_distinct_rewards_than_sums_are_refused_by_the_exact_accumulator_and_wait_in_the_other():
  batch = with_rewards(offline.random_batch(np.random.default_rng(3), groups=1), [[0.0, 0.25, 0.5, 1.0]])
  objective, params = policy_gradient.PolicyGradient(advantage_clip=1.0), cases.tiny_params('float32')
  with pytest.raises(types.TsJaxError, match='3 distinct rewards .* sums for 2: raise config.objective.max_distinct_rewards'):
    cases.direction(batch, params, policy(objective, 'trajectory', exact=True, reward_sums=2), accumulator='exact')
  cases.direction(batch, params, policy(objective, 'trajectory', reward_sums=2))


@pytest.mark.parametrize('granularity, teacher', [('trajectory', False), ('turn', False), ('forward', False), ('forward', True)])
def test_masked_scores_never_enter(granularity, teacher, monkeypatch):
  objective = dataclasses.replace(WITH_TERMS['opd' if teacher else 'grpo'], terms=COUNTED)
  batch = offline.random_batch(np.random.default_rng(8), groups=2, size=2, scored_rate=0.5, teacher=teacher, reference=True)
  params, how = cases.tiny_params('float32'), policy(objective, granularity)
  plain, _ = cases.direction(batch, params, how)

  def poison(data):
    names = [n for n in ('sampler_log_probs', 'teacher_log_probs', 'reference_log_probs') if getattr(data, n) is not None]
    return dataclasses.replace(data, **{n: np.where(data.mask, getattr(data, n), np.nan) for n in names})

  of, turn = sources.SourceData.of, open_trajectories.Turns.data
  monkeypatch.setattr(sources.SourceData, 'of', lambda t: poison(of(t)))
  monkeypatch.setattr(open_trajectories.Turns, 'data', lambda *a: (lambda d: None if d is None else poison(d))(turn(*a)))
  monkeypatch.setattr(open_trajectories.Turns, 'begins_with', lambda *_: True)  # NaN is not equal to itself
  poisoned, _ = cases.direction(batch, params, how)
  assert offline.bits(plain) == offline.bits(poisoned)


@pytest.mark.parametrize('granularity', ['trajectory', 'turn', 'forward'])
def test_missing_reference_scores_stop_the_update(granularity):
  batch = offline.random_batch(np.random.default_rng(3), groups=1, size=2)
  with pytest.raises(types.TsJaxError, match='no reference log-probs'):
    cases.direction(batch, cases.tiny_params('float32'), policy(policy_gradient.PolicyGradient(terms=Terms(kl=0.1)), granularity))
