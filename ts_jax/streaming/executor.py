"""Runs what is assigned to lanes: at the same time where each has a device of its own, else in turn."""

from __future__ import annotations

import dataclasses
import queue
import threading
from typing import Callable, Sequence

import jax

from ts_jax.streaming import lane as lane_lib, scheduler


@dataclasses.dataclass(frozen=True)
class Finished:
  """A lane is through with a work item of an update: with its result, or the error that ended it."""

  update: int
  assignment: scheduler.Assignment
  result: lane_lib.Result | None = None
  error: BaseException | None = None


class Executor:
  """The lanes at work, within one update.

  Lanes whose devices are all different run in a thread each.  Others, one lane above all, run in the thread that submits, whose
  errors are then its own.
  """

  def __init__(self, update: int, lanes: Sequence[lane_lib.Lane], put: Callable[[Finished], None]):
    """Args: the update; its lanes, begun; where completions go, from any thread."""
    self._update, self._lanes, self._put = update, lanes, put
    self._waiting = 0
    self._queues: list[queue.SimpleQueue] = []
    self._threads: list[threading.Thread] = []
    if len({lane.device for lane in lanes}) == len(lanes) > 1:
      precision = jax.config.jax_enable_x64  # a thread begins with the process's, not with its parent's
      for lane in lanes:
        self._queues.append(queue.SimpleQueue())
        self._threads.append(threading.Thread(target=self._serve, args=(self._queues[-1], precision), name=f'lane {lane.index}', daemon=True))
        self._threads[-1].start()

  def __enter__(self) -> 'Executor':
    return self

  def __exit__(self, kind, value, traceback) -> None:
    """Ends the threads, each after what it is working on."""
    for waiting in self._queues:
      waiting.put(None)
    for thread in self._threads:
      thread.join()

  @property
  def busy(self) -> bool:
    """Something was submitted and not taken back with `take`."""
    return self._waiting > 0

  def submit(self, assignment: scheduler.Assignment, parts: Sequence[lane_lib.Parts] = ()) -> None:
    """Has a lane run its work item; `parts`: see `Lane.run`."""
    self._waiting += 1
    if self._queues:
      self._queues[assignment.lane].put((assignment, parts))
    else:
      self._put(self._run(assignment, parts))

  def take(self, finished: Finished) -> lane_lib.Result:
    """The result of what was submitted.

    Raises:
      BaseException: what ended it.
    """
    self._waiting -= 1
    if finished.error is not None:
      raise finished.error
    return finished.result

  def _run(self, assignment: scheduler.Assignment, parts: Sequence[lane_lib.Parts]) -> Finished:
    return Finished(self._update, assignment, self._lanes[assignment.lane].run(assignment.work, parts))

  def _serve(self, waiting: queue.SimpleQueue, precision: bool) -> None:
    with jax.enable_x64(precision):
      while (item := waiting.get()) is not None:
        try:
          self._put(self._run(*item))
        except BaseException as error:  # raised again in the update's thread, with this one's traceback
          self._put(Finished(self._update, item[0], error=error))
