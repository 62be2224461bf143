"""Conversations as token ids, appended to and never rewritten.

Only the text that the template itself writes can produce control ids.  Message contents pass through the template with
every control string replaced by a marker, so that the template may trim or move them; what comes out is cut at the
template's control strings, and each piece of text between them is encoded as text.
"""

from __future__ import annotations

import json
import re
from typing import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

from ts_jax import types
from ts_jax.models import tokenizer as tokenizer_lib

Message = Mapping[str, str]

# Assistant texts that the append-only check sends through the template.
_PROBE_REPLIES = ('a reply', '<think>\na thought\n</think>\n\na reply', '```bash\nls -l\n```')


class ChatTemplate:
  """Renders conversations through the tokenizer's own chat template.

  A trajectory is `initial(messages)`, sampled ids, `observation(...)`, sampled ids, and so on.  When the sampled text
  re-tokenises to the sampled ids and has no white space that the template trims, the concatenation equals `render` of
  the whole conversation; when not, the sampled ids stand.

  Attributes:
    tokenizer: the tokenizer that owns the template.
    end_of_turn_id: the id that the template puts after an assistant's text.
    stop_ids: every id at which sampling a turn stops, ascending.
  """

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer, observation_role: str = 'user'):
    """Compiles the template and checks that it only ever appends.

    Args:
      tokenizer: its `chat_template` is used.
      observation_role: role of the messages that carry tool output.

    Raises:
      ConfigError: no template, a template that does not compile, that rewrites what it rendered before, or that ends
        an assistant's turn without a control token.
    """
    if not tokenizer.chat_template:
      raise types.ConfigError(f'{tokenizer.folder} has no chat template: put one under "chat_template" in '
                              'tokenizer_config.json, or use an instruction-tuned model')
    self.tokenizer = tokenizer
    self._observation_role = observation_role
    alternatives = sorted(tokenizer.control_strings, key=len, reverse=True)  # the longest match wins
    self._control = re.compile('(' + '|'.join(map(re.escape, alternatives)) + ')' if alternatives else '(?!)')
    try:
      self._template = _environment().from_string(tokenizer.chat_template)
    except jinja2.TemplateError as e:
      raise types.ConfigError(f'the chat template of {tokenizer.folder} does not compile: {e}') from e
    self.end_of_turn_id = self._find_end_of_turn()
    self.stop_ids = tuple(sorted({self.end_of_turn_id, *tokenizer.stop_ids}))
    self._checked_roles: set[str] = set()
    self._check_appends(observation_role)

  def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[int, ...]:
    """Returns the ids of a whole conversation.

    Args:
      messages: mappings with 'role' and 'content' (text).
      add_generation_prompt: end with what an assistant's reply starts after.

    Raises:
      ConfigError: the template refuses the conversation.
    """
    nonce = _unused_marker(messages)
    return self._encode(self._render_text(messages, add_generation_prompt, nonce), nonce)

  def initial(self, messages: Sequence[Message]) -> tuple[int, ...]:
    """Returns the prompt of a trajectory: the conversation so far, ready for an assistant's reply."""
    return self.render(messages, add_generation_prompt=True)

  def observation(self, content: str, previous_finished: bool, role: str | None = None) -> tuple[int, ...]:
    """Returns only what is new after an assistant's turn, up to where the next one starts.

    Args:
      content: the observation's text.
      previous_finished: whether the last sampled id was `end_of_turn_id`.  If it was, the ids start with the separator
        that the template puts after it (a stopped engine never samples it); if the turn was cut, with the
        end-of-turn id itself.
      role: role of the observation; by default the one given at construction.

    Raises:
      ConfigError: the template rewrites history for this role, or refuses it.
    """
    role = role or self._observation_role
    self._check_appends(role)
    observation = {'role': role, 'content': content}
    nonce = _unused_marker([observation])
    # Any history will do: the append-only check has shown that the tail does not depend on it.
    before = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': nonce}]
    text = self._render_text([*before, observation], True, nonce)
    ids = self._encode(text.split(nonce, 1)[1], nonce)
    return ids[1:] if previous_finished else ids

  def _render_text(self, messages: Sequence[Message], add_generation_prompt: bool, nonce: str | None = None) -> str:
    """Renders; given a nonce, with each control string in a content replaced by nonce + its index + nonce."""
    safe = list(messages)
    if nonce is not None:
      names = {s: f'{nonce}{i}{nonce}' for i, s in enumerate(self.tokenizer.control_strings)}
      safe = [{**m, 'content': self._control.sub(lambda hit: names[hit.group()], m['content'])} for m in messages]
    try:
      return self._template.render(messages=safe, add_generation_prompt=add_generation_prompt, tools=None, documents=None,
                                   **self.tokenizer.special_strings)
    except jinja2.TemplateError as e:
      roles = [m['role'] for m in messages]
      raise types.ConfigError(f'the chat template of {self.tokenizer.folder} refuses a conversation of roles {roles}: {e}') from e

  def _encode(self, text: str, nonce: str | None = None) -> tuple[int, ...]:
    """Encodes rendered text piece by piece, putting back the control strings that `_render_text` replaced."""
    strings = list(self.tokenizer.control_strings)
    marker = re.compile(f'{nonce}(\\d+){nonce}' if nonce is not None else '(?!)')
    ids: list[int] = []
    for i, piece in enumerate(self._control.split(text)):
      if i % 2:  # the separators of a split by one group
        ids.append(self.tokenizer.control_strings[piece])
      elif piece:
        ids.extend(self.tokenizer.encode(marker.sub(lambda hit: strings[int(hit.group(1))], piece), allow_special=False))
    return tuple(ids)

  def _find_end_of_turn(self) -> int:
    reply = 'a reply'
    text = self._render_text([{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': reply}], False)
    tail = self._control.match(text, text.rindex(reply) + len(reply)) if reply in text else None
    if tail is None:
      raise types.ConfigError(f'the chat template of {self.tokenizer.folder} does not put a control token after an '
                              'assistant\'s text: a turn would have no end.  Use a template with an end-of-turn token')
    return self.tokenizer.control_strings[tail.group()]

  def _check_appends(self, role: str) -> None:
    """Renders growing conversations; each must extend the one before by text that does not depend on the history."""
    if role in self._checked_roles:
      return
    where = f'the chat template of {self.tokenizer.folder}'
    end_of_turn = self.tokenizer.decode([self.end_of_turn_id])
    tails = set()
    for system in ([], [{'role': 'system', 'content': 'be brief'}]):
      messages = [*system, {'role': 'user', 'content': 'first'}]
      text = self._render_text(messages, True)
      for reply in _PROBE_REPLIES * 2:
        # Replies go in as a model writes them, reasoning tags included: that is what a template may drop later.
        messages += [{'role': 'assistant', 'content': reply}, {'role': role, 'content': 'result'}]
        record, text = text + reply + end_of_turn, self._render_text(messages, True)
        if not text.startswith(record):
          at = next((i for i, (a, b) in enumerate(zip(text, record)) if a != b), min(len(text), len(record)))
          raise types.ConfigError(
              f'{where} rewrites history: after an observation of role {role!r} it renders {text[at:at + 40]!r} where '
              f'{record[at:at + 40]!r} was recorded.  Use a template that only appends (one that keeps earlier reasoning) '
              'or another observation role')
        tails.add(text[len(record):])
      if len(tails) > 1:
        raise types.ConfigError(f'{where} renders an observation of role {role!r} differently at different turns '
                                f'({sorted(tails)}): a record cannot be extended.  Use another template')
      if self.tokenizer.encode(text, allow_special=True) != self._encode(text):
        raise types.ConfigError(f'the tokenizer in {self.tokenizer.folder} encodes a conversation differently from its parts: '
                                'use a tokenizer that adds no prefix to the first word and strips nothing around control tokens')
    self._checked_roles.add(role)


class _GenerationTag(jinja2.ext.Extension):
  """`{% generation %}` marks assistant text for trainers that mask by template; here it changes nothing."""
  tags = {'generation'}

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def _environment() -> jinja2.Environment:
  """The environment transformers renders in, except `strftime_now`: a prompt that holds today's date cannot be resumed."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
  environment.filters['tojson'] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
  environment.globals['raise_exception'] = _raise
  return environment


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)


def _unused_marker(messages: Sequence[Message]) -> str:
  """Returns a private-use character string that occurs in no content."""
  text = ''.join(m['content'] for m in messages)
  marker = '\ue000'
  while marker in text:
    marker += '\ue001'
  return marker
