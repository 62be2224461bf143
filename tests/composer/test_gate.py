"""The validity gate and the score."""

import numpy as np
import pytest

from tests.composer import cases
from ts_jax.composer import focus, gate, records
from ts_jax.composer import pool as pool_lib
from ts_jax import types


@pytest.mark.parametrize('defect', sorted(cases.DEFECTS))
def test_every_defect_is_counted_under_its_own_reason(defect):
  rows = [cases.make_row(0, 0), cases.make_row(0, 1, defect=defect)]
  candidates = pool_lib.Candidates.of(rows)
  assert candidates.valid.tolist() == [True, False]
  assert gate.counts(candidates.reason) == {defect: 1}
  # A shortened prompt still carries loss for a reader without a gate; every other defect leaves nothing to train on.
  assert candidates.valid_tokens.tolist() == [2, 2 if defect == 'truncated_prompt' else 0]


@pytest.mark.parametrize('changes, reason', [
    (dict(student_log_probs=(-1.0, -1.0)), gate.Reason.MISSING_TOKENS),
    (dict(teacher_log_probs=(-1.0,) * 4), gate.Reason.MISSING_TEACHER),
    (dict(teacher_valid_mask=(True,) * 4), gate.Reason.MISALIGNED_MASK),
    (dict(scored_mask=()), gate.Reason.EMPTY_MASK),
    (dict(student_log_probs=(cases.NAN, -1.0, -1.0)), gate.Reason.NON_FINITE),
    (dict(prompt_truncated=True, teacher_log_probs=None), gate.Reason.TRUNCATED_PROMPT),
    (dict(token_ids=(), teacher_log_probs=None), gate.Reason.MISSING_TOKENS),
])
def test_the_first_reason_that_applies_is_given(changes, reason):
  assert gate.inspect(cases.make_row(0, 0, **changes))[0] is reason


def test_an_absent_teacher_mask_means_all_valid_and_a_partial_one_restricts_the_score():
  whole, part = cases.make_row(0, 0, quarters=3), cases.make_row(0, 0, quarters=3, teacher_valid_mask=(True, False, True))
  assert gate.inspect(whole)[1].tolist() == [True, True, False]
  assert gate.inspect(part)[1].tolist() == [True, False, False]
  assert focus.score(whole, gate.inspect(whole)[1]) == 0.75
  assert focus.score(part, gate.inspect(part)[1]) == -1.0 + 1.5 + 0.75


def test_the_score_is_a_cumulative_sum_correctly_rounded():
  student, teacher = (1e16, 1.0, -1e16, -0.5), (0.0, 0.0, 0.0, -1.5)
  row = cases.make_row(0, 0, token_ids=(1,) * 4, student_log_probs=student, teacher_log_probs=teacher, scored_mask=(True,) * 4)
  assert focus.score(row, np.ones(4, bool)) == 2.0


def test_a_row_of_a_recorded_turn_survives_json():
  sampled = types.SampledTokens((4, 5), (-0.5, -0.25), 3, 4, types.FinishReason.STOP)
  row = records.from_turn(types.Turn(2, (9,), sampled, (True, False)), 8, [-1.0, -2.0], task='t', succeeded=True)
  assert (row.key, row.version, row.scored_mask, row.teacher_valid_mask) == ((8, 2), 3, (True, False), None)
  assert records.Row.from_json(row.to_json()) == row
