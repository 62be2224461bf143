"""Configs resolve, and what is wrong in one is said before anything starts."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def train(*arguments, timeout_s=120):
  return subprocess.run([sys.executable, '-m', 'experiments.train', *arguments], cwd=ROOT, capture_output=True, text=True,
                        timeout=timeout_s)


@pytest.mark.parametrize('setting, told', [
    ('--config.updatez=3', 'Did you mean "updates"'),
    ('--config.updates=many', 'many'),
    ('--config.schedule.name=asink', "'asink' is unknown: use one of ('sync', 'thundersync', 'async', 'fully_async')"),
    ('--config.schedule.max_staleness=1', "max_staleness=1 is a setting of schedule 'fully_async'"),
    ('--config.model.source=/nowhere', '/nowhere'),
    ('--config.agent.sandbox=jail', 'jail'),
    ('--config.tasks.root=/nowhere', '/nowhere'),
    ('--config.learner.cores=99', 'may use'),
    ('--config.schedule.accumulator=float8', 'float8'),
    ('--config.objective.name=ppo', "'ppo' is unknown"),
    ('--config.agent.max_prompt_tokens=50', 'max_prompt_tokens'),
    ("--config.rollout.urls=('http://127.0.0.1:9',)", '127.0.0.1:9'),
])
def test_bad_values_are_named_before_rollout_starts(setting, told, tmp_path):
  result = train('--config=configs/smoke.py', f'--workdir={tmp_path}/run', setting)
  assert result.returncode != 0
  assert told in result.stderr, result.stderr[-2000:]
  assert 'Traceback' not in result.stderr
