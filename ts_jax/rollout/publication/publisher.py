"""The publisher: brings every replica to a version and checks that it serves it and nothing else."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import threading
import time
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from ts_jax import types
from ts_jax.models import safetensors_file
from ts_jax.models.config import ModelConfig
from ts_jax.rollout import control as control_lib
from ts_jax.rollout.publication import probe as probe_lib, sparse_transfer, transfer as transfer_lib

_FIRST_PAUSE_S = 0.5  # between attempts; doubles
MODES = ('auto', 'extension', 'sparse')
_OWN_KINDS = {types.PolicyVersionError, safetensors_file.DiskFullError}  # raised as such when every failure is of the kind


@dataclasses.dataclass(frozen=True)
class Published:
  """The current version.

  Attributes:
    version: policy version.
    checksum: `weights_checksum` of its published weights.
    prepare_s: conversion, comparison with the version before, checksum and file, seconds.
  """

  version: int
  checksum: str
  prepare_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Delivery:
  """The last publication to one replica.

  Attributes:
    version: that it acknowledged.
    size_bytes: that it read.
    sparse: as a difference to the version before.
    load_s: from the call to the acknowledgement of the weights, seconds.
    paused_s: from before the pause to after the resumption, seconds.
  """

  version: int
  size_bytes: int
  sparse: bool
  load_s: float
  paused_s: float


class Publisher:
  """Sends weights to engines through a folder both can read (ideally in memory: /dev/shm).

  What the current version needs stays there, so that a replica that died is brought to it before it serves again.
  """

  def __init__(self, engines: Sequence[Any], exchange_folder: str | os.PathLike, dtype='float32',
               restart_timeout_s: float = 60.0, mode: str = 'auto', probe: probe_lib.Probe | None = None,
               transfer: transfer_lib.Transfer | None = None):
    """Creates the folder.

    Args:
      engines: `EngineControl` objects, or anything with one as `.control` (EngineClient, EngineProcess).
      exchange_folder: created if needed; one writer only.
      dtype: of the published weights.
      restart_timeout_s: how long a publication waits for an engine that is restarting, or for a slot for the probe.
      mode: 'extension' sends whole files, 'sparse' the changed weights wherever a replica holds the version before; 'auto' is
        'sparse' for dtypes of 16 bits (in float32 a step changes nearly every weight, and both sides would keep a copy for nothing).
      probe: asked before and after each publication; None trusts checksum and version.
      transfer: another way than those of `mode`.

    Raises:
      ConfigError: the folder cannot be made or written, or an unknown mode.
    """
    if mode not in MODES:
      raise types.ConfigError(f'publication {mode!r} is unknown: use one of {list(MODES)}')
    self._engines = [getattr(e, 'control', e) for e in engines]
    self._folder = pathlib.Path(exchange_folder)
    self._restart_timeout_s = restart_timeout_s
    self._probe = probe
    self._lock = threading.Lock()
    self._engine_locks: dict[str, threading.Lock] = {}
    self._expected: concurrent.futures.Future[np.ndarray] | None = None
    self.current: Published | None = None
    self.deliveries: dict[str, Delivery] = {}
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
      raise types.ConfigError(f'exchange folder {self._folder} cannot be made: {e.strerror}') from e
    if not os.access(self._folder, os.W_OK):
      raise types.ConfigError(f'exchange folder {self._folder} is not writable')
    if mode == 'auto':
      mode = 'sparse' if np.dtype(dtype).itemsize == 2 else 'extension'
    kind = {'extension': transfer_lib.FullTransfer, 'sparse': sparse_transfer.SparseTransfer}[mode]
    self._transfer = transfer or kind(self._folder, dtype)
    self.description = (f'{self._transfer.description}, {np.dtype(dtype).name}; every replica acknowledges version and checksum'
                        + (f' and answers a probe of {len(probe.token_ids)} tokens within {probe.tolerance:g} nats' if probe else ''))

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
      ConfigError: the parameters do not fit the sizes.
      DiskFullError: no room in the exchange folder.
      PolicyVersionError: the version does not advance, or a replica acknowledges another.
      InfrastructureError: a replica refused, could not be reached, or failed the probe, by URL.
    """
    with concurrent.futures.ThreadPoolExecutor(len(self._engines) + 1) as pool:
      with self._lock:
        if self.current and version <= self.current.version:
          raise types.PolicyVersionError(f'version {version} was to be published after {self.current.version}: versions only advance')
        begin = time.perf_counter()
        expected = pool.submit(self._probe.log_probs, params) if self._probe else None
        checksum = self._transfer.prepare(params, config, version)
        # From here on a restarted replica gets this one.
        self.current, self._expected = Published(version, checksum, time.perf_counter() - begin), expected
        engines = tuple(self._engines)
      self._on_all(pool, engines, self._bring_up_patiently)
    self._transfer.clean()
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
      while not self._delivered(control):
        pass  # superseded by the next version

  def _delivered(self, control: control_lib.EngineControl) -> bool:
    with self._lock:
      current, expected = self.current, self._expected
    if current is None:
      return True
    begin = time.perf_counter()
    if self._probe and not control.is_paused():
      self._probe.warm(control, self._restart_timeout_s)
    # Not resumed after a failure: an engine whose weights are in doubt must not sample.
    control.pause('keep')
    load = time.perf_counter()
    try:
      delivered = self._transfer.deliver(control, current.version)
    except transfer_lib.SupersededError:
      return False
    load_s = time.perf_counter() - load
    control.reset_prefix_cache()
    control.set_version(current.version)
    info = control.weight_info()
    if delivered.checksum != current.checksum or (info.checksum or current.checksum) != current.checksum:
      raise types.InfrastructureError(f'engine {control.url} holds weights with checksum {delivered.checksum}, not '
                                      f'{current.checksum} of version {current.version}: it stays paused')
    if info.version != current.version:
      raise types.PolicyVersionError(f'engine {control.url} acknowledged version {info.version}, not {current.version}: it stays '
                                     'paused')
    control.resume()
    self.deliveries[control.url] = Delivery(current.version, delivered.size_bytes, delivered.sparse, load_s,
                                            time.perf_counter() - begin)
    if expected is not None:
      self._check(control, expected.result())
    return True

  def _check(self, control: control_lib.EngineControl, expected: np.ndarray) -> None:
    try:
      self._probe.check(control, expected, self._restart_timeout_s)
    except types.InfrastructureError as e:
      control.pause('keep')  # only a running engine answers
      raise types.InfrastructureError(f'{e}; it is paused') from e

  def _bring_up_patiently(self, control: control_lib.EngineControl) -> None:
    """As `bring_up_to_date`, outliving a restart of the engine; one that is dying may still call itself healthy, so not only once."""
    end, pause = time.monotonic() + self._restart_timeout_s, _FIRST_PAUSE_S
    while True:
      try:
        return self.bring_up_to_date(control)
      except types.InfrastructureError:
        left = end - time.monotonic()
        if left <= 0:
          raise
        time.sleep(min(pause, left))
        pause *= 2
        control.wait_ready(max(left, _FIRST_PAUSE_S))

  def close(self) -> None:
    """Deletes the exchange files."""
    with self._lock:
      self._transfer.clean(everything=True)

  def _on_all(self, pool: concurrent.futures.Executor, engines: Sequence[control_lib.EngineControl], call: Callable) -> None:
    futures = {e.url: pool.submit(call, e) for e in engines}
    failed = [(url, f.exception()) for url, f in futures.items() if f.exception()]
    if failed:
      kinds = {type(e) for _, e in failed}
      kind = kinds.pop() if len(kinds) == 1 and kinds <= _OWN_KINDS else types.InfrastructureError
      raise kind(f'{len(failed)} of {len(futures)} engines did not take version {self.current.version}: '
                 + '; '.join(f'{url}: {e}' for url, e in failed)) from failed[0][1]
