"""Trajectories whose history was rewritten, against each turn alone behind its full path."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments import offline, reference, whole_sequences
from tests.streaming import cases
from ts_jax import types
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.objectives.terms import Terms
from ts_jax.streaming import branches, scheduler, sources

OBJECTIVES = {'grpo': policy_gradient.PolicyGradient(), 'opd': distillation.Distillation()}


@pytest.fixture(scope='module')
def params64():
  with jax.enable_x64(True):
    yield cases.tiny_params('float64')


def rewritten(batch: types.LogicalBatch, rng: np.random.Generator) -> types.LogicalBatch:
  """The batch with turns that keep only a part of what was there before them."""
  def change(t: types.Trajectory) -> types.Trajectory:
    turns, path = [], len(t.prompt_ids)
    for turn in t.turns:
      keeps = int(rng.integers(len(t.prompt_ids), path + 1)) if rng.random() < 0.6 else None
      turns.append(dataclasses.replace(turn, keeps=keeps))
      path = (path if keeps is None else keeps) + len(turn.context_ids) + len(turn.sampled.token_ids)
    return dataclasses.replace(t, turns=tuple(turns))

  groups = (dataclasses.replace(g, trajectories=tuple(map(change, g.trajectories))) for g in batch.groups)
  return dataclasses.replace(batch, groups=tuple(groups))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(OBJECTIVES)), granularity=st.sampled_from(scheduler.GRANULARITIES))
def test_random_trees_give_the_gradient_of_full_sequences(params64, seed, name, granularity):
  rng = np.random.default_rng(seed)
  batch = rewritten(offline.random_batch(rng, groups=2, max_turns=4, teacher=name == 'opd'), rng)
  rows = (1,) if granularity in ('turn', 'forward') else (2, 1)
  policy = scheduler.Policy(granularity, pack_rows=rows, objective=OBJECTIVES[name])
  with jax.enable_x64(True):
    wanted = {'grpo': reference.grpo_direction, 'opd': reference.opd_direction}[name](cases.TINY, params64, batch)
    got, _ = cases.direction(batch, params64, policy, dtype='float64', order_seed=seed)
    if any(np.any(x) for x in jax.tree.leaves(wanted)):
      assert offline.relative_error(got, wanted) <= 1e-10


@pytest.mark.parametrize('granularity', ['batch', 'trajectory'])
def test_terms_and_a_batch_baseline_over_trees_give_the_gradient_of_full_sequences(params64, granularity):
  rng = np.random.default_rng(2)
  batch = rewritten(offline.random_batch(rng, groups=2, size=3, max_turns=4, reference=True, scored_rate=0.4), rng)
  assert any(t.branches for t in batch.trajectories)
  terms, mean = Terms(1.1, 0.3, 'k3', 0.2), np.mean([t.reward for t in batch.trajectories])
  objective = policy_gradient.PolicyGradient('mean', 'trajectory', baseline='batch', terms=terms)
  with jax.enable_x64(True):
    coefficients = [[(t.reward - mean) / 3 for t in g.trajectories] for g in batch.groups]
    wanted = reference.terms_direction(cases.TINY, params64, batch, coefficients, lambda t: 1 / 2, terms)
    got, _ = cases.direction(batch, params64, scheduler.Policy(granularity, objective=objective), dtype='float64')
    assert offline.relative_error(got, wanted) <= 1e-10


def test_whole_sequences_through_the_students_layers_are_those_of_the_branches(params64):
  rng = np.random.default_rng(0)
  batch = rewritten(offline.random_batch(rng, groups=1, max_turns=3, rewards=(0.0, 1.0)), rng)
  assert any(t.branches for t in batch.trajectories) and len({t.reward for t in batch.trajectories}) == 2
  with jax.enable_x64(True):
    functions = sources.SourceFunctions(cases.TINY, dtype='float64')
    got = whole_sequences.whole_sequence_direction(functions, params64, batch, OBJECTIVES['grpo'])
    assert offline.relative_error(got, reference.grpo_direction(cases.TINY, params64, batch)) <= 1e-10


@pytest.mark.parametrize('granularity', ['trajectory', 'forward'])
def test_exact_sums_of_trees_have_equal_bits_for_every_order(granularity):
  rng = np.random.default_rng(5)
  batch = rewritten(offline.random_batch(rng, groups=2), rng)
  assert any(t.branches for t in batch.trajectories)
  policy = scheduler.Policy(granularity, direct=False)
  seen = {offline.bits(cases.direction(batch, cases.tiny_params('float32'), policy, accumulator='exact', order_seed=order)[0])
          for order in range(4)}
  assert len(seen) == 1


def turn(index, context, sampled, keeps=None, scored=None):
  tokens = types.SampledTokens(sampled, (-1.0,) * len(sampled), 0, 0, types.FinishReason.STOP)
  return types.Turn(index, context, tokens, scored or (True,) * len(sampled), keeps=keeps)


def test_segments_are_cut_where_paths_part_and_hold_every_token_once():
  reasoning, answer = (11, 12), (13, 14)
  t = types.Trajectory(0, 0, 0, 'task', 0, (1, 2, 3), (
      turn(0, (), reasoning + answer), turn(1, answer + (21,), (22, 23), keeps=3), turn(2, (31,), (32,))), types.TerminalReason.DONE)
  assert t.branches and t.paths() == ((1, 2, 3), (1, 2, 3), (1, 2, 3, 13, 14, 21, 22, 23))
  tree = branches.segments(t)
  assert [(s.parent, s.before, s.behind, s.data.completion.tolist(), s.rank.tolist()) for s in tree] == [
      (-1, 3, 0, [11, 12, 13, 14], [0, 1, 2, 3]), (-1, 3, 0, [13, 14, 21, 22, 23, 31, 32], [4, 5, 6])]
  later = dataclasses.replace(t, turns=(turn(0, (), reasoning + answer), turn(1, (21,), (22,), keeps=5), turn(2, (31,), (32,), keeps=6)))
  tree = branches.segments(later)
  assert [(s.parent, s.before, s.behind, s.data.completion.tolist()) for s in tree] == [
      (-1, 3, 0, [11, 12]), (0, 12, 2, [13, 14]), (0, 12, 2, [21]), (2, 21, 3, [22]), (2, 21, 3, [31, 32])]


@pytest.mark.parametrize('granularity', ['trajectory', 'forward'])
def test_only_paths_need_to_fit_the_shapes(params64, granularity):
  """A tree of more tokens than the longest bucket, on paths that are shorter."""
  make = lambda index, reward, keeps: types.Trajectory(
      0, 0, index, 'task', 0, (1, 2), tuple(turn(n, (n,), tuple(range(3 + index, 15 + index)), keeps if n else None) for n in range(3)),
      types.TerminalReason.DONE, reward)
  members = make(0, 1.0, 2), make(1, 0.0, 4)
  assert [t.longest_completion for t in members] == [13, 15] and all(len(t.completion_ids) == 39 > cases.BUCKETS.lengths[-1] for t in members)
  batch = types.LogicalBatch(0, 0, (types.Group(0, 'task', (1, 2), members),))
  with jax.enable_x64(True):
    got, _ = cases.direction(batch, params64, scheduler.Policy(granularity), dtype='float64')
    assert offline.relative_error(got, reference.grpo_direction(cases.TINY, params64, batch)) <= 1e-10


def test_what_no_scored_id_depends_on_is_left_out():
  t = types.Trajectory(0, 0, 0, 'task', 0, (1, 2), (
      turn(0, (), (5, 6), scored=(True, False)), turn(1, (7,), (8,), keeps=2)), types.TerminalReason.DONE)
  assert [s.data.completion.tolist() for s in branches.segments(t)] == [[5], [7, 8]]


def test_the_prompt_cannot_be_rewritten():
  with pytest.raises(ValueError, match='turn 1 keeps 1 ids of a path of 4; the 2 of the prompt must stay'):
    types.Trajectory(0, 0, 0, 'task', 0, (1, 2), (turn(0, (), (5, 6)), turn(1, (7,), (8,), keeps=1)), types.TerminalReason.DONE)
  with pytest.raises(ValueError, match='keeps 9 ids of a path of 4'):
    types.Trajectory(0, 0, 0, 'task', 0, (1, 2), (turn(0, (), (5, 6)), turn(1, (7,), (8,), keeps=9)), types.TerminalReason.DONE)
