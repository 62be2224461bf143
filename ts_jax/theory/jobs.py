"""Learner jobs that a workload releases at a granularity: the explicit counterpart of a release law."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from ts_jax.theory.release import Granularity


class Jobs(NamedTuple):
  """Arrays [jobs]: when inputs were fixed (seconds after the update's start), service (seconds), learner lane."""

  ready_s: np.ndarray
  service_s: np.ndarray
  lane: np.ndarray


@dataclasses.dataclass(frozen=True)
class Workload:
  """One update's turns and trajectories, whatever granularity they ran at.

  Attributes:
    turn_ready_s: [turns] when a turn's inputs (teacher scores included) were fixed, seconds after the update's start.
    turn_service_s: [turns] its share of the service of Sync's cheapest pass over its trajectory, seconds.
    trajectory: [turns] index of its trajectory.
    complete_s: [trajectories] when all that the trajectory's source needs (for GRPO its reward) was fixed.
    group: [trajectories] index of its group.
    lane: [trajectories] learner lane it is assigned to.

  Raises:
    ValueError: lengths or indices that do not fit, times that are not finite, a turn later than its trajectory.
  """

  turn_ready_s: np.ndarray
  turn_service_s: np.ndarray
  trajectory: np.ndarray
  complete_s: np.ndarray
  group: np.ndarray
  lane: np.ndarray

  def __post_init__(self):
    for field in dataclasses.fields(self):
      object.__setattr__(self, field.name, np.asarray(getattr(self, field.name)))
    turns, trajectories = len(self.trajectory), len(self.complete_s)
    if not len(self.turn_ready_s) == len(self.turn_service_s) == turns or not len(self.group) == len(self.lane) == trajectories:
      raise ValueError(f'turn arrays of {len(self.turn_ready_s)}, {len(self.turn_service_s)} and {turns}, trajectory arrays of '
                       f'{trajectories}, {len(self.group)} and {len(self.lane)}: give one entry a turn and one a trajectory')
    for name in ('turn_ready_s', 'turn_service_s', 'complete_s'):
      values = getattr(self, name)
      wrong = ~(np.isfinite(values) & (values >= 0))
      if np.any(wrong):
        raise ValueError(f'{name} has {values[wrong][0]}: give finite seconds, none negative')
    for name in ('group', 'lane'):
      if np.min(getattr(self, name), initial=0) < 0:
        raise ValueError(f'{name} has {np.min(getattr(self, name))}: number them from 0')
    if turns and not 0 <= np.min(self.trajectory) <= np.max(self.trajectory) < trajectories:
      raise ValueError(f'trajectory indices {np.min(self.trajectory)} to {np.max(self.trajectory)} do not fit {trajectories} trajectories')
    late = np.flatnonzero(self.turn_ready_s > self.complete_s[self.trajectory])
    if len(late):
      raise ValueError(f'turn {late[0]} is ready at {self.turn_ready_s[late[0]]} s, after its trajectory {self.trajectory[late[0]]} '
                       f'completed at {self.complete_s[self.trajectory[late[0]]]} s: complete_s must cover every turn')

  @property
  def service_s(self) -> np.ndarray:
    """[trajectories] service of Sync's cheapest pass, seconds."""
    return np.bincount(self.trajectory, self.turn_service_s, minlength=len(self.complete_s))

  def lane_service_s(self, lanes: int) -> np.ndarray:
    """[lanes] the same, by lane."""
    return np.bincount(self.lane, self.service_s, minlength=lanes)


def release(granularity: Granularity, workload: Workload) -> Jobs:
  """Jobs of a workload; fractions of no service give no jobs.  A trajectory's jobs stay on its lane."""
  service = workload.service_s
  closed = np.zeros(int(np.max(workload.group, initial=-1)) + 1)
  np.maximum.at(closed, workload.group, workload.complete_s)
  parts = (
      (granularity.turn, workload.turn_ready_s, workload.turn_service_s, workload.lane[workload.trajectory]),
      (1 - granularity.turn - granularity.closure, workload.complete_s, service, workload.lane),
      (granularity.closure, closed[workload.group], service, workload.lane),
  )
  kept = [(ready, fraction * granularity.work * seconds, lane) for fraction, ready, seconds, lane in parts if fraction > 0]
  return Jobs(*(np.concatenate(column) for column in zip(*kept)))
