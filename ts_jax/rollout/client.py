"""The async engine client: deadlines, retries while an engine restarts, and a check of every reply's policy version."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from typing import Any, Awaitable, Callable

import aiohttp

from ts_jax import types
from ts_jax.rollout import control as control_lib
from ts_jax.rollout import protocol

GenerateRequest = protocol.GenerateRequest
_BACKOFF_S = (0.1, 2.0)  # first and longest pause between attempts
_READY_POLL_S = 0.1


_MAX_SERVER_ERRORS = 3  # answers with a 5xx status; lost connections are retried until the deadline


class _Unavailable(Exception):
  """The engine went away or is starting: worth another attempt."""

  def __init__(self, message: str, answered: bool):
    super().__init__(message)
    self.answered = answered


class EngineClient:
  """Talks to one engine; any number of coroutines, and of event loops, may use it at once.

  A request carries its seed, so an attempt repeated after a restart returns the same tokens.
  """

  def __init__(self, url: str, *, model: str | None = None, timeout_s: float = 600.0, score_timeout_s: float = 120.0,
               await_ready: Callable[[], Awaitable[None]] | None = None):
    """Configures the client; connects at the first call.

    Args:
      url: base URL, http://host:port.
      model: served name; asked from the engine when None.
      timeout_s: deadline of one generate call, all attempts together.
      score_timeout_s: deadline of one score call.
      await_ready: called after a lost connection, before the next attempt; default polls /health.
    """
    self.url = url.rstrip('/')
    self.control = control_lib.EngineControl(self.url)
    self._model = model
    self._timeout_s, self._score_timeout_s = timeout_s, score_timeout_s
    self._await_ready = await_ready or self.await_ready
    self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = weakref.WeakKeyDictionary()

  async def __aenter__(self) -> 'EngineClient':
    return self

  async def __aexit__(self, *exc) -> None:
    await self.close()

  async def close(self) -> None:
    """Closes this event loop's connections."""
    session = self._sessions.pop(asyncio.get_running_loop(), None)
    if session:
      await session.close()

  def _session(self) -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    session = self._sessions.get(loop)
    if session is None or session.closed:
      # No limit: trajectories wait in the engine's queue, where admission order can be chosen, not for a connection.
      session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
      self._sessions[loop] = session
    return session

  async def generate(self, request: GenerateRequest, timeout_s: float | None = None) -> types.SampledTokens:
    """Samples one turn.

    Args:
      request: what to sample.
      timeout_s: overrides the client's deadline.

    Raises:
      ConfigError: the engine refuses the request (too long, unknown id, unsupported parameter).
      PolicyVersionError: tokens come from another version than `request.expected_version`.
      InfrastructureError: no answer by the deadline, or an answer that makes no sense.
    """
    where = f'engine {self.url}, request {request.request_id!r}'
    body = protocol.generate_body(request, '')
    sampled = protocol.parse_sampled(await self._post(body, timeout_s or self._timeout_s, where), where)
    expected = request.expected_version
    if expected is not None and sampled.token_ids and (sampled.version_start, sampled.version_end) != (expected, expected):
      raise types.PolicyVersionError(
          f'{where}: tokens come from policy version {sampled.version_start}..{sampled.version_end}, expected {expected}: '
          'publish that version to this engine before sampling')
    return sampled

  async def score(self, token_ids: tuple[int, ...], start: int, timeout_s: float | None = None,
                  request_id: str = '', reuse: bool = True) -> tuple[float, ...]:
    """Log-probs (temperature 1) of token_ids[start:], each given everything before it.

    Args:
      token_ids: the whole sequence.
      start: first scored position, at least 1.
      timeout_s: overrides the client's deadline.
      request_id: appears in errors; what comes before its last two dashes names the trajectory (`agents.teacher`).
      reuse: compute only what the engine's prefix cache does not hold, where that is all that is wanted.

    Returns:
      len(token_ids) - start values.

    Raises:
      ConfigError: refused, or `start` out of range.
      InfrastructureError: no or no sensible answer.
    """
    if not 1 <= start < len(token_ids):
      raise types.ConfigError(f'start={start} must be in [1, {len(token_ids) - 1}]: the first token has no log-prob')
    where = f'engine {self.url}, score {request_id!r}'
    # What came from the prefix cache has no log-probs: where another trajectory with the same ids has left a wanted position there, all
    # must be computed.  Under a salt of its own the trajectory then finds, next time, what it computed itself.
    own = request_id.rsplit('-', 2)[0]
    ways = ((True, ''), *([(True, own)] if own else ()), (False, '')) if reuse else ((False, ''),)
    for cached_too, salt in ways:
      reply = await self._post(protocol.score_body(token_ids, '', request_id, cached_too, salt), timeout_s or self._score_timeout_s, where)
      values, cached = protocol.parse_prompt_log_probs(reply, token_ids, where)
      if cached < start and all(v is not None and v == v and v <= 1e-4 and v > -float('inf') for v in values[start:]):
        return tuple(values[start:])
    raise types.InfrastructureError(f'{where}: the engine returned no finite log-probs for all positions from {start}')

  async def health(self) -> dict[str, Any]:
    """See `EngineControl.health`."""
    return await asyncio.to_thread(self.control.health)

  async def weight_info(self) -> control_lib.WeightInfo:
    """See `EngineControl.weight_info`."""
    return await asyncio.to_thread(self.control.weight_info)

  async def await_ready(self) -> None:
    """Returns once /health answers 200; the caller's deadline bounds the wait."""
    while True:
      try:
        async with self._session().get(self.url + '/health', timeout=aiohttp.ClientTimeout(total=5.0)) as reply:
          if reply.status == 200:
            return
      except (aiohttp.ClientError, asyncio.TimeoutError):
        pass  # not yet; the caller's deadline ends this
      await asyncio.sleep(_READY_POLL_S)

  async def _post(self, body: dict[str, Any], timeout_s: float, where: str) -> Any:
    """Posts to the generate route until it answers or the deadline passes."""
    end = time.monotonic() + timeout_s
    pause, last, errors = _BACKOFF_S[0], 'no answer at all', 0
    while True:
      try:
        async with asyncio.timeout(end - time.monotonic()):
          return await self._attempt(body, where)
      except _Unavailable as e:
        last, errors = str(e), errors + e.answered
        if errors == _MAX_SERVER_ERRORS:
          raise types.InfrastructureError(f'{where}: failed {errors} times, last with {last}') from e
      except TimeoutError as e:
        raise types.InfrastructureError(f'{where}: no reply within {timeout_s:g} s (last: {last}): the engine hangs, is overloaded '
                                        'or is not there; check its log, or raise the timeout') from e
      try:
        async with asyncio.timeout(end - time.monotonic()):
          await asyncio.sleep(pause)
          await self._await_ready()
      except TimeoutError as e:
        raise types.InfrastructureError(f'{where}: gone ({last}) and not back within {timeout_s:g} s: start it again, or look '
                                        'into its log') from e
      pause = min(2 * pause, _BACKOFF_S[1])

  async def _attempt(self, body: dict[str, Any], where: str) -> Any:
    try:
      if self._model is None:
        async with self._session().get(self.url + '/v1/models') as reply:
          models = await reply.json(content_type=None)
        self._model = models['data'][0]['id']
      async with self._session().post(self.url + '/inference/v1/generate', json={**body, 'model': self._model}) as reply:
        text = await reply.text(errors='replace')
    except (KeyError, IndexError, TypeError, ValueError) as e:
      raise types.InfrastructureError(f'{where}: /v1/models is not a model list: is this an engine?') from e
    except (aiohttp.ClientError, ConnectionError) as e:
      raise _Unavailable(f'{type(e).__name__}: {e}', answered=False) from e
    if reply.status in (500, 502, 503, 504):
      raise _Unavailable(f'HTTP {reply.status}: {control_lib.error_message(text)}', answered=True)
    if reply.status != 200:
      raise types.ConfigError(f'{where}: refused with HTTP {reply.status}: {control_lib.error_message(text)}')
    try:
      answer = json.loads(text)
      if protocol.is_unpublished(answer):
        raise _Unavailable('it serves the weights it started with', answered=False)
      return answer
    except ValueError as e:
      raise types.InfrastructureError(f'{where}: the reply is not JSON ({e}): is another server behind this URL?  It began '
                                      f'{text[:120]!r}') from e
