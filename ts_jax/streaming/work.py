"""What goes into the scheduler and what comes out: events, and work for lanes."""

from __future__ import annotations

import dataclasses
import enum


class Service(enum.IntEnum):
  """What was known when a source was started; lower is served first."""

  FINAL = 0
  KNOWN = 1
  CONTENT = 2


@dataclasses.dataclass(frozen=True)
class TurnReady:
  """`steps` of a running trajectory can be worked on (fewer than before where a failed attempt is made again).

  `tokens`: in them, which `elastic` needs to know.
  """

  group: int
  index: int
  steps: int
  tokens: int = 0


@dataclasses.dataclass(frozen=True)
class ContentReady:
  """Tokens and mask of a trajectory are fixed."""

  group: int
  index: int
  scored: int
  cost: int


@dataclasses.dataclass(frozen=True)
class RewardReady:
  """The reward of a trajectory is fixed."""

  group: int
  index: int
  reward: float


@dataclasses.dataclass(frozen=True)
class PromptForward:
  """Compute a group's boundary state ahead of its first source."""

  group: int


@dataclasses.dataclass(frozen=True)
class TurnWork:
  """Work on the turns of a running trajectory that are there, up to `steps`, with `tokens` in all."""

  group: int
  index: int
  steps: int
  tokens: int = 0


@dataclasses.dataclass(frozen=True)
class SourceWork:
  """Differentiate sources.  FINAL with `coefficients`: fold into the batch; otherwise into the group's statistics.

  `whole`: in one pass; otherwise (by turns) go on with what was done of their turns before, or begin now.
  """

  group: int
  indices: tuple[int, ...]
  service: Service
  coefficients: tuple[float, ...] | None = None
  reward: float | None = None
  whole: bool = True


@dataclasses.dataclass(frozen=True)
class FoldHeld:
  """Fold a gradient whose reward was pending when it was computed; with a `coefficient` into the batch."""

  group: int
  index: int
  reward: float
  coefficient: float | None = None


@dataclasses.dataclass(frozen=True)
class CloseGroup:
  """Reduce a group's statistics and run its prompt's backward pass (nothing but clean-up where all of it is zero).

  `rewards`: those that its advantages are relative to.
  """

  group: int
  rewards: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class HandOver:
  """Give up everything that is held for another lane's group: that lane adds it to its own before it closes the group."""

  group: int


Work = PromptForward | TurnWork | SourceWork | FoldHeld | HandOver | CloseGroup


@dataclasses.dataclass(frozen=True)
class WorkDone:
  """A lane finished what it was assigned.

  `seconds`, where it was measured: what it took, without the group's prompt and without folds.
  """

  lane: int
  work: Work
  seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Assignment:
  """Work for a lane."""

  lane: int
  work: Work


Event = TurnReady | ContentReady | RewardReady | WorkDone
