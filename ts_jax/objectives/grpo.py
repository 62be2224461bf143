"""GRPO: from late scalars (rewards, lengths) to the coefficients of score gradients.

Equations 4 to 7 of ThunderSyncRL.  With H_i the gradient of S_i = sum_t w_it log pi(a_it | h_it),

    g_G = 1/m sum_i (r_i - mu) / (sigma + eps) H_i = (G1 - mu G2) / (m (sigma + eps)),
    G1 = sum_i r_i H_i,  G2 = sum_i H_i,  sigma = population standard deviation.

A direction is one of ascent.  Two precautions the formula does not show:
  * A uniform group has exactly zero direction.  G1 - mu G2 would be rounding noise, and dividing it by eps = 1e-6 would
    make it a gradient (eight rewards of 0.7 have a computed sigma of 1e-16, not 0).
  * Streamed statistics hold (r_i - c) H_i with a centre c fixed in advance, so that G1 - mu G2 does not cancel from the
    full size of the rewards.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Sequence

import numpy as np

EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class GroupReduction:
  """Scalars that close a group: g_G = scale * (G1c - shift * G2), G1c = sum_i (r_i - centre) H_i."""

  shift: float
  scale: float


def is_uniform(rewards: Sequence[float]) -> bool:
  """All rewards are the same number: the group's direction is exactly zero."""
  return all(r == rewards[0] for r in rewards)


def group_moments(rewards: Sequence[float]) -> tuple[float, float]:
  """(mean, population standard deviation) of a group's rewards in float64 (Equation 5).

  Raises:
    ValueError: no rewards, or one that is missing or not finite.
  """
  if not rewards:
    raise ValueError('a group needs at least one reward')
  if any(r is None or not math.isfinite(r) for r in rewards):
    raise ValueError(f'rewards {list(rewards)} are not all finite numbers')
  if is_uniform(rewards):
    return float(rewards[0]), 0.0
  values = np.asarray(rewards, np.float64)
  return float(values.mean()), float(values.std())


def advantages(rewards: Sequence[float], epsilon: float = EPSILON) -> np.ndarray:
  """Group-normalised advantages [m] in float64; exactly zero for a uniform group."""
  mean, std = group_moments(rewards)
  if is_uniform(rewards):
    return np.zeros(len(rewards))
  return (np.asarray(rewards, np.float64) - mean) / (std + epsilon)


def source_coefficients(rewards: Sequence[float], epsilon: float = EPSILON) -> np.ndarray:
  """Coefficient of each H_i in g_G [m]: advantage over group size (Equation 6)."""
  return advantages(rewards, epsilon) / len(rewards)


def group_reduction(rewards: Sequence[float], centre: float, epsilon: float = EPSILON) -> GroupReduction:
  """Scalars that turn centred statistics into g_G (Equation 7).

  Raises:
    ValueError: the group is uniform; its direction is zero and needs no statistics.
  """
  if is_uniform(rewards):
    raise ValueError(f'rewards {list(rewards)} are uniform: the group direction is exactly zero')
  mean, std = group_moments(rewards)
  return GroupReduction(shift=mean - centre, scale=1.0 / (len(rewards) * (std + epsilon)))


def token_weight(prompts_per_update: int, scored_tokens: int) -> float:
  """w_it = 1 / (prompts * L_i): makes the sum of group directions the mean over trajectories (Appendix D.1)."""
  return 1.0 / (prompts_per_update * scored_tokens) if scored_tokens else 0.0
