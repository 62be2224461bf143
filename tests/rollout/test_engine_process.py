"""Engine processes that die, hang or never start, and publications to them."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from tests.rollout import tiny_engine
from tests.rollout.tiny_engine import prompt
from ts_jax import types
from ts_jax.models import weights as weights_lib
from ts_jax.rollout import client as client_lib
from ts_jax.rollout import process, supervision
from ts_jax.rollout import publication
from ts_jax.rollout.client import GenerateRequest


def test_a_killed_engine_is_replaced_at_the_right_version_and_the_call_survives(start_engine, tmp_path):
  publisher = publication.Publisher([], tmp_path / 'exchange')
  engine = start_engine(bring_up=publisher.bring_up_to_date)
  params = tiny_engine.random_params(1)
  publisher.add(engine)
  publisher.publish(params, tiny_engine.CONFIG, 5)
  requests = [GenerateRequest(prompt(s, 30), 200, seed=s, expected_version=5, ignore_eos=True) for s in range(6)]

  async def go():
    async with client_lib.EngineClient(engine.url, timeout_s=120) as client:
      undisturbed = await asyncio.gather(*(client.generate(r) for r in requests))
      decoded = (await client.health())['decoded_tokens']
      calls = [asyncio.create_task(client.generate(r)) for r in requests]
      while (await client.health())['decoded_tokens'] < decoded + 50:
        await asyncio.sleep(0.005)
      os.kill(engine.pid, signal.SIGKILL)
      return undisturbed, await asyncio.gather(*calls)

  undisturbed, disturbed = asyncio.run(go())
  assert engine.restarts == 1
  assert [r.token_ids for r in disturbed] == [r.token_ids for r in undisturbed]
  assert {(r.version_start, r.version_end) for r in disturbed} == {(5, 5)}
  expected = tiny_engine.reference_log_probs(params, requests[0].token_ids + disturbed[0].token_ids)[29:]
  np.testing.assert_allclose(disturbed[0].log_probs, expected, atol=1e-5)


def test_publication_survives_an_engine_that_dies_meanwhile(start_engine, tmp_path):
  publisher = publication.Publisher([], tmp_path)
  engine = start_engine(bring_up=publisher.bring_up_to_date)
  publisher.add(engine)
  os.kill(engine.pid, signal.SIGKILL)
  published = publisher.publish(tiny_engine.random_params(2), tiny_engine.CONFIG, 1)
  info = engine.control.weight_info()
  assert (info.version, info.checksum) == (1, published.checksum)


def test_publication_reaches_all_replicas_and_keeps_one_file(start_engine, engine, tmp_path):
  engines = [start_engine(), start_engine()]
  publisher = publication.Publisher(engines, tmp_path)
  checksums = [publisher.publish(tiny_engine.random_params(v), tiny_engine.CONFIG, v).checksum for v in (1, 2, 7)]
  assert len(set(checksums)) == 3
  for e in engines:
    assert (e.control.weight_info().version, e.control.weight_info().checksum) == (7, checksums[-1])
  assert [p.name for p in tmp_path.iterdir()] == ['weights-7.safetensors']
  assert os.stat(tmp_path / 'weights-7.safetensors').st_mode & 0o777 == 0o644
  with pytest.raises(types.PolicyVersionError, match='only advance'):
    publisher.publish(tiny_engine.random_params(0), tiny_engine.CONFIG, 7)
  publisher.close()
  assert not list(tmp_path.iterdir())


def test_weights_with_another_checksum_are_refused_and_the_old_ones_kept(engine, model, tmp_path):
  path, before = tmp_path / 'w.safetensors', engine.control.weight_info()
  checksum = weights_lib.save_weights(path, tiny_engine.random_params(3), tiny_engine.CONFIG, np.float32)
  damaged = bytearray(path.read_bytes())
  damaged[-5] ^= 1
  path.write_bytes(damaged)
  with pytest.raises(types.InfrastructureError, match='damaged or of another version'):
    engine.control.load_weights(str(path), checksum)
  with pytest.raises(types.InfrastructureError, match='nowhere'):
    engine.control.load_weights('/nowhere.safetensors', checksum)
  assert engine.control.weight_info() == before

  async def go():
    async with client_lib.EngineClient(engine.url) as client:
      return await client.generate(GenerateRequest(prompt(3, 20), 5, expected_version=0))
  reply = asyncio.run(go())
  expected = tiny_engine.reference_log_probs(model.params, prompt(3, 20) + reply.token_ids)[19:]
  np.testing.assert_allclose(reply.log_probs, expected, atol=1e-5)


def test_a_replica_that_cannot_be_reached_is_named(engine, tmp_path):
  gone = client_lib.EngineClient(f'http://127.0.0.1:{supervision.free_port()}')
  publisher = publication.Publisher([gone], tmp_path, restart_timeout_s=0.3)
  with pytest.raises(types.InfrastructureError, match=f'1 of 1 engines did not take version 1: {gone.url}'):
    publisher.publish(tiny_engine.random_params(0), tiny_engine.CONFIG, 1)


def test_a_stopped_engine_is_a_deadline_error_and_is_replaced(start_engine):
  engine = start_engine(hang_timeout_s=3.0)
  pid = engine.pid
  os.kill(pid, signal.SIGSTOP)
  with pytest.raises(types.InfrastructureError, match='did not answer /health within 1 s'):
    engine.control.health(timeout_s=1.0)

  async def go():
    async with client_lib.EngineClient(engine.url) as client:
      with pytest.raises(types.InfrastructureError, match='no reply within 0.5 s'):
        await client.generate(GenerateRequest((1, 2), 3), timeout_s=0.5)
      return await client.generate(GenerateRequest((1, 2), 3), timeout_s=60)
  assert asyncio.run(go()).token_ids
  assert engine.pid != pid and not psutil.pid_exists(pid)


@pytest.mark.parametrize('kwargs, message', [
    (dict(model_folder='/nowhere'), '/nowhere'),
    (dict(max_context=5000), '1024 positions'),
    (dict(cores=[4096]), '4096'),
])
def test_an_engine_that_cannot_start_says_why(start_engine, kwargs, message):
  with pytest.raises(types.InfrastructureError, match=message):
    start_engine(**kwargs)


def test_a_port_in_use_is_named(start_engine, engine):
  with pytest.raises(types.InfrastructureError, match=f'{engine.port}.*another engine'):
    start_engine(port=engine.port)


def test_restarts_are_bounded(start_engine):
  engine = start_engine(max_restarts=0)
  os.kill(engine.pid, signal.SIGKILL)
  while engine.pid:  # the kernel takes a moment
    time.sleep(0.01)
  with pytest.raises(types.InfrastructureError, match='given up'):
    engine.wait_ready(60)
  assert engine.pid is None


def test_deaths_far_apart_are_not_counted_together(start_engine, monkeypatch):
  monkeypatch.setattr(supervision, '_STEADY_S', 0.0)  # however short its service was
  engine = start_engine(max_restarts=1)
  for _ in range(2):
    victim = engine.pid
    os.kill(victim, signal.SIGKILL)
    while engine.pid == victim:
      time.sleep(0.01)
    engine.wait_ready(60)
  assert engine.restarts == 2 and engine.failure is None


def test_a_start_that_never_ends_is_a_deadline_error_and_leaves_nothing(start_engine, monkeypatch):
  monkeypatch.setattr(supervision, '_STARTED_MARGIN_S', 0.5)
  monkeypatch.setattr(supervision, '_END_DEADLINE_S', 0.5)
  reached, let_go = threading.Event(), threading.Event()
  engine = start_engine(wait=False, start_timeout_s=60, bring_up=lambda control: reached.set() or let_go.wait(120))
  assert reached.wait(60)
  pid = engine.pid
  monkeypatch.setattr(engine, '_start_timeout_s', 0.0)
  try:
    with pytest.raises(types.InfrastructureError, match='nor stop trying'):
      engine.wait_started()
    assert not psutil.pid_exists(pid)
  finally:
    let_go.set()


def test_pinned_to_a_core(start_engine):
  engine = start_engine(cores=[0])
  assert psutil.Process(engine.pid).cpu_affinity() == [0]


def test_the_engine_dies_with_its_parent(model, tmp_path):
  script = ('import sys, time\nfrom ts_jax.rollout import process\n'
            'e = process.EngineProcess(sys.argv[1], log_path=sys.argv[2], slots=1, max_context=64)\n'
            'e.start()\nprint(e.pid, flush=True)\ntime.sleep(100)\n')
  parent = subprocess.Popen([sys.executable, '-c', script, str(model.folder), str(tmp_path / 'log')], stdout=subprocess.PIPE,
                            text=True)
  pid = int(parent.stdout.readline())
  parent.kill()
  parent.wait()
  end = time.monotonic() + 10
  while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
    assert time.monotonic() < end, 'the engine outlived its parent'
    time.sleep(0.05)
