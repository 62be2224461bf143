"""Text and ids: nothing is lost, and control strings in text stay text."""

import dataclasses
import json
import shutil
import threading

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from tests.models.conftest import TEXTS
from ts_jax import types
from ts_jax.models import tokenizer as tokenizer_lib

CONTROL = ('<|im_start|>', '<|im_end|>', '<|endoftext|>', '<repo_name>', '<empty_output>')
# Valid Unicode in which control strings are frequent, also broken and joined ones.  SmolLM2's vocabulary has no token for some
# bytes (a few ASCII control characters, unassigned planes); transformers drops them too.
_CHARACTERS = st.characters(codec='utf-8', max_codepoint=0x3ffff, exclude_characters='\x04\x06\x13\x14\x16\x1d')
ANY_TEXT = st.lists(st.one_of(st.text(_CHARACTERS, max_size=20), st.sampled_from(CONTROL + ('<|im_', 'end|>', '\n'))),
                    max_size=8).map(''.join)


@pytest.fixture
def folder(model_folder, tmp_path):
  """A copy of the tokenizer's files to break."""
  for name in ('tokenizer.json', 'tokenizer_config.json', 'generation_config.json'):
    shutil.copy(model_folder / name, tmp_path)
  return tmp_path


def edit(path, change):
  values = json.loads(path.read_text())
  change(values)
  path.write_text(json.dumps(values))


def test_sizes_and_special_ids(tokenizer, real):
  assert tokenizer.vocab_size == 49152
  assert tokenizer.eos_id == 2 and tokenizer.stop_ids == (2,)
  assert tokenizer.special_ids == frozenset(range(17))
  tokenizer.check_matches(real[0])


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT)
def test_text_survives_and_never_becomes_control(tokenizer, text):
  ids = tokenizer.encode(text, allow_special=False)
  assert tokenizer.special_ids.isdisjoint(ids)
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text


def test_control_strings_are_ids_only_where_allowed(tokenizer):
  assert tokenizer.encode('a<|im_end|>', allow_special=True)[-1] == 2
  assert tokenizer.decode([2, 28, 2], skip_special=True) == tokenizer.decode([28])


def test_digits_are_single_tokens(tokenizer):
  """What transformers' own GGUF reader gets wrong."""
  assert [tokenizer.decode([i]) for i in tokenizer.encode('x2048', False)] == ['x', '2', '0', '4', '8']


def test_a_character_cut_in_two_decodes_to_a_replacement(tokenizer):
  ids = tokenizer.encode('🙂', allow_special=False)
  assert len(ids) > 1
  assert '\ufffd' in tokenizer.decode(ids[:1])


def test_threads_do_not_change_each_others_mode(tokenizer):
  """Both modes at once, many times: a shared mutable switch would mix them up."""
  text, wrong = 'ls <|im_end|> ' * 20, []
  expected = {mode: tokenizer.encode(text, mode) for mode in (True, False)}

  def work(mode):
    wrong.extend(1 for _ in range(300) if tokenizer.encode(text, mode) != expected[mode])

  threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
  for t in threads:
    t.start()
  for t in threads:
    t.join()
  assert not wrong


def test_added_tokens_that_are_not_marked_special_stay_text_too(folder):
  """<tool_call> of some families: an added token, not 'special', yet it controls the template."""
  edit(folder / 'tokenizer.json', lambda v: v['added_tokens'].append(
      dict(id=49152, content='<tool_call>', single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)))
  tokenizer = tokenizer_lib.Tokenizer.load(folder)
  assert tokenizer.encode('<tool_call>', allow_special=True) == (49152,)
  assert 49152 not in tokenizer.encode('<tool_call>', allow_special=False)
  assert tokenizer.decode(tokenizer.encode('<tool_call>', allow_special=False)) == '<tool_call>'


def test_stored_truncation_is_ignored(folder):
  edit(folder / 'tokenizer.json', lambda v: v.update(truncation=dict(direction='Right', max_length=4, strategy='LongestFirst', stride=0)))
  assert len(tokenizer_lib.Tokenizer.load(folder).encode('one two three four five six seven', False)) > 4


def test_stop_ids_come_from_the_generation_config_too(folder):
  edit(folder / 'generation_config.json', lambda v: v.update(eos_token_id=[0, 2]))
  assert tokenizer_lib.Tokenizer.load(folder).stop_ids == (0, 2)


