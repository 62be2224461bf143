"""Release laws: the fraction of an update's learner service that is ready by a fraction u of the rollout window.

Equations 21 to 24 of ThunderSyncRL are one law.  A trajectory completes at U, uniform on (0, 1), with mean service
proportional to U^gamma; a share of it is released turn by turn at jU/a, a share when the group of m closes, the rest at
completion:

    F(u) = turn/a sum_j min(1, a u/j)^(gamma+1) + (1 - turn - closure) u^(gamma+1) + closure u^(gamma+m).

The paper's GRPO is turn = 0, closure = beta (Equation 22); its OPD is turn = 1 - delta, closure = 0 (Equation 24).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Granularity:
  """When a trajectory's service is released.  What is neither `turn` nor `closure` is released at completion.

  Attributes:
    turn: fraction released turn by turn, in equal parts.
    closure: fraction released when the last trajectory of the group completes.
    work: streamed service over the service of Sync's cheapest pass.  The paper's comparison fixes the physical jobs, so
      there it is 1.

  Raises:
    ValueError: fractions that do not partition the service, or no work.
  """

  turn: float = 0.0
  closure: float = 0.0
  work: float = 1.0

  def __post_init__(self):
    if not (self.turn >= 0 and self.closure >= 0 and self.turn + self.closure <= 1):
      raise ValueError(f'turn={self.turn} and closure={self.closure} must be fractions whose sum is at most 1')
    if not 0 < self.work < math.inf:
      raise ValueError(f'work={self.work} must be positive: it is the streamed service over that of one full pass')


def grpo(closure_fraction: float) -> Granularity:
  """A trajectory's service at its reward, `closure_fraction` (beta) once its group closes (Equation 22)."""
  return Granularity(closure=closure_fraction)


def group() -> Granularity:
  """Everything once the group closes: what complete-group pipelines release."""
  return Granularity(closure=1.0)


def opd(deferred_fraction: float, work: float = 1.0) -> Granularity:
  """A turn's service when the teacher has scored it, `deferred_fraction` (delta) at completion (Equation 24)."""
  return Granularity(turn=1.0 - deferred_fraction, work=work)


def forward(turn_fraction: float, closure_fraction: float = 0.0, work: float = 1.0) -> Granularity:
  """Layers forward when a turn arrives (`turn_fraction` of the service), layers backward at completion.

  Nothing is done twice, so that `work` is close to 1 where `opd` needs nearly 2.  Not in the paper.
  """
  return Granularity(turn_fraction, closure_fraction, work)


class Pieces(NamedTuple):
  """F between `edges` [pieces + 1]: offset [pieces] + slope [pieces] u^(gamma+1) + closure u^(gamma+m)."""

  edges: np.ndarray
  offset: np.ndarray
  slope: np.ndarray


@dataclasses.dataclass(frozen=True)
class ReleaseLaw:
  """F of a granularity under the paper's model of completion times and service.

  Attributes:
    granularity: how a trajectory's service is split.
    turns: a, turns of a trajectory, of equal service.
    group_size: m, trajectories of a group.
    service_exponent: gamma >= 0, how service grows with completion time.

  Raises:
    ValueError: a value outside its range.
  """

  granularity: Granularity
  turns: int = 1
  group_size: int = 1
  service_exponent: float = 0.0

  def __post_init__(self):
    if self.turns < 1 or self.group_size < 1:
      raise ValueError(f'turns={self.turns} and group_size={self.group_size} must be at least 1')
    if not 0 <= self.service_exponent < math.inf:
      raise ValueError(f'service_exponent={self.service_exponent} must be finite and not negative: later completion, no less service')

  def pieces(self) -> Pieces:
    """Intervals on which every turn is either released for all trajectories or for none longer than u: F is convex on each."""
    turns = self.turns if self.granularity.turn else 1
    powers = np.arange(1, turns + 1.0)**-(self.service_exponent + 1)
    unsaturated = np.cumsum(powers[::-1])[::-1]  # sum over j > k of j^-(gamma+1), k = 0 .. a-1
    whole = 1 - self.granularity.turn - self.granularity.closure
    return Pieces(edges=np.arange(turns + 1) / turns, offset=self.granularity.turn * np.arange(turns) / turns,
                  slope=self.granularity.turn * turns**self.service_exponent * unsaturated + whole)

  def released(self, u: np.ndarray) -> np.ndarray:
    """F(u), the shape of `u`; continuous, so that ready before u and ready by u are the same.

    Raises:
      ValueError: u outside [0, 1].
    """
    u = np.asarray(u, np.float64)
    if not np.all((u >= 0) & (u <= 1)):
      raise ValueError(f'u={u} must lie in [0, 1]: it is a fraction of the rollout window')
    edges, offset, slope = self.pieces()
    piece = np.clip(np.searchsorted(edges, u, side='right') - 1, 0, len(slope) - 1)
    late = self.granularity.closure * u**(self.service_exponent + self.group_size)
    return offset[piece] + slope[piece] * u**(self.service_exponent + 1) + late

  def slope(self, u: np.ndarray, piece_slope: np.ndarray) -> np.ndarray:
    """dF/du at `u` inside a piece with the slope coefficient `piece_slope` (left-hand side of Equation 23)."""
    power = self.service_exponent
    result = (power + 1) * piece_slope * u**power
    if self.granularity.closure:
      result = result + self.granularity.closure * (power + self.group_size) * u**(power + self.group_size - 1)
    return result
