"""The equivalence experiment of Appendix G as its users run it, on a tiny random student and random batches with times."""

import dataclasses
import json
import queue
import subprocess
import sys

import numpy as np
import pytest

from configs import equivalence as config_lib
from experiments import equal_bits, equivalence_figure, offline, replayed_updates, update_errors
from tests.experiments.conftest import ROOT
from ts_jax import types
from ts_jax.telemetry import rundir

SETTINGS = {'updates': 2, 'batch.prompts': 2, 'batch.group_size': 3, 'learner.buckets': (64,), 'equivalence.student_updates': 1,
            'equivalence.student_orders': 1, 'equivalence.lane_orders': 1, 'equivalence.lanes': (1, 2), 'equivalence.width': 32}


def timed(t: types.Trajectory, update: int) -> types.Trajectory:
  """The trajectory with times: later members of a group finish earlier, verdicts come out of order."""
  content = 10.0 - t.index + 0.3 * t.group
  turns = tuple(dataclasses.replace(u, request_end_s=content - len(t.turns) + u.index) for u in t.turns)
  return dataclasses.replace(t, update=update, turns=turns, content_s=content, reward_s=content + (t.index + t.group) % 2)


def batch(update: int, teacher: bool, rewards=(0.0, 0.5, 1.5)) -> list[types.Trajectory]:
  made = offline.random_batch(np.random.default_rng(update), groups=2, size=3, vocab=1000, teacher=teacher, shared=40, rewards=rewards)
  return [timed(t, update) for t in made.trajectories]


@pytest.fixture(scope='module', params=equivalence_figure.OBJECTIVES)
def measured(request, tiny_student, tmp_path_factory):
  """(objective, output, figures of the JSON line, folder) of one run of the command."""
  folder, config = tmp_path_factory.mktemp(request.param), config_lib.get_config(request.param)
  config.update_from_flattened_dict(SETTINGS | {'model.source': str(tiny_student)})
  with rundir.RunDirectory(folder / 'recording') as run:
    run.open(config)
    batches = [batch(k, request.param == 'opd') for k in range(2)]
    if request.param == 'grpo':  # a batch without a direction, which is passed over
      batches.insert(0, batch(7, False, rewards=(0.5,)))
    for k, trajectories in enumerate(batches):
      for t in trajectories:
        run.append_trajectory(dataclasses.replace(t, update=k))
  settings = [f'--config.{k}={v}' for k, v in (SETTINGS | {'model.source': tiny_student}).items()]
  result = subprocess.run(
      [sys.executable, '-m', 'experiments.equivalence', f'--config=configs/equivalence.py:{request.param}', f'--recording={folder}/recording',
       f'--figure={folder}/figure', '--orders=2', *settings], cwd=ROOT, capture_output=True, text=True, timeout=540)
  assert result.returncode == 0, result.stderr[-3000:]
  return request.param, result.stdout, json.loads(result.stdout.splitlines()[-1]), folder


def test_every_granularity_is_sync_to_rounding(measured):
  _, output, figures, _ = measured
  by_granularity = figures['by_granularity']
  assert set(by_granularity['float32_relative_error']) == set(update_errors.STREAMED)
  assert figures['float32_relative_error'] == max(by_granularity['float32_relative_error'].values()) <= 5e-6
  assert figures['one_minus_cosine'] <= 1e-11
  assert all(len(gaps) == 2 for gaps in by_granularity['parameter_gap'].values()) and figures['parameter_gap'] <= 1e-3
  assert 1e-4 < figures['bf16_error_sync'] < 0.3 and 1e-4 < figures['bf16_error_streamed'] < 0.3
  assert figures['precision_parameter_gap'][0] > 10 * figures['parameter_gap']
  assert 'paper' in output


def test_exact_sums_have_equal_bits_over_consecutive_updates(measured):
  _, _, figures, _ = measured
  assert figures['bit_equal_orders'] == 2 and figures['bit_equal_lanes'] == [1, 2]
  student = figures['bits']['student']
  assert all(s['equal'] == 1 and s['updates'] == 1 for s in student.values())
  assert student['trajectory']['like_sync'] and student['group']['like_sync']


def test_the_objective_s_row_of_the_figure_is_drawn(measured):
  name, _, _, folder = measured
  assert (folder / f'figure-{name}.png').read_bytes().startswith(b'\x89PNG')
  assert 'FP32: identical gradients' in ' '.join((folder / f'figure-{name}.svg').read_text().replace('<!--', '').split())
  assert not (folder / 'figure.svg').exists()  # the other objective's data are not there


