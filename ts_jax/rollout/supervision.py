"""A server as a supervised child process: started, watched, restarted at the right version, ended with us."""

from __future__ import annotations

import abc
import logging
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time
from typing import Callable, Mapping, Sequence

from ts_jax import types
from ts_jax.rollout import control as control_lib

_WATCH_S = 0.2
_LOG_TAIL_BYTES = 3000
_GRACE_S = 5.0  # from SIGTERM to SIGKILL
_END_DEADLINE_S = 10.0  # for the kernel to end what was killed, and for the supervisor to notice
_STARTED_MARGIN_S = 120.0  # beyond a start's own deadline, for the calls in it to meet theirs
_STEADY_S = 600.0  # of service, after which earlier deaths are forgiven


def free_port(host: str = '127.0.0.1') -> int:
  """A TCP port of the interface nobody listens on at the moment.

  Raises:
    ConfigError: the machine has no such address.
  """
  with socket.socket() as s:
    try:
      s.bind((host, 0))
    except OSError as e:
      raise types.ConfigError(f'{host!r} is not an IPv4 address of this machine ({e})') from e
    return s.getsockname()[1]


class ServerProcess(abc.ABC):
  """One engine.  The URL stays the same across restarts.

  `bring_up` (usually `Publisher.bring_up_to_date`) gives the child the current weights, and only then does it count as
  ready.  A supervisor thread restarts it when it dies, reports itself dead, or stops answering.
  """

  def __init__(self, command: Sequence[str], *, port: int, log_path: str | pathlib.Path, host: str = '127.0.0.1',
               environment: Mapping[str, str] | None = None, bring_up: Callable[[control_lib.EngineControl], None] | None = None,
               start_timeout_s: float = 180.0, hang_timeout_s: float = 60.0, max_restarts: int = 5):
    """Describes the engine; `start` runs it.

    Args:
      command: what to run; it listens on `port` of `host`.
      port: TCP port.
      log_path: its output, appended.
      host: IPv4 address of an interface.
      environment: its variables; None for ours.
      bring_up: called with the healthy engine before it serves, at each start.
      start_timeout_s: how long a start may take.
      hang_timeout_s: how long /health may go unanswered before the engine is killed.
      max_restarts: deaths in a row that are made good, after which `failure` is set; ten minutes of service begin a new count.
    """
    self.port = port
    self.url = f'http://{host}:{self.port}'
    self.control = control_lib.EngineControl(self.url)
    self.log_path = pathlib.Path(log_path)
    self.restarts = 0
    self.failure: str | None = None
    self.ready = threading.Event()
    self._command, self._environment = list(command), environment
    self._bring_up = bring_up
    self._start_timeout_s, self._hang_timeout_s, self._max_restarts = start_timeout_s, hang_timeout_s, max_restarts
    self._child: subprocess.Popen | None = None
    self._stopping = threading.Event()
    self._settled = threading.Event()  # the first start succeeded or failed
    self._supervisor: threading.Thread | None = None

  def __enter__(self):
    self.start()
    return self

  def __exit__(self, *exc) -> None:
    self.stop()

  @abc.abstractmethod
  def _is_ours(self) -> bool:
    """The server that answers on the port is the child, and not somebody else's.

    Raises:
      InfrastructureError: nothing answers yet.
    """

  @property
  def pid(self) -> int | None:
    """Process id of the running child."""
    return self._child.pid if self._child and self._child.poll() is None else None

  def start(self, wait: bool = True) -> None:
    """Starts the engine; with `wait`, returns when it serves.

    Raises:
      InfrastructureError: it did not come up; the message holds the end of its log.
    """
    # Every child is spawned by the supervisor: the kernel ties a child to the thread that made it.
    self._supervisor = threading.Thread(target=self._supervise, name='engine-supervisor', daemon=True)
    self._supervisor.start()
    if wait:
      self.wait_started()

  def wait_started(self) -> None:
    """Returns when the first start has succeeded (to start several engines side by side).

    Raises:
      InfrastructureError: it did not come up.
    """
    if not self._settled.wait(self._start_timeout_s + _STARTED_MARGIN_S):
      self.stop()
      raise types.InfrastructureError(f'engine {self.url} did not start within {self._start_timeout_s:g} s, nor stop trying: '
                                      f'{self._log_tail()}')
    if self.failure:
      self.stop()
      raise types.InfrastructureError(self.failure)

  def wait_ready(self, deadline_s: float) -> None:
    """Returns when the engine serves, also after a restart.

    Raises:
      InfrastructureError: it has failed for good, or not within `deadline_s` seconds.
    """
    end = time.monotonic() + deadline_s
    while not (self.ready.wait(_WATCH_S) and self.pid):
      if self.failure or time.monotonic() > end:
        raise types.InfrastructureError(
            self.failure or f'engine {self.url} was not ready within {deadline_s:g} s: {self._log_tail()}')

  def stop(self) -> None:
    """Ends the child and the supervision; safe to call twice."""
    self._stopping.set()
    self._end_child()  # first: whatever the supervisor asks of it then fails at once
    if self._supervisor and self._supervisor is not threading.current_thread():
      self._supervisor.join(_END_DEADLINE_S)
      if self._supervisor.is_alive():
        logging.error('engine %s: its supervisor did not end within %g s', self.url, _END_DEADLINE_S)
    self._end_child()

  def kill(self) -> None:
    """Ends the child at once and for good; `stop` afterwards waits for nothing."""
    self._stopping.set()
    if self._child is not None:
      _kill_group(self._child.pid)

  def _supervise(self) -> None:
    in_a_row = 0
    while not self._stopping.is_set():
      ready_s = None
      try:
        self._start_child()
        self.ready.set()
        self._settled.set()
        ready_s = time.monotonic()
        reason = self._watch()
      except types.TsJaxError as e:
        reason = str(e)
        if not self._settled.is_set():  # it never worked: restarting will not help
          self.failure = reason
      except OSError as e:
        reason = self.failure = f'engine cannot be started ({self._command[0]}): {e}'
      self.ready.clear()
      self._end_child()
      if self._stopping.is_set():
        break
      in_a_row = 1 if ready_s and time.monotonic() - ready_s > _STEADY_S else in_a_row + 1
      if not self.failure and in_a_row > self._max_restarts:
        self.failure = f'engine {self.url} died {in_a_row} times in a row and is given up; last: {reason}'
      if self.failure:
        logging.error('%s', self.failure)
        break
      self.restarts += 1
      logging.warning('engine %s: %s; restart %d of %d', self.url, reason, in_a_row, self._max_restarts)
    self._settled.set()

  def _start_child(self) -> None:
    self.log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(self.log_path, 'ab') as log:
      # A session of its own: Ctrl-C reaches us only, and we end the engine when nobody needs it any more.
      self._child = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                     env=self._environment, start_new_session=True)
    end = time.monotonic() + self._start_timeout_s
    while True:
      if self._child.poll() is not None:
        raise types.InfrastructureError(f'engine ended with status {self._child.returncode} while starting: {self._log_tail()}')
      if time.monotonic() > end or self._stopping.is_set():
        raise types.InfrastructureError(f'engine {self.url} did not start within {self._start_timeout_s:g} s: {self._log_tail()}')
      try:
        if self._is_ours():
          break
      except types.InfrastructureError:
        pass  # not yet
      time.sleep(_WATCH_S)
    if self._bring_up:
      self._bring_up(self.control)
    self.control.resume()

  def _watch(self) -> str:
    """Returns why the child has to be replaced (or an empty string when stopping)."""
    last_answer = time.monotonic()
    next_health = 0.0
    while not self._stopping.wait(_WATCH_S):
      if self._child.poll() is not None:
        return f'ended with status {self._child.returncode}: {self._log_tail()}'
      if time.monotonic() < next_health:
        continue
      next_health = time.monotonic() + 1.0
      try:
        self.control.health(timeout_s=5.0)
        last_answer = time.monotonic()
      except types.InfrastructureError as e:
        if 'answered 50' in str(e):
          return str(e)
        if time.monotonic() - last_answer > self._hang_timeout_s:
          return f'no sign of life for {self._hang_timeout_s:g} s'
    return ''

  def _end_child(self) -> None:
    """Ends the child and everything it started."""
    if self._child is None:
      return
    if self._child.poll() is None:
      self._child.terminate()
      try:
        self._child.wait(_GRACE_S)
      except subprocess.TimeoutExpired:
        pass
    _kill_group(self._child.pid)
    try:
      self._child.wait(_END_DEADLINE_S)
    except subprocess.TimeoutExpired:
      logging.error('engine %s: process %d was killed and does not end', self.url, self._child.pid)

  def _log_tail(self) -> str:
    try:
      data = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors='replace').strip()
    except OSError as e:
      data = f'(unreadable: {e})'
    return f'the end of its log {self.log_path}:\n{data}'


def _kill_group(leader: int) -> None:
  try:
    os.killpg(leader, signal.SIGKILL)  # a session's group outlives its leader while anything is left in it
  except ProcessLookupError:
    pass
