"""Engines that somebody else runs and restarts: watched, and brought to the current version when they come back without it."""

from __future__ import annotations

import logging
import threading
from typing import Any

from ts_jax import types
from ts_jax.rollout import control as control_lib

_EVERY_S = 1.0
_HEALTH_DEADLINE_S = 5.0
_STOP_DEADLINE_S = 10.0
_log = logging.getLogger(__name__)


class WatchedEngine:
  """What `supervision.ServerProcess` is to a child, to an engine at a URL: `ready` while it answers and serves what it should.

  An engine that states something else than the published version and checksum is brought up to date, unless it only states
  what it did before: then a publication to it is under way.
  """

  def __init__(self, url: str, publisher: Any = None):
    """Looks at nothing before `start`.

    Args:
      url: base URL.
      publisher: `Publisher` of the weights it should serve; None for a model that never changes.
    """
    self.control = control_lib.EngineControl(url)
    self.url = self.control.url
    self.failure: str | None = None  # never given up: whoever runs it may bring it back
    self.ready = threading.Event()
    self._publisher = publisher
    self._settled: Any = None  # what it stated when nothing was left to do
    self._owed = False  # it was to be brought up to date, and that failed
    self._stopping = threading.Event()
    self._thread = threading.Thread(target=self._watch, name='engine-watch', daemon=True)

  def start(self) -> None:
    """Begins to watch.

    Raises:
      InfrastructureError: it is not there.
    """
    self.control.health()
    self._look()
    self._thread.start()

  def stop(self) -> None:
    """Ends the watch, not the engine; safe to call twice."""
    self._stopping.set()
    if self._thread.is_alive():
      self._thread.join(_STOP_DEADLINE_S)  # a load in progress ends by its own deadline, and with this process

  def _watch(self) -> None:
    said = ''
    while not self._stopping.wait(_EVERY_S):
      try:
        self._look()
        said = ''
      except types.TsJaxError as e:
        self.ready.clear()
        if str(e) != said:
          said = str(e)
          _log.warning('%s; watching for its return', said)

  def _look(self) -> None:
    try:
      self.control.health(timeout_s=_HEALTH_DEADLINE_S)
    except types.InfrastructureError:
      self._settled = 'gone'
      raise
    if self._publisher is not None:
      stated, current = self._stated(), self._publisher.current
      wanted = current and (current.version, current.checksum)
      if self._owed or (wanted and stated not in (wanted, (current.version, ''), self._settled)):
        self.ready.clear()
        self._owed = True
        _log.warning('engine %s serves %s, not version %d: loading it again', self.url, stated or 'no published version', current.version)
        self._publisher.bring_up_to_date(self.control)
        self._owed = False
      else:
        self._settled = stated
    self.ready.set()

  def _stated(self) -> tuple[int, str] | None:
    """(version, checksum if it tells); None for weights that nobody published."""
    try:
      info = self.control.weight_info()
    except types.InfrastructureError:  # healthy, and states no number
      return None
    return info.version, info.checksum
