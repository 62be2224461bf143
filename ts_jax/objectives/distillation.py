"""On-policy distillation: from the batch's token count to the coefficients of turn gradients.

Equations 8 and 9 of ThunderSyncRL.  With A_t = sg[log pi_T(a_t | h_t) - log pi(a_t | h_t)] every scored token contributes
A_t grad log pi(a_t | h_t), and the batch's direction is the sum over all of them divided by their number N, a late scalar.
The advantage is formed where the log-probs are (`kernels.logprob.weighted_score`); equal ones give exactly zero.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Sequence

import numpy as np

from ts_jax.objectives.terms import Terms


@dataclasses.dataclass(frozen=True)
class Distillation:
  """Mean over the scored tokens of a batch.  Rewards, where there are any, do not enter.

  Attributes:
    terms: token-local terms.
  """

  terms: Terms = Terms()
  needs_rewards: ClassVar[bool] = False
  needs_batch: ClassVar[bool] = False
  needs_teacher: ClassVar[bool] = True
  affine: ClassVar[bool] = True

  def source_coefficients(self, rewards: Sequence[float | None], population: Sequence[float | None] | None = None) -> np.ndarray:
    """One for every trajectory [m]."""
    del population
    return np.ones(len(rewards))

  def is_zero(self, population: Sequence[float | None]) -> bool:
    """Never: nothing is known of the direction before it is computed."""
    del population
    return False

  def token_weight(self, prompts_per_update: int, group_size: int, scored_tokens: int) -> float:
    """One, up to `normaliser`."""
    del prompts_per_update, group_size, scored_tokens
    return 1.0

  def count_coefficient(self, group_size: int) -> float:
    """One: KL and entropy are means over the scored tokens, too."""
    del group_size
    return 1.0

  def normaliser(self, scored_tokens: int) -> float:
    """1 / N, N all scored tokens of the batch, over all lanes."""
    return 1.0 / max(scored_tokens, 1)
