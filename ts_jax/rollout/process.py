"""The embedded engine as a supervised child process."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Callable, Sequence

from ts_jax.rollout import control as control_lib, supervision


class EngineProcess(supervision.ServerProcess):
  """One embedded engine.  The child starts paused."""

  def __init__(self, model_folder: str | pathlib.Path, *, log_path: str | pathlib.Path, slots: int = 16, max_context: int = 2048,
               prefix_store_mb: int = 512, cores: Sequence[int] = (), host: str = '127.0.0.1', port: int | None = None,
               version: int = 0, compile_cache: str | pathlib.Path | None = None, warm_up: int = 0,
               bring_up: Callable[[control_lib.EngineControl], None] | None = None, start_timeout_s: float = 180.0,
               hang_timeout_s: float = 60.0, max_restarts: int = 5):
    """Describes the engine; `start` runs it.

    Args:
      model_folder: Hugging Face folder of the weights of version 0.
      slots, max_context, prefix_store_mb, warm_up: see the server's flags.
      cores: cores to pin it to; empty for all.
      host: address of the interface it listens on; its routes are not guarded.
      port: TCP port; a free one when None.
      version: of the folder's weights; -1 when they are no version of a run's policy.
      compile_cache: folder of the persistent compilation cache.
      log_path, bring_up, start_timeout_s, hang_timeout_s, max_restarts: see the base class.
    """
    port = port or supervision.free_port(host)
    super().__init__([
        sys.executable, '-m', 'ts_jax.rollout.engine.server', f'--model={model_folder}', f'--host={host}', f'--port={port}',
        f'--weight_version={version}', f'--slots={slots}', f'--max_context={max_context}', f'--prefix_store_mb={prefix_store_mb}',
        f'--warm_up={warm_up}', '--paused',
        f'--die_with_parent={os.getpid()}', f"--cores={','.join(map(str, cores))}", f'--compile_cache={compile_cache or ""}'],
        port=port, host=host, log_path=log_path, bring_up=bring_up, start_timeout_s=start_timeout_s, hang_timeout_s=hang_timeout_s,
        max_restarts=max_restarts)

  def _is_ours(self) -> bool:
    return self.control.health(timeout_s=2.0).get('pid') == self._child.pid
