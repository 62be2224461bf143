"""What the learner asks of an objective: late scalars in, coefficients of score gradients out."""

from __future__ import annotations

from typing import Mapping, Protocol, Sequence

import numpy as np

from ts_jax.objectives.terms import Terms


class Objective(Protocol):
  """Frozen and hashable; states what it needs.

  `population`: the rewards that advantages are relative to, those of the group or, with `needs_batch`, of the whole batch.

  Attributes:
    needs_rewards: coefficients depend on the rewards of the whole population; otherwise they are known from the start.
    needs_batch: that population is the batch.
    needs_teacher: scored tokens carry the detached advantage of a teacher over the student.
    affine: coefficients are affine in a trajectory's own reward; otherwise they are some function of it.
    terms: token-local terms beside the score.
  """

  needs_rewards: bool
  needs_batch: bool
  needs_teacher: bool
  affine: bool
  terms: Terms

  def source_coefficients(self, rewards: Sequence[float | None], population: Sequence[float | None] | None = None) -> np.ndarray:
    """Coefficient of each trajectory's gradient in its group's direction [m]; `population` None: the group's own rewards."""

  def reduction(self, population: Sequence[float], centre: float) -> tuple[float, float]:
    """(shift, scale) of an affine objective: coefficients are scale * (r - centre - shift)."""

  def reward_coefficients(self, population: Sequence[float]) -> Mapping[float, float]:
    """Coefficient by reward."""

  def is_zero(self, population: Sequence[float | None]) -> bool:
    """All coefficients are known to be exactly zero."""

  def token_weight(self, prompts_per_update: int, group_size: int, scored_tokens: int) -> float:
    """Weight of a trajectory's scored tokens, up to `normaliser`."""

  def count_coefficient(self, group_size: int) -> float:
    """Coefficient of the terms that carry no advantage, where a score has its trajectory's own."""

  def normaliser(self, scored_tokens: int) -> float:
    """Factor of the batch's direction, from the number of its scored tokens over all lanes."""
