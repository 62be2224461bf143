"""Weights in and out: exact, refused by name when they do not fit, and never half written."""

import json
import os
import stat
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from tests.models.conftest import TINY
from ts_jax import types
from ts_jax.models import safetensors_file
from ts_jax.models import weights

MODELS = pytest.mark.parametrize('name', list(TINY))


def write_folder(folder, tensors, config, name='model.safetensors'):
  folder.mkdir(exist_ok=True)
  safetensors.numpy.save_file(tensors, folder / name, metadata={'format': 'pt'})
  (folder / 'config.json').write_text(json.dumps(config.to_hf()))
  return folder


@pytest.fixture
def stored(tiny, tmp_path):
  """(config, params, tensors of the untied model as the safetensors library reads them)."""
  config, params = tiny['untied']
  weights.save_weights(tmp_path / 'w.safetensors', params, config)
  return config, params, safetensors.numpy.load_file(tmp_path / 'w.safetensors')


@MODELS
def test_round_trip_keeps_every_bit_and_the_checksum(name, tiny, tmp_path):
  config, params = tiny[name]
  path = tmp_path / 'w.safetensors'
  checksum = weights.save_weights(path, params, config)
  jax.tree.map(np.testing.assert_array_equal, weights.load_weights_file(path, config), params)
  on_device = jax.tree.map(jax.numpy.asarray, params)
  assert checksum == weights.weights_checksum(path) == weights.weights_checksum(params, config)
  assert checksum == weights.weights_checksum(on_device, config)
  assert stat.S_IMODE(path.stat().st_mode) == 0o644
  assert [p.name for p in tmp_path.iterdir()] == ['w.safetensors']


def test_layout_is_the_one_other_libraries_read(stored):
  config, params, tensors = stored
  np.testing.assert_array_equal(tensors['model.layers.1.mlp.down_proj.weight'], params['layers']['down']['kernel'][1].T)
  np.testing.assert_array_equal(tensors['lm_head.weight'], params['head']['kernel'].T)
  assert tensors['model.layers.0.self_attn.k_proj.weight'].shape == (config.kv_heads * config.head_dim, config.width)


@MODELS
def test_bfloat16_and_float16(name, tiny, tmp_path):
  config, params = tiny[name]
  for dtype in (ml_dtypes.bfloat16, np.float16):
    checksum = weights.save_weights(tmp_path / 'w', params, config, dtype)
    assert checksum == weights.weights_checksum(tmp_path / 'w') == weights.weights_checksum(params, config, dtype)
    wide = weights.load_weights_file(tmp_path / 'w', config, np.float32)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype).astype(np.float32)), wide, params)
    narrow = weights.load_weights_file(tmp_path / 'w', config, dtype)
    assert all(x.dtype == dtype for x in jax.tree.leaves(narrow))


def test_checksum_sees_one_bit_a_sign_and_an_exchange(tiny):
  config, params = tiny['tied']
  before = weights.weights_checksum(params, config)

  def changed(edit):
    copy = jax.tree.map(np.copy, params)
    edit(copy)
    return weights.weights_checksum(copy, config)

  def flip(p):
    p['layers']['q']['kernel'].view(np.uint32)[1, 2, 3] ^= 1

  def negate(p):
    p['final_norm']['scale'] *= -1

  def exchange(p):
    p['layers']['k']['kernel'], p['layers']['v']['kernel'] = p['layers']['v']['kernel'], p['layers']['k']['kernel']

  assert len({before, changed(flip), changed(negate), changed(exchange)}) == 4
  assert changed(lambda p: None) == before


def test_sharded_checkpoint(stored, tmp_path):
  config, params, tensors = stored
  names = sorted(tensors)
  shards = {'a.safetensors': names[::2], 'b.safetensors': names[1::2]}
  for shard, members in shards.items():
    write_folder(tmp_path / 'm', {n: tensors[n] for n in members}, config, shard)
  index = tmp_path / 'm' / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': {n: s for s, members in shards.items() for n in members}}))
  jax.tree.map(np.testing.assert_array_equal, weights.load_params(tmp_path / 'm'), params)
  assert weights.weights_checksum(tmp_path / 'm') == weights.weights_checksum(params, config)
  (tmp_path / 'm' / 'b.safetensors').unlink()
  with pytest.raises(types.ConfigError, match='b.safetensors'):
    weights.load_params(tmp_path / 'm')


def test_missing_unknown_and_misshapen_tensors_are_named(stored, tmp_path):
  config, _, tensors = stored
  for message, change in {
      r"missing tensors \['model.layers.1.mlp.up_proj.weight'\]": lambda t: t.pop('model.layers.1.mlp.up_proj.weight'),
      r"unknown tensors \['model.layers.0.self_attn.q_proj.bias'\]":
          lambda t: t.update({'model.layers.0.self_attn.q_proj.bias': np.zeros(60, np.float32)}),
      r"unknown tensors \['model.layers.2": lambda t: t.update({'model.layers.2.input_layernorm.weight': np.ones(24, np.float32)}),
      r"'model.norm.weight' has shape \(7,\)": lambda t: t.update({'model.norm.weight': np.ones(7, np.float32)}),
  }.items():
    broken = dict(tensors)
    change(broken)
    with pytest.raises(types.ConfigError, match=message):
      weights.load_params(write_folder(tmp_path / 'm', broken, config))


