"""The part of ts_jax that runs inside vLLM's workers, loaded by --worker-extension-cls.

Depends on torch, safetensors and vLLM only, never on JAX or the rest of ts_jax: the server has an environment of its own,
where this file is put on the path under the name `MODULE`.  Its methods are called through /collective_rpc.
"""

from __future__ import annotations

import concurrent.futures
import glob
import hashlib
import os
import zlib

import safetensors
import torch
from vllm.v1 import outputs

MODULE = 'ts_jax_vllm_extension'

_CODES = {torch.float64: 'F64', torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16'}


class WeightExtension:
  """Weights in, and what was loaded out."""

  def load_weights(self, path: str, expected: str = '') -> dict[str, str]:
    """Loads a safetensors file under Hugging Face names into the running model.

    Args:
      path: a file this process can read.
      expected: its checksum; another one is refused before any weight changes.

    Returns:
      {'checksum': of the tensors that were loaded}.

    Raises:
      ValueError: damaged, not the file that was announced, or of another model than the engine's.
    """
    with safetensors.safe_open(path, framework='pt') as file:
      tensors = {name: file.get_tensor(name) for name in file.keys()}
    checksum = weights_checksum(tensors)
    if expected and checksum != expected:
      raise ValueError(f'weights {path} have checksum {checksum}, but {expected} was announced: the file is damaged or of another '
                       'version.  The engine keeps its weights; publish again')
    _check_shapes(tensors, self.model_config.model)
    self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
    _repack_tied(self.model_runner.get_model())
    return {'checksum': checksum}


def _check_shapes(tensors: dict[str, torch.Tensor], folder: str) -> None:
  """Refuses weights that are not of the served model: vLLM's loaders cut what is too large, and say nothing."""
  served: dict[str, tuple[int, ...]] = {}
  for path in glob.glob(os.path.join(folder, '*.safetensors')):
    with safetensors.safe_open(path, framework='pt') as file:
      served.update((name, tuple(file.get_slice(name).get_shape())) for name in file.keys())
  for name in sorted(served.keys() | tensors.keys()) if served else ():
    ours, theirs = served.get(name), tuple(tensors[name].shape) if name in tensors else None
    if ours != theirs and name != 'lm_head.weight':  # some folders store the tied head twice
      raise ValueError(f'published weights have {name} of shape {theirs}, the model {folder} that this engine serves has {ours}: they are '
                       'of another model.  The engine keeps its weights')


def weights_checksum(tensors: dict[str, torch.Tensor]) -> str:
  """The checksum that the learner gives the same tensors, whatever file or pytree they lie in."""
  def crc(name: str) -> int:
    return zlib.crc32(memoryview(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()))

  with concurrent.futures.ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
    found = dict(zip(tensors, pool.map(crc, tensors)))
  lines = sorted(f'{n} {_CODES[x.dtype]} {list(x.shape)} {found[n]:08x}\n' for n, x in tensors.items())
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def _repack_tied(model: torch.nn.Module) -> None:
  """A tied head has no weight of its own to load, so nothing repacks what the CPU build computes with."""
  seen: set[int] = set()
  for module in model.modules():
    weight = getattr(module, 'weight', None)
    if not isinstance(weight, torch.Tensor) or not weight.numel():
      continue
    if weight.data_ptr() in seen and hasattr(module, 'cpu_linear'):
      module.quant_method.process_weights_after_loading(module)
    seen.add(weight.data_ptr())


def _zeroed(num_positions: int, num_tokens_per_position: int):
  """`LogprobsTensors.empty_cpu`, whose memory is sent as it is for positions that came from the prefix cache: not a number at times,
  which is not JSON."""
  tensors = _empty(num_positions, num_tokens_per_position)
  for tensor in (tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks):
    tensor.zero_()
  return tensors


_empty = outputs.LogprobsTensors.empty_cpu
outputs.LogprobsTensors.empty_cpu = staticmethod(_zeroed)