def test_wrong_tokenizer_for_the_weights(tokenizer, real):
  config = real[0]
  for rows in (49151, 32000, 128256):
    with pytest.raises(types.ConfigError, match=f'49152 ids but the weights have {rows}'):
      tokenizer.check_matches(dataclasses.replace(config, vocab_size=rows))
  tokenizer.check_matches(dataclasses.replace(config, vocab_size=49280))  # rows added to reach a round size


def test_missing_and_broken_files_are_named(folder):
  edit(folder / 'tokenizer_config.json', lambda v: v.update(eos_token='<nothing>'))
  with pytest.raises(types.ConfigError, match="eos_token '<nothing>' is not in the vocabulary"):
    tokenizer_lib.Tokenizer.load(folder)
  (folder / 'tokenizer.json').write_text('{"model": {"type": "Unheard"}}')
  with pytest.raises(types.ConfigError, match='tokenizer.json'):
    tokenizer_lib.Tokenizer.load(folder)
  (folder / 'tokenizer.json').write_text('{')
  with pytest.raises(types.ConfigError, match='tokenizer.json cannot be read'):
    tokenizer_lib.Tokenizer.load(folder)
  (folder / 'tokenizer.json').unlink()
  with pytest.raises(types.ConfigError, match='tokenizer.json is missing'):
    tokenizer_lib.Tokenizer.load(folder)


def test_fingerprint_depends_on_what_decides_the_ids(tokenizer, folder):
  assert tokenizer_lib.Tokenizer.load(folder).fingerprint() == tokenizer.fingerprint()
  edit(folder / 'tokenizer.json', lambda v: v['model'].update(merges=[' '.join(m) for m in v['model']['merges']]))
  older = tokenizer_lib.Tokenizer.load(folder)  # the older spelling of the same merges
  assert older.fingerprint() == tokenizer.fingerprint()
  assert [older.encode(t, False) for t in TEXTS] == [tokenizer.encode(t, False) for t in TEXTS]
  edit(folder / 'tokenizer.json', lambda v: v['model']['merges'].pop())
  assert tokenizer_lib.Tokenizer.load(folder).fingerprint() != tokenizer.fingerprint()


def swapped(vocab):
  a, b = (next(token for token, i in vocab.items() if i == n) for n in (1000, 2000))
  vocab[a], vocab[b] = vocab[b], vocab[a]


@pytest.mark.parametrize('file, change, told', [
    ('tokenizer.json', lambda s: swapped(s['model']['vocab']), r"id 1000 is '(.+)' to the teacher and '(?!\1)(.+)' to the student"),
    ('tokenizer.json', lambda s: s['added_tokens'].append(s['added_tokens'][0] | dict(content='<|extra|>', id=49152)),
     r"id 49152 is '<\|extra\|>' to the teacher and no token to the student"),
    ('tokenizer_config.json', lambda s: s.pop('bos_token'), r"bos_token is None \(id None\) to the teacher and '<\|im_start\|>' \(id 1\)"),
    ('tokenizer_config.json', lambda s: s.update(pad_token='<|endoftext|>'), r"pad_token is '<\|endoftext\|>' \(id 0\) .* '<\|im_end\|>' \(id 2\)"),
    ('generation_config.json', lambda s: s.update(eos_token_id=[2, 0]), r"id 0 \('<\|endoftext\|>'\) is a stop id of the teacher"),
])
def test_a_teacher_that_reads_ids_differently_is_refused_with_the_first_difference(tokenizer, folder, file, change, told):
  edit(folder / file, change)
  with pytest.raises(types.ConfigError, match=told) as e:
    tokenizer_lib.check_same_ids(tokenizer, tokenizer_lib.Tokenizer.load(folder))
  assert str(folder) in str(e.value) and str(tokenizer.folder) in str(e.value)


def test_a_stop_id_only_the_student_has_is_refused_too(tokenizer, folder):
  edit(folder / 'generation_config.json', lambda s: s.update(eos_token_id=[2, 0]))
  with pytest.raises(types.ConfigError, match='is a stop id of the student .* and not of the teacher'):
    tokenizer_lib.check_same_ids(tokenizer_lib.Tokenizer.load(folder), tokenizer)


def test_a_teacher_with_other_merges_or_another_template_is_accepted(tokenizer, folder):
  edit(folder / 'tokenizer.json', lambda s: s['model']['merges'].pop())
  edit(folder / 'tokenizer_config.json', lambda s: s.pop('chat_template', None))
  tokenizer_lib.check_same_ids(tokenizer, tokenizer_lib.Tokenizer.load(folder))
