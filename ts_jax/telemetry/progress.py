"""Live progress in the terminal: a status that is rewritten in place, and one lasting line per finished piece of work."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import threading
import time
from typing import Any, Callable, Mapping, Sequence, TextIO

_TTY_INTERVAL_S = 0.1
_PLAIN_INTERVAL_S = 10.0
_RECENT_UPDATES = 5


@dataclasses.dataclass(frozen=True)
class TrainStatus:
  """What the status line of a training run shows.  Shares are in [0, 1]; None is not known yet.

  Attributes:
    update: 0-based update in progress.
    updates: how many the run will have.
    done, running, total: trajectories of this update: rewarded, being generated, planned.
    reward_mean: over the rewarded ones.
    tokens_per_s: generated tokens a second.
    learner_busy: share of this update's time in which the learner worked.
    elapsed_s: since the run started.
    eta_s: until its last update is done.
    phase: 'rollout', 'learner', 'publish', 'evaluate', ...
  """

  update: int
  updates: int
  done: int = 0
  running: int = 0
  total: int = 0
  reward_mean: float | None = None
  tokens_per_s: float | None = None
  learner_busy: float | None = None
  elapsed_s: float = 0.0
  eta_s: float | None = None
  phase: str = ''


# --- pure formatting


def format_duration(seconds: float | None) -> str:
  """Formats a duration: '0.4s', '12s', '3m05s', '2h07m', '--' when unknown."""
  if seconds is None or not 0 <= seconds < 1e9:
    return '--'
  if seconds < 9.95:
    return f'{seconds:.1f}s'
  whole = round(seconds)
  if whole < 60:
    return f'{whole}s'
  if whole < 3600:
    return f'{whole // 60}m{whole % 60:02d}s'
  minutes = round(seconds / 60)
  return f'{minutes // 60}h{minutes % 60:02d}m'


def format_status(status: TrainStatus) -> str:
  """Formats the status line of a training run.  Updates have their number in the record (from 0) and a count (from 1)."""
  parts = [f'update {status.update} ({status.update + 1}/{status.updates})' + (f' {status.phase}' if status.phase else '')]
  if status.total:
    parts.append(f'traj {status.done} done {status.running} running /{status.total}')
  parts.append(f'reward {_number(status.reward_mean, ".2f")}')
  parts.append(f'{_number(status.tokens_per_s, ".0f")} tok/s')
  if status.learner_busy is not None:
    busy = round(100 * min(1.0, max(0.0, status.learner_busy)))
    parts.append(f'learner {busy}% busy {100 - busy}% idle')
  parts.append(f'{format_duration(status.elapsed_s)} ETA {format_duration(status.eta_s)}')
  return ' | '.join(parts)


def format_update(record: Mapping[str, Any], updates: int) -> str:
  """Formats the lasting line of a finished update from its metrics record.  Mixed groups have a reward difference."""
  step = record['step_s'] or 0.0
  in_lane = (record['learner_busy_s'] or 0.0) + (record['learner_idle_s'] or 0.0)
  busy = f'{record["learner_busy_s"] / in_lane:.0%}' if in_lane > 0 else '--'
  digits = len(str(updates))
  return (f'update {record["update"]:>{digits}} ({record["update"] + 1:>{digits}}/{updates})'
          f'  reward {_number(record["reward_mean"], "5.3f")}  success {_number(record["success_rate"], "4.0%")}'
          f'  mixed groups {record["groups"] - record["groups_uniform"]}/{record["groups"]}  {record["scored_tokens"]} tok'
          f'  step {format_duration(step)} (rollout {format_duration(record["rollout_s"])} tail {format_duration(record["tail_s"])})'
          f'  learner {busy} busy{_lag(record)}')


def _lag(record: Mapping[str, Any]) -> str:
  """How old the tokens were, in updates; nothing where none was old."""
  return f'  lag {record["lag_mean"]:.2f} (max {record["lag_max"]})' if record.get('lag_max') else ''


def format_evaluation(record: Mapping[str, Any]) -> str:
  """Formats the lasting line of an evaluation from its metrics record."""
  return (f'{record["split"].replace("_", "-")} after {record["update"]} updates: reward {_number(record["reward_mean"], ".3f")}'
          f'  success {_number(record["success_rate"], ".0%")}  ({record["attempts"]} attempts)')


def remaining_s(finished_steps_s: Sequence[float], current_s: float, current_share: float, updates_left: int) -> float | None:
  """Estimates the seconds until the last update is done.

  Args:
    finished_steps_s: durations of the updates finished by this process.  The median of the last few counts, so that one
      update with compilation in it does not mislead.
    current_s: age of the update in progress.
    current_share: share of it that is done, in [0, 1].
    updates_left: updates not yet finished, the one in progress included.

  Returns:
    Seconds, or None while nothing is known.
  """
  if updates_left <= 0:
    return 0.0
  if finished_steps_s:
    step = statistics.median(finished_steps_s[-_RECENT_UPDATES:])
  elif current_share > 0:
    step = current_s / current_share
  else:
    return None
  return max(0.0, step - current_s) + step * (updates_left - 1)


def format_work(label: str, done: int, total: int | None, elapsed_s: float, unit: str = '') -> str:
  """Formats the status line of countable work, with its rate's ETA."""
  if not total:
    return f'{label}: {done}{unit and " " + unit} | {format_duration(elapsed_s)}'
  eta = elapsed_s / done * (total - done) if done else None
  return (f'{label}: {done}/{total}{unit and " " + unit} ({done / total:.0%}) | {format_duration(elapsed_s)}'
          f' ETA {format_duration(eta)}')


