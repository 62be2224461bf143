"""The fault matrix: what happens to real server processes and to what they say, and what the update that follows makes of it.

Either it has the bits of the undisturbed one (same seeds, same tokens), or it stops with the cause.  Runs against vLLM and against the
embedded engine; `pytest -m faults` runs it alone.
"""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from experiments import offline
from tests import placement
from tests.rollout import fault_proxy, fault_stage
from ts_jax import types
from ts_jax.models import tokenizer as tokenizer_lib
from ts_jax.rollout import control as control_lib, identity, process, publication
from ts_jax.rollout.vllm import environment, process as vllm_process
from ts_jax.streaming import mismatch

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

GENERATE, LOAD = '/inference/v1/generate', '/collective_rpc'
HANG_S = 15.0
CORES = placement.engine_cores()


@pytest.fixture(scope='module')
def student(tmp_path_factory):
  return fault_stage.Student(fault_stage.write_model(tmp_path_factory.mktemp('student') / 'model', seed=3))


@pytest.fixture(scope='module', params=['embedded', 'vllm'])
def stage(request, student, tmp_path_factory):
  root = tmp_path_factory.mktemp(request.param)
  settings = dict(log_path=root / 'engine.log', slots=8, max_context=fault_stage.CONTEXT, cores=CORES, start_timeout_s=fault_stage.START_S,
                  hang_timeout_s=HANG_S, max_restarts=20)
  if request.param == 'vllm':
    python = environment.ensure(pathlib.Path(__file__).parents[2] / '.venv-vllm', 'cpu')
    make = lambda folder, **more: vllm_process.VllmProcess(python, folder, **settings, **more)
  else:
    make = lambda folder, **more: process.EngineProcess(folder, compile_cache=root / 'xla', **settings, **more)
  made = fault_stage.Stage(student, make, root / 'exchange')
  try:
    made.server.start()
    made.publisher.add(made.server)
    yield made
  finally:
    made.close()


@pytest.fixture(scope='module')
def undisturbed(stage, student):
  first = student.update(stage.publish(), stage.client())
  assert np.any(offline.flat(first.direction)) and not any(g.trajectories[0].reward == g.trajectories[1].reward for g in first.result.batch.groups)
  again = student.update(stage.publish(), stage.client())
  assert again.bits == first.bits and again.tokens == first.tokens
  stale = student.update(stage.publish(student.other), stage.client())
  assert stale.tokens != first.tokens  # what a stale engine samples would show
  return first


@pytest.fixture
def proxy(stage):
  with fault_proxy.FaultProxy(stage.server.url) as made:
    yield made


# ---- The process ----------------------------------------------------------------------------------------------------


def test_killed_while_generating_it_comes_back_and_leaves_nothing_behind(stage, student, undisturbed):
  version, before = stage.publish(), stage.server.restarts
  family = stage.processes()
  found = student.update(version, stage.client(), on_turn=family[0].kill)
  stage.await_restart(before)
  assert found.bits == undisturbed.bits
  np.testing.assert_allclose(found.log_probs, undisturbed.log_probs, atol=1e-4)
  assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_killed_while_loading_weights(stage, student, undisturbed):
  version, before = stage.publish(), stage.server.restarts
  for _ in range(5):  # a load may be over before it is seen
    victim, loaded = stage.processes()[0], threading.Event()

    def kill_when_it_reads():
      while not loaded.is_set():
        try:
          if str(stage.exchange) in pathlib.Path(f'/proc/{victim.pid}/maps').read_text():
            return victim.kill()
        except OSError:
          return

    watcher = threading.Thread(target=kill_when_it_reads)
    watcher.start()
    try:
      version += 1
      assert stage.publisher.publish(student.params, fault_stage.SIZES, version).version == version
    finally:
      loaded.set()
      watcher.join()
    if stage.server.restarts > before or not victim.is_running():
      break
  stage.await_restart(before)
  assert student.update(version, stage.client()).bits == undisturbed.bits


