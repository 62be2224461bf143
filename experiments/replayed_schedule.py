"""A schedule by itself, on recorded batches at their recorded times, without a run directory: for measurements."""

from __future__ import annotations

import contextlib
from typing import Sequence

from experiments import learner, rollouts, schedules, trainer as trainer_lib
from ts_jax import types
from ts_jax.rollout import replay as replay_lib
from ts_jax.streaming import barrier, lane as lane_lib, scheduler


class Updates(list[trainer_lib.Done]):
  """A `trainer.Journal` that keeps what was done, and nothing else."""

  def begin(self, update: int, total: int) -> None:
    """Nothing to tell."""

  def __call__(self, event: rollouts.Event) -> None:
    """Nothing to keep."""

  def phase(self, name: str) -> None:
    """Nothing to tell."""

  def warn(self, message: str) -> None:
    """Nothing to tell."""

  def batch(self, update: int, planned: Sequence[tuple[int, int]]) -> None:
    """Nothing to keep."""

  trained = list.append


def run(config, lanes: Sequence[lane_lib.Lane], policy: scheduler.Policy, state: barrier.LearnerState,
        batches: Sequence[Sequence[types.Trajectory]], scale: float = 1.0) -> tuple[barrier.LearnerState, list[trainer_lib.Done]]:
  """Trains on each batch once, from whatever parameters there are, which count as version 0.

  Args:
    config: of a run; its `schedule` is the one that runs.
    lanes, policy: made for that config.
    state: cut as `learner.layout` says; consumed.
    batches: recorded trajectories, one batch per update.
    scale: multiplies recorded times.

  Returns:
    (state behind the last update, what each update did when).
  """
  updates = Updates()
  arrivals = rollouts.Arrivals(updates, config.rollout.stall_timeout_s)
  replayer = replay_lib.Replayer(arrivals.put, scale, arrivals.put)
  trainer = trainer_lib.Trainer(config, learner.optimizer(config), state._replace(policy_version=0), lanes, policy,
                                rollouts.Replayed(replayer, batches.__getitem__), arrivals, updates, updates=len(batches),
                                layout=learner.layout(config))
  with contextlib.closing(replayer):
    schedules.run(config, trainer)
  return trainer.state, list(updates)
