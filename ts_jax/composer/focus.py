"""Stage 3, focus: which turns fill the slots a rollout received (DivOPD Section 3.3)."""

from __future__ import annotations

import math

import numpy as np

from ts_jax.composer.records import Row


def score(row: Row, mask: np.ndarray) -> float:
  """s(u): student minus teacher log-prob, summed over the valid tokens, at the generating version (Equation 2), nats.

  Correctly rounded, so that turns whose scores tie exactly also tie here.  0 for a row without valid tokens.
  """
  positions = np.flatnonzero(mask).tolist()
  student, teacher = row.student_log_probs, row.teacher_log_probs
  return math.fsum(x for i in positions for x in (student[i], -teacher[i]))


def uniform_keys(rollout: np.ndarray, turn: np.ndarray, seed: int, update: int) -> np.ndarray:
  """Keys [n] in [0, 1) that rank turns uniformly at random: DivOPD-base.

  A key depends on (seed, update, rollout, turn) alone (SplitMix64 over the four), not on what else is in the pool.
  """
  state = np.full(len(rollout), seed % 2**64, np.uint64)
  for part in (np.uint64(update), rollout.astype(np.uint64), turn.astype(np.uint64)):
    state = (state ^ part) + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
  return (state >> np.uint64(11)) * 2.0**-53


def rank(group: np.ndarray, keys: np.ndarray, *ties: np.ndarray) -> np.ndarray:
  """Place of each row within its group [n], from 0: highest key first, ties by lowest `ties` in the order given."""
  order = np.lexsort((*reversed(ties), -keys, group))
  ordered = group[order]
  starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(group) else np.zeros(0, np.int64)
  places = np.empty(len(group), np.int64)
  places[order] = np.arange(len(group)) - np.repeat(starts, np.diff(starts, append=len(group)))
  return places
