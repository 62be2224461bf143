"""The part of ts_jax that runs inside vLLM's workers, loaded by --worker-extension-cls.

Depends on torch, safetensors and vLLM, never on JAX or the rest of ts_jax but two files that need NumPy
alone: the server has an environment of its own, where `environment.install_extension` puts them on the path.  Its methods are called through
/collective_rpc.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import glob
import hashlib
import os

import numpy as np
import safetensors
import torch
import ts_jax_vllm_fingerprint as fingerprint  # the server's names of two files of ours
import ts_jax_vllm_sparse as sparse
from vllm.v1 import outputs
from vllm.v1.worker import gpu_model_runner

_CODES = {torch.float64: 'F64', torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16'}


@dataclasses.dataclass
class _Kept:
  """What the model serves, in host memory under Hugging Face names: packing leaves nothing that a patch could be applied to."""

  checksum: str
  tensors: dict[str, torch.Tensor]
  fingerprints: dict[str, int]


class WeightExtension:
  """Weights in, and what was loaded out."""

  _ts_jax_kept: _Kept | None = None

  def takes_weights(self) -> bool:
    """That this extension is loaded."""
    return True

  def load_weights(self, path: str, expected: str = '', keep: bool = False) -> dict[str, str]:
    """Loads a safetensors file under Hugging Face names into the running model.

    Args:
      path: a file this process can read.
      expected: its checksum; another one is refused before any weight changes.
      keep: also in host memory, for `apply_patch`.

    Returns:
      {'checksum': of the tensors that were loaded}.

    Raises:
      ValueError: damaged, not the file that was announced, or of another model than the engine's.
    """
    with safetensors.safe_open(path, framework='pt') as file:
      tensors = {name: file.get_tensor(name) for name in file.keys()}
    fingerprints = _fingerprints(tensors)
    checksum = _checksum(tensors, fingerprints)
    if expected and checksum != expected:
      raise ValueError(f'weights {path} have checksum {checksum}, but {expected} was announced: the file is damaged or of another '
                       'version.  The engine keeps its weights; publish again')
    _check_shapes(tensors, self.model_config.model)
    kept, self._ts_jax_kept = self._ts_jax_kept, None
    if keep:
      tensors = _copied(tensors, kept)
    self._serve(tensors)
    if keep:
      self._ts_jax_kept = _Kept(checksum, tensors, fingerprints)
    return {'checksum': checksum}

  def apply_patch(self, path: str, base: str, expected: str) -> dict[str, str]:
    """Changes the kept weights by a file of `sparse.pack` and serves the result.

    Args:
      path: a file this process can read.
      base: checksum of the weights that the patch is relative to.
      expected: checksum of the result.

    Returns:
      {'checksum': of what is kept now, '' for nothing}.  Where it is not `expected`, the model serves what it did before.
    """
    kept = self._ts_jax_kept
    if kept is None or kept.checksum != base:
      return {'checksum': kept.checksum if kept else ''}
    with safetensors.safe_open(path, framework='numpy') as file:
      patches = sparse.unpack({name: file.get_tensor(name) for name in file.keys()})
    self._ts_jax_kept = None  # until the result is known to be right, and served

    def change(name: str) -> int:
      array = _bytes(kept.tensors[name])
      sparse.apply(array.view(f'u{kept.tensors[name].element_size()}'), patches[name])
      return fingerprint.fingerprint(array)

    kept.fingerprints.update(_in_parallel(change, patches))
    kept.checksum = _checksum(kept.tensors, kept.fingerprints)
    if kept.checksum == expected:
      self._serve(kept.tensors)
      self._ts_jax_kept = kept
    return {'checksum': kept.checksum}

  def _serve(self, tensors: dict[str, torch.Tensor]) -> None:
    self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
    _repack_tied(self.model_runner.get_model())

  def compare_computed(self, path: str) -> dict[str, int]:
    """Compares a weights file with what the model's linear layers (the head among them) compute from one-hot inputs.

    That is every value of their weights, packed or not: one product with 1 and sums of zeros are exact.  One worker only.

    Returns:
      {'compared': elements, 'different': elements whose values differ}.
    """
    with safetensors.safe_open(path, framework='pt') as file:
      tensors = {name: file.get_tensor(name) for name in file.keys()}
    model, totals = self.model_runner.get_model(), {'compared': 0, 'different': 0}
    for name, module in model.named_modules():
      wanted = _weights_of(model, name, tensors)
      if wanted is None or not hasattr(module, 'quant_method') or name.endswith('embed_tokens'):
        continue
      one_hot = torch.eye(wanted.shape[1], dtype=wanted.dtype, device=next(model.parameters()).device)
      computed = module.quant_method.apply(module, one_hot, None).T[:wanted.shape[0]].cpu()
      totals['compared'] += wanted.numel()
      totals['different'] += int((computed != wanted).sum())
    return totals


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
  return _checksum(tensors, _fingerprints(tensors))


def _checksum(tensors: dict[str, torch.Tensor], fingerprints: dict[str, int]) -> str:
  lines = sorted(f'{n} {_CODES[x.dtype]} {list(x.shape)} {fingerprints[n]:08x}\n' for n, x in tensors.items())
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def _fingerprints(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
  return _in_parallel(lambda name: fingerprint.fingerprint(_bytes(tensors[name])), tensors)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
  return tensor.reshape(-1).view(torch.uint8).numpy()


def _in_parallel(function, names) -> dict:
  with concurrent.futures.ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
    return dict(zip(names, pool.map(function, names)))


def _copied(tensors: dict[str, torch.Tensor], kept: _Kept | None) -> dict[str, torch.Tensor]:
  """In memory of our own (the file goes away), that of the version before where it fits."""
  def copy(name: str) -> torch.Tensor:
    old = kept.tensors.get(name) if kept else None
    if old is not None and (old.shape, old.dtype) == (tensors[name].shape, tensors[name].dtype):
      return old.copy_(tensors[name])
    return tensors[name].clone()
  return _in_parallel(copy, tensors)


def _weights_of(model: torch.nn.Module, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
  """The file's weights that a module holds, those of fused modules one below the other."""
  parent, _, last = name.rpartition('.')
  parts = getattr(model, 'packed_modules_mapping', {}).get(last, [last])
  names = [f'{parent}.{part}.weight'.lstrip('.') for part in parts]
  if names == ['lm_head.weight'] and names[0] not in tensors:
    names = ['model.embed_tokens.weight']
  found = [tensors[n] for n in names if n in tensors]
  return torch.cat(found) if len(found) == len(names) and found[0].ndim == 2 else None


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


def _without_generators_of_discarded(sample_tokens):
  """`GPUModelRunner.sample_tokens`, which on a CPU ends the server where a seeded request's prompt is prefilled in pieces: the token that
  it samples after each piece is thrown away, and the generator's offset taken back, which a CPU generator has none of.  Here such a
  request lends no generator, so that its seed's first draw is for the first token that is kept."""
  @functools.wraps(sample_tokens)
  def run(self, *args, **kwargs):
    generators, hidden = self.input_batch.generators, {}
    if self.device.type == 'cpu':
      discarded = np.flatnonzero(self.discard_request_mask.np[:self.input_batch.num_reqs])
      hidden = {i: generators.pop(i) for i in discarded.tolist() if i in generators}
    try:
      return sample_tokens(self, *args, **kwargs)
    finally:
      generators.update(hidden)
  return run


gpu_model_runner.GPUModelRunner.sample_tokens = _without_generators_of_discarded(gpu_model_runner.GPUModelRunner.sample_tokens)
