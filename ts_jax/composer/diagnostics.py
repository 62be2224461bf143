"""Measures of a composed batch and of what a learner ever used (DivOPD Sections 2.2 and 4.5, Appendices D to F).

Plain arrays in, numbers out.  Shares are fractions, not per cent.  Tokens are valid tokens unless the caller counts others.
"""

from __future__ import annotations

import math
from typing import Mapping, Sequence

import numpy as np

from ts_jax.composer import focus
from ts_jax.composer.pool import Candidates

DEPTH_BINS = (0, 2, 4, 6, 10)  # lower ends, turns: Table 14


def rollout_sums(rollout: np.ndarray, values: np.ndarray) -> np.ndarray:
  """Sum of `values` [n] for every distinct rollout."""
  _, group = np.unique(rollout, return_inverse=True)
  return np.bincount(group, weights=values)


def effective_rollouts(rollout: np.ndarray, tokens: np.ndarray) -> float:
  """1 / sum p_r^2, p_r the fraction of the batch's tokens from rollout r (Section 2.2); 0 when no row has tokens."""
  sums = rollout_sums(rollout, tokens)
  return float(sums.sum()**2 / (sums**2).sum()) if sums.any() else 0.0


def top_rollout_share(rollout: np.ndarray, tokens: np.ndarray) -> float:
  """max p_r; 0 when no row has tokens."""
  sums = rollout_sums(rollout, tokens)
  return float(sums.max() / sums.sum()) if sums.any() else 0.0


def turns_per_rollout(rollout: np.ndarray) -> float:
  """Selected turns per rollout that has any; 0 for no turns."""
  return len(rollout) / max(len(np.unique(rollout)), 1)


def dead_slot_share(tokens: np.ndarray) -> float:
  """Share of the batch's rows without a valid token."""
  return float((tokens == 0).mean()) if len(tokens) else 0.0


def disagreement_deviation(rollout: np.ndarray, score: np.ndarray) -> float:
  """Population deviation over the batch's rollouts of their summed student - teacher log-probs, nats (Figures 6 and 7)."""
  return float(rollout_sums(rollout, score).std()) if len(rollout) else 0.0


def kl_per_token(score: np.ndarray, tokens: np.ndarray) -> float:
  """Mean student - teacher log-prob of the batch's valid tokens, nats (Table 9)."""
  return float(score.sum() / max(int(tokens.sum()), 1))


def batch_measures(batch: Candidates) -> dict[str, float]:
  """The measures of one batch, as a learner logs them."""
  return {
      'effective_rollouts': effective_rollouts(batch.rollout, batch.valid_tokens),
      'top_rollout_share': top_rollout_share(batch.rollout, batch.valid_tokens),
      'turns_per_rollout': turns_per_rollout(batch.rollout),
      'dead_slot_share': dead_slot_share(batch.valid_tokens),
      'disagreement_deviation': disagreement_deviation(batch.rollout, batch.score),
      'kl_per_token': kl_per_token(batch.score, batch.valid_tokens),
  }


def never_selected_share(counts: np.ndarray) -> float:
  """Share of valid rollouts without a trained turn, from their trained turns [rollouts] (Table 11)."""
  return float((counts == 0).mean()) if len(counts) else 0.0


def gini(counts: np.ndarray) -> float:
  """Gini coefficient of the trained turns of valid rollouts, unused ones included (Table 11): 0 when all are equal."""
  ordered, size = np.sort(counts), len(counts)
  if not size or not ordered.sum():
    return 0.0
  return float(((2 * np.arange(1, size + 1) - size - 1) * ordered).sum() / (size * ordered.sum()))


def scored_per_trained(scored_tokens: int, trained_tokens: int) -> float:
  """Tokens the teacher scored per token trained on (Table 16); 1 - 1 / ratio of them never entered a batch."""
  return scored_tokens / trained_tokens if trained_tokens else math.inf


def depth_outcome(batch: Candidates) -> dict[tuple[str, bool | None], float]:
  """Share of the rows by depth of the turn and outcome of its rollout (Table 14)."""
  shares: dict[tuple[str, bool | None], float] = {}
  for row in batch.rows:
    low = max(b for b in DEPTH_BINS if b <= row.turn)
    high = next((b for b in DEPTH_BINS if b > row.turn), None)
    label = f'{low}+' if high is None else f'{low}-{high - 1}'
    shares[label, row.succeeded] = shares.get((label, row.succeeded), 0.0) + 1 / len(batch)
  return shares


def focus_retention(kept: Candidates, dropped: Candidates, kept_norms: Sequence[float] | None = None,
                    dropped_norms: Sequence[float] | None = None) -> dict[str, float]:
  """What focus left out (Table 10): share of turns, and of gradient norm if norms are given; mean depth and score per token.

  Raises:
    ValueError: one side is empty; there is nothing to compare.
  """
  if not len(kept) or not len(dropped):
    raise ValueError(f'{len(kept)} kept and {len(dropped)} dropped turns: both are needed, so compose from a larger pool')
  result = {'dropped_turns': len(dropped) / (len(kept) + len(dropped))}
  if kept_norms is not None and dropped_norms is not None:
    result['dropped_norm'] = float(np.sum(dropped_norms) / (np.sum(kept_norms) + np.sum(dropped_norms)))
  for name, part in (('kept', kept), ('dropped', dropped)):
    result[f'{name}_depth'] = float(part.turn.mean())
    result[f'{name}_score_per_token'] = float((part.score / np.maximum(part.valid_tokens, 1)).mean())
  return result


def rank_correlation(cached: Sequence[float], current: Sequence[float]) -> float:
  """Spearman's correlation of cached scores and the same turns' recomputed ones; ties share their mean rank (Appendix E.2).

  Raises:
    ValueError: the lengths differ, or one side has a single value, for which no correlation is defined.
  """
  if len(cached) != len(current):
    raise ValueError(f'{len(cached)} cached and {len(current)} current scores: they must be of the same turns')
  a, b = _mean_ranks(np.asarray(cached, np.float64)), _mean_ranks(np.asarray(current, np.float64))
  a, b = a - a.mean() if len(a) else a, b - b.mean() if len(b) else b
  if not a.any() or not b.any():
    raise ValueError(f'{len(cached)} scores without two different values on each side have no rank correlation: compare more turns')
  return float((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))


def selection_overlap(rollout: np.ndarray, turn: np.ndarray, cached: np.ndarray, current: np.ndarray, k: int) -> float:
  """Share of the top k turns of each rollout by cached score that are also its top k by current score (Appendix E.2)."""
  top = [focus.rank(rollout, np.asarray(s, np.float64), turn) < k for s in (cached, current)]
  return float((top[0] & top[1]).sum() / top[0].sum())


def moving_average(values: Sequence[float], alpha: float = 0.12) -> np.ndarray:
  """Exponential moving average [n], started at the first value (the smoothing of Figures 6 and 7)."""
  result = np.asarray(values, np.float64).copy()
  for i in range(1, len(result)):
    result[i] = alpha * result[i] + (1 - alpha) * result[i - 1]
  return result


def mean_measures(measures: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Mean over batches of every measure."""
  return {name: float(np.mean([m[name] for m in measures])) for name in measures[0]} if measures else {}


def _mean_ranks(values: np.ndarray) -> np.ndarray:
  _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
  ends = np.cumsum(counts)
  return (ends - (counts - 1) / 2)[group]
