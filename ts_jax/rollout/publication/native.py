"""Publication through vLLM's own weight-transfer API, by a sender process in the server's environment (see `vllm/sender.py`).

The server acknowledges nothing but the end of the transfer, so here the probe is the check.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import threading
from typing import Any, Mapping, Sequence

from ts_jax import types
from ts_jax.models.config import ModelConfig
from ts_jax.rollout import control as control_lib
from ts_jax.rollout.publication import transfer

_SENDER = pathlib.Path(__file__).parents[1] / 'vllm' / 'sender.py'


class NativeTransfer:
  """Whole files from the exchange folder, which only the senders read, over the backend the servers were started with."""

  def __init__(self, folder: pathlib.Path, dtype, python: str | os.PathLike, backend: str = 'nccl',
               variables: Mapping[str, str] | None = None, timeout_s: float = 600.0):
    """Prepares senders; each starts with the first publication to its server.

    Args:
      folder: for files.
      dtype: of the published weights.
      python: interpreter of the servers' environment (`vllm.environment.ensure`).
      backend: 'nccl', or 'MODULE:FUNCTION' that makes the trainer's side of another one.
      variables: environment of the senders, e.g. with the CUDA_VISIBLE_DEVICES they send from; None for ours.
      timeout_s: of one transfer, the sender's start included.
    """
    self._files = transfer.FullTransfer(folder, dtype)
    self._path = lambda version: transfer.weights_path(folder, version)
    self._command, self._backend, self._variables, self._timeout_s = [str(python), str(_SENDER)], backend, variables, timeout_s
    self._lock = threading.Lock()
    self._senders: dict[str, _Sender] = {}
    self._current: tuple[int, str] | None = None
    self.description = f"vLLM's own weight transfer ({backend}), in full"

  def prepare(self, params: Mapping[str, Any], config: ModelConfig, version: int) -> str:
    """See `transfer.Transfer`."""
    checksum = self._files.prepare(params, config, version)
    with self._lock:
      self._current = version, checksum
    return checksum

  def deliver(self, control: control_lib.EngineControl, version: int) -> transfer.Delivered:
    """See `transfer.Transfer`; the checksum is of what was sent."""
    with self._lock:
      if self._current[0] != version:
        raise transfer.SupersededError
      checksum = self._current[1]
      sender = self._senders.get(control.url)
      if sender is None or not sender.alive:
        sender = self._senders[control.url] = _Sender([*self._command, control.url, self._backend], self._variables)
    return transfer.Delivered(checksum, sender.send(str(self._path(version)), version, control.url, self._timeout_s))

  def clean(self, everything: bool = False) -> None:
    """See `transfer.Transfer`; with everything, the senders end too."""
    self._files.clean(everything)
    if everything:
      with self._lock:
        for sender in self._senders.values():
          sender.end()
        self._senders.clear()


class _Sender:
  """One sender process."""

  def __init__(self, command: Sequence[str], variables: Mapping[str, str] | None):
    try:
      self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
    except OSError as e:
      raise types.ConfigError(f'the sender cannot be started ({command[0]}): {e.strerror}: is it the vLLM environment?') from e
    self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=self._read, name='weight-sender', daemon=True).start()

  def _read(self) -> None:
    for line in self._child.stdout:
      self._answers.put(line)
    self._answers.put('')

  @property
  def alive(self) -> bool:
    """It takes orders."""
    return self._child.poll() is None

  def send(self, path: str, version: int, url: str, timeout_s: float) -> int:
    """Sends a file; returns its bytes.  After a failure the process is gone."""
    try:
      self._child.stdin.write(json.dumps({'path': path, 'version': version}) + '\n')
      self._child.stdin.flush()
      answer = json.loads(self._answers.get(timeout=timeout_s) or '{"error": "the sender ended; its output says why"}')
    except queue.Empty:
      answer = {'error': f'no end of the transfer within {timeout_s:g} s'}
    except (OSError, ValueError) as e:
      answer = {'error': str(e)}
    if 'error' in answer:
      self.end()
      raise types.InfrastructureError(f'engine {url} did not take the weights of version {version}: {answer["error"]}')
    return int(answer['sent'])

  def end(self) -> None:
    """Ends the process; safe to call twice."""
    if self._child.poll() is None:
      self._child.kill()
    self._child.wait()
