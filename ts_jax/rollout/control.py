"""Operating an engine from ordinary (not async) code: health, pausing, loading weights, versions."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import Any

import httpx

from ts_jax import types

_POLL_S = 0.1

logging.getLogger('httpx').setLevel(logging.WARNING)  # it reports every health check at INFO


@dataclasses.dataclass(frozen=True)
class WeightInfo:
  """What an engine says it serves.

  Attributes:
    version: policy version.
    checksum: `weights_checksum` of its weights; empty when the engine does not tell.
  """

  version: int
  checksum: str


class EngineControl:
  """Control routes of one engine; safe to use from several threads."""

  def __init__(self, url: str, timeout_s: float = 60.0):
    """Args: url: base URL; timeout_s: of every call but those that say otherwise."""
    self.url = url.rstrip('/')
    self._timeout_s = timeout_s
    # Engines are local or on a private network: a proxy from the environment would only be in the way.  Connections are
    # not kept: a restarted engine would reset them.
    self._http = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

  def _call(self, method: str, path: str, *, timeout_s: float | None = None, **kwargs) -> Any:
    timeout_s = timeout_s or self._timeout_s
    try:
      reply = self._http.request(method, self.url + path, timeout=timeout_s, **kwargs)
    except httpx.TimeoutException as e:
      raise types.InfrastructureError(f'engine {self.url} did not answer {path} within {timeout_s:g} s: it hangs or is '
                                      'overloaded; restart it or raise the timeout') from e
    except httpx.HTTPError as e:
      raise types.InfrastructureError(f'engine {self.url} cannot be reached ({type(e).__name__}: {e}): is it running, and is the '
                                      'URL right?') from e
    if reply.status_code != 200:
      raise types.InfrastructureError(f'engine {self.url}{path} answered {reply.status_code}: {error_message(reply.text)}')
    try:
      return reply.json() if reply.content else {}
    except ValueError as e:
      raise types.InfrastructureError(f'engine {self.url}{path} did not answer with JSON: {reply.text[:200]!r}') from e

  def health(self, timeout_s: float = 5.0) -> dict[str, Any]:
    """The engine's own account of itself (empty for vLLM).

    Raises:
      InfrastructureError: it is dead, unreachable, or hangs.
    """
    return self._call('GET', '/health', timeout_s=timeout_s)

  def wait_ready(self, deadline_s: float) -> None:
    """Blocks until the engine is healthy.

    Raises:
      InfrastructureError: not within `deadline_s` seconds; says what the last attempt met.
    """
    end = time.monotonic() + deadline_s
    while True:
      try:
        self.health(timeout_s=max(0.1, min(5.0, end - time.monotonic())))
        return
      except types.InfrastructureError as e:
        if time.monotonic() + _POLL_S > end:
          raise types.InfrastructureError(f'engine {self.url} was not ready within {deadline_s:g} s: {e}') from e
        time.sleep(_POLL_S)

  def weight_info(self) -> WeightInfo:
    """Version and checksum of the weights it serves."""
    info = self._call('GET', '/weight_info')
    try:
      return WeightInfo(int(info['weight_version']), str(info.get('checksum') or ''))
    except (KeyError, TypeError, ValueError) as e:
      raise types.InfrastructureError(f'engine {self.url} reports no usable weight version: {info!r}.  Publish a version '
                                      'first') from e

  def models(self) -> list[dict[str, Any]]:
    """The /v1/models entries."""
    try:
      return list(self._call('GET', '/v1/models')['data'])
    except (KeyError, TypeError) as e:
      raise types.InfrastructureError(f'{self.url}/v1/models is not a model list: is this an engine?') from e

  def pause(self, mode: str = 'keep', timeout_s: float | None = None) -> None:
    """Stops sampling: 'keep' freezes running requests, 'abort' ends them, 'wait' lets them finish.  Caches are dropped."""
    self._call('POST', '/pause', params={'mode': mode}, timeout_s=timeout_s)

  def resume(self) -> None:
    """Continues after `pause`."""
    self._call('POST', '/resume')

  def reset_prefix_cache(self) -> None:
    """Drops every key and value computed under the weights of before."""
    self._call('POST', '/reset_prefix_cache')

  def load_weights(self, path: str, checksum: str) -> str:
    """Loads a weights file that the engine can read; returns the checksum it found.

    Raises:
      InfrastructureError: refused (it keeps its weights), or unreachable.
    """
    reply = self._call('POST', '/collective_rpc', json={'method': 'load_weights', 'args': [str(path), checksum]}, timeout_s=600.0)
    try:
      return str(reply['results'][0]['checksum'])
    except (KeyError, IndexError, TypeError) as e:
      raise types.InfrastructureError(f'engine {self.url} did not acknowledge the weights: {str(reply)[:200]}') from e

  def set_version(self, version: int) -> None:
    """Labels the loaded weights."""
    self._call('POST', '/update_weight_version', json={'new_version': str(version)})  # vLLM's versions are strings


def error_message(text: str) -> str:
  """The message inside an error body, or the start of the body."""
  try:
    body = json.loads(text)
    return str(body['error']['message'])
  except (ValueError, KeyError, TypeError):
    return text[:300]
