"""The async engine client: deadlines, retries while an engine restarts, and a check of every reply's policy version."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import weakref
from typing import Any, Awaitable, Callable

import aiohttp

from ts_jax import types
from ts_jax.rollout import completions
from ts_jax.rollout import control as control_lib
from ts_jax.rollout import protocol

GenerateRequest = protocol.GenerateRequest
_BACKOFF_S = (0.1, 2.0)  # first and longest pause between attempts
_READY_POLL_S = 0.1
_SIGN_OF_LIFE_S = 10.0  # a call that takes longer asks /health this often
_HEALTH_DEADLINE_S = 5.0
_GENERATE, _COMPLETIONS = '/inference/v1/generate', '/v1/completions'
_log = logging.getLogger(__name__)

MAX_SERVER_ERRORS = 3  # answers with a 5xx status; lost connections are retried until the deadline


class EngineGone(types.InfrastructureError):
  """The engine went away, is starting, hangs, or serves what nobody published: worth another attempt, here or elsewhere.

  Attributes:
    answered: it said so itself, with a status or by its reply.
  """

  def __init__(self, message: str, answered: bool = False):
    super().__init__(message)
    self.answered = answered


class EngineClient:
  """Talks to one engine; any number of coroutines, and of event loops, may use it at once.

  A request carries its seed, so an attempt repeated after a restart, or by another engine, returns the same tokens.
  """

  def __init__(self, url: str, *, model: str | None = None, timeout_s: float = 600.0, score_timeout_s: float = 120.0,
               await_ready: Callable[[], Awaitable[None]] | None = None, patient: bool = True, hang_timeout_s: float = 60.0):
    """Configures the client; connects at the first call.

    Args:
      url: base URL, http://host:port.
      model: served name; asked from the engine when None.
      timeout_s: deadline of one generate call, all attempts together.
      score_timeout_s: deadline of one score call.
      await_ready: called after a lost connection, before /health is polled and the next attempt made.
      patient: wait for an engine that is gone, until the deadline; else raise `EngineGone` at once (`replicas.ReplicaSet` then
        asks another one).
      hang_timeout_s: how long /health may go unanswered during a call before the engine counts as gone.
    """
    self.url = url.rstrip('/')
    self.control = control_lib.EngineControl(self.url)
    self._model, self._ask_model = model, model is None
    self._route: str | None = None  # the one the server has, once known
    self._timeout_s, self._score_timeout_s = timeout_s, score_timeout_s
    self._custom_ready, self._patient, self._hang_timeout_s = await_ready, patient, hang_timeout_s
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
      PolicyVersionError: tokens come from versions that the request does not accept.
      InfrastructureError: no answer by the deadline, or an answer that makes no sense.
    """
    where = f'engine {self.url}, request {request.request_id!r}'
    body = protocol.generate_body(request, '')
    sampled = protocol.parse_sampled(await self._post(body, timeout_s or self._timeout_s, where), where)
    request.check_version(sampled, where)
    return sampled

  async def score(self, token_ids: tuple[int, ...], start: int, timeout_s: float | None = None,
                  request_id: str = '', salt: str = '', reuse: bool = True) -> tuple[float, ...]:
    """Log-probs (temperature 1) of token_ids[start:], each given everything before it.

    Args:
      token_ids: the whole sequence.
      start: first scored position, at least 1.
      timeout_s: overrides the client's deadline.
      request_id: appears in errors.
      salt: names the trajectory, where it has one, to the prefix cache.
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
    ways = (*dict.fromkeys([(True, ''), (True, salt)] if reuse else []), (False, ''))
    for cached_too, own in ways:
      reply = await self._post(protocol.score_body(token_ids, '', request_id, cached_too, own), timeout_s or self._score_timeout_s, where,
                               versioned=False)
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
    """Returns once the engine serves again; the caller's deadline bounds the wait.

    Raises:
      InfrastructureError: it never will (a custom `await_ready` may know).
    """
    while True:
      if self._custom_ready is not None:
        await self._custom_ready()
      if await self._healthy():
        return
      await asyncio.sleep(_READY_POLL_S)

  async def _healthy(self) -> bool:
    try:
      async with self._session().get(self.url + '/health', timeout=aiohttp.ClientTimeout(total=_HEALTH_DEADLINE_S)) as reply:
        return reply.status == 200
    except (aiohttp.ClientError, asyncio.TimeoutError):
      return False

  async def _post(self, body: dict[str, Any], timeout_s: float, where: str, versioned: bool = True) -> Any:
    """Asks until there is an answer or the deadline passes.

    Args:
      body: of the generate route, without a model.
      timeout_s: deadline, seconds.
      where: names engine and request in errors.
      versioned: the answer's policy version matters; a scorer's does not.
    """
    end = time.monotonic() + timeout_s
    pause, last, errors = _BACKOFF_S[0], 'no answer at all', 0
    while True:
      try:
        async with asyncio.timeout(end - time.monotonic()):
          return await self._attempt(body, where, versioned)
      except EngineGone as e:
        if not self._patient:
          raise EngineGone(f'{where}: {e}', e.answered) from e
        last, errors = str(e), errors + e.answered
        if errors == MAX_SERVER_ERRORS:
          raise types.InfrastructureError(f'{where}: failed {errors} times, last with {last}') from e
      except TimeoutError as e:
        raise types.InfrastructureError(f'{where}: no reply within {timeout_s:g} s (last: {last}): the engine hangs, is overloaded '
                                        'or is not there; check its log, or raise the timeout') from e
      try:
        async with asyncio.timeout(end - time.monotonic()):
          await asyncio.sleep(pause)
          await self.await_ready()
      except TimeoutError as e:
        raise types.InfrastructureError(f'{where}: gone ({last}) and not back within {timeout_s:g} s: start it again, or look '
                                        'into its log') from e
      pause = min(2 * pause, _BACKOFF_S[1])

  async def _attempt(self, body: dict[str, Any], where: str, versioned: bool) -> Any:
    if self._model is None:
      try:
        self._model = (await self._call('GET', '/v1/models', where))['data'][0]['id']
      except (KeyError, IndexError, TypeError) as e:
        raise types.InfrastructureError(f'{where}: /v1/models is not a model list: is this an engine?') from e
    body = {**body, 'model': self._model}
    try:
      answer = await self._ask(body, where, versioned)
    except _NotFound as e:
      if self._ask_model:
        self._model = None  # perhaps it came back under another name
        raise EngineGone(str(e), answered=True) from e
      raise types.ConfigError(f'{where}: refused with {e}') from e
    if versioned and protocol.is_unpublished(answer):
      raise EngineGone('it serves the weights it started with')
    return answer

  async def _ask(self, body: dict[str, Any], where: str, versioned: bool) -> Any:
    """An answer as the generate route gives it, by the route that the server has."""
    if self._route != _COMPLETIONS:
      try:
        answer = await self._call('POST', _GENERATE, where, body)
        self._route = _GENERATE
        return answer
      except _NotFound as e:
        # Also an unknown model is not found: by a route that is there.
        if self._route == _GENERATE or (e.status == 404 and await self._has(_GENERATE)):
          raise
      if self._route is None:  # else a request beside this one has found out
        _log.warning('engine %s has no %s (vLLM: --enable-scale-out): asking %s, with versions read before and after', self.url,
                     _GENERATE, _COMPLETIONS)
      self._route = _COMPLETIONS
    before = await self._version(where) if versioned else None
    if before in protocol.UNPUBLISHED:
      raise EngineGone('it serves the weights it started with')
    reply = await self._call('POST', _COMPLETIONS, where, completions.body(body))
    return completions.generate_reply(reply, (before, await self._version(where)) if versioned else None, where)

  async def _has(self, route: str) -> bool:
    """Whether there is such a POST route: another method is then refused differently."""
    try:
      return (await self._request('GET', route))[0] == 405
    except (aiohttp.ClientError, ConnectionError) as e:
      raise EngineGone(f'{type(e).__name__}: {e}') from e

  async def _version(self, where: str) -> Any:
    try:
      return (await self._call('GET', '/weight_info', where))['weight_version']
    except (_NotFound, KeyError, TypeError) as e:
      raise types.ConfigError(f'{where}: the server has neither {_GENERATE} nor a policy version at /weight_info ({e}): start it with '
                              '--enable-scale-out, and VLLM_SERVER_DEV_MODE=1 for its weights to be published') from e

  async def _call(self, method: str, route: str, where: str, body: Any = None) -> Any:
    """One HTTP call, given up when the engine shows no sign of life meanwhile.

    Raises:
      EngineGone: lost, hanging, or a 5xx status.
      _NotFound: 403 or 404.
      ConfigError: any other status but 200.
      InfrastructureError: not JSON.
    """
    call = asyncio.ensure_future(self._request(method, route, body))
    alive_s = time.monotonic()
    try:
      while not (await asyncio.wait([call], timeout=min(_SIGN_OF_LIFE_S, self._hang_timeout_s)))[0]:
        if await self._healthy():
          alive_s = time.monotonic()
        elif time.monotonic() - alive_s > self._hang_timeout_s:
          raise EngineGone(f'no sign of life for {self._hang_timeout_s:g} s')
      status, text = call.result()
    except (aiohttp.ClientError, ConnectionError) as e:
      raise EngineGone(f'{type(e).__name__}: {e}') from e
    finally:
      call.cancel()
    if status in (500, 502, 503, 504):
      raise EngineGone(f'HTTP {status}: {control_lib.error_message(text)}', answered=True)
    if status in (403, 404):
      raise _NotFound(status, control_lib.error_message(text))
    if status != 200:
      raise types.ConfigError(f'{where}: refused with HTTP {status}: {control_lib.error_message(text)}')
    try:
      return json.loads(text)
    except ValueError as e:
      raise types.InfrastructureError(f'{where}: the reply is not JSON ({e}): is another server behind this URL?  It began '
                                      f'{text[:120]!r}') from e

  async def _request(self, method: str, route: str, body: Any = None) -> tuple[int, str]:
    async with self._session().request(method, self.url + route, json=body) as reply:
      return reply.status, await reply.text(errors='replace')


class _NotFound(Exception):
  """A route or model that the server does not have."""

  def __init__(self, status: int, message: str):
    super().__init__(f'HTTP {status}: {message}')
    self.status = status
