"""Stage 2, rollout-first coverage: how many slots each rollout receives (DivOPD Section 3.2, Algorithm 1 steps 4 to 7).

Sweeping groups under a cap that rises by one is sorting by (sweep, group, rank within the group): with cap k, the turn of
rank j joins in sweep max(0, j - k + 1).  The batch is the head of that order, so its last group may receive fewer slots.
"""

from __future__ import annotations

import numpy as np


def sweep(rollout: np.ndarray, first_seen: np.ndarray, rank: np.ndarray, budget: int, cap: int | None) -> np.ndarray:
  """Chooses at most `budget` of the valid turns, rollouts that wait longest first.

  Args:
    rollout: rollout of each turn [n].
    first_seen: update in which a learner first saw the turn [n]; a rollout has waited since its oldest one.
    rank: place of the turn within its rollout [n], from 0 without gaps.
    budget: B, turns.
    cap: k, turns per rollout in the first sweep; None for no cap.

  Returns:
    Indices in order of selection: min(budget, n) of them, from at least min(rollouts, ceil(budget / cap)) rollouts.
  """
  names, group = np.unique(rollout, return_inverse=True)
  oldest = np.full(len(names), np.iinfo(np.int64).max)
  np.minimum.at(oldest, group, first_seen)
  place = np.empty(len(names), np.int64)
  place[np.argsort(oldest, kind='stable')] = np.arange(len(names))  # names are sorted: ties go to the lower rollout
  sweeps = np.zeros_like(rank) if cap is None else np.maximum(rank - cap + 1, 0)
  return np.lexsort((rank, place[group], sweeps))[:budget]