def test_killed_between_load_and_acknowledgement(stage, student, undisturbed, proxy):
  version, before = stage.publish(), stage.server.restarts
  victim = stage.processes()[0]

  def kill(reply):
    assert reply.status == 200 and b'checksum' in reply.body  # it has loaded
    victim.kill()

  through = publication.Publisher([control_lib.EngineControl(proxy.url)], stage.exchange / 'other', restart_timeout_s=fault_stage.START_S)
  stage.publisher.publish(student.other, fault_stage.SIZES, version + 1)  # what the supervisor brings it back with
  with proxy.spoiling(LOAD, fault_proxy.Fault(change=kill)):
    through.publish(student.params, fault_stage.SIZES, version + 2)
  through.close()
  assert proxy.struck == 1
  stage.await_restart(before)
  stage.publisher.publish(student.params, fault_stage.SIZES, version + 3)
  assert student.update(version + 3, stage.client()).bits == undisturbed.bits


def test_a_server_that_hangs_is_replaced(stage, student, undisturbed):
  version, before = stage.publish(), stage.server.restarts

  def stop():
    for p in stage.processes():
      p.send_signal(signal.SIGSTOP)

  assert student.update(version, stage.client(), on_turn=stop).bits == undisturbed.bits
  stage.await_restart(before)


def test_an_engine_that_hangs_behind_a_server_that_answers_stops_the_update_in_time(stage, student, undisturbed):
  version = stage.publish()
  victim, begin = stage.processes()[0], time.monotonic()
  try:
    with pytest.raises(types.TsJaxError, match='InfrastructureError.*no reply within 4 s.*the engine hangs'):
      student.update(version, stage.client(timeout_s=4.0), retries=0, on_turn=victim.suspend)
    assert time.monotonic() - begin < 30
  finally:
    victim.resume()
  assert student.update(version, stage.client()).bits == undisturbed.bits


# ---- The reply ------------------------------------------------------------------------------------------------------


def with_nan(body: bytes) -> bytes:
  reply = json.loads(body)
  reply['choices'][0]['logprobs']['content'][1]['logprob'] = float('nan')
  return json.dumps(reply).encode()


def without_log_probs(body: bytes) -> bytes:
  reply = json.loads(body)
  reply['choices'][0]['logprobs'] = None
  return json.dumps(reply).encode()


_LOST = 'no reply within|gone'  # a lost connection is tried again until the deadline

