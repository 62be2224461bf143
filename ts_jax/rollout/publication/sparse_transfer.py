"""Publication of differences (B5): what changed since the version before, in full where a replica does not hold that version.

The learner keeps the published bits of one version in host memory, and so does each replica that takes differences.
"""

from __future__ import annotations

import pathlib
import threading
from typing import Any, Mapping

import numpy as np

from ts_jax import types
from ts_jax.models import fingerprint, safetensors_file, weights as weights_lib
from ts_jax.models.config import ModelConfig
from ts_jax.rollout import control as control_lib
from ts_jax.rollout.publication import sparse, transfer


class SparseTransfer:
  """Differences, with whole files as the fallback.

  A replica says by checksum which version it holds: one that was restarted, missed a version or failed while loading holds none or
  another, and gets the whole file, which is written when the first one asks.
  """

  def __init__(self, folder: pathlib.Path, dtype):
    """Args: folder: that replicas can read; dtype: of the published weights."""
    self._folder, self._dtype = folder, np.dtype(dtype)
    self._lock = threading.Lock()
    self._specs: dict[str, safetensors_file.TensorSpec] = {}
    self._tensors: dict[str, np.ndarray] = {}
    self._fingerprints: dict[str, int] = {}
    self._version: int | None = None
    self._checksum = self._base = ''
    self._patch_bytes = 0  # 0: there is none
    self.description = f'changed weights, or whole files where a replica lacks the version before, in {folder}'

  def prepare(self, params: Mapping[str, Any], config: ModelConfig, version: int) -> str:
    """See `transfer.Transfer`.  Converts, compares and checksums tensor by tensor, in as many threads as there are cores."""
    tensors = weights_lib.file_tensors(params, config, self._dtype)
    with self._lock:
      self._specs, base = weights_lib.file_specs(config, self._dtype), self._checksum
      self._checksum, self._version = '', None  # what is kept is of no version until all of it is of the new one
      full, patches = sum(int(np.prod(s.shape)) * s.dtype.itemsize for s in self._specs.values()), {}

      def one(name: str) -> None:
        new, old = tensors[name], self._tensors.get(name)
        if base and sum(p.size_bytes for p in list(patches.values())) <= full:  # else the file is the smaller one already
          patch = sparse.diff(sparse.bits(old), sparse.bits(new))
          if patch is None:
            return
          patches[name] = patch
        # Never the caller's own array, which its next step may overwrite.
        self._tensors[name] = new if new.flags.owndata else new.copy()
        self._fingerprints[name] = fingerprint.fingerprint(new)

      safetensors_file.in_parallel(one, self._specs)
      sparse_enough = base and sum(p.size_bytes for p in patches.values()) <= full
      self._base, self._patch_bytes = base, self._write_patch(self._patch_path(version), patches) if sparse_enough else 0
      self._checksum, self._version = weights_lib.checksum_of(self._specs, self._fingerprints), version
      return self._checksum

  def deliver(self, control: control_lib.EngineControl, version: int) -> transfer.Delivered:
    """See `transfer.Transfer`."""
    with self._lock:
      self._check_current(version)
      base, checksum, size = self._base, self._checksum, self._patch_bytes
    if size:
      acknowledged = control.apply_patch(str(self._patch_path(version)), base, checksum)
      if acknowledged == checksum:
        return transfer.Delivered(acknowledged, size, sparse=True)
    path = transfer.weights_path(self._folder, version)
    with self._lock:
      self._check_current(version)
      if not path.exists():
        safetensors_file.write(path, self._specs, self._tensors.__getitem__)
    return transfer.Delivered(control.load_weights(str(path), checksum, keep=True), path.stat().st_size)

  def clean(self, everything: bool = False) -> None:
    """See `transfer.Transfer`."""
    with self._lock:
      keep = () if everything or self._version is None else (
          transfer.weights_path(self._folder, self._version), self._patch_path(self._version))
      transfer.delete_others(self._folder, keep)

  def _check_current(self, version: int) -> None:
    if self._version is None:
      raise types.InfrastructureError(f'version {version} is not at hand any more: the publication after it failed; publish again')
    if version != self._version:
      raise transfer.SupersededError

  def _patch_path(self, version: int) -> pathlib.Path:
    return self._folder / f'patch-{version}.safetensors'

  def _write_patch(self, path: pathlib.Path, patches: Mapping[str, sparse.Patch]) -> int:
    arrays = sparse.pack(dict(sorted(patches.items())))
    safetensors_file.write(path, {n: safetensors_file.TensorSpec(a.shape, a.dtype) for n, a in arrays.items()}, arrays.__getitem__)
    return path.stat().st_size
