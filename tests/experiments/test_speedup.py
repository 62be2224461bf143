"""The comparison of schedules runs as its users run it, on a tiny student."""

import json
import subprocess
import sys

from tests.experiments.conftest import ROOT


def test_schedules_are_compared_on_one_recording(tiny_student, tmp_path):
  result = subprocess.run(
      [sys.executable, '-m', 'experiments.speedup', '--config=configs/smoke.py', f'--recording={tmp_path}/recording', '--batches=1', '--rounds=1',
       f'--config.model.source={tiny_student}', '--config.learner.buckets=(224,512)', '--config.tasks.instances=4',
       '--config.schedule.granularity=forward'], cwd=ROOT, capture_output=True, text=True, timeout=540)
  assert result.returncode == 0, result.stderr[-3000:]
  figures = json.loads(result.stdout.splitlines()[-1])
  assert set(figures) == {'speedup', 'bound', 'fraction_of_bound', 'rollout_over_learner'}
  assert 1 <= figures['bound'] <= 2
