"""Step time from explicit release and service times: the recurrence of Equation 14 of ThunderSyncRL, lane by lane."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Replay:
  """What a schedule that serves jobs in readiness order would have taken.  Seconds.

  Attributes:
    step_s: max(R, c_n) + P, c_n the latest completion over lanes.
    tail_s: [c_n - R]+, learner time after rollout.
    sync_step_s: R + L + P, L the longest lane's service when nothing starts before R.
    rollout_s: R.
    suffix_s: P.
    lane_busy_s: [lanes] service of each lane.
    lane_end_s: [lanes] completion of each lane; 0 where it has no jobs.
    start_s, end_s: [jobs] service of each job, in the order given.
  """

  step_s: float
  tail_s: float
  sync_step_s: float
  rollout_s: float
  suffix_s: float
  lane_busy_s: np.ndarray
  lane_end_s: np.ndarray
  start_s: np.ndarray
  end_s: np.ndarray

  @property
  def tail(self) -> float:
    """lambda = [c_n - R]+ / R."""
    return self.tail_s / self.rollout_s

  @property
  def speedup(self) -> float:
    """T_Sync / T_step (Equation 16)."""
    return self.sync_step_s / self.step_s

  @property
  def bound(self) -> float:
    """(R + L + P) / (max(R, L) + P), L as in `sync_step_s` (Equation 17)."""
    service = self.sync_step_s - self.rollout_s - self.suffix_s
    return self.sync_step_s / (max(self.rollout_s, service) + self.suffix_s)


def replay(ready_s: np.ndarray, service_s: np.ndarray, lane: np.ndarray | None = None, *, lanes: int | None = None,
           rollout_s: float | None = None, suffix_s: float = 0.0, dispatch_s: float = 0.0,
           sync_service_s: np.ndarray | None = None) -> Replay:
  """Replays jobs through c_j = max(ready_j, c_(j-1)) + service_j on each lane.

  The result does not depend on the order of the arrays, to the bit.

  Args:
    ready_s: [jobs] seconds after the update's start.
    service_s: [jobs] seconds.
    lane: [jobs] learner lane of each job; one lane by default.
    lanes: number of lanes; by default the lanes that have jobs.
    rollout_s: R; by default the last readiness.
    suffix_s: P, what follows the last job: reduction, optimizer step, publication.
    dispatch_s: fixed cost of a job, added to its service.
    sync_service_s: [lanes] or a number for one lane: service of Sync's pass where it does other work than these jobs.

  Raises:
    ValueError: no jobs, lengths that differ, times that are negative or not finite, a job ready after R, a lane outside the range.
  """
  ready, service = _seconds('ready_s', ready_s), _seconds('service_s', service_s) + float(_seconds('dispatch_s', dispatch_s))
  lane = np.zeros(len(ready), int) if lane is None else np.asarray(lane)
  if not len(ready) == len(service) == len(lane):
    raise ValueError(f'{len(ready)} ready times, {len(service)} services, {len(lane)} lanes: give one of each a job')
  if not len(ready):
    raise ValueError('a replay needs at least one job: an update without learner work takes rollout_s + suffix_s')
  if not np.issubdtype(lane.dtype, np.integer):
    raise ValueError(f'lanes {lane} are not integers: number them from 0')
  lanes = int(lane.max()) + 1 if lanes is None else lanes
  if lane.min() < 0 or lane.max() >= lanes:
    raise ValueError(f'lanes {lane.min()} to {lane.max()} do not fit lanes={lanes}: number them from 0')
  rollout = float(ready.max() if rollout_s is None else _seconds('rollout_s', rollout_s))
  if ready.max() > rollout:
    raise ValueError(f'a job is ready at {ready.max()} s, after rollout_s={rollout}: R is when the last input of the update is fixed')
  if not rollout > 0:
    raise ValueError('every job is ready at 0 s: give rollout_s, the time of the last rollout event, greater than 0')
  suffix = float(_seconds('suffix_s', suffix_s))

  # Jobs that are ready together are served by service, so that the order of the arrays leaves no trace in the rounding.
  order = np.lexsort((service, ready, lane))
  end, busy, lane_end = np.zeros(len(ready)), np.zeros(lanes), np.zeros(lanes)
  for k, mine in enumerate(np.split(order, np.searchsorted(lane[order], np.arange(1, lanes)))):
    if len(mine):
      done = np.cumsum(service[mine])
      waited = np.maximum.accumulate(ready[mine] - np.concatenate([[0.0], done[:-1]]))  # idle time up to each job (Equation 15)
      end[mine] = waited + done
      busy[k], lane_end[k] = done[-1], end[mine[-1]]
  sync = busy if sync_service_s is None else np.atleast_1d(_seconds('sync_service_s', sync_service_s))
  if len(sync) != lanes:
    raise ValueError(f'sync_service_s has {len(sync)} entries for {lanes} lanes: give the service of each lane')
  finish = float(lane_end.max())
  return Replay(max(rollout, finish) + suffix, max(finish - rollout, 0.0), rollout + float(sync.max()) + suffix, rollout, suffix, busy,
                lane_end, end - service, end)


def _seconds(name: str, value: np.ndarray) -> np.ndarray:
  values = np.asarray(value, np.float64)
  wrong = ~(np.isfinite(values) & (values >= 0))
  if np.any(wrong):
    raise ValueError(f'{name} has {values[wrong][0]}: give finite seconds, none negative')
  return values
