"""Token-local terms of an objective: pure functions of a token's scores, differentiated where the token's log-prob is.

A term needs nothing beyond its token's own scores, so it streams as it is: no late scalar, no other trajectory.  Per scored
token t, with w_t its policy-gradient weight (advantage included) and u_t what it counts in the aggregation (advantage not
included), all to be ascended:

    policy gradient        w_t rho_t log pi(a_t | h_t),  rho_t = sg[min(pi(a_t | h_t) / exp(sampler_t), cap)] or 1
    KL to a reference      -kl u_t k(log pi(a_t | h_t), reference_t)
    entropy                entropy u_t H(pi(. | h_t)), over the whole vocabulary at the sampling temperature

All but the entropy are functions of log pi(a_t | h_t) alone: their gradient is a multiplier of grad log pi(a_t | h_t).
They stand beside rewards and beside distillation alike, whose w_t holds the teacher's advantage.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

KL_ESTIMATORS = ('k1', 'k2', 'k3')


class Scores(NamedTuple):
  """What terms are functions of, beside weights and log-probs; a field that no term needs may be None.

  Attributes:
    sampler: [N] log-probs of the targets under the policy that sampled them.
    reference: [N] log-probs of the targets under the frozen reference policy.
    counts: [N] u_t; 0 where masked.
  """

  sampler: Any = None
  reference: Any = None
  counts: Any = None


@dataclasses.dataclass(frozen=True)
class Terms:
  """The terms of an objective; hashable, a static argument of jitted functions.

  Attributes:
    importance_cap: truncation of the importance weight against the sampler, detached; None for no importance weight.
    kl: coefficient of the KL to the reference.
    kl_estimator: with d = reference - log pi: 'k1', -d, whose gradient is that of log pi and zero in expectation; 'k2', d^2 / 2;
      'k3', exp(d) - 1 - d (Schulman, "Approximating KL divergence"; GRPO's).  The estimator is what is differentiated.
    entropy: coefficient of the entropy.
  """

  importance_cap: float | None = None
  kl: float = 0.0
  kl_estimator: str = 'k3'
  entropy: float = 0.0

  def __post_init__(self):
    if self.importance_cap is not None and not 0 < self.importance_cap < math.inf:
      raise ValueError(f'importance_cap={self.importance_cap} must be a positive finite number, or None for no importance weight')
    if self.kl_estimator not in KL_ESTIMATORS:
      raise ValueError(f'kl_estimator {self.kl_estimator!r} is unknown: use one of {KL_ESTIMATORS}')
    for name in ('kl', 'entropy'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(f'{name}={getattr(self, name)} must be finite and not negative: KL is held down and entropy up')

  @property
  def needs(self) -> frozenset[str]:
    """Scores without which the terms are not defined, among 'sampler' and 'reference'; a teacher is the objective's need."""
    by_term = {'sampler': self.importance_cap is not None, 'reference': self.kl > 0}
    return frozenset(name for name, needed in by_term.items() if needed)

  @property
  def needs_counts(self) -> bool:
    """Whether tokens contribute by u_t, so that one of zero advantage still does."""
    return self.kl > 0 or self.entropy > 0

  def check(self, scores: Scores | None):
    """Refuses scores that are missing.

    Raises:
      ValueError: a needed score, or `counts`, is None.
    """
    for name in sorted(self.needs) + ['counts'] * self.needs_counts:
      if getattr(scores, name, None) is None:
        raise ValueError(f'{self} needs {name} [N], which is None')

  def active(self, weights: Array, scores: Scores | None) -> Array:
    """[N] bool, tokens that contribute: w_t or u_t is not 0."""
    return (weights != 0) | (scores.counts != 0) if self.needs_counts else weights != 0

  def local(self, weights: Array, log_probs: Array, scores: Scores | None) -> tuple[Array, Array]:
    """All terms but the entropy.

    Args:
      weights: [N] w_t, teacher advantage included.
      log_probs: [N] log pi(a_t | h_t).
      scores: scores of the tokens.

    Returns:
      (values [N] whose sum is ascended, [N] multipliers of grad log pi(a_t | h_t)).
    """
    if self.importance_cap is not None:
      ratio = jnp.minimum(jnp.exp(log_probs - scores.sampler), self.importance_cap)
      weights = jnp.where(weights != 0, weights * ratio, 0)
    values = jnp.where(weights != 0, weights * log_probs, 0)
    if self.kl > 0:
      value, slope = kl_estimate(self.kl_estimator, log_probs, scores.reference)
      values -= jnp.where(scores.counts != 0, self.kl * scores.counts * value, 0)
      weights -= jnp.where(scores.counts != 0, self.kl * scores.counts * slope, 0)
    return values, weights

  def entropy_weights(self, scores: Scores | None) -> Array | None:
    """[N] multipliers of H(pi(. | h_t)), or None without an entropy term."""
    return self.entropy * scores.counts if self.entropy > 0 else None


def kl_estimate(estimator: str, log_probs: Array, reference: Array) -> tuple[Array, Array]:
  """(estimate [N] of KL(pi || reference) at sampled tokens, its derivative [N] with respect to log pi)."""
  excess = reference - log_probs
  match estimator:
    case 'k1':
      return -excess, jnp.ones_like(excess)
    case 'k2':
      return excess**2 / 2, -excess
  return jnp.expm1(excess) - excess, -jnp.expm1(excess)
