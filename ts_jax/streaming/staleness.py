"""How old the tokens of an update are: the learner's version minus the one that sampled the token."""

from __future__ import annotations

import dataclasses
from typing import Iterable, NamedTuple

from ts_jax import types


class Lags(NamedTuple):
  """The lags that a schedule's tokens may have: (0, 0) in sync and thundersync, (1, 1) in async, (0, bound) in fully_async."""

  least: int = 0
  most: int = 0

  def check(self, trajectory: types.Trajectory, version: int) -> None:
    """Looks at every token of a trajectory that is to be trained at parameters of `version`.

    Raises:
      PolicyVersionError: one was sampled at a version outside these lags.
    """
    versions = {trajectory.policy_version, *trajectory.versions}
    if any(not self.least <= version - v <= self.most for v in versions):
      first, last = min(versions), max(versions)
      at = f'version {first}' if first == last else f'versions {first}..{last}'
      wanted = '' if self == Lags() else f'; its lag must be {self.least}' + (f' to {self.most}' if self.most > self.least else '')
      raise types.PolicyVersionError(f'trajectory {trajectory.index} of group {trajectory.group} was sampled at policy {at}, the update '
                                     f'runs at {version}{wanted}')


@dataclasses.dataclass(frozen=True)
class Staleness:
  """Lags of sampled tokens.

  Attributes:
    tokens: how many.
    total: sum of their lags.
    largest: largest lag.
  """

  tokens: int = 0
  total: int = 0
  largest: int = 0

  @classmethod
  def of(cls, trajectories: Iterable[types.Trajectory], version: int) -> 'Staleness':
    """Measures trajectories that are trained at parameters of `version`."""
    lags = [version - v for t in trajectories for v in t.versions]
    return cls(len(lags), sum(lags), max(lags, default=0))

  def summary(self) -> dict[str, float | None]:
    """The fields of `telemetry.metrics.UpdateRecord`; None where no token was sampled."""
    return dict(lag_mean=self.total / self.tokens, lag_max=self.largest) if self.tokens else dict(lag_mean=None, lag_max=None)
