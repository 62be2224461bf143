"""Published weights into the embedded engine: whole files and patches, as vLLM's worker extension takes them."""

from __future__ import annotations

import threading

import numpy as np

from ts_jax import types
from ts_jax.models import fingerprint, safetensors_file, weights as weights_lib
from ts_jax.rollout.engine import core as core_lib
from ts_jax.rollout.publication import sparse


class LoadedWeights:
  """What the engine holds, by checksum; with `keep` also in host memory, so that patches can follow."""

  def __init__(self, core: core_lib.EngineCore, checksum: str):
    """Args: core: the engine; checksum: of the weights it holds."""
    self._core = core
    self._lock = threading.Lock()
    self._kept: dict[str, np.ndarray] = {}
    self._fingerprints: dict[str, int] = {}
    self._kept_checksum = ''
    self.checksum = checksum

  def load_weights(self, path: str, expected: str = '', keep: bool = False) -> str:
    """Loads a safetensors file; returns its checksum.

    Raises:
      ConfigError: unreadable, not the model's weights, or not those that were announced; nothing has changed.
      BusyError: requests are running and the engine is not paused.
    """
    with self._lock:
      tensors = safetensors_file.read(path)
      fingerprints = safetensors_file.checksums(tensors)
      checksum = self._checksum_of(tensors, fingerprints)
      if expected and checksum != expected:
        raise types.ConfigError(f'weights {path} have checksum {checksum}, but {expected} was announced: the file is damaged or of '
                                'another version.  The engine keeps its weights; publish again')
      params = weights_lib.params_of(tensors, self._core.config)
      self._kept, self._fingerprints, self._kept_checksum = {}, {}, ''
      self._core.load(params)
      self.checksum = checksum
      if keep:
        self._kept, self._fingerprints, self._kept_checksum = {n: np.array(t) for n, t in tensors.items()}, fingerprints, checksum
      return checksum

  def apply_patch(self, path: str, base: str, expected: str) -> str:
    """Changes the kept weights by a patch file and serves the result; returns the checksum of what is kept now, '' for nothing.

    Where that is not `expected`, the engine serves what it did before.

    Raises:
      ConfigError: the file cannot be read or is no patch of these weights.
      BusyError: requests are running and the engine is not paused.
    """
    with self._lock:
      if not base or self._kept_checksum != base:
        return self._kept_checksum
      patches = sparse.unpack(safetensors_file.read(path, integers=True))
      self._kept_checksum = ''  # until the result is known to be right, and served
      try:
        for name, patch in patches.items():
          sparse.apply(sparse.bits(self._kept[name]), patch)
          self._fingerprints[name] = fingerprint.fingerprint(self._kept[name])
      except (KeyError, ValueError) as e:
        raise types.ConfigError(f'{path} is no patch of these weights ({e}): publish them in full') from e
      checksum = self._checksum_of(self._kept, self._fingerprints)
      if checksum == expected:
        self._core.load(weights_lib.params_of(self._kept, self._core.config))
        self.checksum = self._kept_checksum = checksum
      return checksum

  def _checksum_of(self, tensors: dict[str, np.ndarray], fingerprints: dict[str, int]) -> str:
    return weights_lib.checksum_of({n: safetensors_file.TensorSpec(t.shape, t.dtype) for n, t in tensors.items()}, fingerprints)
