"""Late scalars of policy gradients against their formulas, written out a second time."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ts_jax.objectives import policy_gradient

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 0.7, 1.5]), min_size=2, max_size=9)
ADVANTAGES = {
    'standardised': lambda r: (r - r.mean()) / (np.sqrt(np.mean((r - r.mean())**2)) + 1e-6),
    'mean': lambda r: r - r.mean(),
    'leave_one_out': lambda r: np.array([x - np.delete(r, i).mean() for i, x in enumerate(r)]),
}


@given(REWARDS, st.sampled_from(policy_gradient.ESTIMATORS))
def test_reduction_of_centred_statistics_equals_the_advantages(rewards, estimator):
  objective = policy_gradient.PolicyGradient(estimator)
  coefficients = objective.source_coefficients(rewards)
  if policy_gradient.is_uniform(rewards):
    assert not coefficients.any()
    return
  r = np.array(rewards)
  expected = ADVANTAGES[estimator](r) / len(r)
  np.testing.assert_allclose(coefficients, expected, atol=1e-13)
  reduction = objective.group_reduction(rewards, centre=0.75)
  np.testing.assert_allclose(reduction.scale * ((r - 0.75) - reduction.shift), expected, atol=1e-12)


@pytest.mark.parametrize('estimator', policy_gradient.ESTIMATORS)
def test_equal_rewards_are_uniform_whatever_their_rounding(estimator):
  assert np.std([0.7] * 6) > 0  # the trap: a computed deviation is not zero
  assert policy_gradient.group_moments([0.7] * 6) == (0.7, 0.0)
  objective = policy_gradient.PolicyGradient(estimator)
  assert not objective.advantages([0.7] * 8).any() and not objective.advantages([1.5]).any()
  with pytest.raises(ValueError, match='uniform'):
    objective.group_reduction([0.7] * 8, centre=0.75)


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
  assert policy_gradient.PolicyGradient(aggregation='token').normaliser(50) == 0.02 and policy_gradient.PolicyGradient().normaliser(50) == 1


@pytest.mark.parametrize('wrong, message', [(dict(estimator='median'), "estimator 'median' is unknown"),
                                            (dict(aggregation='sum'), "aggregation 'sum' is unknown"),
                                            (dict(epsilon=-1.0), 'must not be negative'), (dict(constant=0), 'at least 1')])
def test_unknown_choices_are_refused(wrong, message):
  with pytest.raises(ValueError, match=message):
    policy_gradient.PolicyGradient(**wrong)
