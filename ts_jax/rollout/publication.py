"""Publication: a new policy version reaches every replica, which drops its caches and acknowledges before it samples."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import threading
import time
from typing import Any, Mapping, Sequence

from ts_jax import types
from ts_jax.models import weights as weights_lib
from ts_jax.models.config import ModelConfig
from ts_jax.rollout import control as control_lib

_RETRY_S = 0.5


@dataclasses.dataclass(frozen=True)
class Published:
  """The current version.

  Attributes:
    version: policy version.
    path: its weights file.
    checksum: of the file.
  """

  version: int
  path: pathlib.Path
  checksum: str


class Publisher:
  """Sends weights to engines through a folder both can read (ideally in memory: /dev/shm).

  The file of the current version stays, so that a replica that died is brought to it before it serves again.
  """

  def __init__(self, engines: Sequence[Any], exchange_folder: str | os.PathLike, dtype='float32',
               restart_timeout_s: float = 60.0):
    """Creates the folder.

    Args:
      engines: `EngineControl` objects, or anything with one as `.control` (EngineClient, EngineProcess).
      exchange_folder: created if needed; one writer only.
      dtype: of the weights file.
      restart_timeout_s: how long a publication waits for an engine that is restarting.

    Raises:
      ConfigError: the folder cannot be made or written.
    """
    self._engines = [getattr(e, 'control', e) for e in engines]
    self._folder = pathlib.Path(exchange_folder)
    self._dtype = dtype
    self._restart_timeout_s = restart_timeout_s
    self._lock = threading.Lock()
    self._engine_locks: dict[str, threading.Lock] = {}
    self.current: Published | None = None
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
      raise types.ConfigError(f'exchange folder {self._folder} cannot be made: {e.strerror}') from e
    if not os.access(self._folder, os.W_OK):
      raise types.ConfigError(f'exchange folder {self._folder} is not writable')

  def add(self, engine: Any) -> None:
    """Publishes to one more engine from now on."""
    with self._lock:
      self._engines.append(getattr(engine, 'control', engine))

  def publish(self, params: Mapping[str, Any], config: ModelConfig, version: int) -> Published:
    """Makes `params` policy `version` on every replica, in parallel; returns when all have acknowledged.

    Args:
      params: the parameters (contract of `models.llama`).
      config: their sizes.
      version: larger than the current one.

    Raises:
      ConfigError: the weights cannot be written (a full disk says so).
      PolicyVersionError: the version does not advance, or a replica acknowledges another.
      InfrastructureError: a replica refused or could not be reached, by URL.
    """
    with self._lock:
      if self.current and version <= self.current.version:
        raise types.PolicyVersionError(f'version {version} was to be published after {self.current.version}: versions only advance')
      path = self._folder / f'weights-{version}.safetensors'
      checksum = weights_lib.save_weights(path, params, config, self._dtype)
      self.current = Published(version, path, checksum)  # from here on a restarted replica gets this one
    self._on_all(self._bring_up_patiently)
    for old in self._folder.glob('weights-*.safetensors'):
      if old != path:
        old.unlink(missing_ok=True)
    return self.current

  def bring_up_to_date(self, engine: Any) -> None:
    """Loads the current version into one replica and checks its acknowledgement; nothing to do before the first publication.

    Running requests are frozen, their keys and values dropped, and they continue under the new version.

    Raises:
      PolicyVersionError, InfrastructureError: as `publish`.
    """
    control: control_lib.EngineControl = getattr(engine, 'control', engine)
    with self._lock:
      lock = self._engine_locks.setdefault(control.url, threading.Lock())
    with lock:  # a restart and a publication may meet
      current = self.current
      if current is None:
        return
      # Not resumed after a failure: an engine whose weights are in doubt must not sample.
      control.pause('keep')
      acknowledged = control.load_weights(str(current.path), current.checksum)
      control.reset_prefix_cache()
      control.set_version(current.version)
      info = control.weight_info()
      if acknowledged != current.checksum or (info.checksum or current.checksum) != current.checksum:
        raise types.InfrastructureError(f'engine {control.url} holds weights with checksum {acknowledged}, not '
                                        f'{current.checksum} of version {current.version}: it stays paused')
      if info.version != current.version:
        raise types.PolicyVersionError(f'engine {control.url} acknowledged version {info.version}, not {current.version}: it stays '
                                       'paused')
      control.resume()

  def _bring_up_patiently(self, control: control_lib.EngineControl) -> None:
    """As `bring_up_to_date`, outliving a restart of the engine; one that is dying may still call itself healthy, so not only once."""
    end = time.monotonic() + self._restart_timeout_s
    while True:
      try:
        return self.bring_up_to_date(control)
      except types.InfrastructureError:
        left = end - time.monotonic()
        if left <= 0:
          raise
        time.sleep(min(_RETRY_S, left))
        control.wait_ready(max(left, _RETRY_S))

  def close(self) -> None:
    """Deletes the exchange file."""
    with self._lock:
      if self.current:
        self.current.path.unlink(missing_ok=True)

  def _on_all(self, call) -> None:
    if not self._engines:
      return
    with concurrent.futures.ThreadPoolExecutor(len(self._engines)) as pool:
      futures = {e.url: pool.submit(call, e) for e in self._engines}
    failed = [(url, f.exception()) for url, f in futures.items() if f.exception()]
    if failed:
      of_version = all(isinstance(e, types.PolicyVersionError) for _, e in failed)
      kind = types.PolicyVersionError if of_version else types.InfrastructureError
      raise kind(f'{len(failed)} of {len(futures)} engines did not take version {self.current.version}: '
                 + '; '.join(f'{url}: {e}' for url, e in failed)) from failed[0][1]
