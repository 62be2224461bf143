"""Which replica serves which sequence: pure decisions on a frozen state.  `replicas.ReplicaSet` carries them out.

A sequence (one trajectory's growing tokens) is open from its first request until it is released.  It stays with one replica,
which keeps its prefix in its cache, and moves only when that replica is down.  A sequence that needs a replica joins the one
with most open members of its group, which hold the group's prompt, unless that one has more than `slack` open sequences above
the least busy; else it goes to the least busy.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Hashable, Mapping

from ts_jax import types


@dataclasses.dataclass(frozen=True)
class Routing:
  """Where everything is.

  Attributes:
    replicas: how many there are.
    slack: open sequences by which a group's replica may exceed the least busy and still take another of the group.
    down: numbers of the replicas that do not serve.
    homes: replica by (group, member) of each open sequence.
  """

  replicas: int
  slack: int = 4
  down: frozenset[int] = frozenset()
  homes: Mapping[tuple[Hashable, Hashable], int] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.replicas < 1 or self.slack < 0:
      raise types.ConfigError(f'replicas={self.replicas} must be at least 1 and slack={self.slack} not negative')

  @property
  def active(self) -> tuple[int, ...]:
    """Open sequences of each replica."""
    counts = collections.Counter(self.homes.values())
    return tuple(counts[r] for r in range(self.replicas))


def assign(state: Routing, group: Hashable, member: Hashable) -> tuple[Routing, int | None]:
  """Opens a sequence, or finds it: (state, its replica), or None where none is up (the sequence then stays what it was)."""
  home = state.homes.get((group, member))
  if home is not None and home not in state.down:
    return state, home
  up = [r for r in range(state.replicas) if r not in state.down]
  if not up:
    return state, None
  active = state.active
  together = collections.Counter(r for (g, _), r in state.homes.items() if g == group)
  least = min(active[r] for r in up)
  chosen = max((r for r in up if active[r] <= least + state.slack), key=lambda r: (together[r], -active[r], -r))
  return dataclasses.replace(state, homes={**state.homes, (group, member): chosen}), chosen


def release(state: Routing, group: Hashable, member: Hashable) -> Routing:
  """The sequence asks for nothing more; nothing happens where it is not open."""
  return dataclasses.replace(state, homes={k: r for k, r in state.homes.items() if k != (group, member)})


def mark_down(state: Routing, replica: int) -> Routing:
  """The replica does not serve; its sequences move as they ask."""
  return dataclasses.replace(state, down=state.down | {replica})


def mark_up(state: Routing, replica: int) -> Routing:
  """The replica serves again; sequences that moved away stay where they are."""
  return dataclasses.replace(state, down=state.down - {replica})
