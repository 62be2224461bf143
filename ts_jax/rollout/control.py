"""Operating an engine from ordinary (not async) code: health, pausing, loading weights, versions."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import Any, Sequence

import httpx

from ts_jax import types
from ts_jax.rollout import protocol

_POLL_S = 0.1
_LOAD_TIMEOUT_S = 600.0

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

  def _call(self, method: str, path: str, *, timeout_s: float | None = None, as_text: bool = False, **kwargs) -> Any:
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
    if as_text:
      return reply.text
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

  def _rpc(self, method: str, *args, **kwargs) -> list[Any]:
    reply = self._call('POST', '/collective_rpc', json={'method': method, 'args': list(args), 'kwargs': kwargs}, timeout_s=_LOAD_TIMEOUT_S)
    try:
      return list(reply['results'])
    except (KeyError, TypeError) as e:
      raise types.InfrastructureError(f'engine {self.url} answered {method} without results: {str(reply)[:200]}') from e

  def is_paused(self) -> bool:
    """Requests wait for `resume`."""
    return bool(self._call('GET', '/is_paused').get('is_paused'))

  def check_takes_weights(self) -> None:
    """Asks for what publication needs, before there is something to publish.

    Raises:
      ConfigError: the server has no worker extension of ours.
    """
    try:
      self._rpc('takes_weights')
    except types.InfrastructureError as e:
      raise types.ConfigError(f'engine {self.url} takes no weights ({e}): start it with experiments.serve, which gives it our worker '
                              "extension and opens its development routes, or set config.rollout.publication='native' where it was started "
                              'for vLLM\'s own weight transfer') from e

  def load_weights(self, path: str, checksum: str, keep: bool = False) -> str:
    """Loads a weights file that the engine can read; returns the checksum it found.

    Args:
      path: the file.
      checksum: of its weights; the engine refuses others.
      keep: in the engine's host memory too, so that `apply_patch` can follow.

    Raises:
      InfrastructureError: refused (it keeps its weights), or unreachable.
    """
    return self._weights_rpc('load_weights', str(path), checksum, keep)

  def apply_patch(self, path: str, base: str, checksum: str) -> str:
    """Changes the weights the engine keeps by a patch file, and serves the result.

    Args:
      path: the file.
      base: checksum of the weights that the patch is relative to.
      checksum: of the result.

    Returns:
      The checksum of what it keeps now: `checksum` when that is what it serves.  Otherwise it does not hold the base ('': holds
      nothing), or the patch is damaged: it needs the weights in full.

    Raises:
      InfrastructureError: unreachable, or the file cannot be read.
    """
    return self._weights_rpc('apply_patch', str(path), base, checksum)

  def _weights_rpc(self, method: str, *args) -> str:
    results = self._rpc(method, *args)
    try:
      checksums = {str(result['checksum']) for result in results}  # one of each of the replica's workers
    except (KeyError, TypeError) as e:
      raise types.InfrastructureError(f'engine {self.url} did not acknowledge the weights: {str(results)[:200]}') from e
    if len(checksums) != 1:
      raise types.InfrastructureError(f'the workers of engine {self.url} hold different weights: {sorted(checksums)}')
    return checksums.pop()

  def differing_weights(self, path: str) -> tuple[int, int]:
    """Compares a weights file with what the linear layers compute with, packed or not (vLLM, one worker): (compared, different)."""
    found = self._rpc('compare_computed', str(path))[0]
    return found['compared'], found['different']

  def reload_from(self, folder: str) -> None:
    """vLLM's own loading of a model folder.  On a CPU it leaves a tied head at the old weights: measurements only."""
    self._rpc('reload_weights', weights_path=str(folder))

  def prompt_log_probs(self, token_ids: Sequence[int], timeout_s: float | None = None) -> tuple[list[float | None], int]:
    """Scores a prompt, with what the prefix cache holds of it: (log-prob of each token or None, tokens from the cache)."""
    ids = tuple(token_ids)
    body = protocol.score_body(ids, '', '', reuse=True)
    del body['model']  # whatever is served
    reply = self._call('POST', '/inference/v1/generate', json=body, timeout_s=timeout_s)
    return protocol.parse_prompt_log_probs(reply, ids, f'engine {self.url}')

  def load_adapter(self, name: str, folder: str) -> None:
    """Loads a LoRA adapter from a folder the engine can read, in place of the one of that name (vLLM only)."""
    self._call('POST', '/v1/load_lora_adapter', json={'lora_name': name, 'lora_path': str(folder), 'load_inplace': True}, as_text=True)

  def unload_adapter(self, name: str) -> None:
    """Forgets a LoRA adapter; requests that began with it end with it."""
    self._call('POST', '/v1/unload_lora_adapter', json={'lora_name': name}, as_text=True)

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
