"""Interruptions that wait until what is being written is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Iterator


@contextlib.contextmanager
def delayed() -> Iterator[None]:
  """Delays the first SIGINT or SIGTERM to the end of the block; a second one is handled at once.

  For steps that a run cannot resume in the middle of.  Nested blocks wait for the outermost.
  """
  if threading.current_thread() is not threading.main_thread():  # signals are handled in the main thread alone
    yield
    return
  arrived: list[int] = []
  before = {}

  def note(number, frame):
    if arrived and callable(before[number]):
      before[number](number, frame)
    arrived.append(number)

  for number in (signal.SIGINT, signal.SIGTERM):
    before[number] = signal.signal(number, note)
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
    if len(arrived) == 1:
      signal.raise_signal(arrived[0])