REPLIES = {
    'truncated': (fault_proxy.TRUNCATED, _LOST),
    'no reply': (fault_proxy.NO_REPLY, _LOST),
    'not JSON': (fault_proxy.replaced(lambda body: b'<html>Bad gateway</html>'), 'the reply is not JSON'),
    'half of the JSON': (fault_proxy.replaced(lambda body: body[:len(body) // 2]), 'the reply is not JSON'),
    'NaN': (fault_proxy.replaced(with_nan), 'not finite'),
    'no log-probs': (fault_proxy.replaced(without_log_probs), '0 log-probs'),
    'another JSON': (fault_proxy.replaced(lambda body: b'{"choices": []}'), 'not a generate reply'),
}


@pytest.mark.parametrize('name', REPLIES)
def test_a_spoilt_reply_is_asked_for_again_and_one_that_stays_spoilt_stops_the_update(stage, student, undisturbed, proxy, name):
  fault, cause = REPLIES[name]
  version = stage.publish()
  with proxy.spoiling(GENERATE, fault, times=2):
    assert student.update(version, stage.client(proxy.url)).bits == undisturbed.bits
    assert proxy.struck == 2
  with proxy.spoiling(GENERATE, fault, times=10**6), pytest.raises(types.TsJaxError, match=f'(?s){cause}') as error:
    student.update(version, stage.client(proxy.url, timeout_s=5.0 if cause == _LOST else fault_stage.START_S), retries=1)
  assert proxy.url in str(error.value)


# ---- What is served -------------------------------------------------------------------------------------------------


def test_a_version_behind_stops_the_update(stage, student, undisturbed):
  version = stage.publish()
  with pytest.raises(types.TsJaxError, match=rf'PolicyVersionError.*policy version {version}\.\.{version}, expected {version + 1}'):
    student.update(version + 1, stage.client(), retries=1)
  stage.publisher.publish(student.params, fault_stage.SIZES, version + 1)
  assert student.update(version + 1, stage.client()).bits == undisturbed.bits


def test_a_version_ahead_in_the_middle_of_an_update_stops_it(stage, student, undisturbed):
  version = stage.publish()
  ahead = lambda: stage.publisher.publish(student.other, fault_stage.SIZES, version + 1)
  with pytest.raises(types.TsJaxError, match=rf'PolicyVersionError.*policy version .*{version + 1}, expected {version}'):
    student.update(version, stage.client(), retries=1, on_turn=lambda: threading.Thread(target=ahead).start() or time.sleep(0.5))
  stage.server.wait_ready(fault_stage.START_S)
  assert student.update(stage.publish(), stage.client()).bits == undisturbed.bits


def test_other_weights_under_the_right_version_are_seen_before_the_step(stage, student, undisturbed, tmp_path):
  version, control = stage.publish(), fault_stage.direct_control(stage.server)
  limits = mismatch.Limits(*mismatch.DEFAULTS['float32'])
  assert limits.check(undisturbed.result.mismatch, 0) == ''
  meddler = publication.Publisher([control], tmp_path)
  meddler.publish(student.other, fault_stage.SIZES, version)
  meddler.close()
  found = student.update(version, stage.client())
  assert found.result.batch.policy_version == version
  with pytest.raises(types.TsJaxError, match='differ from the sampler.*above config.mismatch.stop=1e-05: the step was not taken'):
    limits.check(found.result.mismatch, 0)
  assert student.update(stage.publish(), stage.client()).bits == undisturbed.bits


def test_weights_of_other_sizes_are_refused_by_the_engine_and_the_right_ones_taken_afterwards(stage, student, undisturbed):
  version = stage.publish()
  wide = dataclasses.replace(fault_stage.SIZES, ffn_width=256)
  impatient = publication.Publisher([fault_stage.direct_control(stage.server)], stage.exchange / 'wide', restart_timeout_s=1.0)
  with pytest.raises(types.InfrastructureError, match=f'1 of 1 engines did not take version {version + 1}: {stage.server.url}.*shape'):
    impatient.publish(fault_stage.random_params(1, wide), wide, version + 1)
  impatient.close()
  stage.server.wait_ready(fault_stage.START_S)
  assert student.update(stage.publish(), stage.client()).bits == undisturbed.bits


def test_a_model_of_another_vocabulary_or_context_or_tokenizer_is_found_at_connection(stage, student):
  stage.publish()
  check = lambda **kwargs: identity.check(stage.server.url, **{
      **dict(ours='the student', ids=49152, vocab_size=49152, context=fault_stage.CONTEXT, tokenizer=student.tokenizer), **kwargs})
  check()
  check(ids=49000, vocab_size=None)  # a teacher with more padding
  for smaller_or_larger, word in ((dict(vocab_size=49151), 'known'), (dict(ids=49153), 'refused')):
    with pytest.raises(types.ConfigError, match=f'(?s)which is not the student: id .* is {word} there .* has {max(smaller_or_larger.values())} ids'):
      check(**smaller_or_larger)
  with pytest.raises(types.ConfigError, match='it holds 512 tokens, and this run needs 513'):
    check(context=513)


def test_another_tokenizer_is_found_at_connection(stage, student, tmp_path):
  spec = json.loads((student.folder / 'tokenizer.json').read_text('utf-8'))
  del spec['model']['merges'][-1]
  spec['model']['merges'].reverse()
  for name in ('config.json', 'tokenizer_config.json'):
    (tmp_path / name).write_bytes((student.folder / name).read_bytes())
  (tmp_path / 'tokenizer.json').write_text(json.dumps(spec), 'utf-8')
  check = lambda: identity.check(stage.server.url, 'the student', ids=49152, context=512, tokenizer=tokenizer_lib.Tokenizer.load(tmp_path))
  if isinstance(stage.server, process.EngineProcess):  # which has no tokenizer: ids are all it knows
    check()
  else:
    with pytest.raises(types.ConfigError, match='its tokenizer gives .* where ours gives'):
      check()


# ---- Disk and teacher -----------------------------------------------------------------------------------------------

FULL_DISK = """
import sys
from tests.rollout import fault_stage
from ts_jax.models import safetensors_file
from ts_jax.rollout import control, publication
publisher = publication.Publisher([control.EngineControl(sys.argv[1])], sys.argv[2])
try:
  publisher.publish(fault_stage.random_params(2), fault_stage.SIZES, int(sys.argv[3]))
except safetensors_file.DiskFullError as e:
  print(e)
"""


def test_a_full_exchange_folder_stops_the_publication_and_the_engine_keeps_its_version(stage, student, undisturbed, tmp_path):
  version = stage.publish()
  done = subprocess.run(['bwrap', '--bind', '/', '/', '--dev', '/dev', '--proc', '/proc', '--size', '1048576', '--tmpfs', tmp_path, sys.executable, '-c',
                         FULL_DISK, stage.server.url, tmp_path, str(version + 1)], text=True, capture_output=True, timeout=200, cwd=os.getcwd())
  assert f'no room for {tmp_path}/' in done.stdout, done.stdout + done.stderr
  assert student.update(version, stage.client()).bits == undisturbed.bits


@pytest.fixture(scope='module')
def teacher(student, tmp_path_factory):
  root = tmp_path_factory.mktemp('teacher')
  folder = fault_stage.write_model(root / 'model', seed=4)
  with process.EngineProcess(folder, log_path=root / 'teacher.log', slots=8, max_context=fault_stage.CONTEXT, cores=CORES, compile_cache=root / 'xla',
                             bring_up=lambda control: control.set_version(0), start_timeout_s=fault_stage.START_S) as engine:
    yield engine


def test_a_teacher_that_is_down_for_a_while_is_waited_for_and_one_that_stays_away_stops_the_update(stage, student, teacher):
  version, scorer = stage.publish(), lambda **kwargs: stage.client(teacher.url, **kwargs)
  expected = student.update(version, stage.client(), teacher=scorer())
  before, victim = teacher.restarts, psutil.Process(teacher.pid)
  found = student.update(version, stage.client(), teacher=scorer(), on_turn=victim.kill)
  assert teacher.restarts == before + 1 and found.tokens == expected.tokens
  # Another batch composition rounds its scores differently.
  assert offline.relative_error(found.direction, expected.direction) <= 1e-5
  victim = psutil.Process(teacher.pid)
  victim.suspend()
  try:
    with pytest.raises(types.TsJaxError, match='the teacher did not score turn .*no reply within 3 s'):
      student.update(version, stage.client(), teacher=scorer(timeout_s=3.0), retries=1)
  finally:
    victim.resume()


def test_a_teacher_whose_scores_are_not_finite_or_missing_stops_the_update(stage, student, teacher):
  version = stage.publish()

  def spoilt(value):
    def change(body: bytes) -> bytes:
      reply = json.loads(body)
      for entry in reply['prompt_logprobs'][1:]:
        entry[next(iter(entry))]['logprob'] = value
      return json.dumps(reply).encode()
    return fault_proxy.replaced(change)

  with fault_proxy.FaultProxy(teacher.url) as proxy:
    for value in (float('nan'), float('-inf'), None):
      with proxy.spoiling(GENERATE, spoilt(value), times=10**6), pytest.raises(types.TsJaxError, match='the teacher did not score turn'):
        student.update(version, stage.client(), teacher=stage.client(proxy.url, timeout_s=5.0), retries=0)
      assert proxy.struck