def test_tied_checkpoint_may_repeat_its_embedding_but_not_another_head(tiny, tmp_path):
  config, params = tiny['tied']
  weights.save_weights(tmp_path / 'w', params, config)
  tensors = safetensors.numpy.load_file(tmp_path / 'w')
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
  jax.tree.map(np.testing.assert_array_equal, weights.load_params(write_folder(tmp_path / 'm', tensors, config)), params)
  tensors['lm_head.weight'][3, 4] += 1
  with pytest.raises(types.ConfigError, match='lm_head.weight differs'):
    weights.load_params(write_folder(tmp_path / 'm', tensors, config))


def test_folder_without_weights_or_config(tmp_path, stored):
  config = stored[0]
  with pytest.raises(types.ConfigError, match='does not exist'):
    weights.load_params(tmp_path / 'nowhere')
  (tmp_path / 'm').mkdir()
  with pytest.raises(types.ConfigError, match='config.json is missing'):
    weights.load_config(tmp_path / 'm')
  (tmp_path / 'm' / 'config.json').write_text(json.dumps(config.to_hf()))
  with pytest.raises(types.ConfigError, match='neither model.safetensors'):
    weights.load_params(tmp_path / 'm')
  (tmp_path / 'm' / 'config.json').write_text('{"model_type": "llama"}')
  with pytest.raises(types.ConfigError, match='lacks'):
    weights.load_config(tmp_path / 'm')


def test_damaged_files_are_refused(stored, tmp_path):
  config, _, _ = stored
  whole = (tmp_path / 'w.safetensors').read_bytes()
  for content in (whole[:-5], whole[:40], b'', b'not weights at all, but long enough for a header length', b'\x08' + bytes(20)):
    (tmp_path / 'broken').write_bytes(content)
    with pytest.raises(types.ConfigError, match='broken'):
      weights.load_weights_file(tmp_path / 'broken', config)


def test_parameters_of_another_model_are_not_written(tiny, tmp_path):
  config, params = tiny['tied']
  with pytest.raises(types.ConfigError, match='head/kernel'):
    weights.save_weights(tmp_path / 'w', params, TINY['untied'])
  smaller = {**params, 'final_norm': {'scale': params['final_norm']['scale'][:-1]}}
  with pytest.raises(types.ConfigError, match=r'final_norm/scale has shape \(31,\)'):
    weights.save_weights(tmp_path / 'w', smaller, config)
  assert not list(tmp_path.iterdir())


FULL_DISK = """
import sys, numpy as np
from ts_jax.models import safetensors_file as s
path = sys.argv[1]
spec = {'t': s.TensorSpec((500_000,), np.dtype(np.float32))}
s.write(path, {'t': s.TensorSpec((1000,), np.dtype(np.float32))}, lambda _: np.full(1000, 7, np.float32))
try:
  s.write(path, spec, lambda _: np.zeros(500_000, np.float32))
except s.DiskFullError as e:
  print(e)
import os
print(os.listdir(os.path.dirname(path)), s.read(path)['t'].sum())
"""


def test_full_disk_is_a_clear_error_and_keeps_the_old_file(tmp_path):
  """On a real file system of one megabyte."""
  done = subprocess.run(['bwrap', '--bind', '/', '/', '--dev', '/dev', '--size', '1048576', '--tmpfs', tmp_path, sys.executable,
                         '-c', FULL_DISK, tmp_path / 'w.safetensors'], text=True, capture_output=True, timeout=60,
                        cwd=os.getcwd())
  assert done.returncode == 0, done.stderr
  message, rest = done.stdout.splitlines()
  assert f'no room for {tmp_path}/w.safetensors: it needs 2000' in message and 'bytes and' in message
  assert rest == "['w.safetensors'] 7000.0"


def test_reader_agrees_with_the_library_on_its_own_files(tmp_path):
  tensors = {'a': np.arange(6, dtype=np.float16).reshape(2, 3), 'b': np.zeros((0, 4), np.float32), 'c': np.float64([1, 2])}
  safetensors.numpy.save_file(tensors, tmp_path / 'x')
  ours = safetensors_file.read(tmp_path / 'x')
  assert ours.keys() == tensors.keys()
  for name, tensor in tensors.items():
    np.testing.assert_array_equal(ours[name], tensor)
    assert ours[name].dtype == tensor.dtype
  specs = {n: safetensors_file.TensorSpec(t.shape, t.dtype) for n, t in tensors.items()}
  crcs = safetensors_file.write(tmp_path / 'y', specs, tensors.__getitem__)
  assert crcs == safetensors_file.checksums(ours)
  with safetensors.safe_open(tmp_path / 'y', 'numpy') as f:
    for name, tensor in tensors.items():
      np.testing.assert_array_equal(f.get_tensor(name), tensor)


def test_export_refuses_a_foreign_tokenizer(tiny, model_folder, tmp_path):
  config, params = tiny['tied']
  with pytest.raises(types.ConfigError, match='49152 ids but the weights have 97'):
    weights.export_hf(tmp_path / 'out', params, config, model_folder)
  assert not (tmp_path / 'out').exists()
