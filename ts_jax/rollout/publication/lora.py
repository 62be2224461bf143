"""Publication of LoRA adapters to vLLM: a PEFT folder that every replica loads beside the frozen weights.

The adapter's name carries the version, so that a request states which policy it wants, one in flight keeps the adapter it began with,
and no key or value of another version can be found in the prefix cache (names are part of its keys).
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shutil
from typing import Any, Mapping, Sequence

import numpy as np

from ts_jax import types
from ts_jax.models import safetensors_file
from ts_jax.rollout import control as control_lib

Adapter = Mapping[str, tuple[Any, Any]]  # module under its Hugging Face name -> (A [r, in], B [out, r])


def adapter_name(version: int) -> str:
  """The model name that requests for a policy version give."""
  return f'policy-{version}'


def save_adapter(folder: str | os.PathLike, modules: Adapter, alpha: float, dtype=np.float32) -> int:
  """Writes an adapter, W + alpha / r B A, as PEFT does.

  Args:
    folder: created if needed.
    modules: e.g. {'model.layers.0.self_attn.q_proj': (A, B)}; one rank r for all.
    alpha: scale.
    dtype: of the file.

  Returns:
    Bytes of the weights file.

  Raises:
    ConfigError: no modules, or factors whose ranks differ.
    DiskFullError: no room.
  """
  ranks = {r for a, b in modules.values() for r in (np.shape(a)[0], np.shape(b)[1])}
  if len(ranks) != 1:
    raise types.ConfigError(f'an adapter has one rank, and these factors have {sorted(ranks)}: A is [r, in], B is [out, r]')
  folder = pathlib.Path(folder)
  arrays = {f'base_model.model.{name}.lora_{letter}.weight': factor
            for name, factors in modules.items() for letter, factor in zip('AB', factors)}
  specs = {n: safetensors_file.TensorSpec(np.shape(x), np.dtype(dtype)) for n, x in arrays.items()}
  path = folder / 'adapter_model.safetensors'
  safetensors_file.write(path, specs, lambda n: np.ascontiguousarray(np.asarray(arrays[n]), dtype))
  (folder / 'adapter_config.json').write_text(json.dumps({
      'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'r': ranks.pop(), 'lora_alpha': alpha, 'lora_dropout': 0.0, 'bias': 'none',
      'target_modules': sorted({name.rpartition('.')[2] for name in modules})}, indent=2) + '\n', 'utf-8')
  return path.stat().st_size


class LoraPublisher:
  """Sends adapters to vLLM servers started with `lora_rank` (see `vllm.environment`)."""

  def __init__(self, engines: Sequence[Any], exchange_folder: str | os.PathLike, alpha: float, dtype='float32'):
    """Args: engines: as for `Publisher`; exchange_folder: that they can read; alpha: scale; dtype: of the files."""
    self._engines: list[control_lib.EngineControl] = [getattr(e, 'control', e) for e in engines]
    self._folder, self._alpha, self._dtype = pathlib.Path(exchange_folder), alpha, dtype
    self.current: int | None = None

  def publish(self, modules: Adapter, version: int) -> int:
    """Loads the adapter of `version` on every replica, in parallel, and forgets the one before; returns its bytes.

    Raises:
      ConfigError, DiskFullError: as `save_adapter`.
      PolicyVersionError: the version does not advance.
      InfrastructureError: a replica refused it, or could not be reached.
    """
    if self.current is not None and version <= self.current:
      raise types.PolicyVersionError(f'version {version} was to be published after {self.current}: versions only advance')
    folder = self._folder / adapter_name(version)
    size = save_adapter(folder, modules, self._alpha, self._dtype)
    self._on_all(lambda control: control.load_adapter(adapter_name(version), str(folder)))
    previous, self.current = self.current, version
    if previous is not None:
      self._on_all(lambda control: control.unload_adapter(adapter_name(previous)))
      shutil.rmtree(self._folder / adapter_name(previous), ignore_errors=True)
    return size

  def close(self) -> None:
    """Deletes the exchange files."""
    if self.current is not None:
      shutil.rmtree(self._folder / adapter_name(self.current), ignore_errors=True)

  def _on_all(self, call) -> None:
    with concurrent.futures.ThreadPoolExecutor(max(1, len(self._engines))) as pool:
      for future in [pool.submit(call, e) for e in self._engines]:
        future.result()
