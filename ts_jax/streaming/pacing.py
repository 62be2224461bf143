"""Fully asynchronous rollout within a staleness bound: a pure state machine.

Groups are numbered in the order they start; n of them make a batch.  Rollout paces itself: group s starts once version
s // n - bound is published.  So at most (bound + 1) n groups are under way or waiting at a time, and nothing is ever discarded.

Which complete groups a batch takes is free as long as none of the others becomes too old.  A group whose oldest token is of version v
must be trained by update v + bound, its deadline.  With u the next update, and n places in each, that is possible exactly when for every
k >= u at most (k - u + 1) n groups have a deadline of k or before.  Starting keeps this true: groups that are not trained are at
most (v + bound + 1) n - u n.  A batch keeps it true by taking, for every k, enough of the groups with a deadline up to k; what room
is left goes to whichever are complete, first come first served.  Where one that must go in is not complete, the learner waits for it:
it will come.

Like the scheduler it has no threads and no clock; a shell around it starts groups, and trains.
"""

from __future__ import annotations

import dataclasses
from typing import Collection, Mapping, Sequence


class PacingError(RuntimeError):
  """An event that cannot happen: a group that was not running completed, a version did not advance."""


@dataclasses.dataclass(frozen=True)
class Pace:
  """Everything there is to know.

  Attributes:
    size: n, groups of a batch.
    updates: of the run: groups beyond the last one's are never started.
    bound: largest lag of a trained token, in updates.
    update: u, the next whose batch is taken.
    started: groups that have started, so also the next one's number.
    running: group -> oldest version it can have.
    complete: group -> oldest version it has, in the order they were completed.
  """

  size: int
  updates: int
  bound: int
  update: int = 0
  started: int = 0
  running: Mapping[int, int] = dataclasses.field(default_factory=dict)
  complete: Mapping[int, int] = dataclasses.field(default_factory=dict)

  @property
  def waiting(self) -> dict[int, int]:
    """Groups that are not trained, with their deadlines."""
    return {group: oldest + self.bound for group, oldest in {**self.running, **self.complete}.items()}

  def due(self, update: int) -> int:
    """How many of them must have been trained once `update` is."""
    return sum(deadline <= update for deadline in self.waiting.values())


def publish(pace: Pace, version: int) -> tuple[Pace, Sequence[int]]:
  """Engines serve `version` from now on; returns the groups that start with it."""
  if version > pace.update:
    raise PacingError(f'version {version} was published before update {version - 1} had a batch')
  last = min(pace.updates, version + pace.bound + 1) * pace.size
  groups = range(pace.started, last)
  return dataclasses.replace(pace, started=max(pace.started, last), running={**pace.running, **dict.fromkeys(groups, version)}), groups


def complete(pace: Pace, group: int, oldest: int) -> Pace:
  """Every trajectory of `group` has its reward; `oldest` is the oldest version of their tokens."""
  if group not in pace.running:
    raise PacingError(f'group {group} was completed, which does not run')
  if oldest < pace.running[group]:
    raise PacingError(f'group {group} started at version {pace.running[group]} and has tokens of version {oldest}')
  running = {g: v for g, v in pace.running.items() if g != group}
  return dataclasses.replace(pace, running=running, complete={**pace.complete, group: oldest})


def take(pace: Pace) -> tuple[Pace, tuple[int, ...] | None]:
  """The next batch, in order of group numbers; None while the learner must wait."""
  deadlines, chosen = pace.waiting, []
  for update in sorted(set(deadlines.values())):
    ready = [g for g in pace.complete if g not in chosen and deadlines[g] <= update]
    missing = pace.due(update) - (update - pace.update) * pace.size - sum(deadlines[g] <= update for g in chosen)
    if missing > len(ready):
      return pace, None
    chosen += ready[:max(0, missing)]
  chosen += [g for g in pace.complete if g not in chosen][:pace.size - len(chosen)]
  if len(chosen) < pace.size:
    return pace, None
  left = {g: v for g, v in pace.complete.items() if g not in chosen}
  return dataclasses.replace(pace, update=pace.update + 1, complete=left), tuple(sorted(chosen))


def resumed(size: int, updates: int, bound: int, update: int, trained: Collection[int],
            oldest: Mapping[int, int]) -> tuple[Pace, Sequence[int]]:
  """A run that goes on at `update`, the version that its engines serve now.

  Args:
    size, updates, bound, update: see `Pace`.
    trained: groups of the updates before.
    oldest: oldest version among the finished trajectories of groups that are not trained; groups without any begin anew.

  Returns:
    The state, and the groups that go on or start.

  Raises:
    PacingError: what was trained is not what the updates before take, or what is kept cannot be trained in time.
  """
  if len(set(trained)) != update * size:
    raise PacingError(f'{len(set(trained))} groups are recorded as trained, {update} updates take {update * size}')
  started = min(updates, update + bound + 1) * size
  running = {g: min(oldest.get(g, update), update) for g in range(started) if g not in trained}
  pace = Pace(size, updates, bound, update, started, running)
  for deadline in pace.waiting.values():
    if pace.due(deadline) > (deadline - update + 1) * size:
      raise PacingError(f'{pace.due(deadline)} groups must be trained by update {deadline}, {deadline - update + 1} updates from now')
  return pace, tuple(running)
