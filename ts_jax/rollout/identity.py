"""Whether an engine serves the model it should: one that reads the same ids, and has room for them."""

from __future__ import annotations

from typing import Any, Protocol

import httpx

from ts_jax import types
from ts_jax.rollout import control as control_lib

# Digits, case, white space, punctuation, other scripts, and characters of several tokens: where tokenizers differ.
_TEXT = 'Rename  two_words.txt to 12345.md;\n\techo "Ünïcode" > \'ñ\' && ls -la | wc -l\r\n  привет 你好 🙂🏽 e\u0301 \u00a0x = 0xFF // Don\'t'
_TIMEOUT_S = 30.0


class Tokenizer(Protocol):
  """What is compared of a tokenizer (`models.tokenizer.Tokenizer`)."""

  def encode(self, text: str, allow_special: bool) -> tuple[int, ...]:
    """Ids of a text."""


def check(url: str, ours: str, *, ids: int, context: int = 0, vocab_size: int | None = None, tokenizer: Tokenizer | None = None,
          timeout_s: float = _TIMEOUT_S) -> None:
  """Asks an engine that is serving (not paused) what it takes for an id, how many fit, and how it tokenizes a text.

  Args:
    url: base URL.
    ours: name of the model whose ids it will be sent.
    ids: all below are sent, so it must know them.
    context: tokens of prompt and reply that must fit; 0 where that is known.
    vocab_size: of that model, padding included, where the engine should serve just that one: it knows no id from there on.  A teacher
      with the same tokenizer may be padded otherwise.
    tokenizer: of that model; compared with the engine's where the engine has one (vLLM).
    timeout_s: of each question.

  Raises:
    ConfigError: it serves another model; names both and the difference.
    InfrastructureError: it does not answer.
  """
  with httpx.Client(base_url=url, trust_env=False, timeout=timeout_s) as http:
    models = _ask(http, 'GET', '/v1/models')[1]
    try:
      served = models['data'][0]
      name = served['id']
    except (KeyError, IndexError, TypeError) as e:
      raise types.ConfigError(f'{url}/v1/models is not a model list ({str(models)[:200]}): is this an engine?') from e

    def refuse(difference: str) -> None:
      raise types.ConfigError(f'engine {url} serves {served.get("root") or name}, which is not {ours}: {difference}.  Start it with the '
                              "model (or the teacher's) of this run, or give the right URL")

    room = served.get('max_model_len')
    if room is not None and int(room) < context:
      refuse(f'it holds {room} tokens, and this run needs {context}')
    for token, known in ((ids - 1, True), *(((vocab_size, False),) if vocab_size is not None else ())):
      status, answer = _ask(http, 'POST', '/inference/v1/generate', {
          'model': name, 'token_ids': [token], 'stream': False, 'sampling_params': {'max_tokens': 1, 'temperature': 0.0, 'detokenize': False}})
      if status not in (403, 404) and (status == 200) != known:  # those: it has no such route, and is asked through another
        refuse(f'id {token} is {"known" if status == 200 else "refused"} there ({str(answer)[:200]}), and the vocabulary here has {ids if known else vocab_size} ids')
    if tokenizer is not None:
      status, answer = _ask(http, 'POST', '/tokenize', {'model': name, 'prompt': _TEXT, 'add_special_tokens': False})
      if status == 200:
        _compare(tuple(answer['tokens']), tokenizer.encode(_TEXT, allow_special=False), refuse)


def _compare(theirs: tuple[int, ...], ours: tuple[int, ...], refuse) -> None:
  if theirs != ours:
    at = next((i for i, pair in enumerate(zip(theirs, ours)) if pair[0] != pair[1]), min(len(theirs), len(ours)))
    refuse(f'its tokenizer gives {theirs[at:at + 5]} where ours gives {ours[at:at + 5]}, from token {at} of a test text')


def _ask(http: httpx.Client, method: str, path: str, body: Any = None) -> tuple[int, Any]:
  try:
    reply = http.request(method, path, json=body)
    return reply.status_code, reply.json() if reply.status_code == 200 else control_lib.error_message(reply.text)
  except (httpx.HTTPError, ValueError) as e:
    raise types.InfrastructureError(f'engine {http.base_url}{path.lstrip("/")} gave no usable answer ({type(e).__name__}: {e}): is it '
                                    'serving, and is the URL right?') from e
