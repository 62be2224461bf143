"""An HTTP proxy that spoils chosen exchanges between a client and a real server."""

from __future__ import annotations

import contextlib
import http.server
import threading
from typing import Callable, NamedTuple

import httpx


class Reply(NamedTuple):
  """What the client gets; `announced` bytes, of which `body` may be fewer (the connection then ends)."""

  status: int
  body: bytes
  announced: int


class Fault(NamedTuple):
  """What happens to an exchange: before the server sees it, and to its reply (None: the connection ends without one)."""

  before: Callable[[], None] = lambda: None
  change: Callable[[Reply], Reply | None] = lambda reply: reply


def replaced(body: Callable[[bytes], bytes]) -> Fault:
  """The reply's body is another."""
  def change(reply: Reply) -> Reply:
    changed = body(reply.body)
    return Reply(reply.status, changed, len(changed))
  return Fault(change=change)


TRUNCATED = Fault(change=lambda reply: Reply(reply.status, reply.body[:len(reply.body) // 2], reply.announced))
NO_REPLY = Fault(change=lambda reply: None)


class FaultProxy:
  """Listens on a port of its own; a context manager."""

  def __init__(self, upstream: str):
    """Args: upstream: base URL of the server."""
    self._lock = threading.Lock()
    self._faults: list[tuple[str, Fault, int]] = []
    self.struck = 0  # exchanges that met a fault
    proxy = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def do_GET(self):
        proxy._serve(self, upstream)

      do_POST = do_GET

      def log_message(self, *_):
        pass

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self._server.daemon_threads = True
    self.url = f'http://127.0.0.1:{self._server.server_port}'
    self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

  def __enter__(self) -> 'FaultProxy':
    self._thread.start()
    return self

  def __exit__(self, *exc) -> None:
    self._server.shutdown()
    self._server.server_close()
    self._thread.join(10)

  @contextlib.contextmanager
  def spoiling(self, path: str, fault: Fault, times: int = 1):
    """While open, the first `times` exchanges on `path` meet the fault."""
    with self._lock:
      self._faults, self.struck = [(path, fault, times)], 0
    try:
      yield self
    finally:
      with self._lock:
        self._faults = []

  def _fault_of(self, path: str) -> Fault:
    with self._lock:
      for i, (where, fault, times) in enumerate(self._faults):
        if path.split('?')[0] == where and times:
          self._faults[i] = where, fault, times - 1
          self.struck += 1
          return fault
    return Fault()

  def _serve(self, handler: http.server.BaseHTTPRequestHandler, upstream: str) -> None:
    body = handler.rfile.read(int(handler.headers.get('Content-Length') or 0))
    fault = self._fault_of(handler.path)
    handler.close_connection = True
    fault.before()
    try:
      found = httpx.request(handler.command, upstream + handler.path, content=body, timeout=600.0, trust_env=False,
                            headers={'Content-Type': handler.headers.get('Content-Type', 'application/json')})
    except httpx.HTTPError:
      return  # as the server's own end of the connection would look
    reply = fault.change(Reply(found.status_code, found.content, len(found.content)))
    if reply is None:
      return
    with contextlib.suppress(OSError):  # a client that gave up
      handler.send_response(reply.status)
      handler.send_header('Content-Type', found.headers.get('Content-Type', 'application/json'))
      handler.send_header('Content-Length', str(reply.announced))
      handler.send_header('Connection', 'close')
      handler.end_headers()
      handler.wfile.write(reply.body)
