"""Conversations as token ids: appended to, or, where the template rewrites what it rendered before, branching.

Only the text that the template itself writes can produce control ids.  Message contents pass through the template with
every control string replaced by a marker, so that the template may trim or move them; what comes out is cut at the
template's control strings, and each piece of text between them is encoded as text.

Sampled ids are the record, and a template that rewrites history does not change that: where it renders a reply whole, the
reply's ids stand.  White space that it trims at a reply's ends does not count (a template that trims would otherwise branch
after every reply that ends with a line break): such a reply was kept whole, as it is behind a template that only appends.
Control ids that were sampled are shown to the template as what they are, since a `</think>` may be one, and stay control ids
in what it leaves of a reply; what was spelled out in ordinary ids stays text.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Callable, Iterable, Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

from ts_jax import types
from ts_jax.models import tokenizer as tokenizer_lib

Message = Mapping[str, str]

# Assistant texts that are sent through the template to see what it does to them later.
_PROBE_REPLIES = ('a reply', '<think>\na thought\n</think>\n\na reply', '```bash\nls -l\n```')


class ChatTemplate:
  """Renders conversations through the tokenizer's own chat template.

  A trajectory is `initial(messages)`, sampled ids, `following(...)`, sampled ids, and so on; behind a template that only
  appends, `following` is `observation(...)`.  When the sampled text re-tokenises to the sampled ids and has no white space
  that the template trims, what a turn is sampled behind equals `render` of the conversation; when not, the sampled ids stand.

  Attributes:
    tokenizer: the tokenizer that owns the template.
    end_of_turn_id: the id that the template puts after an assistant's text.
    stop_ids: every id at which sampling a turn stops, ascending.
    rewriting: what the template does to earlier replies when an observation follows, in words; '' where it only appends.
  """

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer, observation_role: str = 'user'):
    """Compiles the template and finds out whether it only ever appends.

    Args:
      tokenizer: its `chat_template` is used.
      observation_role: role of the messages that carry tool output.

    Raises:
      ConfigError: no template, a template that does not compile, that rewrites the prompt, or that ends an assistant's
        turn without a control token.
    """
    if not tokenizer.chat_template:
      raise types.ConfigError(f'{tokenizer.folder} has no chat template: put one under "chat_template" in '
                              'tokenizer_config.json, or use an instruction-tuned model')
    self.tokenizer = tokenizer
    self._observation_role = observation_role
    alternatives = sorted(tokenizer.control_strings, key=len, reverse=True)  # the longest match wins
    self._control = re.compile('(' + '|'.join(map(re.escape, alternatives)) + ')' if alternatives else '(?!)')
    self._places = {s: i for i, s in enumerate(tokenizer.control_strings)}
    try:
      self._template = _environment().from_string(tokenizer.chat_template)
    except jinja2.TemplateError as e:
      raise types.ConfigError(f'the chat template of {tokenizer.folder} does not compile: {e}') from e
    self.end_of_turn_id = self._find_end_of_turn()
    self.stop_ids = tuple(sorted({self.end_of_turn_id, *tokenizer.stop_ids}))
    self._header = self._find_header()
    self._rewriting: dict[str, str] = {}  # by role of the observations
    self.rewriting = self._find_rewriting(observation_role)

  @property
  def rewrites(self) -> bool:
    """Turns may keep only a part of the path before them: trajectories branch."""
    return bool(self.rewriting)

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
    """Returns the prompt of a trajectory: the conversation so far, ready for an assistant's reply.

    Raises:
      ConfigError: the template refuses the conversation, or would rewrite it once there are replies.
    """
    if self.rewrites:
      self._check_prompt(messages, self._observation_role)
    return self.render(messages, add_generation_prompt=True)

  def following(self, messages: Sequence[Message] | None, history: Sequence[tuple[Sequence[int], str]], path: Sequence[int],
                encoded: dict[tuple[str, str], tuple[int, ...]] | None = None) -> tuple[int | None, tuple[int, ...]]:
    """Returns what the turn after an observation is sampled behind: `keeps` and `context_ids` as in `types.Turn`.

    Args:
      messages: what the trajectory's prompt was rendered from; not needed (None) where the template only appends.
      history: (sampled ids, observation) of each turn so far, at least one.
      path: the ids behind which a further id of the last reply would have been sampled; ends with that reply.
      encoded: what has been encoded for earlier turns of the trajectory; what is new is added.

    Raises:
      ConfigError: the template refuses the conversation or rewrites its prompt, or `path` does not begin with that prompt.
    """
    if not self.rewrites:
      sampled, observation = history[-1]
      return None, self.observation(observation, bool(sampled) and sampled[-1] == self.end_of_turn_id)
    if messages is None:
      raise types.ConfigError(f'the chat template of {self.tokenizer.folder} rewrites history: what follows an observation cannot be '
                              'rendered without the messages of the prompt')
    ids, prompt_tokens = self._conversation(messages, history, {} if encoded is None else encoded)
    keeps = next((i for i, (new, old) in enumerate(zip(ids, path)) if new != old), min(len(ids), len(path)))
    if keeps < prompt_tokens:
      raise types.ConfigError(f'the path differs at id {keeps} from the prompt of {prompt_tokens} that its messages render to: give '
                              'the messages that the prompt was made from')
    return (None if keeps == len(path) else keeps), ids[keeps:]

  def observation(self, content: str, previous_finished: bool, role: str | None = None) -> tuple[int, ...]:
    """Returns only what is new after an assistant's turn, up to where the next one starts.

    Args:
      content: the observation's text.
      previous_finished: whether the last sampled id was `end_of_turn_id`.  If it was, the ids start with the separator
        that the template puts after it (a stopped engine never samples it); if the turn was cut, with the
        end-of-turn id itself.
      role: role of the observation; by default the one given at construction.

    Raises:
      ConfigError: the template rewrites history for this role (see `following`), or refuses it.
    """
    role = role or self._observation_role
    rewriting = self._find_rewriting(role)
    if rewriting:
      raise types.ConfigError(f'the chat template of {self.tokenizer.folder} rewrites history: {rewriting}.  What follows a reply then '
                              'depends on the whole conversation')
    observation = {'role': role, 'content': content}
    nonce = _unused_marker([observation])
    # Any history will do: the append-only check has shown that the tail does not depend on it.
    before = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': nonce}]
    text = self._render_text([*before, observation], True, nonce)
    ids = self._encode(text.split(nonce, 1)[1], nonce)
    return ids[1:] if previous_finished else ids

  def _conversation(self, messages: Sequence[Message], history: Sequence[tuple[Sequence[int], str]],
                    encoded: dict[tuple[str, str], tuple[int, ...]]) -> tuple[tuple[int, ...], int]:
    """Ids of a conversation up to where the next reply starts, sampled ids as sampled; and how many of them are the prompt's."""
    bodies = [ids[:-1] if ids and ids[-1] in self.stop_ids else ids for ids, _ in history]
    stems = [tuple(ids[:-1] if ids and ids[-1] == self.end_of_turn_id else ids) for ids, _ in history]  # the template writes the rest
    said = [*(self.tokenizer.decode(body) for body in bodies), *(observation for _, observation in history)]
    nonce = _unused_marker([*messages, *({'content': text} for text in said)])
    replies = [self._reply_text(body, nonce) for body in bodies]
    opening = self._hidden(messages, nonce)
    prompt = self._run_template(opening, True)

    def render(marked: Iterable[int]) -> str:
      turns = []
      for i, (reply, (_, observation)) in enumerate(zip(replies, history)):
        end = f'{nonce}e{i}{nonce}' if i in marked else ''  # shows where a reply ends, and changes nothing of how it begins
        turns += [{'role': 'assistant', 'content': reply + end},
                  *self._hidden([{'role': self._observation_role, 'content': observation}], nonce)]
      return self._run_template([*opening, *turns], True)

    text = render(())
    if not text.startswith(prompt):
      raise self._rewrites_prompt(prompt, text)
    ends, with_ends, plain = _find_ends([i for i, stem in enumerate(stems) if stem], render, text, f'{nonce}e(\\d+){nonce}')

    def encode(piece: str) -> tuple[int, ...]:
      if (nonce, piece) not in encoded:
        encoded[nonce, piece] = self._encode(piece, nonce)
      return encoded[nonce, piece]

    ids = list(encode(prompt))
    prompt_tokens = len(ids)
    with_ends[0], plain[0] = with_ends[0][len(prompt):], plain[0][len(prompt):]
    for before, shown, end in zip(with_ends, plain, [*ends, None]):
      kept = None if end is None else next((t for t in (replies[end], replies[end].lstrip()) if before.endswith(t)), None)
      written = shown if kept is None else before[:len(before) - len(kept)]
      # As in the record, what stands where a reply starts is a piece of its own.
      for piece in re.split(f'(?<={re.escape(self._header)})', written) if self._header else [written]:
        ids += encode(piece)
      ids += () if kept is None else stems[end]
    return tuple(ids), prompt_tokens

  def _reply_text(self, ids: Sequence[int], nonce: str) -> str:
    """A reply as the template gets it: control ids as their strings, control strings spelled out in other ids replaced."""
    text = ''
    for control, run in itertools.groupby(ids, self.tokenizer.special_ids.__contains__):
      run_text = self.tokenizer.decode(list(run))
      text += run_text if control else self._hide(run_text, nonce)
    return text

  def _hide(self, text: str, nonce: str) -> str:
    """Replaces each control string by nonce + its index + nonce."""
    return self._control.sub(lambda hit: f'{nonce}{self._places[hit.group()]}{nonce}', text)

  def _hidden(self, messages: Sequence[Message], nonce: str) -> list[Message]:
    return [{**m, 'content': self._hide(m['content'], nonce)} for m in messages]

  def _render_text(self, messages: Sequence[Message], add_generation_prompt: bool, nonce: str | None = None) -> str:
    """Renders; given a nonce, with the control strings in contents replaced."""
    return self._run_template(messages if nonce is None else self._hidden(messages, nonce), add_generation_prompt)

  def _run_template(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    try:
      return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, tools=None, documents=None,
                                   **self.tokenizer.special_strings)
    except jinja2.TemplateError as e:
      roles = [m['role'] for m in messages]
      raise types.ConfigError(f'the chat template of {self.tokenizer.folder} refuses a conversation of roles {roles}: {e}') from e

  def _encode(self, text: str, nonce: str | None = None) -> tuple[int, ...]:
    """Encodes rendered text piece by piece, putting back the control strings that `_hide` replaced."""
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

  def _find_header(self) -> str:
    """What the template writes where a reply starts; '' where that cannot be told from what is before it."""
    messages = [{'role': 'user', 'content': 'q'}]
    before, text = (self._render_text(messages, ready) for ready in (False, True))
    return text[len(before):] if text.startswith(before) else ''

  def _find_rewriting(self, role: str) -> str:
    """Renders growing conversations and says how one does not extend the one before; '' where all do.

    Raises:
      ConfigError: what is appended depends on the history, or what is rewritten begins in the prompt.
    """
    if role in self._rewriting:
      return self._rewriting[role]
    where = f'the chat template of {self.tokenizer.folder}'
    end_of_turn = self.tokenizer.decode([self.end_of_turn_id])
    tails, rewriting = set(), ''
    for system in ([], [{'role': 'system', 'content': 'be brief'}]):
      messages = prompt = [*system, {'role': 'user', 'content': 'first'}]
      text = self._render_text(messages, True)
      for reply in _PROBE_REPLIES * 2:
        # Replies go in as a model writes them, reasoning tags included: that is what a template may drop later.
        messages = [*messages, {'role': 'assistant', 'content': reply}, {'role': role, 'content': 'result'}]
        record, text = text + reply + end_of_turn, self._render_text(messages, True)
        if text.startswith(record):
          tails.add(text[len(record):])
        elif not rewriting:
          rewriting = f'after an observation of role {role!r} it renders {_difference(text, record)} was recorded'
      if rewriting:
        self._check_prompt(prompt, role)
      elif len(tails) > 1:
        raise types.ConfigError(f'{where} renders an observation of role {role!r} differently at different turns '
                                f'({sorted(tails)}): a record cannot be extended.  Use another template')
      if self.tokenizer.encode(text, allow_special=True) != self._encode(text):
        raise types.ConfigError(f'the tokenizer in {self.tokenizer.folder} encodes a conversation differently from its parts: '
                                'use a tokenizer that adds no prefix to the first word and strips nothing around control tokens')
    self._rewriting[role] = rewriting
    return rewriting

  def _check_prompt(self, messages: Sequence[Message], role: str) -> None:
    """Raises ConfigError unless a prompt stays as it is when the conversation goes on."""
    conversation = self._hidden(messages, _unused_marker(messages))
    prompt = self._run_template(conversation, True)
    for reply in _PROBE_REPLIES * 2:
      conversation += [{'role': 'assistant', 'content': reply}, {'role': role, 'content': 'result'}]
      text = self._run_template(conversation, True)
      if not text.startswith(prompt):
        raise self._rewrites_prompt(prompt, text)

  def _rewrites_prompt(self, prompt: str, text: str) -> types.ConfigError:
    return types.ConfigError(
        f'the chat template of {self.tokenizer.folder} rewrites the prompt: once there is a reply it renders {_difference(text, prompt)} '
        'was.  What the trajectories of a group share must stay: use a template that leaves the first messages, and what a reply starts '
        'behind, as they were')


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


