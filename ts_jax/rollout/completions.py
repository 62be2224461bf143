"""vLLM's /v1/completions in the terms of its generate route, for servers without the latter.

It states no policy version: the one read before the request and the one read after it stand for the reply's tokens.  Nor can
it be told to read the prefix cache while it scores: there each score costs the whole sequence.
"""

from __future__ import annotations

from typing import Any

from ts_jax import types

_TOKEN = 'token_id:'


def body(generate_body: dict[str, Any]) -> dict[str, Any]:
  """The completions request that asks what a generate (or scoring) body asks."""
  params = dict(generate_body['sampling_params'])
  for name in ('detokenize', 'skip_reading_prefix_cache'):  # not among its parameters
    params.pop(name, None)
  rest = {name: value for name, value in generate_body.items() if name not in ('token_ids', 'sampling_params')}
  return {**rest, **params, 'prompt': generate_body['token_ids'], 'return_token_ids': True, 'return_tokens_as_token_ids': True}


def generate_reply(reply: Any, versions: tuple[Any, Any] | None, where: str) -> dict[str, Any]:
  """A completions reply as the generate route would have given it.

  Args:
    reply: the decoded JSON.
    versions: what /weight_info said (before, after); where they differ an empty span states the first, so that the tokens count
      as sampled from both.  None: the reply states none.
    where: names the engine and request in errors.

  Raises:
    InfrastructureError: the reply lacks a part.
  """
  try:
    choice = reply['choices'][0]
    token_ids = choice['token_ids']
    answer = {'choices': [{'token_ids': token_ids, 'finish_reason': choice['finish_reason'], 'logprobs': _log_probs(choice)}],
              'usage': reply.get('usage'), 'prompt_logprobs': choice.get('prompt_logprobs')}
    if versions is not None:
      before, after = versions
      spans = [{'version': after, 'start': 0, 'end': len(token_ids)}]
      answer['choices'][0]['weight_versions'] = spans if before == after else [{'version': before, 'start': 0, 'end': 0}, *spans]
    return answer
  except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
    raise types.InfrastructureError(f'{where}: the reply is not a completion with token ids ({type(e).__name__}: {e}): is this a '
                                    f'vLLM server?  It began {str(reply)[:200]!r}') from e


def _log_probs(choice: dict[str, Any]) -> dict[str, Any] | None:
  found = choice.get('logprobs')
  if found is None:
    return None
  return {'content': [{'token_id': int(token.removeprefix(_TOKEN)), 'logprob': log_prob}
                      for token, log_prob in zip(found['tokens'], found['token_logprobs'], strict=True)]}
