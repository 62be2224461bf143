"""Diagnostics against their definitions, written out, and the shared-buffer replay."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.composer import cases
from ts_jax.composer import diagnostics, methods, replay
from ts_jax.composer import pool as pool_lib


def events(updates: int = 40):
  for update, rows in cases.fixed_stream(updates):
    yield from rows
    yield replay.Drain(update)


def test_shares_of_rollouts_are_weighted_by_tokens():
  rollout, tokens = np.array([4, 9, 4, 2]), np.array([10, 20, 30, 0])
  assert diagnostics.effective_rollouts(rollout, tokens) == pytest.approx(1 / ((40 / 60)**2 + (20 / 60)**2))
  assert diagnostics.effective_rollouts(np.arange(5), np.full(5, 3)) == pytest.approx(5)
  assert diagnostics.top_rollout_share(rollout, tokens) == pytest.approx(40 / 60)
  assert diagnostics.turns_per_rollout(rollout) == pytest.approx(4 / 3)
  assert diagnostics.dead_slot_share(tokens) == 0.25
  assert diagnostics.disagreement_deviation(rollout, np.array([1.0, 2.0, 5.0, 4.0])) == pytest.approx(np.std([6.0, 2.0, 4.0]))
  assert diagnostics.kl_per_token(np.array([1.0, 2.0, 5.0, 4.0]), tokens) == pytest.approx(12 / 60)
  assert diagnostics.effective_rollouts(rollout, np.zeros(4, int)) == diagnostics.top_rollout_share(rollout, np.zeros(4, int)) == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_gini_is_half_the_relative_mean_difference(counts):
  mean = sum(counts) / len(counts)
  expected = sum(abs(a - b) for a in counts for b in counts) / (2 * len(counts)**2 * mean) if mean else 0.0
  assert diagnostics.gini(np.array(counts)) == pytest.approx(expected, abs=1e-12)
  assert diagnostics.never_selected_share(np.array(counts)) == counts.count(0) / len(counts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=12).filter(
    lambda p: len({a for a, _ in p}) > 1 and len({b for _, b in p}) > 1))
def test_rank_correlation_is_pearsons_of_mean_ranks(pairs):
  rank = lambda values: [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]
  a, b = ([p[i] for p in pairs] for i in (0, 1))
  assert diagnostics.rank_correlation(a, b) == pytest.approx(np.corrcoef(rank(a), rank(b))[0, 1], abs=1e-12)


def test_a_correlation_that_is_not_defined_is_an_error():
  with pytest.raises(ValueError, match='no rank correlation'):
    diagnostics.rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])
  with pytest.raises(ValueError, match='2 cached and 3 current'):
    diagnostics.rank_correlation([1.0, 2.0], [1.0, 2.0, 3.0])


def test_overlap_of_selections_and_moving_average():
  rollout, turn = np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1])
  assert diagnostics.selection_overlap(rollout, turn, np.array([3, 2, 1, 5, 4]), np.array([3, 1, 2, 4, 5]), k=2) == 3 / 4
  np.testing.assert_allclose(diagnostics.moving_average([1.0, 2.0, 3.0], 0.5), [1.0, 1.5, 2.25])


def test_depth_outcome_and_retention_tables():
  rows = [cases.make_row(0, t, quarters=12 - t, succeeded=t < 5) for t in (0, 1, 4, 10, 11, 30)]
  batch = pool_lib.Candidates.of(rows)
  assert diagnostics.depth_outcome(batch) == pytest.approx({('0-1', True): 2 / 6, ('4-5', True): 1 / 6, ('10+', False): 3 / 6})
  found = diagnostics.focus_retention(batch.take(slice(0, 2)), batch.take(slice(2, None)), [3.0, 3.0], [1.0] * 4)
  assert (found['dropped_turns'], found['dropped_norm']) == pytest.approx((4 / 6, 0.4))
  assert (found['kept_depth'], found['dropped_depth']) == (0.5, 13.75)
  assert found['kept_score_per_token'] == pytest.approx((12 + 11) / 2 / 4 / 2)


def test_replay_counts_trained_turns_of_valid_rollouts():
  rows = [cases.make_row(r, t) for r in range(2) for t in range(3)]
  rows.append(cases.make_row(2, 0, defect='missing_teacher'))  # a rollout without a valid turn is not counted
  rows += [cases.make_row(3, 0, defect='no_overlap'), cases.make_row(3, 1)]  # vanilla reaches only the dead one
  stream = [*rows, replay.Drain(0), cases.make_row(9, 0), replay.Drain(1), cases.make_row(8, 0)]  # rollout 8 has no chance
  recording = replay.Recording.of(stream)
  numbers = methods.Settings(batch_size=4, cap=2)
  vanilla = replay.replay(recording, methods.METHODS['vanilla'], numbers)
  assert replay.trained_turns(recording, vanilla).tolist() == [3, 3, 0, 0]
  found = replay.measures(recording, vanilla)
  assert found['never_selected_share'] == 0.5 and found['gini'] == pytest.approx(0.5)
  assert found['dead_slot_share'] == pytest.approx(1 / 4) and found['scored_per_trained'] == pytest.approx(8 / 6)
  divopd = replay.replay(recording, methods.METHODS['divopd'], numbers)
  assert replay.trained_turns(recording, divopd).tolist() == [3, 3, 1, 1]
  assert replay.measures(recording, divopd)['never_selected_share'] == 0


def test_replay_shows_what_coverage_and_gate_do_when_producers_are_fast():
  numbers = methods.Settings(batch_size=16, cap=4)
  found = replay.compare(events(), numbers)
  assert set(found) == set(methods.METHODS)
  assert found['divopd_base']['never_selected_share'] <= found['vanilla']['never_selected_share'] / 2
  assert found['divopd_base']['gini'] < found['vanilla']['gini']
  # From the second update on the pools differ; the slots a rollout receives stay alike (Table 11 prints one line for both).
  assert found['divopd']['never_selected_share'] == pytest.approx(found['divopd_base']['never_selected_share'], abs=0.02)
  assert found['uncapped']['never_selected_share'] > found['divopd_base']['never_selected_share']
  assert found['vanilla']['dead_slot_share'] > 0 and found['gate_only']['dead_slot_share'] == 0
  assert found['divopd']['kl_per_token'] > found['divopd_base']['kl_per_token']
  assert found['top_b']['kl_per_token'] > found['divopd']['kl_per_token']
  assert all(f['selected'] == 640 for f in found.values())
  assert found == replay.compare(events(), numbers)


def test_a_recorded_buffer_survives_json_and_needs_a_drain():
  recorded = [json.loads(json.dumps(e.to_json())) for e in events(4)]
  again = [replay.event_from_json(e) for e in recorded]
  assert replay.compare(again, methods.Settings(8)) == replay.compare(events(4), methods.Settings(8))
  with pytest.raises(ValueError, match='without a drain'):
    replay.Recording.of([cases.make_row(0, 0)])
