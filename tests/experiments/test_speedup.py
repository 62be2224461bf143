"""The comparison of schedules runs as its users run it, on a tiny student."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import contenders, memory, offline
from tests.experiments.conftest import ROOT
from tests.streaming import cases
from ts_jax import types
from ts_jax.rollout import replay as replay_lib
from ts_jax.telemetry import rundir

KEYS = {'speedup', 'bound', 'fraction_of_bound', 'rollout_over_learner', 'replay_fraction_of_bound'}
SCHEDULES = ('sync', 'thundersync', 'async', 'fully_async')


def speedup(student, workdir, *settings, buckets='(224,512)'):
  return subprocess.run(
      [sys.executable, '-m', 'experiments.speedup', '--config=configs/smoke.py', f'--workdir={workdir}', f'--config.model.source={student}',
       f'--config.learner.buckets={buckets}', '--config.schedule.pack_rows=(1,)', '--config.tasks.instances=4', *settings],
      cwd=ROOT, capture_output=True, text=True, timeout=540)


def check_rows(rows, schedules=SCHEDULES):
  assert set(rows) == set(schedules)
  for row in rows.values():
    assert row['rollout_s'] + row['residual_s'] + row['publish_s'] == pytest.approx(row['step_s'], rel=1e-3)
    assert row['peak_bytes'] > 0 and row['accumulator_bytes'] > 0 and row['service_s'] > 0
  assert rows['sync']['speedup'] == rows['sync']['mfu_over_sync'] == 1
  assert [rows[s]['lag_max'] for s in schedules[:3]] == [0, 0, 1][:len(schedules)]


def test_schedules_are_sampled_and_then_replayed_on_what_sync_sampled(tiny_student, tmp_path):
  result = speedup(tiny_student, tmp_path, '--schedules=sync,thundersync', '--updates=2', '--nobalance', '--config.agent.concurrency=6', '--config.objective.entropy=0.01')
  assert result.returncode == 0, result.stderr[-3000:]
  found = json.loads(result.stdout.splitlines()[-1])['grpo']
  assert KEYS <= set(found) and 1 <= found['bound'] <= 2 and found['trajectories'] == 12 and found['concurrency'] == 6
  for name in ('schedules', 'replayed'):
    check_rows(found[name], SCHEDULES[:2])
  assert all(row['publish_s'] > 0 for row in found['schedules'].values())
  assert len(rundir.RunDirectory(tmp_path / 'grpo-42').read_trajectories(1)) == 12


def test_a_recorded_run_is_replayed_in_balance_under_both_objectives(tiny_student, tmp_path):
  with rundir.RunDirectory(tmp_path / 'run') as run:
    run.open({'updates': 3})
    for update in range(3):
      for n, t in enumerate(offline.random_batch(np.random.default_rng(update), groups=2, vocab=1000, teacher=True).trajectories):
        run.append_trajectory(dataclasses.replace(t, update=update, start_s=float(n // 4), content_s=n // 4 + 0.5, reward_s=n // 4 + 1.0))
  result = speedup(tiny_student, tmp_path, f'--config.rollout.replay={tmp_path}/run', '--objectives=grpo,opd', '--config.schedule.granularity=forward',
                   '--replay_ratio=2', buckets='(64,)')
  assert result.returncode == 0, result.stderr[-3000:]
  figures = json.loads(result.stdout.splitlines()[-1])
  assert set(figures) == {'grpo', 'opd'}
  for found in figures.values():
    assert KEYS <= set(found) and found['rollout_over_learner'] > 0 and found['replay_fraction_of_bound'] == found['fraction_of_bound']
    check_rows(found['replayed'])
  refused = speedup(tiny_student, tmp_path, f'--config.rollout.replay={tmp_path}/run', '--updates=4')
  assert refused.returncode == 1 and 'has 3 recorded updates and --updates=4 are wanted' in refused.stderr


def test_balanced_batches_take_the_ratio_of_their_own_service():
  made = offline.random_batch(np.random.default_rng(0), groups=1, size=2).trajectories
  batches = [[dataclasses.replace(t, start_s=10.0 + i, content_s=14.0, reward_s=10.0 + 8.0 * (k + 1)) for i, t in enumerate(made)] for k in range(2)]
  work = [[(0.0, 100.0)], [(1.0, 3.0), (5.0, 6.0)], [(7.0, 12.0)]]  # of the first, which is not timed, and of both batches
  done = [SimpleNamespace(result=SimpleNamespace(spans=[types.Span('source', *at, update=0) for at in spans])) for spans in work]

  class Timed(contenders.Contenders):

    def __init__(self):
      pass

    def replayed(self, config, name, batches, scale, cores):
      assert name == 'sync' and scale == 0 and len(batches) == 3
      return None, done

  balanced = Timed().balanced(None, batches, 2.0, ())
  assert [max(t.reward_s for t in b) - min(t.start_s for t in b) for b in balanced] == pytest.approx([2 * 3.0, 2 * 5.0])


def test_what_cannot_be_compared_is_refused_before_anything_runs(tiny_student, tmp_path):
  for settings, told in ((['--objectives=grpo,opd'], 'none is named: set config.teacher.source'), (['--schedules=sync'], 'sync and thundersync among them'),
                         (['--seeds=x'], '--seeds=x must be whole numbers')):
    result = speedup(tiny_student, tmp_path, *settings)
    assert result.returncode == 1 and told in result.stderr and 'Traceback' not in result.stderr
  assert not (tmp_path / 'tasks').exists()


def test_scaled_times_keep_the_start_and_stretch_the_rest():
  made = offline.random_batch(np.random.default_rng(0), groups=1, size=2).trajectories
  batch = [dataclasses.replace(t, start_s=100.0 + i, content_s=104.0, reward_s=106.0,
                               turns=tuple(dataclasses.replace(u, request_start_s=101.0, request_end_s=102.0, tool_start_s=102.0, tool_end_s=103.0)
                                           for u in t.turns)) for i, t in enumerate(made)]
  first, second = replay_lib.scaled(batch, 0.5)
  assert (first.start_s, first.content_s, first.reward_s, second.start_s) == (100, 102, 103, 100.5)
  assert all((u.request_start_s, u.request_end_s, u.tool_end_s) == (100.5, 101, 101.5) for u in first.turns)
  assert [m.delay_s for m in replay_lib.schedule(replay_lib.scaled(batch, 0.5), 1.0)] == [m.delay_s for m in replay_lib.schedule(batch, 0.5)]


def test_accumulators_are_counted_while_a_group_is_open():
  params = cases.tiny_params('float32')
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  lane = cases.make_lane()
  lane.begin(0, params, [])
  assert memory.accumulator_bytes([lane]) == 0
  lane._statistics.fold(0, params, {}, 1.0)
  assert 2 * size < memory.accumulator_bytes([lane]) < 2 * size + 64  # (G1, G2), and their bounds