def test_both_rows_make_the_whole_figure(tmp_path):
  rng = np.random.default_rng(0)
  keys = ('sync', 'streamed', 'sync_bfloat16', 'streamed_bfloat16')
  errors = update_errors.Errors({'turn': 1e-7}, {'turn': 1e-13}, {'turn': [1e-6, 1e-5]}, {'batch': 0.01, 'turn': 0.02}, [0.1, 0.1], [0.2, 0.2],
                                {k: rng.normal(size=5) for k in keys})
  equivalence_figure.save(tmp_path / 'e', 'grpo', 'turn', errors)
  written = equivalence_figure.save(tmp_path / 'e', 'opd', 'turn', errors)
  assert {p.name for p in written} == {'e-opd.svg', 'e-opd.png', 'e.svg', 'e.png'} and all(p.stat().st_size > 1000 for p in written)


def test_parameter_gap_is_equation_30():
  first, sync, ours = ([np.array(x, np.float32) for x in values] for values in (
      ([1.0, 2.0], [[0.0]]), ([1.0, 5.0], [[4.0]]), ([1.0, 5.3], [[3.6]])))
  moved = replayed_updates.distance(sync, first)
  assert moved == 5.0
  np.testing.assert_allclose(replayed_updates.parameter_gap(ours, sync, moved), 0.5 / 5.0, rtol=1e-6)


def test_history_keeps_each_update_until_it_is_replaced(tmp_path):
  tree = lambda x: {'a': np.full((2, 3), x, np.float32), 'b': np.full(4, -x, np.float32)}
  history = replayed_updates.History(tmp_path, 2, tree(0))
  for k, x in ((0, 1.0), (1, 2.0), (0, 3.0)):
    history.write(k, tree(x))
  assert replayed_updates.distance(history.read(0), tree(3.0)) == replayed_updates.distance(history.read(1), tree(2.0)) == 0


def test_recorded_arrival_follows_the_clock_and_is_shown_one_event_at_a_time():
  made = offline.random_batch(np.random.default_rng(3), groups=1, size=2, teacher=True)
  made = types.LogicalBatch(0, 0, (dataclasses.replace(made.groups[0], trajectories=tuple(timed(t, 0) for t in made.trajectories)),))
  events = offline.recorded_arrival(made)
  content = [e.trajectory.index for e in events if isinstance(e, types.ContentFixed)]
  assert content == [1, 0]  # the second finished first
  assert sum(isinstance(e, types.TurnFixed) for e in events) == sum(len(t.turns) for t in made.trajectories)
  stream = offline.OneByOne(events)
  for n, event in enumerate(events):
    stream.put(n)  # a piece of work is finished
    assert stream.get() is event and stream.get() == n
  with pytest.raises(queue.Empty):
    stream.get(block=False)


def test_a_number_of_lanes_counts_only_where_every_order_was_equal():
  seen = equal_bits.EqualBits(updates=10, orders=5, lane_orders=3, equal=4, lanes={2: 3, 4: 2})
  assert seen.equal_lanes == [2]


def test_a_recording_without_teacher_scores_is_refused_for_distillation(tmp_path):
  config = config_lib.get_config('opd')
  config.update(batch=dict(prompts=2, group_size=3))
  with rundir.RunDirectory(tmp_path) as run:
    run.open(config)
    for t in batch(0, False):
      run.append_trajectory(t)
  with pytest.raises(types.ConfigError, match='recorded without a teacher'):
    replayed_updates.recorded_batches(config, tmp_path, 1)


def test_recorded_arrival_hands_over_the_scores_of_every_scorer_behind_their_turn():
  batch = offline.random_batch(np.random.default_rng(0), groups=1, teacher=True, reference=True)
  fixed, scored = set(), set()
  for event in offline.recorded_arrival(batch):
    if isinstance(event, types.TurnFixed):
      assert not event.turn.scores
      fixed.add((event.group, event.index, event.turn.index))
    elif isinstance(event, types.TurnScored):
      assert (event.group, event.index, event.turn) in fixed
      scored.add((event.group, event.index, event.turn, event.scorer))
  assert scored == {(*at, scorer) for at in fixed for scorer in ('teacher', 'reference')}
