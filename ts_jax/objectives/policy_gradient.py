"""Policy gradients of rewarded trajectories: from late scalars (rewards, lengths) to the coefficients of score gradients.

Equations 4 to 7 of ThunderSyncRL, for every estimator whose advantage is a function of a trajectory's own reward, given the
rewards of its population (its group, or the whole batch).  With H_i the gradient of S_i = sum_t w_it log pi(a_it | h_it):

    affine, A_i = a (r_i - mu)    g_G = 1/m sum_i A_i H_i = a (G1 - mu G2) / m,    G1 = sum_i r_i H_i,  G2 = sum_i H_i
    any other, A_i = A(r_i)       g_G = 1/m sum_r A(r) B_r,    B_r = sum of H_i over the trajectories with reward r

The estimators differ in A, the aggregations in w_it; neither is known before the population is, and neither needs to be.
With the batch as population the factor 1/m is part of w_it, so that sums need not be told apart by groups.  A direction is
one of ascent.  Two precautions the formulas do not show:
  * A uniform population has exactly zero direction.  G1 - mu G2 would be rounding noise, and dividing it by eps = 1e-6 would
    make it a gradient (eight rewards of 0.7 have a computed sigma of 1e-16, not 0).
  * Streamed statistics hold (r_i - c) H_i with a centre c fixed in advance, so that G1 - mu G2 does not cancel from the
    full size of the rewards.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Sequence

import numpy as np

from ts_jax.objectives.terms import Terms

EPSILON = 1e-6
AFFINE = ('standardised', 'mean', 'leave_one_out')
ESTIMATORS = (*AFFINE, 'leave_one_out_std')
AGGREGATIONS = ('sequence', 'trajectory', 'constant', 'token')
BASELINES = ('group', 'batch')

# Objectives by the names the field uses: (estimator, aggregation).
NAMES = {
    'grpo': ('standardised', 'sequence'),
    'dr_grpo': ('mean', 'constant'),
    'rloo': ('leave_one_out', 'trajectory'),
    'reinforce': ('mean', 'trajectory'),
}


@dataclasses.dataclass(frozen=True)
class PolicyGradient:
  """An estimator, an aggregation, and terms beside them.

  Attributes:
    estimator: 'standardised', a = 1 / (sigma + epsilon) with the population deviation (GRPO); 'mean', a = 1 (Dr. GRPO,
      REINFORCE); 'leave_one_out', a = m / (m - 1): the baseline of a trajectory is the mean of the others (RLOO).  Not affine:
      'leave_one_out_std', A_i = (r_i - mean of the others) / (deviation of the others + epsilon).
    aggregation: how token terms become the batch's direction, each defined over the whole batch so that no split changes
      it.  'sequence', mean over trajectories of their token means; 'trajectory', mean over trajectories of their token
      sums; 'constant', the same divided by `constant`; 'token', mean over all scored tokens of the batch.
    epsilon: added to a deviation.
    constant: tokens, for the aggregation 'constant'.
    baseline: the population of the estimator, 'group' or 'batch'.
    advantage_clip: advantages are clipped to at most this size, which makes any estimator one that is not affine; None: as
      they are.
    terms: token-local terms.
  """

  estimator: str = 'standardised'
  aggregation: str = 'sequence'
  epsilon: float = EPSILON
  constant: int = 1
  baseline: str = 'group'
  advantage_clip: float | None = None
  terms: Terms = Terms()
  needs_rewards: ClassVar[bool] = True
  needs_teacher: ClassVar[bool] = False

  def __post_init__(self):
    for name, known in (('estimator', ESTIMATORS), ('aggregation', AGGREGATIONS), ('baseline', BASELINES)):
      if getattr(self, name) not in known:
        raise ValueError(f'{name} {getattr(self, name)!r} is unknown: use one of {known}')
    if self.epsilon < 0 or self.constant < 1:
      raise ValueError(f'epsilon={self.epsilon} must not be negative, constant={self.constant} must be at least 1')
    if self.estimator == 'leave_one_out_std' and not self.epsilon:
      raise ValueError("epsilon=0 divides by zero where all others have one reward: estimator 'leave_one_out_std' needs a positive one")
    if self.advantage_clip is not None and not 0 < self.advantage_clip < math.inf:
      raise ValueError(f'advantage_clip={self.advantage_clip} must be a positive finite number, or None for advantages as they are')

  @property
  def needs_batch(self) -> bool:
    """The population is the batch."""
    return self.baseline == 'batch'

  @property
  def affine(self) -> bool:
    """Advantages are affine in the own reward, given the population."""
    return self.estimator in AFFINE and self.advantage_clip is None

  def _slope(self, rewards: Sequence[float]) -> float:
    if self.estimator == 'standardised':
      return 1.0 / (group_moments(rewards)[1] + self.epsilon)
    return len(rewards) / (len(rewards) - 1) if self.estimator == 'leave_one_out' else 1.0

  def _against_others(self, reward: float, population: Sequence[float]) -> float:
    others = sorted(population)  # an order of their own: equal rewards have bit-equal advantages
    others.remove(reward)
    mean, deviation = group_moments(others)
    return (reward - mean) / (deviation + self.epsilon)

  def advantages(self, rewards: Sequence[float], population: Sequence[float] | None = None) -> np.ndarray:
    """A_i [m] in float64; exactly zero where the population is uniform (a population of one is).

    Args:
      rewards: of a group [m].
      population: what they are relative to, which holds them; None: themselves.
    """
    population = rewards if population is None else population
    mean, _ = group_moments(population)
    if is_uniform(population):
      return np.zeros(len(rewards))
    if self.estimator in AFFINE:
      advantages = (np.asarray(rewards, np.float64) - mean) * self._slope(population)
    else:
      by_reward = {r: self._against_others(r, population) for r in set(rewards)}
      advantages = np.array([by_reward[r] for r in rewards])
    return advantages if self.advantage_clip is None else np.clip(advantages, -self.advantage_clip, self.advantage_clip)

  def source_coefficients(self, rewards: Sequence[float], population: Sequence[float] | None = None) -> np.ndarray:
    """Coefficient of each H_i in g_G [m]: advantage over group size (Equation 6), which with a batch baseline is in w_it."""
    return self.advantages(rewards, population) / self._members(rewards)

  def is_zero(self, population: Sequence[float]) -> bool:
    """All advantages are exactly zero."""
    return is_uniform(population)

  def reduction(self, population: Sequence[float], centre: float) -> tuple[float, float]:
    """(shift, scale) that turn centred statistics into g_G = scale (G1c - shift G2), G1c = sum_i (r_i - centre) H_i (Equation 7).

    Raises:
      ValueError: the population is uniform, so that its direction is zero and needs no statistics; or A is not affine.
    """
    if is_uniform(population):
      raise ValueError(f'rewards {list(population)} are uniform: the direction is exactly zero')
    if not self.affine:
      raise ValueError(f'{self} is not affine in the reward: see reward_coefficients')
    mean, _ = group_moments(population)
    return mean - centre, self._slope(population) / self._members(population)

  def reward_coefficients(self, population: Sequence[float]) -> dict[float, float]:
    """Coefficient of B_r by reward r, ascending."""
    rewards = sorted(set(population))
    return dict(zip(rewards, (self.advantages(rewards, population) / self._members(population)).tolist()))

  def _members(self, population: Sequence[float]) -> int:
    return 1 if self.needs_batch else len(population)

  def token_weight(self, prompts_per_update: int, group_size: int, scored_tokens: int) -> float:
    """w_it, up to `normaliser` (Appendix D.1 for 'sequence')."""
    if not scored_tokens:
      return 0.0
    return self._aggregate(prompts_per_update, group_size, scored_tokens) / (group_size if self.needs_batch else 1)

  def _aggregate(self, prompts_per_update: int, group_size: int, scored_tokens: int) -> float:
    match self.aggregation:
      case 'sequence':
        return 1.0 / (prompts_per_update * scored_tokens)
      case 'trajectory':
        return 1.0 / prompts_per_update
      case 'constant':
        return 1.0 / (prompts_per_update * self.constant)
    return float(group_size)  # 'token': undoes the mean over the group; the batch's token count divides at the barrier

  def count_coefficient(self, group_size: int) -> float:
    """What takes the advantage's place for KL and entropy: 1 over the group's size, unless that is in w_it."""
    return 1.0 if self.needs_batch else 1.0 / group_size

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
