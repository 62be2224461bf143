"""The overhead benchmark: the scheduler takes every event of an update, and overhead is what is left beside the bare gradients."""

import json
import subprocess
import sys

import numpy as np
import pytest

from experiments import bench_overhead
from tests.experiments.conftest import ROOT
from ts_jax.streaming import scheduler


@pytest.mark.parametrize('granularity', scheduler.GRANULARITIES)
def test_the_scheduler_alone_closes_the_update_it_is_driven_through(granularity):
  policy = scheduler.Policy(granularity=granularity)
  events = bench_overhead.rollout_events(np.random.default_rng(0), groups=4, size=3, turns=2)
  assert len(events) == 4 * 3 * (2 + 2)
  if not policy.by_turns:
    events = [e for e in events if not isinstance(e, scheduler.TurnReady)]
  taken, seconds = bench_overhead.drive(policy, [3] * 4, 2, events)
  assert taken > len(events) and seconds > 0  # the lanes' reports too
  with pytest.raises(RuntimeError, match='groups open'):
    bench_overhead.drive(policy, [3] * 4, 2, events[:-1])


def test_the_command_tells_overhead_and_rate(tiny_student):
  result = subprocess.run([sys.executable, '-m', 'experiments.bench_overhead', f'--model={tiny_student}', '--rounds=1', '--size=2', '--tokens=64',
                           '--events_rounds=1'], cwd=ROOT, capture_output=True, text=True, timeout=540)
  assert result.returncode == 0, result.stderr[-3000:]
  figures = json.loads(result.stdout.splitlines()[-1])
  assert figures['events_per_s'] == min(v for k, v in figures.items() if k.startswith('events_per_s_')) > 0
  parts = sum(figures[f'{p}_percent'] for p in ('fold', 'reduce', 'dispatch', 'bookkeeping'))
  assert parts == pytest.approx(figures['overhead_within_percent'], rel=0.05) and figures['fold_percent'] > 0
