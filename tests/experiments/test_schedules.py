"""Schedules that sample ahead: versions of tokens, lags, resumption, and what a replay of the same batches gives."""

import dataclasses
import signal
import subprocess

import numpy as np
import pytest

from configs import defaults
from experiments import learner, offline, replayed_schedule, schedules, wiring
from tests.experiments.conftest import ROOT
from tests.experiments.test_train import final_bits, finished, recording, replay, tokens, wait_for  # noqa: F401: a fixture
from ts_jax import types
from ts_jax.streaming import barrier
from ts_jax.telemetry import rundir

UPDATES = 4


def settings(name, *more):
  # The entropy term moves the parameters where all rewards are equal.
  return (f'--config.updates={UPDATES}', f'--config.schedule.name={name}', '--config.optimizer.learning_rate=1e-3',
          '--config.objective.entropy=0.01', *more)


def updates_of(run):
  return [r for r in run.read_metrics() if r['kind'] == 'update']


def all_versions(run, update):
  return {v for t in run.read_trajectories(update) for v in t.versions}


def trained(run):
  """The trajectories of each update, as it took them."""
  by_group = {}
  for update in range(UPDATES):
    for t in run.read_trajectories(update):
      by_group.setdefault((update, t.group), []).append(t)
  return {update: [t for at in groups for t in by_group[at]] for update, groups in run.read_batches().items()}


@pytest.fixture(scope='module')
def one_behind(train_command, tmp_path_factory):
  folder = tmp_path_factory.mktemp('async')
  result = subprocess.run(train_command(folder, *settings('async')), cwd=ROOT, capture_output=True, text=True, timeout=400)
  assert result.returncode == 0, result.stderr[-3000:]
  assert 'lag 1.00 (max 1)' in result.stderr
  return rundir.RunDirectory(folder)


def test_async_trains_each_batch_on_tokens_of_exactly_one_version_before(one_behind):
  for update in range(UPDATES):
    assert all_versions(one_behind, update) == {max(0, update - 1)}
  lags = [(r['policy_version'], r['lag_mean'], r['lag_max']) for r in updates_of(one_behind)]
  assert lags == [(0, 0, 0), *((k, 1, 1) for k in range(1, UPDATES))]
  spans = one_behind.read_trace()
  sampled, learned = ([s for s in spans if s.kind in kinds and s.update == k] for kinds, k in ((('engine',), 2), (('source', 'prompt'), 1)))
  if learned:  # batch 2 is sampled while batch 1 is learned from
    assert min(s.start_s for s in sampled) < max(s.end_s for s in learned)


def test_async_resumes_in_the_middle_of_a_batch_sampled_from_the_parameters_before(one_behind, start, tmp_path):
  child = start(tmp_path, *settings('async'))
  run = rundir.RunDirectory(tmp_path)
  wait_for(lambda: len(run.read_trajectories(2)) >= 2, child, 'a trajectory of the third batch')
  child.send_signal(signal.SIGINT)
  output, _ = child.communicate(timeout=240)
  assert child.returncode == 130, output[-3000:]
  kept = tokens(run, 2)
  finished(start(tmp_path, *settings('async')))
  for update in range(UPDATES):
    assert tokens(run, update) == tokens(one_behind, update)
  assert all(t in tokens(run, 2) for t in kept) and [r['update'] for r in updates_of(run)] == list(range(UPDATES))


def check_fully_async(run, bound):
  batches = run.read_batches()
  size = len(batches[0])
  assert sorted(at for groups in batches.values() for at in groups) == [(u, g) for u in range(UPDATES) for g in range(size)]  # each once
  for record in updates_of(run):
    lags = [record['update'] - v for t in trained(run)[record['update']] for v in t.versions]
    assert 0 <= min(lags) and max(lags) == record['lag_max'] <= bound and record['lag_mean'] == pytest.approx(sum(lags) / len(lags))


