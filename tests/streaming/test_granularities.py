"""Distillation, and every granularity of every objective, against independent full sequences."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments import offline, reference, synthetic
from tests.streaming import cases
from ts_jax import types
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.streaming import forward_trajectories, lane as lane_lib, scheduler, sources
from ts_jax.streaming.buckets import Buckets

OBJECTIVES = {'grpo': policy_gradient.PolicyGradient(), 'opd': distillation.Distillation()}


@pytest.fixture(scope='module')
def params64():
  with jax.enable_x64(True):
    yield cases.tiny_params('float64')


def expected(name, params, batch):
  return reference.grpo_direction(cases.TINY, params, batch) if name == 'grpo' else reference.opd_direction(cases.TINY, params, batch)


def policy(name, granularity, direct=True, cap=2):
  rows = (1,) if granularity in ('turn', 'forward') or not direct else (2, 1)
  return scheduler.Policy(granularity, direct=direct, admission_cap=cap, kept_cap=cap, pack_rows=rows, objective=OBJECTIVES[name],
                          piece_lengths=cases.BUCKETS.lengths)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(OBJECTIVES)), granularity=st.sampled_from((*scheduler.GRANULARITIES, scheduler.ELASTIC)),
       cap=st.integers(1, 3), lanes=st.integers(1, 2), shared=st.sampled_from([0, 7]))
def test_any_granularity_objective_order_and_split_gives_the_full_sequence_gradient(params64, seed, name, granularity, cap, lanes, shared):
  batch = offline.random_batch(np.random.default_rng(seed), teacher=name == 'opd', shared=shared)
  with jax.enable_x64(True):
    want = expected(name, params64, batch)
    got, _ = cases.direction(batch, params64, policy(name, granularity, cap=cap), dtype='float64', order_seed=seed, lanes=lanes,
                             share=True)
    if any(np.any(x) for x in jax.tree.leaves(want)):
      assert offline.relative_error(got, want) <= 1e-10


@pytest.mark.parametrize('name', OBJECTIVES)
@pytest.mark.parametrize('on_device', [0, 1])
def test_values_kept_in_host_memory_have_the_same_bits(name, on_device):
  batch, params = offline.random_batch(np.random.default_rng(11), size=5, teacher=name == 'opd'), cases.tiny_params('float32')
  one, other = (cases.direction(batch, params, policy(name, 'forward', cap=3), on_device=n)[0] for n in (None, on_device))
  assert offline.bits(one) == offline.bits(other)


@pytest.mark.parametrize('name', OBJECTIVES)
@pytest.mark.parametrize('granularity', scheduler.GRANULARITIES)
def test_exact_sums_have_equal_bits_for_every_order_and_number_of_lanes(name, granularity):
  batch = offline.random_batch(np.random.default_rng(11), size=3, teacher=name == 'opd', shared=7)
  params, seen = cases.tiny_params('float32'), set()
  everywhere = granularity == 'trajectory'  # each device compiles for itself
  for order, lanes in ((0, 1), (1, 1), (2, 1), *(((3, 2), (4, 4)) if everywhere else ((3, 2),))):
    got, _ = cases.direction(batch, params, policy(name, granularity, direct=False), accumulator='exact', order_seed=order,
                             lanes=lanes, share=True, spread=everywhere)
    seen.add(offline.bits(got))
  assert len(seen) == 1


def test_bits_of_turns_run_forward_do_not_depend_on_how_many_had_arrived_where_cuts_change_rounding():
  sizes = dataclasses.replace(cases.TINY, vocab_size=300, width=16, ffn_width=24, layers=2, head_dim=4)
  batch = synthetic.batch(sizes.vocab_size, groups=2, size=2, turns=3, turn_tokens=22, prompt_tokens=60)
  functions, buckets = sources.SourceFunctions(sizes), Buckets((48, 80, 128))
  lane = lane_lib.Lane(0, functions, buckets, accumulator='exact', reward_centre=0.75,
                       trajectories=forward_trajectories.ForwardTrajectories(functions, buckets, 100))
  params = cases.tiny_params('float32', config=sizes)
  seen = {offline.bits(offline.batch_direction(batch, params, [lane], policy('grpo', 'forward', direct=False, cap=3), 'exact', order)[0])
          for order in range(4)}
  assert len(seen) == 1


@pytest.mark.parametrize('granularity', ['batch', 'trajectory'])
def test_equal_teacher_and_student_log_probs_give_exactly_zero(granularity, monkeypatch):
  batch = offline.random_batch(np.random.default_rng(3), groups=1, size=2, teacher=True, scored_rate=1.0)
  params, seen = cases.tiny_params('float32'), {}
  one_row = scheduler.Policy(granularity, objective=OBJECTIVES['opd'])
  measure = lane_lib.Lane._measure

  def keep(self, data, log_probs):
    seen[tuple(data[0].completion)] = log_probs[0, :data[0].scored]
    measure(self, data, log_probs)

  monkeypatch.setattr(lane_lib.Lane, '_measure', keep)
  first, _ = cases.direction(batch, params, one_row)
  assert any(np.any(x) for x in jax.tree.leaves(first))
  got, _ = cases.direction(with_teacher(batch, seen), params, one_row)
  assert not any(np.any(x) for x in jax.tree.leaves(got))


def with_teacher(batch, log_probs):
  """The batch with these scores, by completion."""
  def scored(t):
    left = iter(log_probs[t.completion_ids].tolist())
    turns = [{**u.to_json(), 'teacher_log_probs': [next(left) for _ in u.sampled.token_ids]} for u in t.turns]
    return types.Trajectory.from_json({**t.to_json(), 'turns': turns})

  groups = tuple(types.Group(g.index, g.task_id, g.prompt_ids, tuple(scored(t) if t.scored_tokens else t for t in g.trajectories))
                 for g in batch.groups)
  return types.LogicalBatch(0, 0, groups)


@pytest.mark.parametrize('granularity', ['trajectory', 'turn', 'forward'])
def test_missing_teacher_scores_stop_the_update(granularity):
  batch = offline.random_batch(np.random.default_rng(3), groups=1, size=2)
  with pytest.raises(types.TsJaxError, match='no teacher log-probs'):
    cases.direction(batch, cases.tiny_params('float32'), policy('opd', granularity))


@pytest.mark.parametrize('name, granularity', [(n, g) for n in OBJECTIVES for g in ('turn', 'forward')])
def test_turns_are_worked_on_before_their_trajectory_is_complete(name, granularity):
  batch = offline.random_batch(np.random.default_rng(11), size=5, teacher=name == 'opd')
  _, result = cases.direction(batch, cases.tiny_params('float32'), policy(name, granularity))
  assert any(s.kind == granularity for s in result.spans)


def test_the_shared_prefix_is_processed_once(params64):
  batch = offline.random_batch(np.random.default_rng(2), groups=3, shared=9)
  _, result = cases.direction(batch, cases.tiny_params('float32'), policy('grpo', 'trajectory'), share=True)
  assert [s.group for s in result.spans if s.kind == 'prompt'].count(-1) == 2  # forward, backward


def test_shared_prefix_leaves_every_prompt_something_of_its_own():
  shared = lane_lib.shared_prefix
  assert shared([(1, 2, 3, 4), (1, 2, 3, 5, 6)], at_least=1) == (1, 2)
  assert shared([(1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6, 7)], at_least=1) == (1, 2, 3)
  assert shared([(1, 2, 3, 4)] * 3, at_least=1) == () and shared([(1, 2, 3, 4), (1, 2, 3, 5)], at_least=3) == ()
