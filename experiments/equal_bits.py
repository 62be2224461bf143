"""Equal bits of parameters for every arrival order and number of lanes, with exact sums, over consecutive updates."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Callable, Sequence

import jax
import numpy as np

from experiments import replayed_updates, wiring
from ts_jax import types
from ts_jax.streaming import scheduler


@dataclasses.dataclass
class EqualBits:
  """What one granularity showed; every comparison is with the recorded order on one lane, after each update.

  Attributes:
    updates: consecutive updates of each comparison.
    orders: random orders tried on one lane, and `equal` how many of them had the same bits.
    lanes: by number of lanes, random orders that had the same bits; `lane_orders` were tried.
    like_sync: the bits are those of Sync.
  """

  updates: int
  orders: int
  lane_orders: int
  equal: int = 0
  lanes: dict[int, int] = dataclasses.field(default_factory=dict)
  like_sync: bool = False

  @property
  def equal_lanes(self) -> list[int]:
    """Numbers of lanes with the same bits for every order tried on them."""
    return [1] * (self.equal == self.orders) + [n for n, equal in self.lanes.items() if equal == self.lane_orders]


def count(updates: int, orders: int, lanes: Sequence[int] = (1,), lane_orders: int = 0) -> int:
  """Updates that `compare` runs."""
  return len(scheduler.GRANULARITIES) * updates * (1 + orders + lane_orders * (len(lanes) - 1))


def compare(config, student: wiring.Student, batches: Sequence[types.LogicalBatch], orders: int, lanes: Sequence[int] = (1,),
            lane_orders: int = 0, advance: Callable[[], None] = lambda: None) -> dict[str, EqualBits]:
  """Replays the batches in random orders, at each granularity by itself.

  Args:
    config: the run's.
    student: theta_0.
    batches: recorded; one update each.
    orders: random orders on one lane.
    lanes: numbers of lanes; those beyond 1 need as many devices.
    lane_orders: random orders on each of them.
    advance: told of each update done.
  """
  def bits(replay: replayed_updates.Replay, order: int | None) -> list[bytes]:
    digests = []
    for step in replay.steps(len(batches), order):
      digests.append(_digest(step.params))
      advance()
    return digests

  found, sync = {}, None
  for granularity in scheduler.GRANULARITIES:
    exact = replayed_updates.under(config, granularity, 'exact')
    replay = replayed_updates.Replay(exact, student, batches)
    expected = bits(replay, None)
    sync = sync or expected
    seen = EqualBits(len(batches), orders, lane_orders, like_sync=expected == sync)
    seen.equal = sum(bits(replay, order) == expected for order in range(orders))
    for number in lanes:
      if number > 1:
        split = replayed_updates.Replay(replayed_updates.under(config, granularity, 'exact', lanes=number), student, batches)
        seen.lanes[number] = sum(bits(split, order) == expected for order in range(lane_orders))
    found[granularity] = seen
  return found


def _digest(params) -> bytes:
  total = hashlib.blake2b()
  for leaf in jax.tree.leaves(params):
    total.update(np.ascontiguousarray(leaf))
  return total.digest()
