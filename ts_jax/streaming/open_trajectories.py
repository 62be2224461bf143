"""What a lane knows of trajectories that are still running: their turns, and the teacher's scores of them.

Work done early is used only for tokens (and scores) that turn out to be the trajectory's: an attempt that failed and was
made again starts over.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, Collection, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ts_jax import types
from ts_jax.models import llama
from ts_jax.streaming import sources as sources_lib
from ts_jax.streaming.buckets import Buckets

At = tuple[int, int]  # (group, index)


@dataclasses.dataclass(frozen=True)
class Turns:
  """Turns of one trajectory as far as they are fixed, and log-probs by (turn index, scorer) as far as they are there.

  Never changed: lanes read it while the next turn arrives.
  """

  turns: tuple[types.Turn, ...] = ()
  scores: Mapping[tuple[int, str], Sequence[float]] = dataclasses.field(default_factory=dict)

  @classmethod
  def of(cls, turns: Sequence[types.Turn]) -> 'Turns':
    """A trajectory's as it ended."""
    return cls(tuple(turns), {(t.index, scorer): s for t in turns for scorer, s in t.scores.items()})

  def fix(self, turn: types.Turn) -> 'Turns':
    """With one more turn; an earlier index begins another attempt."""
    return Turns((*self.turns[:turn.index], turn), {key: s for key, s in self.scores.items() if key[0] < turn.index})

  def score(self, turn: int, log_probs: Sequence[float], scorer: str = 'teacher') -> 'Turns':
    """With a scorer's scores of a turn that is fixed."""
    return Turns(self.turns, {**self.scores, (turn, scorer): log_probs}) if turn < len(self.turns) else self

  def data(self, index: int, scorers: Collection[str]) -> sources_lib.SourceData | None:
    """One turn's ids; None while a scorer's scores of it are missing."""
    if not self._has_scores(index, scorers):
      return None
    turn = self.turns[index]
    silent = (0.0,) * len(turn.context_ids)
    scores = {s: self.scores.get((index, s), ()) for s in scorers}
    return sources_lib.SourceData(
        np.asarray(turn.context_ids + turn.sampled.token_ids, np.int32),
        np.asarray((False,) * len(turn.context_ids) + turn.scored_mask, bool),
        np.asarray(silent + turn.sampled.log_probs, np.float64), turn.sampled.version_end,
        **{f'{s}_log_probs': np.asarray((*silent, *values), np.float64) for s, values in scores.items()})

  def scored(self, scorers: Collection[str]) -> int:
    """How many turns, from the first on, have everything that `data` needs."""
    return next((i for i in range(len(self.turns)) if not self._has_scores(i, scorers)), len(self.turns))

  def _has_scores(self, index: int, scorers: Collection[str]) -> bool:
    return not self.turns[index].sampled.token_ids or all((index, s) in self.scores for s in scorers)

  @property
  def branches(self) -> bool:
    """A turn rewrote history: nothing more is worked on early."""
    return any(t.keeps is not None for t in self.turns)

  def begins_with(self, done: Sequence[sources_lib.SourceData], scorers: Collection[str]) -> bool:
    """The first turns are still those that were worked on."""
    return self.scored(scorers) >= len(done) and all(map(_same, done, (self.data(i, scorers) for i in range(len(done)))))

  def ids(self) -> list[int]:
    """All ids behind the prompt."""
    return [i for t in self.turns for i in t.context_ids + t.sampled.token_ids]


def _same(a: sources_lib.SourceData, b: sources_lib.SourceData) -> bool:
  pairs = ((a.completion, b.completion), (a.mask, b.mask), (a.teacher_log_probs, b.teacher_log_probs),
           (a.reference_log_probs, b.reference_log_probs))
  return all(x is y or np.array_equal(x, y) for x, y in pairs)


@functools.partial(jax.jit, donate_argnums=0)
def _add(total, more):
  return jax.tree.map(jnp.add, total, more)


def accumulate(total, more):
  """total + more, in place; `total` None begins a sum."""
  return more if total is None else _add(total, more)


