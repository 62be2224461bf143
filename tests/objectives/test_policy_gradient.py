"""Late scalars of policy gradients against their formulas, written out a second time."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ts_jax.objectives import policy_gradient

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 0.7, 1.5]), min_size=2, max_size=9)
FORMULAS = {  # (rewards, epsilon)
    'standardised': lambda r, e: (r - r.mean()) / (np.sqrt(np.mean((r - r.mean())**2)) + e),
    'mean': lambda r, e: r - r.mean(),
    'leave_one_out': lambda r, e: np.array([x - np.delete(r, i).mean() for i, x in enumerate(r)]),
    'leave_one_out_std': lambda r, e: np.array([(x - np.delete(r, i).mean()) / (np.delete(r, i).std() + e) for i, x in enumerate(r)]),
}


@given(REWARDS, st.sampled_from(policy_gradient.AFFINE))
def test_reduction_of_centred_statistics_equals_the_advantages(rewards, estimator):
  objective = policy_gradient.PolicyGradient(estimator)
  coefficients = objective.source_coefficients(rewards)
  if policy_gradient.is_uniform(rewards):
    assert not coefficients.any()
    return
  r = np.array(rewards)
  expected = FORMULAS[estimator](r, 1e-6) / len(r)
  np.testing.assert_allclose(coefficients, expected, atol=1e-13)
  shift, scale = objective.reduction(rewards, centre=0.75)
  np.testing.assert_allclose(scale * ((r - 0.75) - shift), expected, atol=1e-12)


@given(REWARDS, st.sampled_from(policy_gradient.ESTIMATORS), st.sampled_from([None, 0.5]), st.sampled_from(policy_gradient.BASELINES),
       st.integers(1, 9))
def test_coefficients_by_reward_are_those_of_the_trajectories(population, estimator, clip, baseline, size):
  objective = policy_gradient.PolicyGradient(estimator, epsilon=0.1, advantage_clip=clip, baseline=baseline)
  rewards = population[:size] if baseline == 'batch' else population
  coefficients = objective.source_coefficients(rewards, population)
  by_reward = objective.reward_coefficients(population)
  assert [by_reward[r] for r in rewards] == coefficients.tolist()
  expected = np.zeros(len(population)) if policy_gradient.is_uniform(population) else FORMULAS[estimator](np.array(population), 0.1)
  if clip is not None:
    expected = np.clip(expected, -clip, clip)
  np.testing.assert_allclose(coefficients, expected[:len(rewards)] / (1 if baseline == 'batch' else len(rewards)), atol=1e-12)


@pytest.mark.parametrize('estimator', policy_gradient.ESTIMATORS)
def test_equal_rewards_are_uniform_whatever_their_rounding(estimator):
  assert np.std([0.7] * 6) > 0  # the trap: a computed deviation is not zero
  assert policy_gradient.group_moments([0.7] * 6) == (0.7, 0.0)
  objective = policy_gradient.PolicyGradient(estimator)
  assert not objective.advantages([0.7] * 8).any() and not objective.advantages([1.5]).any()
  assert objective.reward_coefficients([0.7] * 8) == {0.7: 0.0}
  with pytest.raises(ValueError, match='uniform'):
    objective.reduction([0.7] * 8, centre=0.75)


@pytest.mark.parametrize('settings', [dict(estimator='leave_one_out_std'), dict(advantage_clip=1.0)], ids=str)
def test_what_is_not_affine_has_no_reduction(settings):
  objective = policy_gradient.PolicyGradient(**settings)
  assert not objective.affine and policy_gradient.PolicyGradient().affine
  with pytest.raises(ValueError, match='not affine'):
    objective.reduction([0.0, 1.0, 1.0], centre=0.75)


def test_one_that_differs_from_all_others_is_divided_by_epsilon_until_clipped():
  rewards = [0.7, 0.7, 0.7, 1.7]  # the deviation of 0.7s must be exactly zero
  of = lambda **more: policy_gradient.PolicyGradient('leave_one_out_std', epsilon=0.5, **more).advantages(rewards)
  assert of()[3] == 2.0 and of(advantage_clip=1.5)[3] == 1.5 and of()[0] == of()[1]


@pytest.mark.parametrize('rewards', [[], [0.0, None], [0.0, float('nan')]])
def test_missing_rewards_are_refused(rewards):
  with pytest.raises(ValueError):
    policy_gradient.group_moments(rewards)


def test_a_reward_of_zero_is_a_reward():
  assert policy_gradient.group_moments([0.0, 1.0]) == (0.5, 0.5)


def test_token_weights_by_aggregation():
  weight = lambda aggregation, **more: policy_gradient.PolicyGradient(aggregation=aggregation, **more).token_weight(32, 8, 10)
  assert weight('sequence') == 1 / 320 and weight('trajectory') == 1 / 32 and weight('token') == 8
  assert weight('constant', constant=100) == 1 / 3200
  assert policy_gradient.PolicyGradient().token_weight(32, 8, 0) == 0.0
  assert weight('token', baseline='batch') == 1 and weight('sequence', baseline='batch') == 1 / 2560  # 1/m is in the weight
  assert policy_gradient.PolicyGradient(aggregation='token').normaliser(50) == 0.02 and policy_gradient.PolicyGradient().normaliser(50) == 1


@pytest.mark.parametrize('wrong, message', [(dict(estimator='median'), "estimator 'median' is unknown"),
                                            (dict(aggregation='sum'), "aggregation 'sum' is unknown"),
                                            (dict(epsilon=-1.0), 'must not be negative'), (dict(constant=0), 'at least 1'),
                                            (dict(baseline='token'), "baseline 'token' is unknown"),
                                            (dict(advantage_clip=0.0), 'advantage_clip=0.0 must be'),
                                            (dict(estimator='leave_one_out_std', epsilon=0.0), 'needs a positive one')])
def test_unknown_choices_are_refused(wrong, message):
  with pytest.raises(ValueError, match=message):
    policy_gradient.PolicyGradient(**wrong)
