"""The learner's loss on a composed batch: token means within rows, then the mean of all N rows (DivOPD Equations 1, 3, 4).

A dead row contributes nothing and counts in N.  The direction of descent is the sum over valid tokens of

    w_ti A_ti grad log pi(y_ti | h_ti),    w_ti = 1 / (N |V_t|),    A_ti = beta (log pi_teacher - log pi_learner)

with A stopped and the learner's log-probs recomputed at the snapshot before the update.  The surrogate's ratio of policy to
snapshot is one where its gradient is taken, once per batch, so its derivative is grad log pi and clipping is inactive.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from ts_jax.composer import gate
from ts_jax.composer.records import Row


def token_weights(rows: Sequence[Row], row_weights: Sequence[float] | None = None) -> list[np.ndarray]:
  """w_t [T_t] in float64 for every row of the batch; zero outside the valid tokens.

  Args:
    rows: the batch, dead rows included.
    row_weights: factors of the rows [N]; None for ones.

  Raises:
    ValueError: as many factors as rows are needed.
  """
  if row_weights is not None and len(row_weights) != len(rows):
    raise ValueError(f'{len(row_weights)} row weights for {len(rows)} rows: give one per row, dead rows included')
  weights = []
  for index, row in enumerate(rows):
    _, mask = gate.inspect(row)
    factor = 1.0 if row_weights is None else float(row_weights[index])
    weights.append(mask * (factor / (len(rows) * max(int(mask.sum()), 1))))
  return weights


def advantages(row: Row, learner_log_probs: Sequence[float], beta: float = 1.0) -> np.ndarray:
  """A_t [T] in float64 (Equation 1); zero outside the valid tokens, whatever the scores hold there.

  Args:
    row: the turn.
    learner_log_probs: log-probs of its ids at the learner's snapshot [T], nats.
    beta: distillation coefficient.

  Raises:
    ValueError: the log-probs do not fit the row or are not finite on a valid token.
  """
  if len(learner_log_probs) != len(row.token_ids):
    raise ValueError(f'turn {row.key}: {len(learner_log_probs)} learner log-probs for {len(row.token_ids)} ids: recompute them')
  _, mask = gate.inspect(row)
  result = np.zeros(len(mask))
  if mask.any():
    learner = np.asarray(learner_log_probs, np.float64)[mask]
    if not np.isfinite(learner).all():
      raise ValueError(f'turn {row.key}: a learner log-prob of a valid token is not finite: the snapshot cannot score it')
    result[mask] = beta * (np.asarray(row.teacher_log_probs, np.float64)[mask] - learner)
  return result


def score_coefficients(rows: Sequence[Row], learner_log_probs: Sequence[Sequence[float]], beta: float = 1.0,
                       row_weights: Sequence[float] | None = None) -> list[np.ndarray]:
  """w_t * A_t [T_t]: coefficients of grad log pi in the direction of descent (Equation 4, negated)."""
  if len(learner_log_probs) != len(rows):
    raise ValueError(f'learner log-probs of {len(learner_log_probs)} rows for a batch of {len(rows)}')
  weights = token_weights(rows, row_weights)
  return [w * advantages(row, own, beta) for w, row, own in zip(weights, rows, learner_log_probs)]


def loss_value(rows: Sequence[Row], learner_log_probs: Sequence[Sequence[float]], beta: float = 1.0,
               row_weights: Sequence[float] | None = None) -> float:
  """L (Equation 3), nats."""
  return -float(sum(c.sum() for c in score_coefficients(rows, learner_log_probs, beta, row_weights)))
