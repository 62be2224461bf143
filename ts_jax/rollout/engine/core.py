"""The engine's loop: admits requests to slots, prefills in chunks, decodes all rows together, one thread for everything.

A request's tokens depend on its own ids, seed and weights only: the sampling noise is keyed by (seed, position), and
what the batch looks like changes logits by float32 rounding at most.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import math
import queue
import threading
import traceback
from typing import Any, Callable, Mapping

import numpy as np

from ts_jax import types
from ts_jax.models.config import ModelConfig
from ts_jax.rollout.engine import cache as cache_lib
from ts_jax.rollout.engine import forward as forward_lib
from ts_jax.rollout.engine import requests
from ts_jax.rollout.engine import sampling

_CHUNKS = (16, 64, 256)  # compiled prefill lengths
_WAIT_FOR_SHARED = 8  # tokens that a running prefill must be ahead by, for a request to wait for it


class EngineError(types.InfrastructureError):
  """The engine cannot serve: its message says why."""


class BusyError(types.TsJaxError):
  """The operation needs an idle or paused engine."""


class EngineCore:
  """Owns weights, caches and the engine thread.  Every public method may be called from any thread."""

  def __init__(self, config: ModelConfig, params: Mapping[str, Any], *, slots: int = 16, max_context: int = 2048,
               store_bytes: int = 512 * 2**20, version: int = 0, paused: bool = False):
    """Starts the engine thread.

    Args:
      config: sizes.
      params: weights (contract of `models.llama`); emptied, see `forward.Weights`.
      slots: requests that decode together.
      max_context: prompt and sampled tokens of one request at most.
      store_bytes: bound of the prefix store.
      version: policy version of `params`.
      paused: start without serving until `resume`.

    Raises:
      ConfigError: `max_context` beyond the model's positions, or a nonsensical size.
    """
    if slots < 1 or max_context < 2:
      raise types.ConfigError(f'slots={slots}, max_context={max_context}: at least 1 slot and 2 tokens are needed')
    if max_context > config.max_positions:
      raise types.ConfigError(f'max_context={max_context} exceeds the {config.max_positions} positions of the model: lower it')
    self.config, self.max_context, self.version = config, max_context, version
    self._weights = forward_lib.Weights(config, params)
    self._forward = forward_lib.Forward(config)
    self._cache = cache_lib.SlotCache(config, slots, max_context, store_bytes)
    self._sizes = sorted({1, *(s for s in (4, 16, 64) if s < slots), slots})  # rows of a compiled decode step
    self._rows: dict[int, requests.Row] = {}
    self._waiting: collections.deque[requests.Request] = collections.deque()
    self._commands: queue.SimpleQueue = queue.SimpleQueue()
    self._paused, self._draining = paused, None
    self._error: str | None = None
    self.stats = dict(steps=0, decoded_tokens=0, prefilled_tokens=0, reused_tokens=0)
    self._stopped = False
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)
    self._thread.start()

  # ---- called from other threads

  @property
  def error(self) -> str | None:
    """Why the engine is dead, or None while it lives."""
    return self._error

  def submit(self, request: requests.Request) -> None:
    """Queues a request.

    Raises:
      EngineError: the engine is dead.
    """
    self._command(lambda: self._waiting.append(request), lambda e: request.done(e))

  def cancel(self, request: requests.Request) -> None:
    """Forgets a request and frees its slot; its `done` is not called."""
    self._command(lambda: self._forget(request), lambda e: None)

  def call(self, function: Callable[[], Any], timeout_s: float | None = 600.0) -> Any:
    """Runs `function` on the engine thread between steps and returns its result or raises its exception."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run():
      try:
        future.set_result(function())
      except Exception as e:  # handed to the caller, whatever it is
        future.set_exception(e)

    self._command(run, future.set_exception)
    return future.result(timeout_s)

  def reset_cache(self) -> None:
    """Drops all keys and values: slots, store, and those of running requests, which are prefilled again."""
    self.call(self._reset)

  def set_version(self, version: int) -> None:
    """Labels the weights; tokens sampled from now on carry `version`."""
    self.call(lambda: setattr(self, 'version', version))

  def load(self, params: Mapping[str, Any]) -> None:
    """Replaces the weights and drops every cache.

    Args:
      params: as for the constructor.

    Raises:
      BusyError: requests are running and the engine is not paused.
    """
    def swap():
      if (self._rows or self._waiting) and not self._paused:
        raise BusyError(f'{len(self._rows) + len(self._waiting)} requests are running: pause the engine before loading weights')
      self._weights = None  # before the new ones are split by layer: the two never coexist in full
      self._weights = forward_lib.Weights(self.config, params)
      self._reset()
    self.call(swap)

  def pause(self, mode: str, clear_cache: bool = True) -> concurrent.futures.Future:
    """Stops stepping.  The future resolves when the engine is paused.

    Args:
      mode: 'keep' freezes running requests, 'abort' ends them with finish reason abort, 'wait' lets them end first.
      clear_cache: drop keys and values, so that frozen requests recompute them after `resume`.
    """
    done: concurrent.futures.Future = concurrent.futures.Future()

    def start():
      if mode == 'abort':
        for slot in list(self._rows):
          self._finish(slot, self._rows[slot].result('abort'))
        while self._waiting:
          self._waiting.popleft().done(requests.Result([], [], 'abort', None, [], None, 0))
      if mode == 'wait' and self._rows:
        self._draining = (done, clear_cache)
        return
      self._enter_pause(done, clear_cache)

    self._command(start, done.set_exception)
    return done

  def resume(self) -> None:
    """Continues after `pause`."""
    def go():
      self._paused = False
      if self._draining:
        done, self._draining = self._draining[0], None
        done.set_exception(BusyError('resumed before the running requests had ended'))
    self.call(go)

  def warm_up(self, length: int) -> None:
    """Compiles every shape that requests of up to `length` tokens can need."""
    def compile_all():
      for capacity in [c for c in cache_lib.capacities(self.max_context) if c <= max(length * 3 // 2, 256)]:
        self._cache.reserve(capacity - 1)
        for size in self._sizes:
          zeros = np.zeros(size, np.int32)
          draw = sampling.Draw(zeros.astype(np.uint32), zeros.astype(np.uint32), zeros, np.ones(size, np.float32))
          self._forward.decode(self._weights, self._cache.layers, zeros, np.arange(size, dtype=np.int32), zeros, draw)
        for chunk in _CHUNKS:
          if chunk <= capacity:
            self._forward.prefill(self._weights, self._cache.layers, np.zeros(chunk, np.int32), 0, 0)
      self._reset()
      self._cache.shrink(1)
    self.call(compile_all)

  def counts(self) -> dict[str, Any]:
    """Live figures for /health and tests."""
    return dict(running=len(self._rows), waiting=len(self._waiting), paused=self._paused, stored_prefixes=len(self._cache.store),
                capacity=self._cache.capacity, **self.stats)

  def stop(self) -> None:
    """Ends the engine thread; unfinished requests fail."""
    self._stopped = True
    self._commands.put((lambda: None, lambda e: None))
    self._thread.join()

  def _command(self, run, fail) -> None:
    if self._error:
      raise EngineError(self._error)
    self._commands.put((run, fail))
    if self._error:  # died in between: nobody will read the queue again
      self._drain_failed()

  # ---- the engine thread

  def _run(self) -> None:
    try:
      while not self._stopped:
        idle = self._paused or not (self._rows or self._waiting)
        self._read_commands(block=idle)
        if not self._paused:
          self._step()
      self._error = 'the engine was stopped'
    except Exception as e:  # the loop's last line of defence: say why, fail everyone, hang nobody
      logging.error('engine thread died\n%s', traceback.format_exc())
      self._error = f'engine thread died: {type(e).__name__}: {e}'
    for row in list(self._rows.values()):
      row.request.done(EngineError(self._error))
    for request in self._waiting:
      request.done(EngineError(self._error))
    if self._draining:
      self._draining[0].set_exception(EngineError(self._error))
    self._drain_failed()

  def _drain_failed(self) -> None:
    while True:
      try:
        _, fail = self._commands.get_nowait()
      except queue.Empty:
        return
      fail(EngineError(self._error))

  def _read_commands(self, block: bool) -> None:
    while True:
      try:
        run, _ = self._commands.get(block)
      except queue.Empty:
        return
      run()
      block = False

  def _step(self) -> None:
    if not self._draining:
      self._admit()
    elif not self._rows:
      (done, clear), self._draining = self._draining, None
      self._enter_pause(done, clear)
      return
    pending = [s for s, row in self._rows.items() if not row.prefilled]
    if pending:
      self._prefill(pending[0])
    ready = [s for s, row in self._rows.items() if row.prefilled]
    if ready:
      self._decode(sorted(ready))

  def _enter_pause(self, done: concurrent.futures.Future, clear: bool) -> None:
    self._paused = True
    if clear:
      self._reset()
    done.set_result(None)

  def _reset(self) -> None:
    self._cache.clear()
    for row in self._rows.values():
      row.computed = 0

  def _forget(self, request: requests.Request) -> None:
    if request in self._waiting:
      self._waiting.remove(request)
    for slot, row in list(self._rows.items()):
      if row.request is request:
        self._release(slot)

  def _release(self, slot: int) -> None:
    row = self._rows.pop(slot)
    self._cache.tokens[slot] = row.ids[:row.computed].copy()
    self._cache.touch(slot)

  def _finish(self, slot: int, outcome: Any) -> None:
    row = self._rows[slot]
    self._release(slot)
    row.request.done(outcome)

  def _admit(self) -> None:
    free = [s for s in range(len(self._cache.tokens)) if s not in self._rows]
    for request in list(self._waiting):
      if not free:
        return
      needed = np.asarray(request.tokens[:-1], np.int32)
      if request.reuse:
        ahead = max((cache_lib.common_prefix(row.ids[:row.length - 1], needed) for row in self._rows.values()
                     if not row.prefilled and row.request.salt == request.salt), default=0)
        if ahead > _WAIT_FOR_SHARED and ahead > self._cache.available(needed, request.salt) + _WAIT_FOR_SHARED:
          continue  # someone is computing this prefix right now
      self._waiting.remove(request)
      slot, shared = self._cache.claim(needed, request.salt, free, request.reuse)
      free.remove(slot)
      row = requests.Row(request, self.max_context + 1)
      row.computed = row.cached_tokens = shared
      self.stats['reused_tokens'] += shared
      self._rows[slot] = row
      longest = max(r.length for r in self._rows.values())
      self._cache.shrink(longest)
      self._cache.reserve(longest)

  def _prefill(self, slot: int) -> None:
    row = self._rows[slot]
    start, remaining = row.computed, row.length - 1 - row.computed
    fitting = [c for c in _CHUNKS if start + c <= self._cache.capacity]
    if not fitting:
      self._cache.reserve(start + _CHUNKS[0])
      fitting = [_CHUNKS[0]]
    # The smallest length that covers the rest, unless that is mostly padding: then the next smaller one.
    length = next((c for c in fitting if c >= remaining), fitting[-1])
    smaller = [c for c in fitting if c < length]
    if smaller and remaining <= 2 * smaller[-1]:
      length = smaller[-1]
    count = min(length, remaining)
    chunk = np.zeros(length, np.int32)
    chunk[:count] = row.ids[start:start + count]
    hidden = self._forward.prefill(self._weights, self._cache.layers, chunk, slot, start)
    if row.request.score and start < len(row.request.tokens) - 1:
      self._score(row, hidden, start, count, length)
    row.computed += count
    self._cache.tokens[slot] = row.ids[:row.computed]
    self.stats['prefilled_tokens'] += count

  def _score(self, row: requests.Row, hidden, start: int, count: int, length: int) -> None:
    targets = np.zeros(length, np.int32)
    targets[:count] = row.ids[start + 1:start + count + 1]
    scored = self._forward.score(self._weights, hidden, targets, row.request.temperature or 1.0)
    for i in range(min(count, len(row.request.tokens) - 1 - start)):
      row.prompt_log_probs[start + 1 + i] = float(scored[i])

  def _decode(self, ready: list[int]) -> None:
    size = next(s for s in self._sizes if s >= len(ready))
    idle = (s for s in range(len(self._cache.tokens)) if s not in ready)
    slots = sorted(ready + [next(idle) for _ in range(size - len(ready))])
    self._cache.reserve(max(self._rows[s].length for s in ready))
    tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
    seeds, temperatures = np.zeros(size, np.uint64), np.ones(size, np.float32)
    for i, s in enumerate(slots):
      if s in ready:
        row = self._rows[s]
        tokens[i], positions[i] = row.ids[row.length - 1], row.length - 1
        seeds[i], temperatures[i] = row.request.seed, row.request.temperature
      else:
        positions[i] = len(self._cache.tokens[s])  # beyond what the slot holds: harmless
    draw = sampling.Draw((seeds & 0xFFFFFFFF).astype(np.uint32), (seeds >> 32).astype(np.uint32), positions + 1, temperatures)
    sampled, log_probs = self._forward.decode(self._weights, self._cache.layers, tokens, np.asarray(slots, np.int32),
                                              positions, draw)
    self.stats['steps'] += 1
    self.stats['decoded_tokens'] += len(ready)
    for i, s in enumerate(slots):
      if s in ready:
        self._accept(s, int(sampled[i]), float(log_probs[i]))

  def _accept(self, slot: int, token: int, log_prob: float) -> None:
    row = self._rows[slot]
    row.computed = row.length
    self._cache.tokens[slot] = row.ids[:row.computed]
    if not math.isfinite(log_prob):
      self._finish(slot, EngineError(f'log-prob {log_prob} at position {row.length} under version {self.version}: the weights '
                                     'hold non-finite values or overflow'))
      return
    row.append(token, log_prob, self.version)
    if token in row.request.stop_ids:
      self._finish(slot, row.result('stop', token))
    elif len(row.log_probs) >= row.request.max_tokens or row.length >= self.max_context:
      self._finish(slot, row.result('length'))
