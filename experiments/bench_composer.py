"""Time to compose a batch: 256 candidates, and 100,000, on one core.

    python -m experiments.bench_composer

A batch takes a quarter of the pool (c = 4 in DivOPD's Table 3): B = 64 and B = 25,000.  Timed is all of Algorithm 1 on rows
that have arrived: expiry, reading, gate, grouping, ranking, sweeps, retention.  Half of the candidates are pending, half
fresh; some are stale, some invalid.  What a row costs once, on arrival (gate and score), is stated apart.
The last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time

from absl import flags
import numpy as np

from experiments import cli
from ts_jax.composer import methods
from ts_jax.composer import pool as pool_lib
from ts_jax.composer.records import Row

_CORE = flags.DEFINE_integer('core', 0, 'Core to run on.')
_ROUNDS = flags.DEFINE_integer('rounds', 31, 'Compositions timed per size; the median counts.')
_TOKENS = flags.DEFINE_integer('tokens', 32, 'Tokens of a turn.')
_UPDATE = 10


def make_rows(count: int, seed: int) -> list[Row]:
  """Turns of rollouts of 1 to 20 turns, in order of arrival; 2 in 100 stale, 10 in 100 with a shortened prompt."""
  rng, size, rows, rollout = np.random.default_rng(seed), _TOKENS.value, [], 1_000_000 * seed
  while len(rows) < count:
    version = _UPDATE - (4 if rng.random() < 0.02 else int(rng.integers(0, 3)))
    for turn in range(int(rng.integers(1, 21))):
      scores = rng.normal(-1, 0.5, (2, size)).tolist()
      rows.append(Row(rollout, turn, version, tuple(range(size)), tuple(scores[0]), tuple(scores[1]), (True,) * size,
                      prompt_truncated=bool(rng.random() < 0.1)))
    rollout += 1
  return rows[:count]


def make_pool(candidates: int) -> tuple[pool_lib.Pool, float]:
  """(a pool whose next composition has `candidates` of them, half pending; seconds its rows took to arrive)."""
  pending = [r for r in make_rows(candidates, 1) if not r.prompt_truncated and r.version >= _UPDATE - 2][:candidates // 2]
  fresh = make_rows(candidates, 2)  # more than fit: the reader passes stale ones
  begin = time.perf_counter()
  queue = pool_lib.Candidates.of(pending + fresh)
  seconds = time.perf_counter() - begin
  pool = pool_lib.arrive(pool_lib.empty(), queue.take(slice(0, len(pending))))
  seen = dataclasses.replace(pool.queue, first_seen=_UPDATE - 1 - np.arange(len(pending)) % 3)
  pool = dataclasses.replace(pool, pending=seen, queue=pool_lib.empty().queue)
  return pool_lib.arrive(pool, queue.take(slice(len(pending), None))), seconds / len(queue)


def median_ms(candidates: int, batch_size: int, name: str) -> tuple[float, float]:
  """(median milliseconds of a composition, microseconds per row on arrival)."""
  pool, arrival_s = make_pool(candidates)
  settings = methods.Settings(batch_size=batch_size, multiplier=candidates // batch_size)
  times = []
  for _ in range(_ROUNDS.value + 2):
    begin = time.perf_counter()
    composition, after = methods.compose(pool, _UPDATE, methods.method(name), settings)
    times.append(time.perf_counter() - begin)
  if composition.candidates != candidates or len(composition.batch) != batch_size or after.balance:
    raise RuntimeError(f'{name} composed {len(composition.batch)} of {composition.candidates} candidates, {after.balance} rows lost')
  return float(np.median(times[2:]) * 1e3), arrival_s * 1e6


def main() -> None:
  os.sched_setaffinity(0, {_CORE.value})
  result = {}
  for key, candidates, batch_size in (('compose_256_ms', 256, 64), ('compose_100k_ms', 100_000, 25_000)):
    for name in ('divopd', 'divopd_base', 'divopd_focus'):
      median, arrival_us = median_ms(candidates, batch_size, name)
      print(f'{name}: {candidates} candidates, B = {batch_size}: {median:.3f} ms (median of {_ROUNDS.value}); '
            f'{arrival_us:.1f} us per row on arrival', flush=True)
      if name == 'divopd':
        result[key] = round(median, 3)
  if 'jax' in sys.modules:
    raise RuntimeError('composing loaded JAX: it must stay free of device work')
  print(json.dumps(result))


if __name__ == '__main__':
  cli.run(main)
