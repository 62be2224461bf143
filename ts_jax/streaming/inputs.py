"""What is known of an update's trajectories so far: one record for all lanes of a process.

One thread writes, lanes read in threads of their own.  Entries are never changed, only replaced, so a lane sees the one before or
the one after.  A process elsewhere keeps its own record by taking the same calls: see `mirror`.
"""

from __future__ import annotations

from typing import Callable, Sequence

from ts_jax import types
from ts_jax.streaming import branches, sources as sources_lib
from ts_jax.streaming.buckets import Buckets
from ts_jax.streaming.open_trajectories import At, Turns


class Inputs:
  """Prompts, turns and finished trajectories of one update.

  Attributes:
    plans: the groups, by index.
    data: finished trajectories.
    trees: of those whose history was rewritten, their segments.
    turns: of running and finished trajectories.
  """

  def __init__(self, plans: Sequence[types.GroupPlan]):
    """Begins with the prompts.

    Raises:
      ConfigError: a prompt has fewer than two tokens.
    """
    for plan in plans:
      if len(plan.prompt_ids) < 2:
        raise types.ConfigError(f'task {plan.task_id}: a prompt needs at least two tokens, got {len(plan.prompt_ids)}')
    self.plans = {p.index: p for p in plans}
    self.data: dict[At, sources_lib.SourceData] = {}
    self.trees: dict[At, tuple[branches.Segment, ...]] = {}
    self.turns: dict[At, Turns] = {}
    self._mirrors: list[Callable[..., None]] = []

  def mirror(self, tell: Callable[..., None]) -> None:
    """Tells `tell` the name and the arguments of every call that follows, in order."""
    self._mirrors.append(tell)

  def fix_turn(self, at: At, turn: types.Turn) -> None:
    """Takes one more turn of a running trajectory; an earlier index begins another attempt."""
    self._tell('fix_turn', at, turn)
    self.turns[at] = self.turns.get(at, Turns()).fix(turn)

  def score_turn(self, at: At, turn: int, log_probs: Sequence[float], scorer: str) -> None:
    """Takes a scorer's scores of a turn that is fixed."""
    self._tell('score_turn', at, turn, log_probs, scorer)
    self.turns[at] = self.turns[at].score(turn, log_probs, scorer)

  def register(self, trajectory: types.Trajectory) -> None:
    """Takes a finished trajectory."""
    self._tell('register', trajectory)
    at = trajectory.group, trajectory.index
    if trajectory.branches:
      self.trees[at] = branches.segments(trajectory)
    self.turns[at] = Turns.of(trajectory.turns)
    self.data[at] = sources_lib.SourceData.of(trajectory)

  def cost(self, at: At, buckets: Buckets) -> int:
    """Padded tokens of a finished trajectory; of its segments, where its history was rewritten."""
    segments = [s.data for s in self.trees.get(at, ())] or [self.data[at]]
    return sum(buckets.pad(max(d.tokens, 1)) for d in segments)

  def _tell(self, name: str, *arguments) -> None:
    for tell in self._mirrors:
      tell(name, *arguments)
