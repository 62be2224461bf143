"""Tokens of several policy versions in one batch: what is refused, what is measured, and their importance weights."""

import dataclasses

import numpy as np
import pytest

from experiments import offline
from tests.streaming import cases
from ts_jax import types
from ts_jax.objectives import policy_gradient
from ts_jax.objectives.terms import Terms
from ts_jax.streaming import barrier, scheduler, staleness, update


def of_versions(batch, versions):
  """The batch with `versions` dealt out to the sampled tokens of each trajectory, one after the other, a reply holding several."""
  def reply(sampled, first, last):
    some = len(sampled.token_ids) // 2
    counts = (some, *(0,) * (last - first - 1), len(sampled.token_ids) - some) if last > first else ()
    return dataclasses.replace(sampled, version_start=first, version_end=last, version_tokens=counts)

  def mixed(t):
    ends = [versions[min(i, len(versions) - 1)] for i in range(len(t.turns) + 1)]
    turns = tuple(dataclasses.replace(u, sampled=reply(u.sampled, a, b)) for u, a, b in zip(t.turns, ends, ends[1:]))
    return dataclasses.replace(t, turns=turns, policy_version=versions[0])

  groups = tuple(dataclasses.replace(g, trajectories=tuple(map(mixed, g.trajectories))) for g in batch.groups)
  return types.LogicalBatch(batch.update, 4, groups)


def run_with_lags(batch, lags, policy=cases.SYNC):
  lane = cases.make_lane(policy=policy)
  events = offline.OneByOne(offline.shuffled_arrival(batch, np.random.default_rng(0)))
  return update.run_update(0, 4, cases.tiny_params('float32'), offline.plans(batch), events, [lane], policy, lags=lags)


def test_lags_are_those_of_single_tokens_and_must_be_what_the_schedule_says():
  batch = of_versions(offline.random_batch(np.random.default_rng(1), groups=2, size=2), (2, 4))
  measured = run_with_lags(batch, staleness.Lags(0, 2)).staleness
  lags = [4 - v for t in batch.trajectories for v in t.versions]
  assert measured == staleness.Staleness(len(lags), sum(lags), 2) and 0 < sum(lags) < 2 * len(lags)
  for wrong in (staleness.Lags(), staleness.Lags(0, 1), staleness.Lags(1, 2)):
    with pytest.raises(types.PolicyVersionError, match=r'was sampled at policy versions 2\.\.4, the update runs at 4'):
      run_with_lags(batch, wrong)


def test_importance_weights_correct_each_token_against_the_log_prob_it_was_sampled_with_whatever_its_version():
  """One trajectory's tokens come from two policies: the weight of each is its own ratio, truncated."""
  objective = policy_gradient.PolicyGradient(terms=Terms(importance_cap=1.5))
  policy = scheduler.Policy(granularity='batch', objective=objective)
  batch = offline.random_batch(np.random.default_rng(5), groups=1, size=3, rewards=(0.0, 1.0), reference=True)
  fresh = barrier.reduce_lanes('float32', run_with_lags(of_versions(batch, (4,)), staleness.Lags(0, 2), policy).sums)
  mixed = barrier.reduce_lanes('float32', run_with_lags(of_versions(batch, (2, 4)), staleness.Lags(0, 2), policy).sums)
  assert offline.bits(fresh) == offline.bits(mixed)  # log-probs decide, versions do not
  plain = scheduler.Policy(granularity='batch')
  assert offline.bits(fresh) != offline.bits(barrier.reduce_lanes('float32', run_with_lags(batch, staleness.Lags(0, 4), plain).sums))
