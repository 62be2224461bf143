"""Learner tail and speedup over Sync of one rollout window (Equations 16 to 20, 23 and 27 of ThunderSyncRL).

Times are in units of the rollout time R: `service_ratio` rho = L / R with L the service of Sync's pass, `suffix_ratio`
kappa = P / R, and the tail lambda = [c_n - R]+ / R, the learner time that remains after rollout.  A granularity whose work is
not 1 streams work * L; everything here that takes a law accounts for it.
"""

from __future__ import annotations

import numpy as np

from ts_jax.theory.release import ReleaseLaw

_HALVINGS = 50  # of a piece: the error of the supremum is below 1e-15


def tail(law: ReleaseLaw, service_ratio: np.ndarray) -> np.ndarray:
  """lambda, the shape of `service_ratio` (Equation 19).

  Between two edges of the law, u + rho (1 - F(u)) is concave: its maximum is where rho dF/du = 1 (Equation 23), or an edge.

  Raises:
    ValueError: a ratio that is not positive and finite.
  """
  ratio = positive('service_ratio', service_ratio) * law.granularity.work
  values, where = np.unique(ratio, return_inverse=True)
  rho = values[:, None]
  edges, offset, slope = law.pieces()
  low, high = (np.broadcast_to(e, (len(values), len(slope))) for e in (edges[:-1], edges[1:]))
  for _ in range(_HALVINGS):
    middle = (low + high) / 2
    rising = rho * law.slope(middle, slope) < 1
    low, high = np.where(rising, middle, low), np.where(rising, high, middle)
  u = (low + high) / 2
  released = offset + slope * u**(law.service_exponent + 1) + law.granularity.closure * u**(law.service_exponent + law.group_size)
  endpoint = np.max(u + rho * (1 - released), axis=1)
  return np.maximum(endpoint - 1, 0.0)[where].reshape(ratio.shape)


def release_lag(law: ReleaseLaw) -> float:
  """D = sup [u - F(u)], the largest lag behind uniform release; the tail at balance (Equation 20)."""
  return float(tail(law, np.array(1 / law.granularity.work)))


def tail_bounds(lag: float, service_ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(least, greatest) tail of any release with this lag; `service_ratio` of the streamed service (Equation 20)."""
  ratio = positive('service_ratio', service_ratio)
  least = np.maximum(ratio - 1, 0.0)
  return least, least + ratio * lag


def tail_change_bound(release_difference: float, service_ratio: np.ndarray) -> np.ndarray:
  """Most by which the tails of two releases differ that never differ by more than `release_difference` (Equation 27)."""
  return positive('service_ratio', service_ratio) * release_difference


def speedup(law: ReleaseLaw, service_ratio: np.ndarray, suffix_ratio: float) -> np.ndarray:
  """T_Sync / T_ThunderSyncRL of one window, the shape of `service_ratio` (Equation 16)."""
  suffix = not_negative('suffix_ratio', suffix_ratio)
  return (1 + np.asarray(service_ratio) + suffix) / (1 + tail(law, service_ratio) + suffix)


def bound(service_ratio: np.ndarray, suffix_ratio: float) -> np.ndarray:
  """Most that overlap can give: (R + L + P) / (max(R, L) + P) <= 2 (Equation 17)."""
  ratio, suffix = positive('service_ratio', service_ratio), not_negative('suffix_ratio', suffix_ratio)
  return (1 + ratio + suffix) / (np.maximum(ratio, 1.0) + suffix)


def positive(name: str, value: np.ndarray) -> np.ndarray:
  """`value` as float64.

  Raises:
    ValueError: an entry that is not positive and finite.
  """
  values = np.asarray(value, np.float64)
  if not np.all(np.isfinite(values) & (values > 0)):
    raise ValueError(f'{name}={value} must be positive and finite')
  return values


def not_negative(name: str, value: np.ndarray) -> np.ndarray:
  """`value` as float64.

  Raises:
    ValueError: an entry that is negative or not finite.
  """
  values = np.asarray(value, np.float64)
  if not np.all(np.isfinite(values) & (values >= 0)):
    raise ValueError(f'{name}={value} must be finite and not negative')
  return values
