"""On-policy distillation: from the batch's token count to the coefficients of turn gradients.

Equations 8 and 9 of ThunderSyncRL.  With A_t = sg[log pi_T(a_t | h_t) - log pi(a_t | h_t)] every scored token contributes
A_t grad log pi(a_t | h_t), and the batch's direction is the sum over all of them divided by their number N, a late scalar.
The advantage is formed where the log-probs are (`kernels.logprob.weighted_score`); equal ones give exactly zero.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Distillation:
  """Mean over the scored tokens of a batch.  Rewards, where there are any, do not enter."""

  needs_rewards: ClassVar[bool] = False
  needs_teacher: ClassVar[bool] = True

  def source_coefficients(self, rewards: Sequence[float | None]) -> np.ndarray:
    """One for every trajectory [m]."""
    return np.ones(len(rewards))

  def is_zero(self, rewards: Sequence[float | None]) -> bool:
    """Never: nothing is known of the direction before it is computed."""
    del rewards
    return False

  def token_weight(self, prompts_per_update: int, group_size: int, scored_tokens: int) -> float:
    """One, up to `normaliser`."""
    del prompts_per_update, group_size, scored_tokens
    return 1.0

  def normaliser(self, scored_tokens: int) -> float:
    """1 / N, N all scored tokens of the batch, over all lanes."""
    return 1.0 / max(scored_tokens, 1)
