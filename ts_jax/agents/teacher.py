"""The scorers' side of a trajectory: each turn's sampled ids are scored while its command runs and later turns are sampled.

A scorer is a frozen model: a teacher, or the reference of a KL term.  What it is asked is what the engine was asked and what it
answered, id by id; nothing is re-encoded.  A failure of a scorer ends the trajectory at once and is never cured by sampling it
again: the same seeds give the same question.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import AsyncIterator, Callable, Mapping, Protocol, Sequence

from ts_jax import types

_EXPECTED = 'it must be one finite log-prob (temperature 1, at most 0) per sampled id: check its weights and its precision'


class Teacher(Protocol):
  """What scoring needs of an engine client (`rollout.client.EngineClient`)."""

  async def score(self, token_ids: tuple[int, ...], start: int, *, request_id: str = '') -> tuple[float, ...]:
    """Log-probs at temperature 1 of token_ids[start:], within its own deadline and retries."""


class TeacherError(types.TsJaxError):
  """A scorer answered, and its answer cannot be trained on."""


class TeacherFailed(TeacherError, types.InfrastructureError):
  """A scorer gave no usable answer within its client's deadline and retries."""


class Scores:
  """The scores of one attempt; made by `scoring`."""

  def __init__(self, scorers: Mapping[str, Teacher], key: tuple[int, int, int], attempt: int, tasks: asyncio.TaskGroup,
               emit_event: Callable[[types.RolloutEvent], None], emit_span: Callable[[types.Span], None]):
    self._scorers, self._key, self._attempt, self._tasks = scorers, key, attempt, tasks
    self._emit_event, self._emit_span = emit_event, emit_span
    self._turns: dict[int, dict[str, tuple[float, ...]]] = {}  # by turn, fields of the turn

  def start(self, turn: types.Turn, context: Sequence[int]) -> None:
    """Begins to score a turn whose tokens are fixed, and returns.  One without sampled ids needs no score.

    Args:
      turn: as in its `TurnFixed`.
      context: everything before its sampled ids: prompt, earlier turns, its own context.
    """
    if turn.sampled.token_ids:
      for scorer in self._scorers:
        self._tasks.create_task(self._score(scorer, turn, tuple(context)))

  def fill(self, trajectory: types.Trajectory) -> types.Trajectory:
    """Returns the trajectory with the scores in its turns, its content fixed now; after `scoring` has ended."""
    if not self._scorers:
      return trajectory
    turns = tuple(dataclasses.replace(t, **self._turns.get(t.index, {})) for t in trajectory.turns)
    return dataclasses.replace(trajectory, turns=turns, content_s=time.time())

  async def _score(self, scorer: str, turn: types.Turn, context: tuple[int, ...]) -> None:
    update, group, index = self._key
    what = f'turn {turn.index} of trajectory {self._key}'
    start_s = time.time()
    try:
      answer = await self._scorers[scorer].score(context + turn.sampled.token_ids, len(context),
                                                 request_id=f'{update}-{group}-{index}-{turn.index}-{self._attempt}')
    except types.InfrastructureError as e:
      raise TeacherFailed(f'the {scorer} did not score {what}: {e}') from e
    except types.ConfigError as e:
      raise types.ConfigError(f'the {scorer} refused to score {what}: {e}') from e
    end_s = time.time()
    try:
      log_probs = tuple(float(value) for value in answer)
      dataclasses.replace(turn, **{f'{scorer}_log_probs': log_probs})  # checks them against the turn
    except (TypeError, ValueError) as e:
      raise TeacherError(f"the {scorer}'s answer for {what} is unusable ({e}): {_EXPECTED}") from e
    self._turns.setdefault(turn.index, {})[f'{scorer}_log_probs'] = log_probs
    self._emit_span(types.Span(scorer, start_s, end_s, update, group, index, turn.index, tokens=len(log_probs),
                               ready_s=turn.request_end_s))
    self._emit_event(types.TurnScored(update, group, index, turn.index, log_probs, scorer))


@contextlib.asynccontextmanager
async def scoring(scorers: Mapping[str, Teacher], key: tuple[int, int, int], attempt: int,
                  emit_event: Callable[[types.RolloutEvent], None],
                  emit_span: Callable[[types.Span], None]) -> AsyncIterator[Scores]:
  """The time in which an attempt's turns are scored.  Ends when every score is in; emits `TurnScored`, and spans named like the scorer.

  A failed score interrupts the block.  When the block fails, what is being scored is cancelled and awaited.

  Args:
    scorers: by their names in `types.SCORERS`.
    key: (update, group, index) of the trajectory.
    attempt: number of the attempt, for request ids.
    emit_event, emit_span: as for `loop.run_trajectory`.

  Raises:
    TeacherFailed: no answer, by the client's own deadline and retries.
    TeacherError: an answer that is not finite, is incomplete or does not fit the turn.
    ConfigError: a scorer refuses the ids or the length.
  """
  try:
    async with asyncio.TaskGroup() as tasks:
      yield Scores(scorers, key, attempt, tasks, emit_event, emit_span)
  except BaseExceptionGroup as failures:
    errors = _flat(failures)
    first = next((e for e in errors if isinstance(e, TeacherError)), errors[0])
    raise first from first.__cause__


def _flat(error: BaseException) -> list[BaseException]:
  if isinstance(error, BaseExceptionGroup):
    return [e for part in error.exceptions for e in _flat(part)]
  return [error]
