"""Whole runs on several lanes, in one process and in two on this machine: the bits of one lane, and an end for all when one ends."""

import socket
import subprocess

import pytest

from configs import defaults
from experiments import distributed, learner
from tests.experiments.conftest import ROOT
from tests.experiments.test_train import WAIT_S, final_bits, finished, recording, replay, wait_for  # noqa: F401: a fixture
from ts_jax import types
from ts_jax.telemetry import rundir


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


def begin_both(start, folder, *settings):
  both = *settings, f'--config.distributed.coordinator=127.0.0.1:{free_port()}', '--config.distributed.processes=2'
  return [start(folder, *both, f'--config.distributed.process={process}') for process in range(2)]


@pytest.fixture(scope='module')
def one_lane(recording, train_command, tmp_path_factory) -> str:  # noqa: F811
  """Bits of the recorded updates on one lane."""
  folder = tmp_path_factory.mktemp('one')
  subprocess.run(train_command(folder, *replay(recording, 'thundersync')), cwd=ROOT, check=True, capture_output=True, timeout=WAIT_S)
  return final_bits(folder)


def test_two_lanes_give_the_bits_of_one(recording, one_lane, start, tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '2')
  finished(start(tmp_path, *replay(recording, 'thundersync', '--config.schedule.lanes=2')))
  assert final_bits(tmp_path) == one_lane
  assert {s.lane for s in rundir.RunDirectory(tmp_path).read_trace() if s.kind == 'source'} == {0, 1}


def test_two_processes_and_one_that_resumes_their_run_give_the_bits_of_one(recording, one_lane, start, tmp_path):
  settings = replay(recording, 'thundersync')
  children = begin_both(start, tmp_path / 'two', *settings, '--config.updates=2')
  outputs = [finished(child) for child in children]
  assert '{"process": 1}' in outputs[1]
  assert 'resuming  at update 2' in finished(start(tmp_path / 'two', *settings))
  assert final_bits(tmp_path / 'two') == one_lane
  run = rundir.RunDirectory(tmp_path / 'two')
  assert {s.lane for s in run.read_trace() if s.kind == 'source'} == {0, 1}


@pytest.mark.parametrize('killed', [0, 1])
def test_when_one_process_ends_the_other_says_so_and_ends(recording, start, tmp_path, killed):
  children = begin_both(start, tmp_path, *replay(recording, 'thundersync', '--config.rollout.replay_scale=100.0'))
  run = rundir.RunDirectory(tmp_path)
  wait_for(lambda: any(s.kind == 'source' for s in run.read_trace()), children[0], 'the first source')
  children[killed].kill()
  output, _ = children[1 - killed].communicate(timeout=WAIT_S)
  assert children[1 - killed].returncode not in (0, None)
  assert f'process {killed} of the learner has ended' in output, output[-3000:]


@pytest.mark.parametrize('changed, told', [
    (dict(process=1), 'must be from 0 to below processes=1'), (dict(processes=2), 'must be host:port of process 0')], ids=str)
def test_settings_that_do_not_go_together_are_refused(changed, told):
  config = defaults.get_config()
  config.distributed.update(changed)
  with pytest.raises(types.ConfigError, match=told):
    distributed.start(config)


def test_more_lanes_than_devices_are_refused_with_the_remedy():
  config = defaults.get_config()
  config.schedule.lanes = 99
  with pytest.raises(types.ConfigError, match='JAX_NUM_CPU_DEVICES=99'):
    learner.devices(config)
