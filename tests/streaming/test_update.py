"""Streamed and synchronous updates equal the gradient of independent full sequences."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments import offline, reference
from tests.streaming import cases
from ts_jax import types
from ts_jax.objectives import policy_gradient
from ts_jax.rollout import replay
from ts_jax.streaming import barrier, scheduler, update
from ts_jax.streaming.buckets import Buckets

POLICIES = {'sync': cases.SYNC, 'thundersync': cases.STREAM, 'exact sync': cases.SYNC_EXACT, 'exact stream': cases.STREAM_EXACT,
            'forward': cases.FORWARD, 'exact forward': cases.FORWARD_EXACT}


@pytest.fixture(scope='module')
def params64():
  with jax.enable_x64(True):
    yield cases.tiny_params('float64')


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(['sync', 'thundersync']), size=st.integers(1, 5), cap=st.integers(1, 3))
def test_any_batch_in_any_order_gives_the_full_sequence_gradient(params64, seed, name, size, cap):
  batch = offline.random_batch(np.random.default_rng(seed), size=size)
  policy = scheduler.Policy(granularity='trajectory' if name == 'thundersync' else 'batch', admission_cap=cap, pack_rows=(2, 1))
  with jax.enable_x64(True):
    expected = reference.grpo_direction(cases.TINY, params64, batch)
    direction, _ = cases.direction(batch, params64, policy, dtype='float64', order_seed=seed)
    if not any(np.any(x) for x in jax.tree.leaves(expected)):
      assert not any(np.any(x) for x in jax.tree.leaves(direction))
    else:
      assert offline.relative_error(direction, expected) <= 1e-10


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), keep=st.sampled_from(['inputs', 'all']), cap=st.integers(1, 6), exact=st.booleans())
def test_forward_on_arrival_gives_the_full_sequence_gradient(params64, seed, keep, cap, exact):
  batch = offline.random_batch(np.random.default_rng(seed))
  policy = scheduler.Policy(granularity='forward', direct=not exact, admission_cap=2, kept_cap=cap)
  with jax.enable_x64(True):
    expected = reference.grpo_direction(cases.TINY, params64, batch)
    direction, result = cases.direction(batch, params64, policy, dtype='float64', order_seed=seed, keep=keep,
                                        accumulator='exact' if exact else 'float32')
    if any(np.any(x) for x in jax.tree.leaves(expected)):
      assert offline.relative_error(direction, expected) <= (1e-6 if exact else 1e-10)  # exact sums are read as float32
  early = sum(s.kind == 'forward' for s in result.spans)
  assert early <= sum(len(t.turns) for t in batch.trajectories)


def test_turns_do_run_forward_before_their_trajectory_is_complete():
  batch = offline.random_batch(np.random.default_rng(11), size=5)
  _, result = cases.direction(batch, cases.tiny_params('float32'), cases.FORWARD)
  assert any(s.kind == 'forward' for s in result.spans)


def test_an_attempt_made_again_starts_over(params64):
  batch = offline.random_batch(np.random.default_rng(6), groups=1, size=2, max_turns=3, rewards=(0.0,))
  first, second = (types.Trajectory.from_json({**t.to_json(), 'reward': float(i)}) for i, t in enumerate(batch.trajectories))
  batch = types.LogicalBatch(0, 0, (types.Group(0, 'task0', first.prompt_ids, (first, second)),))

  def failed(turn):  # what a lost attempt had sampled
    other = tuple((i + 1) % cases.TINY.vocab_size for i in turn.sampled.token_ids)
    return types.Turn.from_json({**turn.to_json(), 'sampled': {**turn.sampled.to_json(), 'token_ids': list(other)}})

  rest = offline.shuffled_arrival(batch, np.random.default_rng(0))
  events = [types.TurnFixed(0, 0, 1, failed(t)) for t in second.turns] + rest
  with jax.enable_x64(True):
    lane = cases.make_lane(dtype='float64', policy=cases.FORWARD)
    stream = offline.RandomlyLate(events, np.random.default_rng(1))
    result = update.run_update(0, 0, params64, offline.plans(batch), stream, [lane], cases.FORWARD)
    direction = barrier.reduce_lanes('float32', result.sums)
    assert offline.relative_error(direction, reference.grpo_direction(cases.TINY, params64, batch)) <= 1e-10


def test_a_trajectory_longer_than_announced_is_refused_at_granularity_forward():
  batch = offline.random_batch(np.random.default_rng(6), groups=1, size=2)
  longer = tuple(types.Trajectory.from_json({**t.to_json(), 'turns': [*(u.to_json() for u in t.turns), {
      **t.turns[0].to_json(), 'index': len(t.turns), 'context_ids': [1] * 20}]}) for t in batch.trajectories)
  batch = types.LogicalBatch(0, 0, (types.Group(0, 'task0', longer[0].prompt_ids, longer),))
  with pytest.raises(types.TsJaxError, match='room was made for 24'):
    cases.direction(batch, cases.tiny_params('float32'), cases.FORWARD, buckets=Buckets((24, 48)))


def test_float32_stays_close_to_the_float64_reference(params64):
  batch = offline.random_batch(np.random.default_rng(5))
  with jax.enable_x64(True):
    expected = jax.tree.map(np.asarray, reference.grpo_direction(cases.TINY, params64, batch))
  for policy in (cases.SYNC, cases.STREAM):
    direction, _ = cases.direction(batch, cases.tiny_params('float32'), policy)
    assert offline.relative_error(direction, expected) <= 5e-6


def test_exact_accumulator_gives_equal_bits_for_every_order_and_schedule():
  batch = offline.random_batch(np.random.default_rng(11), size=5)
  params = cases.tiny_params('float32')
  for policies in ((cases.SYNC_EXACT, cases.STREAM_EXACT), (cases.FORWARD_EXACT,)):
    seen = set()
    for policy in policies:
      for order in range(8):
        direction, _ = cases.direction(batch, params, policy, accumulator='exact', order_seed=order)
        seen.add(offline.bits(direction))
    assert len(seen) == 1


def with_rewards(batch, rewards):
  groups = tuple(types.Group(g.index, g.task_id, g.prompt_ids, tuple(
      types.Trajectory.from_json({**t.to_json(), 'reward': rewards[t.index]}) for t in g.trajectories)) for g in batch.groups)
  return types.LogicalBatch(batch.update, batch.policy_version, groups)


@pytest.mark.parametrize('name', POLICIES)
def test_equal_rewards_give_exactly_zero_and_near_equal_ones_keep_their_digits(name, params64):
  accumulator = 'exact' if 'exact' in name else 'float32'
  batch = offline.random_batch(np.random.default_rng(3), groups=1, size=8, scored_rate=1.0)
  params = cases.tiny_params('float32')
  direction, result = cases.direction(with_rewards(batch, [0.7] * 8), params, POLICIES[name], accumulator=accumulator)
  assert not any(np.any(x) for x in jax.tree.leaves(direction))
  assert result.skipped + result.wasted == 8 and len(result.batch.groups) == 1

  near = with_rewards(batch, [0.7] * 7 + [0.7 + 1e-3])
  direction, _ = cases.direction(near, params, POLICIES[name], accumulator=accumulator)
  with jax.enable_x64(True):
    expected = jax.tree.map(np.asarray, reference.grpo_direction(cases.TINY, params64, near))
  assert offline.relative_error(direction, expected) <= 1e-4  # (r - c) G cancels 100 times its size here


def test_the_configured_epsilon_is_used_with_and_without_statistics(params64):
  batch = offline.random_batch(np.random.default_rng(2), groups=2)
  with jax.enable_x64(True):
    expected = reference.grpo_direction(cases.TINY, params64, batch, epsilon=0.5)
    for streaming in (False, True):
      policy = scheduler.Policy(granularity='trajectory' if streaming else 'batch', pack_rows=(2, 1), objective=policy_gradient.PolicyGradient(epsilon=0.5))
      direction, _ = cases.direction(batch, params64, policy, dtype='float64')
      assert offline.relative_error(direction, expected) <= 1e-10


@settings(max_examples=16, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), estimator=st.sampled_from(['mean', 'leave_one_out']), streaming=st.booleans(),
       aggregation=st.sampled_from(policy_gradient.AGGREGATIONS))
def test_other_affine_objectives_are_exact_too(params64, seed, estimator, streaming, aggregation):
  batch = offline.random_batch(np.random.default_rng(seed))
  advantages = {'mean': lambda r: r - r.mean(), 'leave_one_out': lambda r: r - (r.sum() - r) / (len(r) - 1)}[estimator]
  groups, size, tokens = len(batch.groups), 4, sum(t.scored_tokens for t in batch.trajectories)
  weights = {'sequence': lambda t: 1 / (groups * t.scored_tokens), 'trajectory': lambda t: 1 / groups,
             'constant': lambda t: 1 / (groups * 40), 'token': lambda t: size / tokens}
  policy = scheduler.Policy(granularity='trajectory' if streaming else 'batch', admission_cap=2, pack_rows=(2, 1),
                            objective=policy_gradient.PolicyGradient(estimator, aggregation, constant=40))
  with jax.enable_x64(True):
    expected = reference.direction(cases.TINY, params64, batch, advantages, weights[aggregation])
    direction, _ = cases.direction(batch, params64, policy, dtype='float64', order_seed=seed)
    if any(np.any(x) for x in jax.tree.leaves(expected)):
      assert offline.relative_error(direction, expected) <= 1e-10


def test_padding_changes_only_rounding(params64):
  batch = offline.random_batch(np.random.default_rng(4), groups=2)
  with jax.enable_x64(True):
    snug, _ = cases.direction(batch, params64, cases.STREAM, dtype='float64')
    wide, _ = cases.direction(batch, params64, cases.STREAM, dtype='float64', buckets=Buckets((48,)))
    assert offline.relative_error(wide, snug) <= 1e-13


def test_sampler_log_probs_of_unscored_tokens_never_enter():
  batch = offline.random_batch(np.random.default_rng(8), scored_rate=0.5)

  def quiet(turn):
    probs = [p if m else -50.0 for p, m in zip(turn.sampled.log_probs, turn.scored_mask)]
    return {**turn.to_json(), 'sampled': {**turn.sampled.to_json(), 'log_probs': probs}}

  groups = tuple(types.Group(g.index, g.task_id, g.prompt_ids, tuple(
      types.Trajectory.from_json({**t.to_json(), 'turns': [quiet(u) for u in t.turns]}) for t in g.trajectories))
      for g in batch.groups)
  params = cases.tiny_params('float32')
  first, result = cases.direction(batch, params, cases.SYNC)
  second, other = cases.direction(types.LogicalBatch(0, 0, groups), params, cases.SYNC)
  assert offline.bits(first) == offline.bits(second) and result.mismatch == other.mismatch


def test_a_trajectory_of_another_policy_version_stops_the_update():
  batch = offline.random_batch(np.random.default_rng(1), groups=1, size=2)
  stale = replay.renamed(batch.trajectories[1], 0, 7)
  groups = (types.Group(0, 'task0', stale.prompt_ids, (batch.trajectories[0], stale)),)
  with pytest.raises(types.PolicyVersionError, match='version 7, the update runs at 0'):
    cases.direction(types.LogicalBatch(0, 0, groups), cases.tiny_params('float32'), cases.STREAM)


def test_silence_from_the_rollout_side_ends_with_a_message():
  batch = offline.random_batch(np.random.default_rng(1), groups=1, size=2)
  lane = cases.make_lane()
  events = offline.RandomlyLate(offline.shuffled_arrival(batch, np.random.default_rng(0))[:-1], np.random.default_rng(0))
  with pytest.raises(types.TsJaxError, match='nothing arrived.*1 trajectories have not finished'):
    update.run_update(0, 0, cases.tiny_params('float32'), offline.plans(batch), events, [lane], cases.STREAM, stall_timeout_s=0.1)
