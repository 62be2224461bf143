"""Learner against sampler log-probs: the figures, how they add up, and what they stop."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments import offline
from tests.streaming import cases
from ts_jax import types
from ts_jax.streaming import mismatch, sources

LIMITS = mismatch.Limits(*mismatch.DEFAULTS['float32'])


def pairs(seed: int, tokens: int, scale: float):
  """Log-probs of the learner and the sampler, `scale` apart."""
  rng = np.random.default_rng(seed)
  sampler = -rng.exponential(2.0, tokens)
  return sampler + scale * rng.standard_normal(tokens), sampler


def by_probabilities(learner, sampler) -> dict:
  """The same figures from probabilities, in extended precision."""
  l, s = np.exp(np.asarray(learner, np.longdouble)), np.exp(np.asarray(sampler, np.longdouble))
  ratio = l / s
  return dict(sampler_gap_mean=np.mean(np.abs(np.log(l) - np.log(s))), sampler_gap_max=np.max(np.abs(np.log(ratio))), sampler_kl_k1=np.mean(np.log(s / l)),
              sampler_kl_k3=np.mean(ratio - 1 - np.log(ratio)), sampler_ess=np.sum(ratio)**2 / (len(l) * np.sum(ratio**2)))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 400), scale=st.sampled_from([1e-3, 0.05, 1.0, 3.0]))
def test_figures_are_those_of_probabilities_in_extended_precision(seed, tokens, scale):
  learner, sampler = pairs(seed, tokens, scale)
  found = mismatch.Mismatch.of(learner, sampler).summary()
  assert 0 < found['sampler_ess'] <= 1 and found['sampler_kl_k3'] >= 0
  for name, value in by_probabilities(learner, sampler).items():
    np.testing.assert_allclose(found[name], float(value), rtol=1e-9, atol=1e-15, err_msg=name)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_parts_add_up_to_the_whole_in_any_order(seed, cuts):
  learner, sampler = pairs(seed, 300, 0.5)
  parts = [mismatch.Mismatch.of(l, s) for l, s in zip(np.split(learner, sorted(cuts)), np.split(sampler, sorted(cuts)))]
  np.random.default_rng(seed).shuffle(parts)
  total = sum(parts, mismatch.Mismatch())
  np.testing.assert_allclose(dataclasses.astuple(total), dataclasses.astuple(mismatch.Mismatch.of(learner, sampler)), rtol=1e-12)


def test_equal_log_probs_have_no_mismatch_and_none_are_no_figures():
  assert mismatch.Mismatch.of([-1.0, -2.0], [-1.0, -2.0]).summary() == dict(
      sampler_gap_mean=0.0, sampler_gap_max=0.0, sampler_kl_k1=0.0, sampler_kl_k3=0.0, sampler_ess=1.0)
  assert set(mismatch.Mismatch.of([], []).summary().values()) == {None} and LIMITS.check(mismatch.Mismatch(), 0) == ''


def test_one_token_that_outweighs_all_others_leaves_one_effective_sample():
  found = mismatch.Mismatch.of([-1.0] * 9 + [-1.0], [-1.0] * 9 + [-40.0]).summary()
  assert found['sampler_ess'] == pytest.approx(1 / 10, rel=1e-9) and found['sampler_kl_k1'] == pytest.approx(-3.9)


def test_whatever_stands_at_unscored_positions_changes_nothing():
  mask = np.array([False, True, True, False, True])
  sampler = np.array([0.0, -1.0, -2.0, 0.0, -3.0])
  lane = cases.make_lane()

  def measured(values):
    lane.mismatch = mismatch.Mismatch()
    lane._measure([sources.SourceData(np.arange(5), mask, values, 0)], np.array([[-1.1, -1.9, -3.0, np.nan, np.nan]]))
    return lane.mismatch

  clean = measured(sampler)
  assert clean == measured(np.where(mask, sampler, np.nan)) and clean.tokens == 3 and math.isfinite(clean.squares)


def test_an_update_measures_every_scored_token_whatever_the_lanes_and_the_order():
  batch = offline.random_batch(np.random.default_rng(5), rewards=(0.0, 1.5), reference=True)
  params, found = cases.tiny_params('float32'), []
  for lanes, order in ((1, 0), (1, 3), (2, 1)):
    found.append(cases.direction(batch, params, cases.STREAM_EXACT, lanes=lanes, order_seed=order, accumulator='exact')[1].mismatch)
    np.testing.assert_allclose(dataclasses.astuple(found[-1]), dataclasses.astuple(found[0]), rtol=1e-6)
  assert found[0].tokens == sum(t.scored_tokens for t in batch.trajectories) and found[0].squares > 0


def at(d: float, tokens: int = 100) -> mismatch.Mismatch:
  return mismatch.Mismatch.of(np.full(tokens, -1.0 + d), np.full(tokens, -1.0))


def test_limits_pass_what_rounding_does_warn_above_and_stop_above_that():
  assert LIMITS.check(at(6e-6), 3) == ''
  warning = LIMITS.check(at(1e-3), 3)
  assert 'update 3' in warning and 'k3 = 5e-07' in warning and 'config.mismatch.warn=1e-08' in warning and 'importance_cap' in warning
  with pytest.raises(types.TsJaxError, match=r'k3 = 5e-05.*config.mismatch.stop=1e-05.*resume; or raise the limit'):
    LIMITS.check(at(0.01), 3)


def test_one_wrong_token_among_many_is_seen():
  learner = np.full(10_000, -1.0)
  learner[17] = -2.0
  with pytest.raises(types.TsJaxError, match='over 10000 tokens'):
    LIMITS.check(mismatch.Mismatch.of(learner, np.full(10_000, -1.0)), 0)


@pytest.mark.parametrize('limits', [LIMITS, mismatch.Limits(math.inf, math.inf)])
def test_what_is_not_a_number_always_stops(limits):
  for parts in ([np.nan, -1.0], [-1.0, np.nan]):
    broken = sum((mismatch.Mismatch.of([p], [-1.0]) for p in parts), mismatch.Mismatch())
    assert math.isnan(broken.largest)
    with pytest.raises(types.TsJaxError, match='k3 = nan'):
      limits.check(broken, 0)


def test_an_overflowing_difference_stops_too():
  with pytest.raises(types.TsJaxError, match='k3 = inf'):
    LIMITS.check(mismatch.Mismatch.of([0.0], [-800.0]), 0)


@pytest.mark.parametrize('warn, stop', [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (math.nan, 1.0)])
def test_limits_that_make_no_sense_are_refused(warn, stop):
  with pytest.raises(types.ConfigError, match='config.mismatch'):
    mismatch.Limits(warn, stop)
