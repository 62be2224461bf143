"""Several engines that serve one model, as one: sticky, balanced, and nothing is lost with one of them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any, Awaitable, Callable, Hashable, Protocol, Sequence

from ts_jax import types
from ts_jax.rollout import client as client_lib, protocol, routing

_PAUSE_S = 0.1  # before a lost replica is looked at, and between looks for one that serves
_log = logging.getLogger(__name__)


class Engine(Protocol):
  """One replica: an `EngineClient` that is not patient, so that what it cannot answer goes elsewhere at once."""

  async def generate(self, request: protocol.GenerateRequest) -> types.SampledTokens:
    """Samples one reply; raises `EngineGone` when another replica may do better."""

  async def score(self, token_ids: tuple[int, ...], start: int, *, request_id: str = '', salt: str = '') -> tuple[float, ...]:
    """Log-probs of token_ids[start:]; raises likewise."""

  async def await_ready(self) -> None:
    """Returns when it serves again; raises InfrastructureError when it never will."""

  async def close(self) -> None:
    """Closes this event loop's connections."""


class ReplicaSet:
  """Routes requests to replicas by `routing`; belongs to one event loop at a time.

  A request whose replica goes away is asked again, of another replica or, where none is up, of the first that comes back: with
  the same seed and the same expected policy version, so with the same tokens.
  """

  def __init__(self, clients: Sequence[Engine], timeout_s: float = 600.0, slack: int = 4):
    """Connects to nothing yet.

    Args:
      clients: one per replica.
      timeout_s: deadline of one call, all attempts and waits together.
      slack: see `routing.Routing`.

    Raises:
      ConfigError: no client, or a negative slack.
    """
    self.clients = tuple(clients)
    self._timeout_s = timeout_s
    self._state = routing.Routing(len(self.clients), slack)
    self._failures: dict[int, types.InfrastructureError] = {}  # of replicas that never come back
    self._probes: set[asyncio.Task] = set()

  @property
  def state(self) -> routing.Routing:
    """Where everything is at the moment."""
    return self._state

  def session(self, group: Hashable) -> 'Session':
    """A new sequence of a group: a context manager that releases it."""
    return Session(self, group)

  async def close(self) -> None:
    """Closes this event loop's connections; another loop may use the set afterwards."""
    for probe in self._probes:
      probe.cancel()
    await asyncio.gather(*self._probes, return_exceptions=True)
    for replica in self._state.down:
      self._state = routing.mark_up(self._state, replica)
    for client in self.clients:
      await client.close()

  async def call(self, group: Hashable, member: Hashable, ask: Callable[[Engine], Awaitable[Any]]) -> Any:
    """Asks the sequence's replica, and others when it goes away.

    Raises:
      InfrastructureError: no answer by the deadline, `MAX_SERVER_ERRORS` server errors, or every replica is given up.
      PolicyVersionError: as many answers came from another policy version.
    """
    last: types.TsJaxError | None = None
    failed = 0
    try:
      async with asyncio.timeout(self._timeout_s):
        while failed < client_lib.MAX_SERVER_ERRORS:
          replica = await self._replica(group, member)
          try:
            return await ask(self.clients[replica])
          except (client_lib.EngineGone, types.PolicyVersionError) as e:
            failed += e.answered if isinstance(e, client_lib.EngineGone) else 1
            last = e
            self._lost(replica, e)
    except TimeoutError as e:
      gone = ', '.join(getattr(self.clients[r], 'url', f'engine {r}') for r in sorted(self._state.down))
      raise types.InfrastructureError(f'{last or "no engine answered"}: no reply within {self._timeout_s:g} s; not back: '
                                      f'{gone or "none"}: start them again, or look into their logs') from e
    raise type(last)(f'failed {failed} times, last: {last}') from last

  def release(self, group: Hashable, member: Hashable) -> None:
    """The sequence asks for nothing more."""
    self._state = routing.release(self._state, group, member)

  async def _replica(self, group: Hashable, member: Hashable) -> int:
    while True:
      self._state, replica = routing.assign(self._state, group, member)
      if replica is not None:
        return replica
      if len(self._failures) == len(self.clients):
        raise types.InfrastructureError('; '.join(str(e) for e in self._failures.values()))
      await asyncio.sleep(_PAUSE_S)

  def _lost(self, replica: int, error: types.TsJaxError) -> None:
    if replica in self._state.down:
      return
    _log.warning('%s; its requests go to %s', error, 'other replicas' if len(self.clients) - len(self._state.down) > 1
                 else 'it again once it is back')
    self._state = routing.mark_down(self._state, replica)
    probe = asyncio.ensure_future(self._probe(replica))
    self._probes.add(probe)
    probe.add_done_callback(self._probes.discard)

  async def _probe(self, replica: int) -> None:
    """Takes a lost replica back when it serves; calls that wait for it have deadlines of their own."""
    await asyncio.sleep(_PAUSE_S)
    try:
      await self.clients[replica].await_ready()
    except types.InfrastructureError as e:
      self._failures[replica] = e
    else:
      self._state = routing.mark_up(self._state, replica)


class Session:
  """One sequence of a set: the engine, and the teacher, of one trajectory."""

  def __init__(self, replicas: ReplicaSet, group: Hashable):
    self._replicas, self._group = replicas, group
    self._salt = uuid.uuid4().hex  # its name in prefix caches, where it must share nothing

  def __enter__(self) -> 'Session':
    return self

  def __exit__(self, *exc) -> None:
    self.release()

  async def generate(self, request: protocol.GenerateRequest) -> types.SampledTokens:
    """As `EngineClient.generate`, by any replica."""
    return await self._replicas.call(self._group, self, lambda client: client.generate(request))

  async def score(self, token_ids: tuple[int, ...], start: int, *, request_id: str = '') -> tuple[float, ...]:
    """As `EngineClient.score`, by any replica."""
    return await self._replicas.call(self._group, self, lambda client: client.score(token_ids, start, request_id=request_id, salt=self._salt))

  def release(self) -> None:
    """It asks for nothing more and weighs on no replica; safe to call twice."""
    self._replicas.release(self._group, self)
