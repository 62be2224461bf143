"""Requests inside the engine: what was asked, where it stands, what became of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import numpy as np


@dataclasses.dataclass
class Request:
  """One request inside the engine; `done` is called once, on the engine's thread, with a Result or an exception.

  Attributes:
    tokens: prompt ids.
    max_tokens: tokens to sample at most.
    temperature: 0 is greedy.
    seed: non-negative, below 2**63.
    stop_ids: sampling stops after one of them.
    salt: prefix-sharing scope.
    score: also return log-probs of the prompt.
    reuse: read known prefixes.
    done: completion callback.
  """

  tokens: tuple[int, ...]
  max_tokens: int
  temperature: float
  seed: int
  stop_ids: frozenset[int]
  salt: str
  score: bool
  reuse: bool
  done: Callable[[Any], None]


@dataclasses.dataclass
class Result:
  """What became of a request.

  Attributes:
    token_ids, log_probs: sampled.
    finish_reason: stop, length or abort.
    stop_id: the id that stopped it.
    spans: (version, start, end) of runs of tokens.
    prompt_log_probs: per prompt token; None for the first, and for those read from the cache.
    cached_tokens: prompt tokens whose keys and values were not computed for this request.
  """

  token_ids: list[int]
  log_probs: list[float]
  finish_reason: str
  stop_id: int | None
  spans: list[tuple[int, int, int]]
  prompt_log_probs: list[float | None] | None
  cached_tokens: int


class Row:
  """A request in a slot."""

  def __init__(self, request: Request, capacity: int):
    self.request = request
    self.ids = np.zeros(capacity, np.int32)
    self.ids[:len(request.tokens)] = request.tokens
    self.length = len(request.tokens)
    self.computed = 0
    self.cached_tokens = 0
    self.log_probs: list[float] = []
    self.spans: list[tuple[int, int, int]] = []
    self.prompt_log_probs: list[float | None] = [None] * len(request.tokens)

  @property
  def prefilled(self) -> bool:
    return self.computed >= self.length - 1

  def append(self, token: int, log_prob: float, version: int) -> None:
    self.ids[self.length] = token
    self.length += 1
    self.log_probs.append(log_prob)
    n = len(self.log_probs)
    if self.spans and self.spans[-1][0] == version:
      self.spans[-1] = (version, self.spans[-1][1], n)
    else:
      self.spans.append((version, n - 1, n))

  def result(self, reason: str, stop_id: int | None = None) -> Result:
    r = self.request
    return Result(self.ids[len(r.tokens):self.length].tolist(), self.log_probs, reason, stop_id, self.spans,
                  self.prompt_log_probs if r.score else None, self.cached_tokens)
