"""A schedule, as the scheduler sees it."""

from __future__ import annotations

import dataclasses

from ts_jax.objectives import policy_gradient
from ts_jax.objectives.objective import Objective

# How early work is released: when every reward of the batch is known (Sync), of the group, or when a trajectory's content is
# fixed; `turn` and `forward` begin with turns of running trajectories.
GRANULARITIES = ('batch', 'group', 'trajectory', 'turn', 'forward')
# Where the lane would idle and it shortens what is left by enough, turns run forward; everything else is as with `trajectory`.
ELASTIC = 'elastic'


@dataclasses.dataclass(frozen=True)
class Policy:
  """A schedule, as the scheduler sees it.

  Attributes:
    granularity: when sources are released, one of `GRANULARITIES`, or `ELASTIC`.
    direct: apply the advantage of `final` sources at once, without group statistics.  Off for the exact accumulator,
      where every source must take the same arithmetic path whatever its arrival.
    admission_cap: groups per lane that may hold statistics at once.
    pack_rows: how many `final` sources of a group may run as one batch, e.g. (4, 1); only with `direct`.
    pack_waste: largest padded cost of a pack relative to its members' own.
    objective: from rewards to coefficients; the lanes' own.
    kept_cap: running trajectories per lane that may hold work of their turns at once (a memory budget).
    piece_lengths: padded lengths of turns that `elastic` runs forward together, ascending.
    reward_sums: distinct rewards per group (per lane, with the batch as population) that may have a sum of their own, where
      the objective is not affine.  A source with one more reward waits until its advantage is known.
  """

  granularity: str = 'trajectory'
  direct: bool = True
  admission_cap: int = 4
  pack_rows: tuple[int, ...] = (1,)
  pack_waste: float = 1.15
  objective: Objective = policy_gradient.PolicyGradient()
  kept_cap: int = 8
  reward_sums: int = 4
  piece_lengths: tuple[int, ...] = (64, 128, 256)

  def __post_init__(self):
    if self.granularity not in (*GRANULARITIES, ELASTIC):
      raise ValueError(f'granularity {self.granularity!r} is unknown: use one of {(*GRANULARITIES, ELASTIC)}')
    if self.admission_cap < 1:
      raise ValueError(f'admission cap {self.admission_cap} must be at least 1')
    if self.reward_sums < 1:
      raise ValueError(f'reward_sums {self.reward_sums} must be at least 1')
    if not self.direct and max(self.pack_rows) > 1:
      raise ValueError(f'pack_rows {self.pack_rows} needs direct=True: packed rows share one sum')
    if self.granularity in ('turn', 'forward') and max(self.pack_rows) > 1:
      raise ValueError(f'granularity {self.granularity!r} needs pack_rows (1,), not {self.pack_rows}')
    if self.granularity == ELASTIC and not self.direct:
      raise ValueError(f'granularity {ELASTIC!r} needs direct=True: what it does early, and with that the rounding, depends on time')
    if 1 not in self.pack_rows:
      raise ValueError(f'pack_rows {self.pack_rows} must contain 1')

  @property
  def by_turns(self) -> bool:
    """Turns of running trajectories are worked on."""
    return self.granularity in ('turn', 'forward', ELASTIC)

  def piece(self, tokens: int) -> int:
    """Padded tokens of turns with `tokens` that `elastic` runs forward together."""
    whole, rest = divmod(tokens, self.piece_lengths[-1])
    return whole * self.piece_lengths[-1] + (next(n for n in self.piece_lengths if n >= rest) if rest else 0)
