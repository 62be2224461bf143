"""Policy gradients of rewarded trajectories: from late scalars (rewards, lengths) to the coefficients of score gradients.

Equations 4 to 7 of ThunderSyncRL, for every estimator that is affine in the rewards of a group.  With H_i the gradient of
S_i = sum_t w_it log pi(a_it | h_it) and an advantage A_i = a (r_i - mu), mu the group's mean,

    g_G = 1/m sum_i A_i H_i = a (G1 - mu G2) / m,    G1 = sum_i r_i H_i,  G2 = sum_i H_i.

The estimators differ in a, the aggregations in w_it; neither is known before the group closes, or the batch, and neither
needs to be.  A direction is one of ascent.  Two precautions the formula does not show:
  * A uniform group has exactly zero direction.  G1 - mu G2 would be rounding noise, and dividing it by eps = 1e-6 would
    make it a gradient (eight rewards of 0.7 have a computed sigma of 1e-16, not 0).
  * Streamed statistics hold (r_i - c) H_i with a centre c fixed in advance, so that G1 - mu G2 does not cancel from the
    full size of the rewards.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Sequence

import numpy as np

EPSILON = 1e-6
ESTIMATORS = ('standardised', 'mean', 'leave_one_out')
AGGREGATIONS = ('sequence', 'trajectory', 'constant', 'token')

# Objectives by the names the field uses: (estimator, aggregation).
NAMES = {
    'grpo': ('standardised', 'sequence'),
    'dr_grpo': ('mean', 'constant'),
    'rloo': ('leave_one_out', 'trajectory'),
    'reinforce': ('mean', 'trajectory'),
}


@dataclasses.dataclass(frozen=True)
class GroupReduction:
  """Scalars that close a group: g_G = scale * (G1c - shift * G2), G1c = sum_i (r_i - centre) H_i."""

  shift: float
  scale: float


@dataclasses.dataclass(frozen=True)
class PolicyGradient:
  """An estimator and an aggregation.

  Attributes:
    estimator: 'standardised', a = 1 / (sigma + epsilon) with the population deviation (GRPO); 'mean', a = 1 (Dr. GRPO,
      REINFORCE with the group's mean as baseline); 'leave_one_out', a = m / (m - 1): the baseline of a trajectory is the
      mean of the others (RLOO).
    aggregation: how token terms become the batch's direction, each defined over the whole batch so that no split changes
      it.  'sequence', mean over trajectories of their token means; 'trajectory', mean over trajectories of their token
      sums; 'constant', the same divided by `constant`; 'token', mean over all scored tokens of the batch.
    epsilon: added to sigma.
    constant: tokens, for the aggregation 'constant'.
  """

  estimator: str = 'standardised'
  aggregation: str = 'sequence'
  epsilon: float = EPSILON
  constant: int = 1
  needs_rewards: ClassVar[bool] = True
  needs_teacher: ClassVar[bool] = False

  def __post_init__(self):
    if self.estimator not in ESTIMATORS:
      raise ValueError(f'estimator {self.estimator!r} is unknown: use one of {ESTIMATORS}')
    if self.aggregation not in AGGREGATIONS:
      raise ValueError(f'aggregation {self.aggregation!r} is unknown: use one of {AGGREGATIONS}')
    if self.epsilon < 0 or self.constant < 1:
      raise ValueError(f'epsilon={self.epsilon} must not be negative, constant={self.constant} must be at least 1')

  def _slope(self, rewards: Sequence[float]) -> float:
    if self.estimator == 'standardised':
      return 1.0 / (group_moments(rewards)[1] + self.epsilon)
    return len(rewards) / (len(rewards) - 1) if self.estimator == 'leave_one_out' else 1.0

  def advantages(self, rewards: Sequence[float]) -> np.ndarray:
    """A_i [m] in float64; exactly zero for a uniform group (a group of one is uniform)."""
    mean, _ = group_moments(rewards)
    if is_uniform(rewards):
      return np.zeros(len(rewards))
    return (np.asarray(rewards, np.float64) - mean) * self._slope(rewards)

  def source_coefficients(self, rewards: Sequence[float]) -> np.ndarray:
    """Coefficient of each H_i in g_G [m]: advantage over group size (Equation 6)."""
    return self.advantages(rewards) / len(rewards)

  def is_zero(self, rewards: Sequence[float]) -> bool:
    """The group's direction is exactly zero."""
    return is_uniform(rewards)

  def group_reduction(self, rewards: Sequence[float], centre: float) -> GroupReduction:
    """Scalars that turn centred statistics into g_G (Equation 7).

    Raises:
      ValueError: the group is uniform; its direction is zero and needs no statistics.
    """
    if is_uniform(rewards):
      raise ValueError(f'rewards {list(rewards)} are uniform: the group direction is exactly zero')
    mean, _ = group_moments(rewards)
    return GroupReduction(shift=mean - centre, scale=self._slope(rewards) / len(rewards))

  def token_weight(self, prompts_per_update: int, group_size: int, scored_tokens: int) -> float:
    """w_it, up to `normaliser` (Appendix D.1 for 'sequence')."""
    if not scored_tokens:
      return 0.0
    match self.aggregation:
      case 'sequence':
        return 1.0 / (prompts_per_update * scored_tokens)
      case 'trajectory':
        return 1.0 / prompts_per_update
      case 'constant':
        return 1.0 / (prompts_per_update * self.constant)
    return float(group_size)  # 'token': undoes the mean over the group; the batch's token count divides at the barrier

  def normaliser(self, scored_tokens: int) -> float:
    """Factor of the whole batch's direction, a late scalar: 1 / N for 'token', N all scored tokens of the batch."""
    return 1.0 / max(scored_tokens, 1) if self.aggregation == 'token' else 1.0


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
