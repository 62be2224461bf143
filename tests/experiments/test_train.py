"""Whole runs of a tiny student: faults in the middle of an update, interruption, resume, replay."""

import pathlib
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest

from experiments import offline
from tests.experiments.conftest import ROOT
from ts_jax import types
from ts_jax.models import weights
from ts_jax.telemetry import rundir

WAIT_S = 400


def wait_for(condition, child, what):
  end = time.monotonic() + WAIT_S
  while not condition():
    assert child.poll() is None, child.stdout.read()[-3000:]
    assert time.monotonic() < end, f'{what} did not happen within {WAIT_S} s'
    time.sleep(0.05)


def finished(child) -> str:
  output, _ = child.communicate(timeout=WAIT_S)
  assert child.returncode == 0, output[-3000:]
  return output


def tokens(run: rundir.RunDirectory, update: int):
  return [(t.key, t.policy_version, [turn.sampled.token_ids for turn in t.turns]) for t in run.read_trajectories(update)]


def engine_of(child) -> psutil.Process:
  return next(p for p in psutil.Process(child.pid).children(recursive=True) if any('engine.server' in a for a in p.cmdline()))


@pytest.fixture(scope='module')
def undisturbed(train_command, tmp_path_factory):
  folder = tmp_path_factory.mktemp('undisturbed')
  result = subprocess.run(train_command(folder, '--config.updates=2'), cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
  assert result.returncode == 0, result.stderr[-3000:]
  return rundir.RunDirectory(folder)


def test_killed_engine_is_restarted_at_the_right_version_and_the_update_completes(undisturbed, start, tmp_path):
  child = start(tmp_path, '--config.updates=2')
  run = rundir.RunDirectory(tmp_path)
  wait_for(lambda: len(run.read_trajectories(1)) >= 1, child, 'the second update')
  engine_of(child).send_signal(signal.SIGKILL)
  finished(child)
  for update in range(2):
    assert tokens(run, update) == tokens(undisturbed, update)  # generated again with their seeds
    assert {version for _, version, _ in tokens(run, update)} == {update}
  assert [r['update'] for r in run.read_metrics() if r['kind'] == 'update'] == [0, 1]


def test_interrupted_run_leaves_no_process_and_resumes_where_it_was(undisturbed, start, tmp_path):
  child = start(tmp_path, '--config.updates=2')
  run = rundir.RunDirectory(tmp_path)
  wait_for(lambda: len(run.read_trajectories(1)) >= 2, child, 'the second update')
  family = psutil.Process(child.pid).children(recursive=True)
  child.send_signal(signal.SIGINT)
  output, _ = child.communicate(timeout=WAIT_S)
  assert child.returncode == 130 and 'resume with' in output and 'Traceback' not in output, output[-3000:]
  _, alive = psutil.wait_procs(family, timeout=10)
  assert not alive
  kept = tokens(run, 1)
  finished(start(tmp_path, '--config.updates=2'))
  assert tokens(run, 1) == tokens(undisturbed, 1)
  assert all(t in tokens(run, 1) for t in kept)
  assert [r['update'] for r in run.read_metrics() if r['kind'] == 'update'] == [0, 1]


@pytest.fixture(scope='module')
def recording(tmp_path_factory):
  """A recorded run with reward differences and times."""
  folder = tmp_path_factory.mktemp('recording')
  with rundir.RunDirectory(folder) as run:
    run.open({'updates': 3})
    run.write_manifest({'task_families': {}})
    for update in range(3):
      for t in offline.random_batch(np.random.default_rng(update), groups=2, size=3, vocab=1000).trajectories:
        at = 0.02 * (t.group * 3 + t.index)
        run.append_trajectory(types.Trajectory.from_json(
            {**t.to_json(), 'update': update, 'start_s': 0.0, 'content_s': at + 0.1, 'reward_s': at + 0.15}))
  return folder


def final_bits(folder: pathlib.Path) -> str:
  return weights.weights_checksum(folder / 'final')


def replay(recording, schedule, *more):
  return (f'--config.rollout.replay={recording}', '--config.updates=3', '--config.schedule.accumulator=exact',
          f'--config.schedule.name={schedule}', '--config.checkpoint.export=True', *more)


def test_replayed_schedules_and_a_resumed_run_give_the_same_bits(recording, start, tmp_path):
  finished(start(tmp_path / 'sync', *replay(recording, 'sync')))
  finished(start(tmp_path / 'stream', *replay(recording, 'thundersync')))
  assert final_bits(tmp_path / 'sync') == final_bits(tmp_path / 'stream')

  settings = replay(recording, 'thundersync', '--config.checkpoint.every=1', '--config.rollout.replay_scale=20.0')
  child = start(tmp_path / 'killed', *settings)
  run = rundir.RunDirectory(tmp_path / 'killed')
  wait_for(lambda: any(r['update'] == 1 for r in run.read_metrics()), child, 'the second update')
  child.kill()
  child.wait()
  finished(start(tmp_path / 'killed', *settings))
  assert final_bits(tmp_path / 'killed') == final_bits(tmp_path / 'stream')
  assert [r['update'] for r in run.read_metrics()] == [0, 1, 2]


def test_turns_that_run_forward_on_arrival_change_no_bit(recording, start, tmp_path):
  forward = '--config.schedule.granularity=forward'
  finished(start(tmp_path / 'at_once', *replay(recording, 'thundersync', forward)))
  finished(start(tmp_path / 'slow', *replay(recording, 'thundersync', forward, '--config.rollout.replay_scale=5.0')))
  assert final_bits(tmp_path / 'at_once') == final_bits(tmp_path / 'slow')
  spans = rundir.RunDirectory(tmp_path / 'slow').read_trace()
  assert any(s.kind == 'forward' for s in spans)


def test_forward_is_refused_where_it_cannot_work(recording, start, tmp_path):
  for name, setting, message in (('sync', '--config.learner.kept_mb=2048', "which schedule 'sync' does not"),
                                 ('thundersync', '--config.learner.kept_mb=0', 'less than one trajectory')):
    child = start(tmp_path / name, *replay(recording, name, '--config.schedule.granularity=forward', setting))
    output, _ = child.communicate(timeout=WAIT_S)
    assert child.returncode == 1 and message in output, output[-2000:]


def test_replay_of_updates_that_were_not_recorded_is_refused(recording, start, tmp_path):
  child = start(tmp_path / 'run', *replay(recording, 'sync'), '--config.updates=9')
  output, _ = child.communicate(timeout=WAIT_S)
  assert child.returncode == 1 and 'no trajectories of update 3' in output


def test_a_mismatch_stops_the_run_before_the_step_and_a_higher_limit_resumes_it(start, tmp_path):
  settings = '--config.updates=1', '--config.objective.entropy=0.001'  # with a term no source is skipped
  child = start(tmp_path, *settings, '--config.mismatch.stop=1e-30')
  output, _ = child.communicate(timeout=WAIT_S)
  run = rundir.RunDirectory(tmp_path)
  assert child.returncode == 1 and 'above config.mismatch.stop=1e-30: the step was not taken' in output, output[-2000:]
  assert not run.read_metrics()
  sampled = tokens(run, 0)
  output = finished(start(tmp_path, *settings, '--config.mismatch.warn=1e-30'))
  assert 'WARNING   update 0' in output and 'config.mismatch.warn=1e-30' in output
  record, = run.read_metrics()
  assert tokens(run, 0) == sampled and 0 < record['sampler_kl_k3'] < 1e-8 and 0.999 < record['sampler_ess'] <= 1