class OpenTrajectories(abc.ABC):
  """Running trajectories of one update, all at one policy version; subclasses decide what runs before completion.

  Attributes:
    span_kind: what early work is in traces.
    max_tokens: longest completion there is room for.
    leaves_some_whole: some completed trajectories are differentiated in one pass, as if no turn of them had been known before.
  """

  span_kind: str
  leaves_some_whole = False

  def __init__(self, functions: sources_lib.SourceFunctions, buckets: Buckets, max_tokens: int, teacher: bool = False):
    """Begins without any.

    Args:
      functions: the student's, with the objective's terms.
      buckets: allowed shapes.
      max_tokens: longest completion.
      teacher: the objective needs the teacher's scores.
    """
    self._functions, self._buckets, self._teacher = functions, buckets, teacher
    self._scorers = frozenset(s for s, needed in (('teacher', teacher), ('reference', 'reference' in functions.terms.needs)) if needed)
    self.max_tokens = buckets.pad(max_tokens)
    self._open: dict[At, Any] = {}  # early work, each kind its own

  def clear(self) -> None:
    """Forgets everything (a new update)."""
    self._open.clear()

  def discard(self, at: At) -> None:
    """Forgets what was done early of a trajectory."""
    self._open.pop(at, None)

  def drop(self, group: int) -> None:
    """Forgets a closed group's trajectories."""
    for at in [at for at in self._open if at[0] == group]:
      del self._open[at]

  def tokens(self, known: Turns) -> int:
    """Tokens that `steps` are about; those that a scorer's scores make a second step of count half each time."""
    count = lambda turns: sum(len(t.context_ids) + len(t.sampled.token_ids) for t in turns)
    return (count(known.turns) + count(known.turns[:known.scored(self._scorers)])) // 2 if self._teacher else count(known.turns)

  def steps(self, known: Turns) -> int:
    """How much could run early by now: grows with every turn or score that makes work possible; 0 once history was rewritten."""
    return 0 if known.branches else self._steps(known)

  @abc.abstractmethod
  def _steps(self, known: Turns) -> int:
    ...

  @abc.abstractmethod
  def last_turn(self, known: Turns) -> int:
    """Index of the last turn that `advance` works on."""

  @abc.abstractmethod
  def advance(self, params, before: int, prompt: llama.Boundary, at: At, known: Turns) -> int:
    """Runs what is possible early; returns the tokens that ran.

    Args:
      params: parameters.
      before: the prompt's last id, which opens the trajectory's segment.
      prompt: boundary state of the prompt without it.
      at: which trajectory.
      known: its turns so far.

    Raises:
      TsJaxError: the trajectory is longer than the longest that was announced.
    """

  @abc.abstractmethod
  def gradients(self, params, before: int, prompt: llama.Boundary, at: At, known: Turns,
                passes: Sequence[tuple[float, float]]) -> list[sources_lib.SourceResult]:
    """Gradients of the completed trajectory, which is forgotten.

    Args:
      params, before, prompt, at: as for `advance`.
      known: all its turns.
      passes: one result for each (w_t, u_t) of every scored token; with a teacher only (1, 1), and w_t its advantage beside.
    """

  @abc.abstractmethod
  def warm_up(self, params, prompt: llama.Boundary) -> Iterator[sources_lib.SourceResult]:
    """Runs every shape once; yields results of the kind that `gradient` returns."""

  def _check_length(self, at: At, tokens: int) -> None:
    if tokens > self.max_tokens:
      raise types.TsJaxError(f'trajectory {at[1]} of group {at[0]} has {tokens} tokens behind its prompt, room was made for '
                             f'{self.max_tokens}: lower the limits in config.agent, or set config.schedule.granularity=trajectory')

  def _pasts(self, prompt: llama.Boundary, capacity: int) -> list[int]:
    """Numbers of positions that turns look back on, ascending; compiled shapes."""
    least = prompt.room
    return [least, *(n for n in self._buckets.lengths if least < n < capacity), capacity]

  def _scored_shapes(self) -> Iterable[tuple[int, int]]:
    return [(t, s) for t in self._buckets.up_to(self.max_tokens) for s in (t // 2, t)]
