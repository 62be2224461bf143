"""Weights in and out: Hugging Face safetensors <-> the parameter pytree of `ts_jax.models.llama`.

Hugging Face stores linear weights [out, in], one tensor per layer; the pytree holds kernels [in, out], stacked over
layers.  One table per family says which is which, and is read in both directions.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any, Mapping, NamedTuple

import numpy as np

from ts_jax import types
from ts_jax.models import config as config_lib
from ts_jax.models import safetensors_file
from ts_jax.models import tokenizer as tokenizer_lib

DiskFullError = safetensors_file.DiskFullError
Params = Mapping[str, Any]

# Name in Hugging Face's files, path in the pytree, dimensions in the file (V vocabulary, D width, F ffn width, Q queries,
# K keys or values).  Linear weights (of two dimensions, except the embedding) are transposed in the pytree.
_LLAMA = (
    ('model.embed_tokens.weight', 'embed/embedding', 'VD'),
    ('model.layers.{i}.input_layernorm.weight', 'layers/attn_norm/scale', 'D'),
    ('model.layers.{i}.self_attn.q_proj.weight', 'layers/q/kernel', 'QD'),
    ('model.layers.{i}.self_attn.k_proj.weight', 'layers/k/kernel', 'KD'),
    ('model.layers.{i}.self_attn.v_proj.weight', 'layers/v/kernel', 'KD'),
    ('model.layers.{i}.self_attn.o_proj.weight', 'layers/o/kernel', 'DQ'),
    ('model.layers.{i}.post_attention_layernorm.weight', 'layers/mlp_norm/scale', 'D'),
    ('model.layers.{i}.mlp.gate_proj.weight', 'layers/gate/kernel', 'FD'),
    ('model.layers.{i}.mlp.up_proj.weight', 'layers/up/kernel', 'FD'),
    ('model.layers.{i}.mlp.down_proj.weight', 'layers/down/kernel', 'DF'),
    ('model.norm.weight', 'final_norm/scale', 'D'),
    ('lm_head.weight', 'head/kernel', 'VD'),
)
# Constants that old checkpoints carry along.
_IGNORED = re.compile(r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq')

_COPIED_ON_EXPORT = ('generation_config.json', 'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json',
                     'chat_template.jinja', 'vocab.json', 'merges.txt')


class _Slot(NamedTuple):
  path: str  # in the pytree
  layer: int | None  # index on the leading axis of the pytree's array
  shape: tuple[int, ...]  # in the file
  transposed: bool


def load_config(folder: str | Path) -> config_lib.ModelConfig:
  """Reads the sizes from a model folder's config.json.

  Raises:
    ConfigError: the file is missing, incomplete, or of an unsupported architecture.
  """
  path = Path(folder) / 'config.json'
  try:
    return config_lib.ModelConfig.from_hf(tokenizer_lib.read_json(path))
  except KeyError as e:
    raise types.ConfigError(f'{path} lacks {e}: copy it again from the model') from e


def load_params(folder: str | Path, dtype=np.float32) -> dict[str, Any]:
  """Reads the weights of a model folder: model.safetensors, or the shards named by model.safetensors.index.json.

  Args:
    folder: a Hugging Face folder.
    dtype: of the returned arrays; widening is exact.

  Returns:
    The parameter pytree, numpy arrays.

  Raises:
    ConfigError: no weights, damaged weights, or a tensor missing, unknown or of the wrong shape, by name.
  """
  return _assemble(_open_folder(Path(folder)), load_config(folder), dtype, str(folder))


def load_weights_file(path: str | Path, config: config_lib.ModelConfig, dtype=np.float32) -> dict[str, Any]:
  """Reads one safetensors file of `save_weights`.  Returns and raises as `load_params`."""
  return _assemble(safetensors_file.read(path), config, dtype, str(path))


def save_weights(path: str | Path, params: Params, config: config_lib.ModelConfig, dtype=np.float32) -> str:
  """Writes ONE safetensors file under Hugging Face names; atomic, mode 0644.

  Args:
    path: file to write or replace.
    params: the parameter pytree (numpy or jax arrays).
    config: its sizes.
    dtype: of the file.

  Returns:
    The file's `weights_checksum`, computed on the way.

  Raises:
    ConfigError: the pytree does not have the parameters of `config`.
    DiskFullError: no room; the old file, if any, is untouched.
  """
  specs = file_specs(config, dtype)
  return checksum_of(specs, safetensors_file.write(path, specs, file_tensors(params, config, dtype).__getitem__))


def file_specs(config: config_lib.ModelConfig, dtype=np.float32) -> dict[str, safetensors_file.TensorSpec]:
  """Shape and dtype of every tensor under its Hugging Face name, in file order."""
  return {n: safetensors_file.TensorSpec(s.shape, np.dtype(dtype)) for n, s in _slots(config).items()}


def file_tensors(params: Params, config: config_lib.ModelConfig, dtype=np.float32) -> Mapping[str, np.ndarray]:
  """Parameters as the tensors of a file, each fetched from its device and laid out when it is looked at.

  Args:
    params, config, dtype: as for `save_weights`.

  Raises:
    ConfigError: the pytree does not have the parameters of `config`.
  """
  leaves, slots = _leaves(params, config), _slots(config)
  return _Lazy(slots, lambda name: _to_file_layout(leaves, slots[name], dtype))


def params_of(tensors: Mapping[str, np.ndarray], config: config_lib.ModelConfig, dtype=np.float32) -> dict[str, Any]:
  """Inverse of `file_tensors`.  Returns and raises as `load_params`."""
  return _assemble(tensors, config, dtype, 'these tensors')


def checksum_of(specs: Mapping[str, safetensors_file.TensorSpec], fingerprints: Mapping[str, int]) -> str:
  """The `weights_checksum` of tensors of which only the fingerprints are at hand."""
  return _digest((n, safetensors_file.dtype_code(s.dtype), s.shape, fingerprints[n]) for n, s in specs.items())


def weights_checksum(source: str | Path | Params, config: config_lib.ModelConfig | None = None, dtype=np.float32) -> str:
  """Returns a checksum of weights that is the same in a file, a model folder and a pytree (guards against accidents).

  Args:
    source: safetensors file, model folder, or parameter pytree.
    config: sizes; needed for a pytree only.
    dtype: what a pytree's values are converted to first (a file is taken as it is).
  """
  if isinstance(source, Mapping):
    if config is None:
      raise ValueError('the checksum of a pytree needs its config')
    return checksum_of(file_specs(config, dtype), safetensors_file.checksums(file_tensors(source, config, dtype)))
  source = Path(source)
  tensors = _open_folder(source) if source.is_dir() else safetensors_file.read(source)
  specs = {n: safetensors_file.TensorSpec(t.shape, t.dtype) for n, t in tensors.items()}
  return checksum_of(specs, safetensors_file.checksums(tensors))


def export_hf(folder: str | Path, params: Params, config: config_lib.ModelConfig, source_folder: str | Path,
              dtype=np.float32) -> str:
  """Writes a Hugging Face folder that transformers and vLLM load.

  Args:
    folder: created if needed.
    params, config: the student.
    source_folder: model folder whose tokenizer, chat template, generation settings and special ids are taken over.
    dtype: of the weights.

  Returns:
    The weights' checksum.

  Raises:
    ConfigError: `source_folder` lacks its tokenizer or config, or the pytree does not fit `config`.
    DiskFullError: no room.
  """
  folder, source_folder = Path(folder), Path(source_folder)
  tokenizer_lib.Tokenizer.load(source_folder).check_matches(config)
  source = tokenizer_lib.read_json(source_folder / 'config.json')
  special = {k: source[k] for k in ('bos_token_id', 'eos_token_id', 'pad_token_id') if k in source}
  checksum = save_weights(folder / 'model.safetensors', params, config, dtype)
  name = np.dtype(dtype).name
  (folder / 'config.json').write_text(json.dumps({**config.to_hf(), **special, 'torch_dtype': name}, indent=2) + '\n', 'utf-8')
  for name in _COPIED_ON_EXPORT:
    if (source_folder / name).exists() and source_folder.resolve() != folder.resolve():
      shutil.copyfile(source_folder / name, folder / name)
  return checksum


def _slots(config: config_lib.ModelConfig) -> dict[str, _Slot]:
  """Returns every tensor name of the file, in order, with where it lives in the pytree."""
  sizes = dict(V=config.vocab_size, D=config.width, F=config.ffn_width, Q=config.heads * config.head_dim,
               K=config.kv_heads * config.head_dim)
  slots = {}
  for name, path, dims in _LLAMA:
    if path == 'head/kernel' and config.tied:
      continue
    for i in range(config.layers) if '{i}' in name else (None,):
      slots[name.format(i=i)] = _Slot(path, i, tuple(sizes[d] for d in dims), path.endswith('/kernel'))
  return slots


def _open_folder(folder: Path) -> dict[str, np.ndarray]:
  if not folder.is_dir():
    raise types.ConfigError(f'model folder {folder} does not exist: give a folder with config.json, tokenizer.json and '
                            '*.safetensors')
  single, index = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
  if single.exists():
    return safetensors_file.read(single)
  if not index.exists():
    raise types.ConfigError(f'{folder} has no weights: neither model.safetensors nor model.safetensors.index.json is there. '
                            'Copy them from the model (other formats must be converted to safetensors first)')
  weight_map = tokenizer_lib.read_json(index).get('weight_map', {})
  tensors: dict[str, np.ndarray] = {}
  for shard in sorted(set(weight_map.values())):
    tensors.update(safetensors_file.read(folder / shard))
  lost = sorted(set(weight_map) - set(tensors))
  if lost:
    raise types.ConfigError(f'{index} names tensors that its shards do not hold: {_some(lost)}.  Copy the shards again')
  return tensors


def _assemble(tensors: Mapping[str, np.ndarray], config: config_lib.ModelConfig, dtype, where: str) -> dict[str, Any]:
  slots = _slots(config)
  missing = sorted(set(slots) - set(tensors))
  unknown = sorted(n for n in set(tensors) - set(slots) if not _IGNORED.fullmatch(n))
  if config.tied and 'lm_head.weight' in unknown:  # some writers store the tied matrix twice
    if not np.array_equal(tensors['lm_head.weight'], tensors.get('model.embed_tokens.weight')):
      raise types.ConfigError(f'{where}: lm_head.weight differs from the embedding although config.json says '
                              'tie_word_embeddings=true.  Set it to false, or use the right config.json')
    unknown.remove('lm_head.weight')
  if missing or unknown:
    raise types.ConfigError(f'weights in {where} do not fit their config: missing tensors {_some(missing)}, unknown tensors '
                            f'{_some(unknown)}.  Use the config.json that belongs to them')
  arrays: dict[str, np.ndarray] = {}
  for name, slot in slots.items():
    if tensors[name].shape != slot.shape:
      raise types.ConfigError(f'{where}: tensor {name!r} has shape {tensors[name].shape}, but config.json implies {slot.shape}. '
                              'Use the config.json that belongs to the weights')
    if slot.path not in arrays:
      shape = slot.shape[::-1] if slot.transposed else slot.shape
      arrays[slot.path] = np.empty(shape if slot.layer is None else (config.layers, *shape), dtype)

  def fill(name: str) -> None:
    slot = slots[name]
    target = arrays[slot.path] if slot.layer is None else arrays[slot.path][slot.layer]
    if slot.transposed:
      _transpose_into(target, tensors[name])
    else:
      target[...] = tensors[name]

  safetensors_file.in_parallel(fill, slots)
  tree: dict[str, Any] = {}
  for path, array in arrays.items():
    *parents, leaf = path.split('/')
    node = tree
    for p in parents:
      node = node.setdefault(p, {})
    node[leaf] = array
  return tree


def _leaves(params: Params, config: config_lib.ModelConfig) -> dict[str, Any]:
  """Flattens the pytree to path -> array, where it lies, and checks it against the config."""
  leaves: dict[str, Any] = {}

  def walk(node, path):
    for key, value in node.items():
      if isinstance(value, Mapping):
        walk(value, f'{path}{key}/')
      else:
        leaves[f'{path}{key}'] = value

  walk(params, '')
  expected = {}
  for slot in _slots(config).values():
    shape = slot.shape[::-1] if slot.transposed else slot.shape
    expected[slot.path] = shape if slot.layer is None else (config.layers, *shape)
  if set(expected) != set(leaves):
    raise types.ConfigError(f'parameters do not fit {config}: missing {_some(sorted(set(expected) - set(leaves)))}, unknown '
                            f'{_some(sorted(set(leaves) - set(expected)))}')
  for path, shape in expected.items():
    if np.shape(leaves[path]) != shape:
      raise types.ConfigError(f'parameter {path} has shape {np.shape(leaves[path])}, expected {shape} for {config}')
  return leaves


def _to_file_layout(leaves: Mapping[str, Any], slot: _Slot, dtype) -> np.ndarray:
  array = np.asarray(leaves[slot.path])  # a device array keeps its host copy: the layers of a leaf fetch it once
  array = array if slot.layer is None else array[slot.layer]
  if not slot.transposed:
    return np.ascontiguousarray(array, dtype)
  out = np.empty(slot.shape, dtype)
  _transpose_into(out, array)
  return out


def _transpose_into(target: np.ndarray, source: np.ndarray) -> None:
  """target[...] = source.T, in strips that stay in the cache.

  Converts along the rows and transposes integers: NumPy moves elements of bfloat16 one by one otherwise (a third of the time).
  """
  integer = f'u{target.itemsize}'
  for i in range(0, source.shape[0], 64):
    target.view(integer)[:, i:i + 64] = np.ascontiguousarray(source[i:i + 64], target.dtype).view(integer).T


class _Lazy(Mapping):
  """Tensors that are laid out when they are looked at, so that a checksum never holds a second copy of the weights."""

  def __init__(self, names, produce):
    self._names, self._produce = names, produce

  def __getitem__(self, name):
    return self._produce(name)

  def __iter__(self):
    return iter(self._names)

  def __len__(self):
    return len(self._names)


def _digest(entries) -> str:
  lines = sorted(f'{name} {code} {list(shape)} {value:08x}\n' for name, code, shape, value in entries)
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def _some(names: list[str]) -> str:
  return str(names) if len(names) <= 5 else f'{names[:5]} and {len(names) - 5} more'