def _number(value: float | None, spec: str) -> str:
  return '--' if value is None else format(value, spec)


# --- printing


class StatusLine:
  """One line rewritten in place on a terminal; elsewhere a plain line now and then.  Safe to use from several threads."""

  def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.time, interval_s: float | None = None):
    """Writes nothing yet.

    Args:
      stream: default standard error.
      clock: seconds.
      interval_s: least time between two statuses; default 0.1 s on a terminal, 10 s elsewhere.
    """
    self._stream, self._clock = stream or sys.stderr, clock
    self._tty = not self._stream.closed and self._stream.isatty()
    self._interval = interval_s if interval_s is not None else (_TTY_INTERVAL_S if self._tty else _PLAIN_INTERVAL_S)
    self._next_s, self._width, self._last = float('-inf'), 0, ''
    self._mutex = threading.Lock()

  @property
  def due(self) -> bool:
    """Whether `show` would write now: spares the caller the work of a status that nobody sees."""
    return self._clock() >= self._next_s

  def show(self, text: str, force: bool = False) -> None:
    """Replaces the status."""
    with self._mutex:
      if not force and not self.due:
        return
      self._next_s = self._clock() + self._interval
      if self._tty:
        text = text[:max(10, shutil.get_terminal_size().columns - 1)]
        self._write('\r' + text + ' ' * (self._width - len(text)))
        self._width = len(text)
      else:
        self._write(text + '\n')
      self._last = text

  def lasting(self, text: str) -> None:
    """Writes a line that stays, above the status."""
    with self._mutex:
      if self._width:
        self._write('\r' + text + ' ' * (self._width - len(text)) + '\n' + self._last)
      else:
        self._write(text + '\n')

  def close(self) -> None:
    """Leaves the last status standing and the cursor on a new line."""
    with self._mutex:
      if self._width:
        self._write('\n')
        self._width = 0

  def _write(self, text: str) -> None:
    try:
      self._stream.write(text)
      self._stream.flush()
    except (BrokenPipeError, ValueError):
      pass  # nobody reads any more (`| head`, a closed stream): not a reason to lose a run


class TrainProgress:
  """Progress of a training run: status line, lasting line per update, ETA."""

  def __init__(self, updates: int, first_update: int = 0, line: StatusLine | None = None, clock: Callable[[], float] = time.time):
    """Starts the clock.

    Args:
      updates: how many the run will have.
      first_update: the one it starts or resumes at.
      line: where it prints.
      clock: seconds.
    """
    self.line = line or StatusLine(clock=clock)
    self._clock, self._updates = clock, updates
    self._start_s = self._update_start_s = clock()
    self._steps: list[float] = []
    self._status = TrainStatus(update=first_update, updates=updates)
    self._mutex = threading.Lock()

  def begin_update(self, update: int, total: int) -> None:
    """An update with `total` planned trajectories starts."""
    self._update_start_s = self._clock()
    self.set(update=update, total=total, done=0, running=0, reward_mean=None, tokens_per_s=None, learner_busy=None, phase='rollout')

  def set(self, **changes: Any) -> TrainStatus:
    """Changes fields of the status (see `TrainStatus`) and prints it when due.  Returns the status."""
    now = self._clock()
    with self._mutex:
      status = dataclasses.replace(self._status, **changes)
      current_s = now - self._update_start_s
      share = status.done / status.total if status.total else 0.0
      status = dataclasses.replace(status, elapsed_s=now - self._start_s,
                                   eta_s=remaining_s(self._steps, current_s, share, self._updates - status.update))
      self._status = status
    if self.line.due:
      self.line.show(format_status(status))
    return status

  def finish_update(self, record: Mapping[str, Any]) -> None:
    """Writes the lasting line of an update from its metrics record."""
    self._steps.append(self._clock() - self._update_start_s)
    self.line.lasting(format_update(record, self._updates))

  def finish_evaluation(self, record: Mapping[str, Any]) -> None:
    """Writes the lasting line of an evaluation from its metrics record."""
    self.line.lasting(format_evaluation(record))

  def close(self) -> None:
    """Ends the status line."""
    self.line.close()


class Progress:
  """Progress of countable work with an ETA.  A context manager."""

  def __init__(self, total: int | None, label: str, unit: str = '', line: StatusLine | None = None,
               clock: Callable[[], float] = time.time):
    """Starts the clock.

    Args:
      total: how many pieces; None when that is not known.
      label: what is being done.
      unit: name of the pieces.
      line: where it prints.
      clock: seconds.
    """
    self.line = line or StatusLine(clock=clock)
    self._total, self._label, self._unit, self._clock = total, label, unit, clock
    self._start_s, self._done = clock(), 0

  def advance(self, count: int = 1) -> None:
    """`count` more pieces are done."""
    self._done += count
    self._show(force=False)

  def close(self) -> None:
    """Shows the final count and ends the line."""
    self._show(force=True)
    self.line.close()

  def _show(self, force: bool) -> None:
    self.line.show(format_work(self._label, self._done, self._total, self._clock() - self._start_s, self._unit), force)

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *_) -> None:
    self.close()
