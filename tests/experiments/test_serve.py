"""Engines served for runs elsewhere, as real processes: told, restarted, used by a training run, ended by signals."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from experiments import serve as serve_lib
from tests.experiments.conftest import ROOT, Served
from ts_jax import types
from ts_jax.rollout import supervision
from ts_jax.telemetry import rundir

WAIT_S = 400


def embedded(student):
  return ('--config=configs/smoke.py', f'--config.model.source={student}', '--config.rollout.slots=4')


def engine_at(served: Served, url: str) -> psutil.Process:
  return next(p for p in psutil.Process(served.child.pid).children(recursive=True)
              if f'--port={url.rsplit(":", 1)[1]}' in p.cmdline())


def test_a_run_with_its_teacher_is_served_survives_a_killed_replica_and_nothing_is_left(serve, start, tiny_student, tmp_path):
  port = supervision.free_port()
  opd = (*embedded(tiny_student), '--config.objective.name=opd', f'--config.teacher.source={tiny_student}')
  served = serve(tmp_path / 'serve', *opd, '--config.rollout.replicas=2', f'--port={port}')
  assert served.told['rollout'] == [f'http://127.0.0.1:{port + i}' for i in range(2)]
  assert served.told['teacher'] == [f'http://127.0.0.1:{port + 2}']
  flags = [f'--config.{role}.urls={tuple(served.told[role])!r}' for role in ('rollout', 'teacher')]
  assert any(all(f'"{flag}"' in line for flag in flags) for line in served.lines)

  run = rundir.RunDirectory(tmp_path / 'run')
  child = start(tmp_path / 'run', '--config.updates=2', '--config.objective.name=opd', f'--config.teacher.source={tiny_student}', *flags)
  end = time.monotonic() + WAIT_S
  while len(run.read_trajectories(1)) < 1:  # in the middle of the second update
    assert child.poll() is None and time.monotonic() < end, child.stdout.read()[-3000:] if child.poll() is not None else 'too slow'
    time.sleep(0.05)
  engine_at(served, served.told['rollout'][0]).send_signal(signal.SIGKILL)
  output, _ = child.communicate(timeout=WAIT_S)
  assert child.returncode == 0, output[-3000:]
  for update in range(2):
    trajectories = run.read_trajectories(update)
    assert len(trajectories) == 12 and {t.policy_version for t in trajectories} == {update}
    assert {(x.sampled.version_start, x.sampled.version_end) for t in trajectories for x in t.turns} == {(update, update)}
  assert 'restart 1' in served.said()
  assert served.end(signal.SIGTERM) < 20 and served.child.returncode == 0


def test_a_second_signal_ends_engines_that_do_not_answer_the_first(serve, tiny_student, tmp_path):
  served = serve(tmp_path / 'serve', *embedded(tiny_student))
  engine_at(served, served.told['rollout'][0]).suspend()  # SIGTERM waits until it is continued
  assert served.end(signal.SIGINT, signal.SIGINT) < 4


@pytest.mark.parametrize('settings, told', [
    (("--config.rollout.urls=('http://127.0.0.1:9',)",), 'config.rollout.urls names engines that already run'),
    (('--host=0.0.0.0',), 'everybody'),
    (('--host=8.8.8.8',), 'everybody'),
    (('--host=here',), "'here' is not an IPv4 address"),
    (('--host=10.255.255.254',), 'not an IPv4 address of this machine'),
    (('--config.rollout.engine=other',), "'other' is unknown"),
])
def test_what_cannot_be_served_is_said_at_once(settings, told, tiny_student, tmp_path):
  result = subprocess.run([sys.executable, '-m', 'experiments.serve', f'--workdir={tmp_path}', *embedded(tiny_student), *settings],
                          cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert result.returncode == 1 and told in result.stderr and 'Traceback' not in result.stderr, result.stderr[-2000:]


def test_an_open_interface_is_warned_of(caplog):
  serve_lib._check_host('192.168.7.7')
  assert 'not guarded' in caplog.text
  caplog.clear()
  serve_lib._check_host('127.0.0.1')
  assert not caplog.text
  with pytest.raises(types.ConfigError):
    serve_lib._check_host('::')
