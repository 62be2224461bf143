"""Metrics records and the figures derived from them."""

import dataclasses
import math
import struct

import pytest
from tensorboardX.proto import event_pb2


import synthetic
from ts_jax import types
from ts_jax.telemetry import metrics
from ts_jax.telemetry import rundir


def read_events(folder):
  """TFRecord frames: length, its checksum, data, its checksum."""
  found = []
  for file in sorted(folder.glob('events*')):
    data, at = file.read_bytes(), 0
    while at < len(data):
      (size,) = struct.unpack_from('<Q', data, at)
      event = event_pb2.Event.FromString(data[at + 12:at + 12 + size])
      found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
      at += 16 + size
  return found


def test_update_record_holds_what_the_trajectories_say(finished_run):
  trajectories = finished_run.read_trajectories(1)
  record = metrics.summarise(trajectories, synthetic.family_of)
  assert record['trajectories'] == 12 and record['groups'] == 4
  assert record['reward_mean'] == pytest.approx(sum(t.reward for t in trajectories) / 12)
  assert sum(record['count_by_family'].values()) == 12 and set(record['reward_by_family']) == set(synthetic.FAMILIES)
  assert record['scored_tokens'] == sum(t.scored_tokens for t in trajectories) > 0
  assert sum(record['terminal'].values()) == 12
  assert record['success_rate'] == sum(t.reward == 1.5 for t in trajectories) / 12


def test_a_trajectory_without_reward_is_not_a_reward_of_zero(finished_run):
  trajectories = finished_run.read_trajectories(4)
  lost = dataclasses.replace(trajectories[0], reward=None, terminal_reason=types.TerminalReason.INFRASTRUCTURE)
  with_lost = metrics.summarise([lost, *trajectories[1:]], synthetic.family_of)
  assert with_lost['reward_mean'] == pytest.approx(sum(t.reward for t in trajectories[1:]) / (len(trajectories) - 1))
  assert metrics.summarise([lost], synthetic.family_of)['reward_mean'] is None


def test_a_reward_of_zero_counts(finished_run):
  zeros = [dataclasses.replace(t, reward=0.0) for t in finished_run.read_trajectories(0)]
  record = metrics.summarise(zeros, synthetic.family_of)
  assert record['reward_mean'] == 0.0 and record['reward_std'] == 0.0 and record['groups_uniform'] == record['groups']


def test_records_go_to_json_lines_and_tensorboard(finished_run, tmp_path):
  source = next(r for r in finished_run.read_metrics() if r['kind'] == 'update')
  record = metrics.UpdateRecord.from_json({k: v for k, v in source.items() if k != 'kind'})
  with rundir.RunDirectory(tmp_path) as run:
    run.open({'updates': 1})
    writer = metrics.MetricsWriter(run)
    written = writer.write(dataclasses.replace(record, grad_norm=math.nan))
    writer.write(metrics.EvalRecord(3, 'held_out', 0.75, 0.5, 8, {'copy': 0.75}))
    writer.close()
    assert written['kind'] == 'update' and written['grad_norm'] is None
    stored = run.read_metrics()
    assert stored[0] == written and stored[1]['split'] == 'held_out'
  events = read_events(run.tensorboard)
  assert (0, 'train/reward_mean', pytest.approx(record.reward_mean)) in events
  assert (3, 'held_out/reward/copy', 0.75) in events
  assert not any(tag == 'train/grad_norm' for _, tag, _ in events)


def test_an_unknown_split_is_refused():
  with pytest.raises(ValueError, match="'test'"):
    metrics.EvalRecord(0, 'test', 0.0, 0.0, 1, {})


def test_outcome_compares_quarters_and_first_and_last_evaluation():
  updates = [{'kind': 'update', 'update': n, 'reward_mean': float(n)} for n in range(9)]
  evals = [{'kind': 'eval', 'update': n, 'split': 'dev', 'reward_mean': n / 10} for n in (0, 4, 9)]
  result = metrics.outcome([*reversed(updates), *evals])
  assert (result.first_quarter, result.last_quarter) == (0.5, 7.5)
  assert (result.dev_before, result.dev_after) == (0.0, 0.9)
  assert result.held_out_before is None and result.held_out_after is None
  assert metrics.outcome([]).first_quarter is None
  assert metrics.outcome(evals[:1]).dev_after is None  # one evaluation is not a before and an after
