"""GRPO's scalars against the equations."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ts_jax.objectives import grpo

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 0.7, 1.5]), min_size=1, max_size=9)


@given(REWARDS)
def test_reduction_of_centred_statistics_equals_the_advantages(rewards):
  coefficients = grpo.source_coefficients(rewards)
  if grpo.is_uniform(rewards):
    assert not coefficients.any()
    return
  r = np.array(rewards)
  expected = (r - r.mean()) / (np.sqrt(np.mean((r - r.mean())**2)) + 1e-6) / len(r)
  np.testing.assert_allclose(coefficients, expected, atol=1e-14)
  reduction = grpo.group_reduction(rewards, centre=0.75)
  np.testing.assert_allclose(reduction.scale * ((r - 0.75) - reduction.shift), expected, atol=1e-12)


def test_equal_rewards_are_uniform_whatever_their_rounding():
  assert np.std([0.7] * 6) > 0  # the trap: a computed deviation is not zero
  assert grpo.group_moments([0.7] * 6) == (0.7, 0.0)
  with pytest.raises(ValueError, match='uniform'):
    grpo.group_reduction([0.7] * 8, centre=0.75)


@pytest.mark.parametrize('rewards', [[], [0.0, None], [0.0, float('nan')]])
def test_missing_rewards_are_refused(rewards):
  with pytest.raises(ValueError):
    grpo.group_moments(rewards)


def test_a_reward_of_zero_is_a_reward():
  assert grpo.group_moments([0.0, 1.0]) == (0.5, 0.5)


def test_token_weight_is_trajectory_mean():
  assert grpo.token_weight(32, 10) == 1 / 320 and grpo.token_weight(32, 0) == 0.0
