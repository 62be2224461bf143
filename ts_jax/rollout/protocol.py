"""What client and engine say to each other: vLLM's generate route, and the parts of it that ts_jax uses.

A server without that route is asked through `completions`, which translates both ways; so every check is made once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

from ts_jax import types

MAX_SEED = 2**63 - 1
UNPUBLISHED = ('default', -1)  # versions stated by engines that nobody has published to: vLLM's, and the embedded engine's
# Whole-distribution sampling, said explicitly: a server may have other defaults of its own or of the model.
_WHOLE_DISTRIBUTION = {'top_p': 1.0, 'top_k': 0, 'min_p': 0.0, 'repetition_penalty': 1.0}


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
  """One turn to sample.

  Attributes:
    token_ids: prompt ids, at least one.
    max_tokens: ids to sample at most, at least one.
    temperature: of the sampled distribution; 0 is greedy.
    seed: makes the reply a function of prompt and weights (`sampling_seed`).
    stop_token_ids: sampling stops after one of these; it is part of the reply.
    expected_version: the policy version every token must come from, or None to accept any.
    newer_too: tokens may come from newer versions as well, published while the request was in flight.
    request_id: appears in logs and errors.
    ignore_eos: sample `max_tokens` whatever comes (benchmarks).
  """

  token_ids: tuple[int, ...]
  max_tokens: int
  temperature: float = 1.0
  seed: int = 0
  stop_token_ids: tuple[int, ...] = ()
  expected_version: int | None = None
  request_id: str = ''
  ignore_eos: bool = False
  newer_too: bool = False

  def __post_init__(self):
    if not self.token_ids:
      raise ValueError(f'request {self.request_id!r} has an empty prompt')
    if self.max_tokens < 1:
      raise ValueError(f'request {self.request_id!r}: max_tokens={self.max_tokens} must be at least 1')
    if not (math.isfinite(self.temperature) and self.temperature >= 0):
      raise ValueError(f'request {self.request_id!r}: temperature={self.temperature} must be finite and not negative')
    if not 0 <= self.seed <= MAX_SEED:
      raise ValueError(f'request {self.request_id!r}: seed={self.seed} must be in [0, 2**63)')

  def check_version(self, sampled: types.SampledTokens, where: str) -> None:
    """Refuses a reply of other policy versions than the request wants.

    Args:
      sampled: the reply.
      where: names the engine and request in the error.

    Raises:
      PolicyVersionError: as said.
    """
    expected, first, last = self.expected_version, sampled.version_start, sampled.version_end
    if expected is None or not sampled.token_ids or (first == expected and last == expected) or (self.newer_too and first >= expected):
      return
    raise types.PolicyVersionError(
        f'{where}: tokens come from policy version {first}..{last}, expected {expected}{" or newer" if self.newer_too else ""}: publish '
        'that version to this engine before sampling')


def sampling_seed(run_seed: int, update: int, task_id: str, trajectory: int, turn: int) -> int:
  """Seed of one turn: a function of what is sampled, never of when it arrives.

  Args:
    run_seed: the run's seed.
    update: logical update.
    task_id: task identifier.
    trajectory: index within the task's group.
    turn: index within the trajectory.

  Returns:
    An integer in [0, 2**63).

  >>> sampling_seed(42, 0, 'a', 0, 1) != sampling_seed(42, 0, 'a', 1, 0)
  True
  """
  name = '\x1f'.join([str(run_seed), str(update), task_id, str(trajectory), str(turn)])
  return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], 'big') & MAX_SEED


def generate_body(request: GenerateRequest, model: str) -> dict[str, Any]:
  """The JSON body of a generate request."""
  return {
      'model': model, **_named(request.request_id), 'token_ids': list(request.token_ids), 'stream': False,
      'sampling_params': {
          'max_tokens': request.max_tokens, 'temperature': request.temperature, **_WHOLE_DISTRIBUTION, 'seed': request.seed,
          'logprobs': 0, 'stop_token_ids': list(request.stop_token_ids), 'ignore_eos': request.ignore_eos, 'detokenize': False}}


def score_body(token_ids: tuple[int, ...], model: str, request_id: str, reuse: bool, salt: str = '') -> dict[str, Any]:
  """The JSON body of a scoring request: log-probs of the prompt, one sampled token that is thrown away.

  Args:
    token_ids: the sequence.
    model: served name.
    request_id: may be empty.
    reuse: read the prefix cache.
    salt: requests with different ones share nothing of the cache.
  """
  return {
      'model': model, **_named(request_id), **({'cache_salt': salt} if salt else {}), 'token_ids': list(token_ids), 'stream': False,
      'sampling_params': {'max_tokens': 1, 'temperature': 1.0, 'prompt_logprobs': 0, 'detokenize': False,
                          'ignore_eos': True, 'skip_reading_prefix_cache': not reuse}}


def _named(request_id: str) -> dict[str, str]:
  return {'request_id': request_id} if request_id else {}


def is_unpublished(reply: Any) -> bool:
  """The tokens come from weights that nobody published: a server that has just started serves such."""
  try:
    return any(span['version'] in UNPUBLISHED for choice in reply['choices'] for span in choice.get('weight_versions') or [])
  except (KeyError, TypeError, AttributeError):
    return False


def parse_sampled(reply: Any, where: str) -> types.SampledTokens:
  """Reads a generate reply.

  Args:
    reply: the decoded JSON.
    where: names the engine and request in errors.

  Raises:
    InfrastructureError: the reply lacks a part, or holds a value that cannot be right (also NaN).
  """
  try:
    choice = reply['choices'][0]
    token_ids = tuple(int(t) for t in choice['token_ids'])
    content = (choice.get('logprobs') or {}).get('content') or []
    log_probs = tuple(float(c['logprob']) for c in content)
    for token, c in zip(token_ids, content):
      if 'token_id' in c and int(c['token_id']) != token:
        raise ValueError(f"log-prob is of token {c['token_id']} where token {token} was sampled")
    reason = types.FinishReason(choice['finish_reason'])
    spans = sorted((int(s['start']), int(s['end']), int(s['version'])) for s in choice.get('weight_versions') or [])
    if token_ids and (not spans or spans[0][0] != 0 or spans[-1][1] != len(token_ids)
                      or any(a[1] != b[0] for a, b in zip(spans, spans[1:]))):
      raise ValueError(f'weight_versions {choice.get("weight_versions")} do not cover the {len(token_ids)} tokens')
    if not token_ids and reason is not types.FinishReason.ABORT:
      raise ValueError(f'finished ({reason.value}) without a token')
    first, last = (spans[0][2], spans[-1][2]) if spans else (0, 0)
    return types.SampledTokens(token_ids, log_probs, first, last, reason, _version_tokens(spans))
  except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
    raise types.InfrastructureError(f'{where}: the reply is not a generate reply ({type(e).__name__}: {e}): is another server '
                                    f'or version behind this URL?  It began {str(reply)[:200]!r}') from e


def _version_tokens(spans: list[tuple[int, int, int]]) -> tuple[int, ...]:
  """Tokens of each version from the first to the last of (start, end, version); empty where all have one, or a span holds none."""
  if not spans or spans[0][2] >= spans[-1][2] or any(start == end for start, end, _ in spans):
    return ()
  counts = dict.fromkeys(range(spans[0][2], spans[-1][2] + 1), 0)
  for start, end, version in spans:
    counts[version] += end - start
  return tuple(counts.values())


def parse_prompt_log_probs(reply: Any, token_ids: tuple[int, ...], where: str) -> tuple[list[float | None], int]:
  """Reads a scoring reply: (log-prob of each prompt token, None up to the cached ones; cached tokens).

  Raises:
    InfrastructureError: malformed.
  """
  try:
    cached = int(((reply.get('usage') or {}).get('prompt_tokens_details') or {}).get('cached_tokens') or 0)
    values: list[float | None] = []
    for position, (token, entry) in enumerate(zip(token_ids, reply['prompt_logprobs'], strict=True)):
      if position and position <= cached:  # whatever stands there was not computed for this request
        entry = None
      entry = entry[str(token)]['logprob'] if isinstance(entry, dict) else entry
      values.append(None if entry is None else float(entry))
    return values, cached
  except (KeyError, TypeError, ValueError, AttributeError) as e:
    raise types.InfrastructureError(f'{where}: the reply holds no prompt log-probs ({type(e).__name__}: {e}): '
                                    f'{str(reply)[:200]!r}') from e
