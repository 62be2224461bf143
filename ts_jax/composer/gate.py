"""Stage 1, the validity gate: which turns carry usable supervision, and why the others do not (DivOPD Section 3.1).

Waiting cannot repair a rejected turn, so it is discarded for good, under the first reason that applies: the counts of the
reasons add up to the rows rejected.
"""

from __future__ import annotations

import enum

import numpy as np

from ts_jax.composer.records import Row


class Reason(enum.IntEnum):
  """Why a row is rejected, in the order of checking."""

  VALID = 0
  TRUNCATED_PROMPT = 1
  MISSING_TOKENS = 2  # no ids, or no student log-prob for each of them
  MISSING_TEACHER = 3  # no teacher log-prob for each id
  MISALIGNED_MASK = 4  # a mask of another length than the ids
  EMPTY_MASK = 5  # no id is scored
  NO_OVERLAP = 6  # no scored id has a usable teacher score
  NON_FINITE = 7  # a log-prob of a valid token is not finite


def inspect(row: Row) -> tuple[Reason, np.ndarray]:
  """(reason, valid tokens bool [T]): VALID(u) of Algorithm 1 and the effective mask m of the loss.

  The mask holds scored ids with a usable teacher score.  It is empty when the fields do not fit each other or a score in it
  is not finite: such a row is dead.  A truncated prompt alone does not empty it, so a reader without a gate trains on it.
  """
  size = len(row.token_ids)
  nothing = np.zeros(size, bool)
  reason = Reason.VALID
  if not size or len(row.student_log_probs) != size:
    reason = Reason.MISSING_TOKENS
  elif row.teacher_log_probs is None or len(row.teacher_log_probs) != size:
    reason = Reason.MISSING_TEACHER
  elif row.scored_mask and len(row.scored_mask) != size:
    reason = Reason.MISALIGNED_MASK
  elif row.teacher_valid_mask is not None and len(row.teacher_valid_mask) != size:
    reason = Reason.MISALIGNED_MASK
  elif not any(row.scored_mask):
    reason = Reason.EMPTY_MASK
  mask = nothing
  if reason is Reason.VALID:
    mask = np.array(row.scored_mask, bool)
    if row.teacher_valid_mask is not None:
      mask &= np.array(row.teacher_valid_mask, bool)
    if not mask.any():
      reason = Reason.NO_OVERLAP
    elif not (np.isfinite(row.student_log_probs)[mask].all() and np.isfinite(row.teacher_log_probs)[mask].all()):
      reason, mask = Reason.NON_FINITE, nothing
  return (Reason.TRUNCATED_PROMPT if row.prompt_truncated else reason), mask


def counts(reasons: np.ndarray) -> dict[str, int]:
  """Rejected rows by reason, from `Reason` codes [n]; reasons that did not occur are left out."""
  found = np.bincount(reasons, minlength=len(Reason))
  return {reason.name.lower(): int(found[reason]) for reason in Reason if reason is not Reason.VALID and found[reason]}
