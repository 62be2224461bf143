"""Request bodies into engine requests and results into reply bodies; refuses what the engine does not do."""

from __future__ import annotations

import math
from typing import Any, Callable

import numpy as np

from ts_jax import types
from ts_jax.rollout import protocol
from ts_jax.rollout.engine import core as core_lib
from ts_jax.rollout.engine import requests


class BadRequest(types.TsJaxError):
  """The request cannot be served: HTTP status and message for the caller."""

  def __init__(self, message: str, status: int = 400):
    super().__init__(message)
    self.status = status


_KNOWN = frozenset({'max_tokens', 'temperature', 'top_p', 'top_k', 'min_p', 'seed', 'logprobs', 'stop_token_ids', 'ignore_eos',
                    'prompt_logprobs', 'detokenize', 'skip_reading_prefix_cache', 'n', 'stop', 'presence_penalty',
                    'frequency_penalty', 'repetition_penalty'})
# Parameters that would change the sampled distribution, each with the values that do not.
_NEUTRAL = {'top_p': (None, 1, 1.0), 'top_k': (None, -1, 0), 'min_p': (None, 0, 0.0), 'n': (None, 1), 'stop': (None, []),
            'presence_penalty': (None, 0, 0.0), 'frequency_penalty': (None, 0, 0.0), 'repetition_penalty': (None, 1, 1.0)}


def _number(params: dict, name: str, default, low: float, high: float, kind: type):
  value = params.get(name)
  if value is None:
    return default
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or kind(value) != value:
    raise BadRequest(f'{name}={value!r} must be {"an integer" if kind is int else "a finite number"}')
  if not low <= value <= high:
    raise BadRequest(f'{name}={value!r} must be between {low} and {high}')
  return kind(value)


def _ids(values: Any, name: str, vocab_size: int) -> tuple[int, ...]:
  if not isinstance(values, list) or not all(type(v) is int for v in values):
    raise BadRequest(f'{name} must be a list of integers')
  for v in values:
    if not 0 <= v < vocab_size:
      raise BadRequest(f'{name} holds {v}, outside the vocabulary of {vocab_size}: was it made by another tokenizer?')
  return tuple(values)


def parse(body: Any, core: core_lib.EngineCore, model: str, eos_ids: tuple[int, ...],
          done: Callable[[Any], None]) -> requests.Request:
  """Reads a generate request.

  Args:
    body: decoded JSON.
    core: for its sizes.
    model: the name served.
    eos_ids: the model's own stop ids, used unless ignore_eos.
    done: completion callback.

  Raises:
    BadRequest: what is wrong and what would be right.
  """
  if not isinstance(body, dict):
    raise BadRequest('the body must be a JSON object')
  if body.get('model') not in (None, model):
    raise BadRequest(f"model {body['model']!r} is not served here: this engine serves {model!r}", 404)
  if body.get('stream'):
    raise BadRequest('stream=true is not supported: set it to false')
  params = body.get('sampling_params') or {}
  if not isinstance(params, dict):
    raise BadRequest('sampling_params must be a JSON object')
  if unknown := sorted(set(params) - _KNOWN):
    raise BadRequest(f'sampling_params {unknown} are not supported: leave them out')
  for name, neutral in _NEUTRAL.items():
    if params.get(name) not in neutral:
      raise BadRequest(f'{name}={params[name]!r} is not supported: tokens are drawn from the whole distribution; leave it out')
  tokens = _ids(body.get('token_ids'), 'token_ids', core.config.vocab_size)
  if not tokens:
    raise BadRequest('token_ids is empty: a prompt needs at least one token')
  if len(tokens) >= core.max_context:
    raise BadRequest(f'the prompt has {len(tokens)} tokens, but the context holds {core.max_context} including the reply: shorten '
                     'it, or start the engine with a larger --max_context')
  stop_ids = frozenset(_ids(params.get('stop_token_ids') or [], 'stop_token_ids', core.config.vocab_size))
  if params.get('ignore_eos'):
    stop_ids = frozenset()
  else:
    stop_ids |= frozenset(eos_ids)
  seed = _number(params, 'seed', None, 0, protocol.MAX_SEED, int)
  score = params.get('prompt_logprobs') is not None
  return requests.Request(
      tokens=tokens, max_tokens=_number(params, 'max_tokens', 16, 1, 2**31, int),
      temperature=_number(params, 'temperature', 1.0, 0.0, 100.0, float),
      seed=int(np.random.default_rng().integers(protocol.MAX_SEED)) if seed is None else seed,
      stop_ids=stop_ids, salt=str(body.get('cache_salt') or ''), score=score,
      reuse=not params.get('skip_reading_prefix_cache', score), done=done)


def reply(request_id: str, request: requests.Request, result: requests.Result) -> dict[str, Any]:
  """The JSON body of a generate reply."""
  body = {
      'request_id': request_id,
      'choices': [{
          'index': 0, 'token_ids': result.token_ids,
          'logprobs': {'content': [{'token_id': t, 'logprob': p} for t, p in zip(result.token_ids, result.log_probs)]},
          'finish_reason': result.finish_reason, 'stop_reason': result.stop_id,
          'weight_versions': [{'version': v, 'start': a, 'end': b} for v, a, b in result.spans]}],
      'usage': {'prompt_tokens': len(request.tokens), 'completion_tokens': len(result.token_ids),
                'prompt_tokens_details': {'cached_tokens': result.cached_tokens}}}
  if result.prompt_log_probs is not None:
    body['prompt_logprobs'] = [None if p is None else {str(t): {'logprob': p}}
                               for t, p in zip(request.tokens, result.prompt_log_probs)]
  return body