def _difference(text: str, record: str) -> str:
  at = next((i for i, (a, b) in enumerate(zip(text, record)) if a != b), min(len(text), len(record)))
  return f'{text[at:at + 40]!r} where {record[at:at + 40]!r}'


def _find_ends(replies: Sequence[int], render: Callable[[Sequence[int]], str], text: str,
               marker: str) -> tuple[list[int], list[str], list[str]]:
  """Finds where replies end in a rendering.

  Args:
    replies: numbers of those to look for.
    render: renders with the given ones' ends marked.
    text: the rendering without marks.
    marker: pattern of a mark, its group the number.

  Returns:
    (numbers of the replies found, in order; the marked rendering, cut at the marks; `text` cut at the same places).
  """
  def cut(marked: Sequence[int]):
    pieces = re.split(marker, render(marked))
    return list(map(int, pieces[1::2])), pieces[::2], _cut_alike(text, pieces[::2])

  ends, with_ends, plain = cut(replies)
  if plain is None:  # a mark changes what the template does with some reply: that one is taken as rewritten
    ends, with_ends, plain = cut([i for i in replies if cut([i])[2] is not None])
  return (ends, with_ends, plain) if plain is not None else ([], [text], [text])


def _cut_alike(text: str, pieces: Sequence[str]) -> list[str] | None:
  """Cuts a text like others, of which it may lack white space at their ends; None where it differs otherwise."""
  starts, at = [], 0
  for n, piece in enumerate(pieces):
    body = piece if n == len(pieces) - 1 else piece.rstrip()
    while not text.startswith(body, at):
      if n == 0 or not text[at:at + 1].isspace():
        return None
      at += 1
    starts.append(at)
    at += len(body)
  return [text[a:b] for a, b in zip(starts, [*starts[1:], None])] if at == len(text) else None


def _unused_marker(messages: Sequence[Message]) -> str:
  """Returns a private-use character string that occurs in no content."""
  text = ''.join(m['content'] for m in messages)
  marker = '\ue000'
  while marker in text:
    marker += '\ue001'
  return marker
