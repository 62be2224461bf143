"""A real sandbox, a real (byte-level) tokenizer and chat template, and ways to look at the machine's processes."""

import json
import pathlib

import pytest
import tokenizers

from tests.agents import scripted
from ts_jax.agents import sandbox as sandbox_lib
from ts_jax.models import chat
from ts_jax.models import tokenizer as tokenizer_lib

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CONTROL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')


@pytest.fixture(scope='session')
def backend():
  return sandbox_lib.Sandbox.probe()


@pytest.fixture
def sandbox(backend, tmp_path):
  with sandbox_lib.Sandbox(backend, folder=tmp_path) as s:
    yield s


@pytest.fixture(scope='session')
def with_template(tmp_path_factory):
  """Function from a chat template's source to it, over bytes: every byte is one token, so that lengths can be written down."""
  def build(source: str) -> chat.ChatTemplate:
    folder = tmp_path_factory.mktemp('tokenizer')
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*CONTROL, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(CONTROL))
    backend.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '<|im_end|>', 'chat_template': source}))
    return chat.ChatTemplate(tokenizer_lib.Tokenizer.load(folder))
  return build


@pytest.fixture(scope='session')
def template(with_template):
  """ChatML."""
  return with_template(CHATML)


@pytest.fixture
def task_folder(tmp_path):
  files = tmp_path / 'task' / 'environment' / 'files'
  files.mkdir(parents=True)
  (files / 'note.txt').write_text('the word is heron\n')
  return tmp_path / 'task'


@pytest.fixture(scope='session')
def processes_with():
  """Function from a text to the ids of all processes of the machine whose command line contains it."""
  def find(text: str) -> list[int]:
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
      try:
        if text.encode() in path.read_bytes().replace(b'\0', b' '):
          found.append(int(path.parent.name))
      except OSError:
        continue  # ended meanwhile
    return found
  return find


@pytest.fixture
def make(template, sandbox, task_folder):
  """Function from replies to a trajectory that is ready to run."""
  return lambda replies, **kwargs: scripted.Run(template, sandbox, task_folder, replies, **kwargs)
