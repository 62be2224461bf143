"""Batches that run in successive rollout waves (Equations 25, 26 and 28 of ThunderSyncRL).

Times are in units of one wave's duration W.  Waves start at intervals of W; the learner works on earlier waves while later
ones run, so that only one wave's tail and one suffix remain however many waves there are.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ts_jax.theory import speedup as speedup_lib
from ts_jax.theory.release import ReleaseLaw


@dataclasses.dataclass(frozen=True)
class Waves:
  """Shape of an update's time.  Fields broadcast against each other.

  Attributes:
    count: w >= 1; between whole numbers the formula is continued.
    service: rho_w, Sync's learner service of one wave over W.
    suffix: kappa_w, the update's serial suffix P over W.

  Raises:
    ValueError: a value outside its range.
  """

  count: np.ndarray
  service: np.ndarray
  suffix: np.ndarray

  def __post_init__(self):
    speedup_lib.positive('service', self.service)
    speedup_lib.not_negative('suffix', self.suffix)
    if not np.all(speedup_lib.positive('count', self.count) >= 1):
      raise ValueError(f'count={self.count} must be at least 1: a batch below capacity is one wave with less service')


def of_batch(batch: np.ndarray, capacity: int, time_ratio: np.ndarray, suffix: float) -> Waves:
  """Waves of `batch` trajectories (Equation 28).

  Args:
    batch: B, trajectories of an update.
    capacity: Q, trajectories that roll out at once.
    time_ratio: r, rollout time over learner time at full capacity.
    suffix: kappa_w.
  """
  full = speedup_lib.positive('batch', batch) / speedup_lib.positive('capacity', capacity)
  return Waves(np.maximum(full, 1.0), np.minimum(full, 1.0) / speedup_lib.positive('time_ratio', time_ratio), suffix)


def of_times(batch: int, capacity: int, rollout_s: float, service_s: float, suffix_s: float) -> Waves:
  """Waves of an update whose R, L (Sync's learner service) and P were measured, in seconds."""
  count = max(1.0, batch / float(speedup_lib.positive('capacity', capacity)))
  wave_s = float(speedup_lib.positive('rollout_s', rollout_s)) / count
  return Waves(count, service_s / rollout_s, suffix_s / wave_s)


def speedup(law: ReleaseLaw, waves: Waves) -> np.ndarray:
  """T_Sync / T_ThunderSyncRL, the fields' common shape (Equation 26).

  With all later waves' service behind a job, the last wave decides where streamed service fits a wave, else the first.
  """
  count, service, suffix = np.asarray(waves.count), np.asarray(waves.service), np.asarray(waves.suffix)
  streamed = service * law.granularity.work
  excess = np.maximum(streamed - 1, 0.0)
  step = count * np.maximum(streamed, 1.0) + suffix - excess + speedup_lib.tail(law, service)
  return (count * (1 + service) + suffix) / step


def bound(waves: Waves) -> np.ndarray:
  """Most that overlap can give where no less is streamed than Sync's pass (Equation 17)."""
  return speedup_lib.bound(waves.service, np.asarray(waves.suffix) / np.asarray(waves.count))
