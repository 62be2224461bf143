"""Workloads drawn from the model behind the release laws: the law's expectations as one batch of explicit times."""

from __future__ import annotations

import numpy as np

from ts_jax.theory.jobs import Workload
from ts_jax.theory.release import ReleaseLaw


def sample(rng: np.random.Generator, law: ReleaseLaw, batch: int, capacity: int, time_ratio: float) -> Workload:
  """Draws one update on one lane; a full wave takes 1 s of rollout and has, in the mean, 1 / time_ratio s of service.

  Args:
    rng: source of the completion times U, uniform within a wave.
    law: turns, group size and service exponent; turns are left out where nothing is released at them.
    batch: B trajectories, in waves of `capacity`; the last wave may be partial.
    capacity: Q.
    time_ratio: r.
  """
  if batch < 1 or capacity < 1 or not time_ratio > 0:
    raise ValueError(f'batch={batch}, capacity={capacity} and time_ratio={time_ratio} must be positive')
  start = np.arange(batch) // capacity
  finished = rng.uniform(size=batch)
  service = (law.service_exponent + 1) * finished**law.service_exponent / (time_ratio * capacity)
  turns = law.turns if law.granularity.turn else 1
  fraction = np.arange(1, turns + 1) / turns
  return Workload(
      turn_ready_s=(start[:, None] + finished[:, None] * fraction).ravel(), turn_service_s=np.repeat(service / turns, turns),
      trajectory=np.repeat(np.arange(batch), turns), complete_s=start + finished, group=np.arange(batch) // law.group_size,
      lane=np.zeros(batch, int))
