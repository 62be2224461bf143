"""Interruptions that wait until what is being written is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Note:
  """A handler that remembers the first signal and handles the second as it would have been without it."""

  def __init__(self):
    self.arrived: int | None = None
    self._before = {number: signal.signal(number, self) for number in _SIGNALS}

  def __call__(self, number, frame):
    if self.arrived is None:
      self.arrived = number
    else:
      self.arrived = None
      self.restore()
      signal.raise_signal(number)

  def restore(self) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)


@contextlib.contextmanager
def delayed() -> Iterator[None]:
  """Delays the first SIGINT or SIGTERM to the end of the block, the outermost where blocks are nested; a second is handled at once.

  For steps that a run cannot resume in the middle of.
  """
  in_main = threading.current_thread() is threading.main_thread()  # where signals are handled
  if not in_main or isinstance(signal.getsignal(signal.SIGINT), _Note):
    yield
    return
  note = _Note()
  try:
    yield
  finally:
    note.restore()
    if note.arrived is not None:
      signal.raise_signal(note.arrived)
