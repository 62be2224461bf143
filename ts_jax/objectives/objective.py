"""What the learner asks of an objective: late scalars in, coefficients of score gradients out."""

from __future__ import annotations

from typing import Protocol, Sequence

import numpy as np


class Objective(Protocol):
  """Frozen and hashable; states what it needs.

  Attributes:
    needs_rewards: coefficients depend on the rewards of the whole group; otherwise they are known from the start.
    needs_teacher: scored tokens carry the detached advantage of a teacher over the student.
  """

  needs_rewards: bool
  needs_teacher: bool

  def source_coefficients(self, rewards: Sequence[float | None]) -> np.ndarray:
    """Coefficient of each trajectory's gradient in its group's direction [m]."""

  def is_zero(self, rewards: Sequence[float | None]) -> bool:
    """The group's direction is known to be exactly zero."""

  def token_weight(self, prompts_per_update: int, group_size: int, scored_tokens: int) -> float:
    """Weight of a trajectory's scored tokens, up to `normaliser`."""

  def normaliser(self, scored_tokens: int) -> float:
    """Factor of the batch's direction, from the number of its scored tokens over all lanes."""
