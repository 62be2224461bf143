"""How long trajectories of a task will be, from those that there were: what groups are dealt out to lanes by."""

from __future__ import annotations

import dataclasses
from typing import Mapping, Sequence

from ts_jax import types

_MEMORY = 0.5  # weight of what was known before, at each group of a task


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Mean tokens of completions.

  Attributes:
    by_task: task id -> tokens, later groups counting more.
  """

  by_task: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def observe(self, batch: types.LogicalBatch) -> 'Lengths':
    """Takes a complete batch."""
    known = dict(self.by_task)
    for group in batch.groups:
      mean = sum(len(t.completion_ids) for t in group.trajectories) / len(group.trajectories)
      known[group.task_id] = _MEMORY * known.get(group.task_id, mean) + (1 - _MEMORY) * mean
    return Lengths(known)

  def predict(self, plans: Sequence[types.GroupPlan]) -> list[float]:
    """Tokens of each group; of a task that was not seen, the mean of those that were."""
    unseen = sum(self.by_task.values()) / len(self.by_task) if self.by_task else 1.0
    return [plan.size * self.by_task.get(plan.task_id, unseen) for plan in plans]
