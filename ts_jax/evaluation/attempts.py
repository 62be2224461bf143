"""Attempts at tasks with a fixed policy: dev and held-out reward of a run."""

from __future__ import annotations

import concurrent.futures
from typing import Any, Callable, Protocol, Sequence

from ts_jax import types

_POLL_S = 0.5


class Sampler(Protocol):
  """What evaluation needs of an agent pool."""

  def submit_update(self, update: int, policy_version: int,
                    groups: Sequence[tuple[types.GroupPlan, Any]]) -> concurrent.futures.Future:
    ...


def evaluate(sampler: Sampler, update: int, policy_version: int, groups: Sequence[tuple[types.GroupPlan, Any]],
             poll: Callable[[], None] = lambda: None) -> tuple[types.Trajectory, ...]:
  """Runs every attempt and returns the trajectories, rewarded.

  Sampling seeds come from a negative update number, so no evaluation shares one with training.

  Args:
    sampler: an agent pool; other trajectories may be running on it, and nothing may be published meanwhile.
    update: how many updates the policy has had.
    policy_version: version the engines serve.
    groups: one (plan, task) per task; the plan's size is the number of attempts.
    poll: called twice a second while waiting (progress).

  Raises:
    TsJaxError: the rollout side failed.
  """
  future = sampler.submit_update(-1 - update, policy_version, groups)
  while True:
    try:
      return future.result(timeout=_POLL_S)
    except concurrent.futures.TimeoutError:
      if future.done():
        raise
      poll()
