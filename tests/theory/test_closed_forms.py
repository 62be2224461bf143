"""Release laws, tails and speedups: the paper's figures, and every closed form against a second computation."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ts_jax.theory import release, speedup, waves

CAPACITY, GROUP, CLOSURE, DEFERRED, EXPONENT, SUFFIX = 128, 8, 0.02, 0.45, 0.49, 0.05  # Appendix F.5
RATIOS = np.append(np.geomspace(0.3, 4, 401), [0.5, 1.0])
GRANULARITIES = st.one_of(
    st.floats(0, 1).map(release.grpo), st.floats(0, 1).map(release.opd), st.just(release.group()),
    st.tuples(st.floats(0, 0.9), st.floats(0, 0.1), st.floats(0.9, 1.8)).map(lambda x: release.forward(*x)))
LAWS = st.builds(release.ReleaseLaw, GRANULARITIES, st.integers(1, 40), st.integers(1, 16), st.floats(0, 3))
SERVICE_RATIOS = st.floats(0.1, 5)


def law(granularity, turns=1):
  return release.ReleaseLaw(granularity, turns, GROUP, EXPONENT)


def predicted(granularity, batch, ratio, turns=1):
  return waves.speedup(law(granularity, turns), waves.of_batch(batch, CAPACITY, ratio, SUFFIX))


grpo = functools.partial(predicted, release.grpo(CLOSURE))
opd = functools.partial(predicted, release.opd(DEFERRED))


def fraction_by_integration(release_law, u):
  """F(u) as the service-weighted share of trajectories whose parts are out by u, one quantile of completion times after another."""
  completed = (np.arange(200_000) + 0.5) / 200_000
  weight = completed**release_law.service_exponent
  part = release_law.granularity
  turns = sum(weight[completed * j / release_law.turns <= u].sum() for j in range(1, release_law.turns + 1)) / release_law.turns
  whole = weight[completed <= u].sum()
  closed = whole * u**(release_law.group_size - 1)  # the other members are independent
  return (part.turn * turns + (1 - part.turn - part.closure) * whole + part.closure * closed) / weight.sum()


@pytest.mark.parametrize('speedup_at_balance, printed', [
    (grpo(256, 1.0), 1.84), (grpo(2048, 1.0), 1.98), (opd(256, 1.0, turns=10), 1.967), (opd(256, 1.0, turns=300), 1.975),
    (opd(2048, 1.0, turns=10), 2.00), (opd(2048, 1.0, turns=300), 2.00)])
def test_figures_at_balance_are_the_papers(speedup_at_balance, printed):
  digits = 3 if printed in (1.967, 1.975) else 2
  assert round(float(speedup_at_balance), digits) == printed


@pytest.mark.parametrize('curve, printed, turns', [(grpo, 1.71, 40), (opd, 1.95, 40), (opd, 1.95, 300)])
def test_peaks_below_one_wave_are_the_papers_and_stand_near_half_the_balance(curve, printed, turns):
  speedups = curve(64, RATIOS, turns=turns)
  assert round(float(speedups.max()), 2) == printed
  assert 0.45 < RATIOS[speedups.argmax()] < 0.6


@pytest.mark.parametrize('batch', [128, 256, 512, 1024, 2048])
@pytest.mark.parametrize('curve', [grpo, functools.partial(opd, turns=10), functools.partial(opd, turns=300)])
def test_figures_away_from_balance_are_the_papers(curve, batch):
  for ratios, least, greatest in (((0.35, 2.8), 1.34, 1.36), ((0.5, 2.0), 1.46, 1.50), ((4.0,), 1.24, 1.25)):
    for ratio in ratios:
      assert least <= round(float(curve(batch, ratio)), 2) <= greatest
  peak = RATIOS[curve(batch, RATIOS).argmax()]
  assert 0.9 < peak < 1.15


def test_grpo_does_not_depend_on_the_horizon_and_its_tail_is_the_release_lag():
  assert grpo(256, 1.0, turns=10) == grpo(256, 1.0, turns=300)
  u = np.linspace(0, 1, 100_001)
  assert speedup.release_lag(law(release.grpo(CLOSURE))) == pytest.approx(np.max(u - law(release.grpo(CLOSURE)).released(u)), abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(LAWS, SERVICE_RATIOS)
def test_tail_equals_the_supremum_searched_on_a_grid(release_law, ratio):
  rho = ratio * release_law.granularity.work
  u = np.linspace(0, 1, 20_001)
  searched = max(0.0, float(np.max(u + rho * (1 - release_law.released(u)))) - 1)
  tail = float(speedup.tail(release_law, ratio))
  # Between grid points the expression rises by at most one step of u, as F does not fall.
  assert searched - 1e-12 <= tail <= searched + 1 / 20_000


def test_interior_maximum_solves_equation_23():
  one = release.ReleaseLaw(release.grpo(0.0), service_exponent=0.5)
  for rho in (0.7, 1.0, 1.3):
    u = (rho * 1.5)**-2.0
    assert speedup.tail(one, rho) == pytest.approx(max(u + rho * (1 - u**1.5) - 1, 0), abs=1e-14)
  two = release.ReleaseLaw(release.grpo(0.25), group_size=4, service_exponent=1.0)
  u = np.linspace(0, 1, 1_000_001)
  root = u[np.argmin(np.abs(0.75 * 2 * u + 0.25 * 5 * u**4 - 1 / 1.2))]
  assert speedup.tail(two, 1.2) == pytest.approx(root + 1.2 * (1 - 0.75 * root**2 - 0.25 * root**5) - 1, abs=1e-9)


def test_no_tail_when_the_last_release_is_slow_enough():
  """rho (gamma + 1 + beta (m - 1)) <= 1."""
  steep = GROUP * CLOSURE - CLOSURE + EXPONENT + 1
  assert speedup.tail(law(release.grpo(CLOSURE)), 0.999 / steep) < 1e-15
  assert speedup.tail(law(release.grpo(CLOSURE)), 1.05 / steep) > 1e-5


@settings(deadline=None, max_examples=60)
@given(LAWS, SERVICE_RATIOS)
def test_tail_lies_within_equation_20(release_law, ratio):
  rho = ratio * release_law.granularity.work
  least, greatest = speedup.tail_bounds(speedup.release_lag(release_law), rho)
  assert least - 1e-12 <= speedup.tail(release_law, ratio) <= greatest + 1e-12


@settings(deadline=None, max_examples=12)
@given(LAWS, st.floats(0.01, 1))
def test_released_fraction_equals_its_integral_over_trajectories(release_law, u):
  assert release_law.released(u) == pytest.approx(fraction_by_integration(release_law, u), abs=2e-4)
  assert release_law.released(1.0) == pytest.approx(1.0, abs=1e-12) and release_law.released(0.0) == 0


@settings(deadline=None, max_examples=30)
@given(LAWS, LAWS, SERVICE_RATIOS)
def test_close_releases_have_close_tails(one, other, ratio):
  """Equation 27, on laws that stream the same service."""
  one, other = (dataclasses.replace(x, granularity=dataclasses.replace(x.granularity, work=1.0)) for x in (one, other))
  u = np.linspace(0, 1, 20_001)
  difference = float(np.max(np.abs(one.released(u) - other.released(u)))) + 1e-3  # the grid misses what lies between its points
  assert abs(speedup.tail(one, ratio) - speedup.tail(other, ratio)) <= speedup.tail_change_bound(difference, ratio)


@pytest.mark.parametrize('exponent', [0.0, 0.49, 2.0])
def test_many_turns_without_deferred_work_leave_no_lag(exponent):
  many = release.ReleaseLaw(release.opd(0.0), turns=20_000, service_exponent=exponent)
  u = np.linspace(0.001, 1, 500)
  limit = u * (1 + 1 / exponent) - u**(exponent + 1) / exponent if exponent else u * (1 - np.log(u))
  np.testing.assert_allclose(many.released(u), limit, atol=2e-4)
  assert speedup.release_lag(many) < 1e-3


def test_forward_is_the_turn_law_with_its_own_fractions_and_no_doubled_work():
  """The extension: equal curves at equal fractions; against the cheapest Sync, doubled work costs more than late release."""
  assert opd(256, 1.0, turns=20) == predicted(release.forward(1 - DEFERRED), 256, 1.0, turns=20)
  trajectory, replayed = grpo(256, 1.0), predicted(release.opd(DEFERRED, work=1.75), 256, 1.0, turns=20)
  forward = predicted(release.forward(0.35), 256, 1.0, turns=20)
  assert replayed < 1.15 < trajectory < forward < waves.bound(waves.of_batch(256, CAPACITY, 1.0, SUFFIX))
  assert predicted(release.group(), 256, 1.0) < trajectory


@settings(deadline=None, max_examples=60)
@given(LAWS, st.floats(1, 20), SERVICE_RATIOS, st.floats(0, 0.5))
def test_speedup_lies_between_sync_and_the_bound(release_law, count, service, suffix):
  shape = waves.Waves(count, service, suffix)
  value = waves.speedup(release_law, shape)
  assert waves.bound(shape) <= 2
  if release_law.granularity.work >= 1:  # less work than Sync's pass could beat it
    assert value <= waves.bound(shape) + 1e-12
  if release_law.granularity.work <= 1:
    assert value >= 1 - 1e-12


@settings(deadline=None, max_examples=40)
@given(LAWS, SERVICE_RATIOS, st.floats(0, 0.5))
def test_one_wave_is_the_single_window_formula(release_law, service, suffix):
  assert waves.speedup(release_law, waves.Waves(1, service, suffix)) == pytest.approx(speedup.speedup(release_law, service, suffix), rel=1e-12)


def test_waves_of_a_batch_and_of_its_measured_times_agree():
  nominal = waves.of_batch(384, CAPACITY, 0.8, SUFFIX)
  measured = waves.of_times(384, CAPACITY, rollout_s=3 * 20.0, service_s=3 * 20.0 / 0.8, suffix_s=20.0 * SUFFIX)
  assert (measured.count, measured.service, measured.suffix) == pytest.approx((nominal.count, nominal.service, nominal.suffix))
  part = waves.of_batch(64, CAPACITY, 0.8, SUFFIX)
  assert part.count == 1 and part.service == 0.5 / 0.8


@pytest.mark.parametrize('call, told', [
    (lambda: release.Granularity(turn=0.7, closure=0.4), 'turn=0.7 and closure=0.4'),
    (lambda: release.opd(1.5), 'turn=-0.5'),
    (lambda: release.grpo(math.nan), 'closure=nan'),
    (lambda: release.forward(0.3, work=0.0), 'work=0.0'),
    (lambda: release.ReleaseLaw(release.group(), turns=0), 'turns=0'),
    (lambda: release.ReleaseLaw(release.group(), service_exponent=-0.1), 'service_exponent=-0.1'),
    (lambda: law(release.group()).released(1.2), 'u=1.2'),
    (lambda: speedup.tail(law(release.group()), -1.0), 'service_ratio=-1.0'),
    (lambda: speedup.bound(1.0, -0.5), 'suffix_ratio=-0.5'),
    (lambda: waves.Waves(0.5, 1.0, 0.0), 'count=0.5'),
    (lambda: waves.of_batch(256, 0, 1.0, 0.05), 'capacity=0'),
])
def test_bad_values_are_named(call, told):
  with pytest.raises(ValueError, match=told):
    call()
