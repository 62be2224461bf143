"""Simulated updates: against Equation 14, elastic against every fixed granularity, lanes against one."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ts_jax.objectives import distillation
from ts_jax.streaming import costs as costs_lib, scheduler, simulation
from ts_jax.streaming.buckets import Buckets
from ts_jax.theory import replay

SERVICE = simulation.Service(whole=1.0, early=0.25, late=0.74, turn_early=1.2, turn_late=1.3, packed={4: 0.95}, fold_s=8.0, prompt_s=16.0,
                             pad=Buckets((64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 32768)).pad)


def arrivals(seed, batch=64, size=8, slots=64, spread=0.5, turns=10, tokens=40, verify=0.01, together=False):
  """Trajectories whose durations have a mean of 1 s and a deviation of `spread`, on so many slots."""
  rng = np.random.default_rng(seed)
  sigma = np.sqrt(np.log(1 + spread**2))
  draw = lambda n: np.exp(rng.normal(-sigma**2 / 2, sigma, n))
  duration = np.repeat(draw(batch // size), size) * rng.uniform(1, 1.005, batch) if together else draw(batch)
  free, made = np.zeros(slots), []
  for n, lasts in enumerate(duration):
    slot = int(free.argmin())
    fixed = free[slot] + lasts * np.arange(1, turns + 1) / turns
    free[slot] = fixed[-1]
    of = tuple(zip(fixed.tolist(), np.maximum(rng.poisson(tokens * lasts, turns), 4).tolist()))
    made.append(simulation.Arrival(n // size, n % size, of, fixed[-1], fixed[-1] + verify * rng.uniform(0.5, 1.5), float(rng.random())))
  return made


def scaled(found, service, ratio):
  """The service at which rollout takes `ratio` times as long as one pass over everything."""
  rollout = max(a.reward_s for a in found)
  factor = rollout / ratio / sum(service.pad(a.tokens) for a in found)
  times = ('whole', 'early', 'late', 'turn_early', 'turn_late', 'fold_s', 'prompt_s')
  return dataclasses.replace(service, **{n: getattr(service, n) * factor for n in times})


def policy(granularity, **changes):
  rows = (1,) if granularity in ('turn', 'forward') else (4, 1)
  return scheduler.Policy(granularity, pack_rows=rows, kept_cap=64, **changes)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), ratio=st.floats(0.2, 4), granularity=st.sampled_from(['batch', 'trajectory']))
def test_one_lane_takes_what_equation_14_says(seed, ratio, granularity):
  made = [dataclasses.replace(a, reward_s=a.content_s) for a in arrivals(seed, batch=16, size=4, turns=1)]
  plain = scaled(made, simulation.Service(1.0, pad=SERVICE.pad), ratio)
  found = simulation.simulate(made, plain, scheduler.Policy(granularity))
  rollout = max(a.reward_s for a in made)
  ready = np.array([rollout if granularity == 'batch' else a.content_s for a in made])
  expected = replay.replay(ready, np.array([plain.whole * plain.pad(a.tokens) for a in made]), rollout_s=rollout)
  assert found.step_s == pytest.approx(expected.step_s, rel=1e-9) and sum(found.busy_s) == pytest.approx(expected.lane_busy_s[0], rel=1e-9)


@pytest.mark.parametrize('spread, ratio, tokens, together', [*itertools.product((0.05, 1.2), (0.35, 1.0, 2.8), (6, 40), (False, True))])
def test_elastic_is_as_fast_as_the_best_fixed_granularity(spread, ratio, tokens, together):
  made = arrivals(0, spread=spread, tokens=tokens, together=together)
  service = scaled(made, SERVICE, ratio)
  fixed = {g: simulation.simulate(made, service, policy(g)).step_s for g in scheduler.GRANULARITIES}
  found = simulation.simulate(made, service, policy('elastic'))
  again = simulation.simulate(made, service, policy('elastic'), costs=found.costs)
  for outcome in (found, again):
    assert outcome.step_s <= 1.02 * min(fixed.values())


def test_elastic_beats_a_trajectory_at_a_time_where_all_end_together():
  made = arrivals(1, batch=128, slots=128, spread=0.05)  # the worst case for GRPO: one wave of equal durations
  service = scaled(made, SERVICE, 1.0)
  step = {g: simulation.simulate(made, service, dataclasses.replace(policy(g), kept_cap=128)).step_s for g in ('batch', 'trajectory', 'elastic')}
  assert step['elastic'] < 0.9 * step['trajectory'] < 0.9 * step['batch']


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), lanes=st.integers(2, 4), granularity=st.sampled_from((*scheduler.GRANULARITIES, 'elastic')),
       distil=st.booleans())
def test_lanes_share_the_work_and_none_ends_long_after_the_others(seed, lanes, granularity, distil):
  made = arrivals(seed, batch=32, size=4, slots=8, spread=1.0)
  service = scaled(made, dataclasses.replace(SERVICE, prompt_s=0.0), 0.2)
  chosen = policy(granularity, **({'objective': distillation.Distillation()} if distil else {}))
  one, several = simulation.simulate(made, service, chosen), simulation.simulate(made, service, chosen, lanes)
  assert several.end_s < one.end_s
  longest = max(service.pad(a.tokens) for a in made) * service.turn_early * 4  # a pack of four at most
  assert max(several.busy_s) - min(several.busy_s) < longest + max(a.reward_s for a in made)
  sources = lambda found: found.skipped + found.works['SourceWork']
  assert max(chosen.pack_rows) > 1 or sources(one) == sources(several) == 32


def test_costs_are_predicted_by_size_and_from_other_kinds_before_they_are_measured():
  costs = costs_lib.Costs()
  assert costs.predict('whole', 100) == 400 and costs.saved(50, 100) == 50
  costs = costs.observe('late', 1000, 3.0)
  assert costs.predict('whole', 500) == pytest.approx(2.0) and costs.predict('early', 500) == pytest.approx(0.5)
  for _ in range(50):
    costs = costs.observe('whole', 4000, 40.0).observe('whole', 40, 4.0)
  assert costs.predict('whole', 4000) == pytest.approx(40, rel=0.05)
  assert 40 * 0.01 < costs.predict('whole', 40) < 4.0  # few tokens: between their own rate and that of all
