"""Text to token ids and back, for tokenizers stored as a Hugging Face tokenizer.json.

A *control token* is an added token of the tokenizer: it has a meaning to the chat template (`<|im_end|>`) and never
comes from merging text.  Whether a control string found in text becomes its control id is the caller's choice at every
call: text written by tools, users or models must never gain control over the conversation.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Iterable, Sequence

import tokenizers

from ts_jax import types
from ts_jax.models import config as config_lib

# Embeddings are padded to round sizes (the largest padding in use is 905 rows); a larger gap is another tokenizer.
_MAX_UNUSED_ROWS = 1024


class Tokenizer:
  """A tokenizer.json with its special ids and chat template.  Immutable and safe to share between threads.

  Attributes:
    folder: where it was loaded from.
    vocab_size: number of ids, control tokens included.
    eos_id: id that ends a text or a turn.
    stop_ids: every id at which sampling stops (`eos_id` and those of generation_config.json), ascending.
    special_ids: ids of all control tokens.
    control_strings: control token text -> id.
    special_strings: `bos_token`, `eos_token`, ... -> text, as chat templates see them.
    chat_template: Jinja source, or None.
  """

  def __init__(self, folder: Path, spec: dict[str, Any], settings: dict[str, Any], stop_ids: Iterable[int],
               chat_template: str | None):
    self.folder = folder
    self._spec = spec
    # Two instances, because the library's switch between the two behaviours is mutable state.  The second has no added
    # tokens at all: the library's own switch would still turn those not marked special (<tool_call>) into their ids.
    self._with_control = _backend(spec)
    self._text_only = _backend({**spec, 'added_tokens': [], 'post_processor': None})
    self.vocab_size = self._with_control.get_vocab_size(with_added_tokens=True)
    self.control_strings = {t['content']: t['id'] for t in spec.get('added_tokens') or []}
    self.special_ids = frozenset(self.control_strings.values())
    self.special_strings = {k: _text_of(v) for k, v in settings.items()
                            if k.endswith('_token') and isinstance(v, (str, dict))}
    self.chat_template = chat_template
    eos = self.special_strings.get('eos_token')
    if eos is None or self._with_control.token_to_id(eos) is None:
      raise types.ConfigError(f'{folder}/tokenizer_config.json: eos_token {eos!r} is not in the vocabulary: sampling would '
                              'never stop.  Take tokenizer.json and tokenizer_config.json from the same model')
    self.eos_id = self._with_control.token_to_id(eos)
    self.stop_ids = tuple(sorted({self.eos_id, *stop_ids}))

  @classmethod
  def load(cls, folder: str | Path) -> 'Tokenizer':
    """Reads tokenizer.json, tokenizer_config.json, generation_config.json and the chat template of a model folder.

    Raises:
      ConfigError: a file is missing or unreadable.
    """
    folder = Path(folder)
    settings = read_json(folder / 'tokenizer_config.json')
    template_file = folder / 'chat_template.jinja'
    template = template_file.read_text('utf-8') if template_file.exists() else settings.get('chat_template')
    if isinstance(template, list):  # several named templates: the one called default is for conversations
      template = {t['name']: t['template'] for t in template}.get('default')
    stop_ids: Any = []
    if (folder / 'generation_config.json').exists():
      stop_ids = read_json(folder / 'generation_config.json').get('eos_token_id')
      stop_ids = [] if stop_ids is None else [stop_ids] if isinstance(stop_ids, int) else stop_ids
    return cls(folder, read_json(folder / 'tokenizer.json'), settings, stop_ids, template)

  def encode(self, text: str, allow_special: bool) -> tuple[int, ...]:
    """Encodes text, adding nothing to it.  Bytes that the vocabulary has no token for are lost, as everywhere else.

    Args:
      text: any text (no lone surrogates).
      allow_special: True for text written by the chat template; False for everything else, where a control string
        becomes ordinary tokens that decode to the same characters.
    """
    backend = self._with_control if allow_special else self._text_only
    return tuple(backend.encode(text, add_special_tokens=False).ids)

  def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
    """Decodes ids; bytes that do not form a character become U+FFFD.  `skip_special` leaves control tokens out."""
    if skip_special:
      ids = [i for i in ids if i not in self.special_ids]
    return self._with_control.decode(list(ids), skip_special_tokens=False)

  def control_id(self, name: str) -> int | None:
    """Returns the id of `bos_token`, `pad_token`, ...; None where the tokenizer has none."""
    text = self.special_strings.get(name)
    return None if text is None else self._with_control.token_to_id(text)

  def vocabulary(self) -> dict[int, str]:
    """Returns every id and its token, control tokens included."""
    return {i: token for token, i in self._with_control.get_vocab(with_added_tokens=True).items()}

  def fingerprint(self) -> str:
    """Returns a digest of everything that decides which ids a text gets: equal tokenizers, equal digests."""
    model = dict(self._spec['model'])
    # Older files write a merge as "a b", newer ones as ["a", "b"].
    model['merges'] = [m if isinstance(m, str) else ' '.join(m) for m in model.get('merges') or []]
    parts = [sorted(model['vocab'].items()) if isinstance(model['vocab'], dict) else model['vocab'], model['merges'],
             sorted(self.control_strings.items()), self._spec.get('normalizer'), self._spec.get('pre_tokenizer')]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

  def check_matches(self, config: config_lib.ModelConfig) -> None:
    """Raises ConfigError unless this tokenizer can belong to weights of the given sizes."""
    gap = config.vocab_size - self.vocab_size
    if 0 <= gap < _MAX_UNUSED_ROWS:
      return
    raise types.ConfigError(
        f'the tokenizer in {self.folder} has {self.vocab_size} ids but the weights have {config.vocab_size} embedding rows: '
        'it belongs to another model.  Use the tokenizer files that came with the weights')


def check_same_ids(student: Tokenizer, teacher: Tokenizer) -> None:
  """Checks that a teacher reads a student's ids as the student means them.

  Merges and chat templates are not compared: the teacher is given ids, never text.

  Raises:
    ConfigError: an id has another token, or bos, eos, pad or the stop ids differ; names the first.
  """
  mine, other = student.vocabulary(), teacher.vocabulary()
  shown = lambda vocabulary, i: 'no token' if i not in vocabulary else repr(vocabulary[i])

  def refuse(difference: str) -> None:
    raise types.ConfigError(f"teacher and student have different tokenizers ({teacher.folder}, {student.folder}): {difference}.  "
                            "Distil from a teacher that has the student's tokenizer")

  for i in sorted(mine.keys() | other.keys()):
    if mine.get(i) != other.get(i):
      refuse(f"id {i} is {shown(other, i)} to the teacher and {shown(mine, i)} to the student")
  for name in ('bos_token', 'eos_token', 'pad_token'):
    theirs, ours = ((t.special_strings.get(name), t.control_id(name)) for t in (teacher, student))
    if theirs != ours:
      refuse(f'{name} is {theirs[0]!r} (id {theirs[1]}) to the teacher and {ours[0]!r} (id {ours[1]}) to the student')
  for i in sorted(set(student.stop_ids) ^ set(teacher.stop_ids)):
    who = ('student', 'teacher') if i in student.stop_ids else ('teacher', 'student')
    refuse(f'id {i} ({shown(mine, i)}) is a stop id of the {who[0]} (its generation_config.json) and not of the {who[1]}')


def read_json(path: Path) -> dict[str, Any]:
  """Reads one JSON file of a model folder; a missing or broken one is a ConfigError that names it."""
  try:
    return json.loads(path.read_text('utf-8'))
  except FileNotFoundError as e:
    raise types.ConfigError(f'{path} is missing: a model folder holds config.json, tokenizer.json, tokenizer_config.json and '
                            '*.safetensors.  Copy it from the model, or name another model') from e
  except (ValueError, OSError) as e:
    raise types.ConfigError(f'{path} cannot be read: {e}.  Copy it again from the model') from e


def _backend(spec: dict[str, Any]) -> tokenizers.Tokenizer:
  # Truncation and padding stored in the file would silently change the record.
  try:
    return tokenizers.Tokenizer.from_str(json.dumps({**spec, 'truncation': None, 'padding': None}))
  except Exception as e:  # the library raises the bare class
    raise types.ConfigError(f'tokenizer.json is not usable by tokenizers {tokenizers.__version__}: {e}') from e


def _text_of(token: str | dict[str, Any]) -> str:
  return token if isinstance(token, str) else token['content']
