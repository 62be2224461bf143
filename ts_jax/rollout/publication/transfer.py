"""How weights get from the learner into a replica: what every way of doing it offers, and the plain one."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from typing import Any, Mapping, Protocol

from ts_jax.models import weights as weights_lib
from ts_jax.models.config import ModelConfig
from ts_jax.rollout import control as control_lib


class SupersededError(Exception):
  """The version that was to be delivered is no longer the current one: deliver that."""


@dataclasses.dataclass(frozen=True)
class Delivered:
  """What a replica acknowledged.

  Attributes:
    checksum: `weights_checksum` of what it holds.
    size_bytes: of what it had to read.
    sparse: as a difference to the version before.
  """

  checksum: str
  size_bytes: int
  sparse: bool = False


class Transfer(Protocol):
  """A way of publishing.  `prepare` is called by one thread at a time; `deliver` by one per replica, also while nothing is published."""

  description: str

  def prepare(self, params: Mapping[str, Any], config: ModelConfig, version: int) -> str:
    """Makes `params` ready for delivery; returns their checksum."""

  def deliver(self, control: control_lib.EngineControl, version: int) -> Delivered:
    """Loads the version into a paused replica.

    Raises:
      SupersededError: another version was prepared meanwhile.
      InfrastructureError: the replica refused, or could not be reached.
    """

  def clean(self, everything: bool = False) -> None:
    """Deletes the files of earlier versions, or all."""


def weights_path(folder: pathlib.Path, version: int) -> pathlib.Path:
  """The file of a version in full."""
  return folder / f'weights-{version}.safetensors'


def delete_others(folder: pathlib.Path, keep: tuple[pathlib.Path, ...]) -> None:
  """Deletes the published files in `folder` but those to keep."""
  for kind in ('weights-*.safetensors', 'patch-*.safetensors'):
    for path in folder.glob(kind):
      if path not in keep:
        path.unlink(missing_ok=True)


class FullTransfer:
  """Every version as a safetensors file that our worker extension (or the embedded engine) loads."""

  def __init__(self, folder: pathlib.Path, dtype):
    """Args: folder: that replicas can read; dtype: of the file."""
    self._folder, self._dtype = folder, dtype
    self._lock = threading.Lock()
    self._current: tuple[int, str, int] | None = None  # version, checksum, bytes
    self.description = f'whole files in {folder}'

  def prepare(self, params: Mapping[str, Any], config: ModelConfig, version: int) -> str:
    """See `Transfer`."""
    path = weights_path(self._folder, version)
    checksum = weights_lib.save_weights(path, params, config, self._dtype)
    with self._lock:
      self._current = version, checksum, path.stat().st_size
    return checksum

  def deliver(self, control: control_lib.EngineControl, version: int) -> Delivered:
    """See `Transfer`."""
    with self._lock:
      current, checksum, size = self._current
    if current != version:
      raise SupersededError
    return Delivered(control.load_weights(str(weights_path(self._folder, version)), checksum), size)

  def clean(self, everything: bool = False) -> None:
    """See `Transfer`."""
    with self._lock:
      keep = (weights_path(self._folder, self._current[0]),) if self._current and not everything else ()
    delete_others(self._folder, keep)
