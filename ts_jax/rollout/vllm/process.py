"""A vLLM server as a supervised child process."""

from __future__ import annotations

import os
import pathlib
import sys
import uuid
from typing import Callable, Sequence

from ts_jax.rollout import control as control_lib, supervision
from ts_jax.rollout.vllm import environment


class VllmProcess(supervision.ServerProcess):
  """One vLLM replica, with our worker extension."""

  def __init__(self, python: pathlib.Path, model_folder: str | pathlib.Path, *, log_path: str | pathlib.Path, slots: int = 16,
               max_context: int = 2048, dtype: str = 'float32', cores: Sequence[int] = (), gpus: Sequence[int] = (),
               memory_fraction: float = 0.65, kv_space_gib: int = 1, lora_rank: int = 0, weight_transfer: str = '',
               host: str = '127.0.0.1', port: int | None = None,
               bring_up: Callable[[control_lib.EngineControl], None] | None = None, start_timeout_s: float = 600.0,
               hang_timeout_s: float = 60.0, max_restarts: int = 5):
    """Describes the server; `start` runs it.

    Args:
      python: interpreter of its environment, see `environment.ensure`.
      model_folder: Hugging Face folder of the weights of version 0.
      slots, max_context, dtype, memory_fraction, kv_space_gib, lora_rank, weight_transfer: see `environment`.
      cores: cores to pin it to; on a CPU it computes on the last of them.
      gpus: devices of this replica, which it splits the model over; empty for one, whichever comes first.
      host: address of the interface it listens on; its development routes are not guarded.
      port: TCP port; a free one when None.
      log_path, bring_up, start_timeout_s, hang_timeout_s, max_restarts: see the base class.
    """
    port = port or supervision.free_port(host)
    self._name = f'policy-{uuid.uuid4().hex[:8]}'  # tells our server from another on the same port
    extension = environment.install_extension(pathlib.Path(log_path).parent / 'vllm_extension')
    server = environment.server_command(python, model_folder, port, host=host, slots=slots, max_context=max_context, dtype=dtype,
                                        served_name=self._name, tensor_parallel=max(1, len(gpus)), memory_fraction=memory_fraction,
                                        lora_rank=lora_rank, weight_transfer=weight_transfer)
    guardian = pathlib.Path(__file__).with_name('guardian.py')
    super().__init__(
        [sys.executable, str(guardian), str(os.getpid()), ','.join(map(str, cores)), *server], port=port, host=host, log_path=log_path,
        environment=environment.server_variables(extension, core=cores[-1] if cores else None, kv_space_gib=kv_space_gib, gpus=gpus),
        bring_up=bring_up, start_timeout_s=start_timeout_s, hang_timeout_s=hang_timeout_s, max_restarts=max_restarts)

  def _is_ours(self) -> bool:
    return any(m.get('id') == self._name for m in self.control.models())