def test_fully_async_publishes_in_flight_within_its_bound_and_goes_on_where_it_was_killed(start, tmp_path):
  more = settings('fully_async', '--config.schedule.max_staleness=1', '--config.checkpoint.every=1', '--config.agent.concurrency=4',
                  '--config.objective.importance_cap=2.0')
  child = start(tmp_path, *more)
  run = rundir.RunDirectory(tmp_path)
  wait_for(lambda: len(run.read_batches()) >= 2, child, 'the second update')
  child.kill()
  child.wait()
  before = {t.key: t for update in range(UPDATES) for t in run.read_trajectories(update)}
  output = finished(start(tmp_path, *more))
  resumed_at = int(output.split('resuming  at update ')[1].split()[0])
  check_fully_async(run, 1)
  versions = [set(t.versions) for update in range(UPDATES) for t in run.read_trajectories(update)]
  assert any(len(v) > 1 for v in versions) or {min(v) for v in versions} >= {0, 1}  # weights arrived while trajectories were sampled
  for t in before.values():  # what was finished stays, unless it holds tokens of parameters that are no more
    if max(t.versions) <= resumed_at:
      now = next(u for u in run.read_trajectories(t.update) if u.key == t.key)
      assert [u.sampled for u in now.turns] == [u.sampled for u in t.turns]


def test_replayed_batches_give_the_bits_of_sync_however_far_ahead_they_are_sampled(recording, start, tmp_path):
  finished(start(tmp_path / 'sync', *replay(recording, 'sync')))
  for name, bound in (('async', 1), ('fully_async', 2)):
    finished(start(tmp_path / name, *replay(recording, name)))
    run = rundir.RunDirectory(tmp_path / name)
    assert final_bits(tmp_path / name) == final_bits(tmp_path / 'sync')  # the same surrogate, at the same parameters
    assert 0 < max(r['lag_max'] for r in run.read_metrics()) <= bound


@pytest.mark.parametrize('chosen, told', [
    (dict(name='asink'), "schedule 'asink' is unknown"),
    (dict(name='sync', max_staleness=1), "is a setting of schedule 'fully_async'; with 'sync' every lag is 0"),
    (dict(name='async', max_staleness=1), "with 'async' every lag is 1"),
    (dict(name='fully_async', max_staleness=-1), 'must be positive'),
    (dict(name='async', granularity='turn'), "granularity 'turn' streams, which schedule 'async' does not"),
], ids=str)
def test_what_does_not_go_together_is_refused(chosen, told):
  config = defaults.get_config()
  config.schedule.update(chosen)
  with pytest.raises(types.ConfigError, match=told):
    learner.policy(config)


def test_lags_are_the_schedules_own_and_old_tokens_have_no_limit_of_mismatch_unless_it_is_asked_for():
  config = defaults.get_config()
  bounds = {}
  for name in schedules.NAMES:
    config.schedule.name = name
    bounds[name] = schedules.max_staleness(config)
    assert (learner.mismatch_limits(config).stop < 1) == (name not in schedules.STALE)
  assert bounds == {'sync': 0, 'thundersync': 0, 'async': 1, 'fully_async': 2}
  config.mismatch.stop = 0.5
  assert learner.mismatch_limits(config).stop == 0.5


@pytest.mark.parametrize('name, lags, overlap', [
    ('sync', {0}, False), ('thundersync', {0}, False), ('async', {0, 1}, True), ('fully_async', {0, 1, 2}, True)])
def test_each_schedule_runs_by_itself_on_recorded_batches(tiny_student, name, lags, overlap):
  config = defaults.get_config()
  config.model.source = str(tiny_student)
  config.schedule.update(name=name, pack_rows=(1,))
  config.learner.buckets = (64,)
  student = wiring.load_student(config)
  batches = []
  for update in range(UPDATES):
    made = offline.random_batch(np.random.default_rng(update), groups=2, size=2, vocab=1000).trajectories
    batches.append([dataclasses.replace(t, start_s=0.0, content_s=0.2 + 0.02 * i, reward_s=0.3) for i, t in enumerate(made)])
  policy = learner.policy(config)
  state = barrier.init(learner.optimizer(config), student.params())
  state, done = replayed_schedule.run(config, [learner.lane(config, student)], policy, state, batches)
  assert [d.update for d in done] == list(range(UPDATES)) and state.policy_version == UPDATES
  found = {d.update - v for d in done for t in d.result.batch.trajectories for v in t.versions}
  assert found <= lags and (max(found) > 0) == overlap
  starts = [min(t.start_s for t in d.result.batch.trajectories) for d in done]
  assert all((starts[k + 1] < done[k].barrier_s) == overlap for k in range(UPDATES - 1))  # sampling goes on while the learner works
