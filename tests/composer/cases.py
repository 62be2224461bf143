"""Rows and streams for the composer's tests.  Scores are multiples of 1/4: any order of summation gives the same float."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from ts_jax.composer import methods
from ts_jax.composer.records import Row

NAN = float('nan')
# What can be wrong with a row, by the name under which the gate counts it.
DEFECTS = {
    'truncated_prompt': dict(prompt_truncated=True),
    'missing_tokens': dict(token_ids=()),
    'missing_teacher': dict(teacher_log_probs=None),
    'misaligned_mask': dict(scored_mask=(True, True)),
    'empty_mask': dict(scored_mask=(False, False, False)),
    'no_overlap': dict(teacher_valid_mask=(False, False, True)),
    'non_finite': dict(teacher_log_probs=(-1.0, float('-inf'), -1.0)),
}


def make_row(rollout: int, turn: int, version: int = 0, quarters: int = 0, defect: str = '', **changes) -> Row:
  """A row with two valid tokens and s(u) = quarters / 4; the third token is not scored and holds garbage."""
  row = Row(rollout=rollout, turn=turn, version=version, token_ids=(5, 6, 7), student_log_probs=(-1.0, -2.0, NAN),
            teacher_log_probs=(-1.5 - quarters / 4, -1.5, NAN), scored_mask=(True, True, False), task=f'task-{rollout % 3}')
  return dataclasses.replace(row, **{**DEFECTS.get(defect, {}), **changes})


@st.composite
def streams(draw, defects: bool = True) -> list[tuple[int, list[Row], list[str]]]:
  """(update, rows that arrive before it, their defects), rollouts interleaved, updates skipped at times."""
  turns, update, stream = {}, 0, []
  kinds = st.sampled_from(('',) * 9 + tuple(DEFECTS)) if defects else st.just('')
  row = st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(-2, 3), kinds)
  for _ in range(draw(st.integers(1, 7))):
    rows, wrong = [], []
    for rollout, lag, quarters, defect in draw(st.lists(row, max_size=24)):
      turn = turns[rollout] = turns.get(rollout, -1) + 1
      rows.append(make_row(rollout, turn, max(update - lag, 0), quarters, defect))
      wrong.append(defect)
    stream.append((update, rows, wrong))
    update += draw(st.sampled_from((1, 1, 1, 2, 3)))
  return stream


@st.composite
def settings_of(draw) -> methods.Settings:
  """Small settings: everything overflows and expires soon."""
  return methods.Settings(batch_size=draw(st.integers(1, 8)), multiplier=draw(st.integers(1, 4)), cap=draw(st.integers(1, 4)),
                          max_staleness=draw(st.integers(0, 4)), max_pending_age=draw(st.integers(0, 4)), seed=draw(st.integers(0, 3)),
                          task_cap=draw(st.integers(1, 3)), task_token_share=draw(st.sampled_from((0.1, 0.25, 0.5, 1.0))))


def fixed_stream(updates: int = 40, seed: int = 0) -> list[tuple[int, list[Row]]]:
  """Variable-length rollouts, arriving twice as fast as a batch of 16 drains; the tail of every fifth is truncated."""
  rng, stream, rollout = np.random.default_rng(seed), [], 0
  for update in range(updates):
    rows = []
    while len(rows) < 32:
      length = int(rng.integers(1, 14))
      for turn in range(length):
        late = rollout % 5 == 0 and turn >= 8
        rows.append(make_row(rollout, turn, update, int(rng.integers(-3, 12)), 'truncated_prompt' if late else '',
                             succeeded=length < 7, **({'scored_mask': (False,) * 3} if late else {})))
      rollout += 1
    stream.append((update, rows))
  return stream
