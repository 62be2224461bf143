"""Recorded runs replayed: own granularity against the measured step, others from the same service, timelines side by side."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from experiments import ledger, release
from ts_jax import types
from ts_jax.models import flops
from ts_jax.models.config import ModelConfig
from ts_jax.streaming.buckets import Buckets
from ts_jax.telemetry import metrics, rundir
from ts_jax.telemetry.report import collect, schedules

ROOT = pathlib.Path(__file__).resolve().parents[2]
T0 = 1_000.0
PROMPT = (1, 2, 3)


def trajectory(group, index, turns_s, reward_s, reward, tokens=10):
  made = tuple(types.Turn(i, (), types.SampledTokens((5,) * tokens, (-1.0,) * tokens, 0, 0, types.FinishReason.STOP), (True,) * tokens,
                          request_start_s=T0 + s - 1, request_end_s=T0 + s) for i, s in enumerate(turns_s))
  return types.Trajectory(0, group, index, f'task{group}', 0, PROMPT, made, types.TerminalReason.DONE, reward, start_s=T0,
                          content_s=T0 + turns_s[-1], reward_s=T0 + reward_s)


def learner(kind, start, end, group, index=-1, ready=-1.0, lane=0, **fields):
  return types.Span(kind, T0 + start, T0 + end, 0, group, index, lane=lane, ready_s=T0 + ready, task=f'task{group}', version=0, **fields)


def source(start, end, group, index, ready, lane=0):
  return [learner('source', start, end - 0.5, group, index, ready, lane, members=(index,), work='known', tokens=20, scored=20),
          learner('fold', end - 0.5, end, group, index, ready, lane, members=(index,))]


# Group 0 is mixed, group 1 uniform; 2 s of service each, 1 s for each pass of group 0's prompt, P = 1.5.
TRAJECTORIES = (trajectory(0, 0, (2, 4), 5, 1.0), trajectory(0, 1, (3, 9), 10, 0.0), trajectory(1, 0, (4, 6), 7, 0.5),
                trajectory(1, 1, (6, 8), 9, 0.5))
STREAMED = (learner('prompt', 0, 1, 0, ready=0, work='forward'), *source(4, 6, 0, 0, 4), *source(6, 8, 1, 0, 6), *source(8, 10, 1, 1, 8),
            *source(10, 12, 0, 1, 9), learner('prompt', 12, 13, 0, ready=10, work='backward'))
SYNC = (learner('prompt', 10, 11, 0, ready=0, work='forward'), *source(11, 13, 0, 0, 4), *source(13, 15, 0, 1, 9),
        learner('prompt', 15, 16, 0, ready=10, work='backward'))


def write_run(folder, spans, name='thundersync', granularity='trajectory', objective='grpo', measured_s=15.0, end_s=13.0, scores={}):
  with rundir.RunDirectory(folder) as run:
    run.open({'schedule': {'name': name, 'granularity': granularity}, 'objective': {'name': objective}, 'updates': 1})
    for t in TRAJECTORIES:
      run.append_trajectory(t)
      for u in t.turns:
        run.append_span(types.Span('engine', u.request_start_s, u.request_end_s, 0, t.group, t.index, u.index))
    for span in (*spans, *(types.Span('teacher', T0, T0 + s, 0, *at) for at, s in scores.items())):
      run.append_span(span)
    run.append_span(types.Span('optimizer', T0 + end_s, T0 + end_s + 1, 0))
    run.append_span(types.Span('publish', T0 + end_s + 1, T0 + end_s + 1.5, 0))
    if measured_s:
      fields = {f: None for f in metrics.UpdateRecord.__dataclass_fields__}
      run.append_metrics({**fields, 'kind': 'update', 'update': 0, 'step_s': measured_s, 'time_s': T0 + measured_s})
  return run


def test_the_own_granularity_is_the_trace_and_others_follow_from_its_service(tmp_path):
  update, = release.updates(write_run(tmp_path, STREAMED))
  assert (update.rollout_s, update.suffix_s, update.step_s, update.lanes) == (10, 1.5, 15, 1)
  own = release.predict(update, 'trajectory', {})
  # Sources end at 6, 8, 10, 12 and the prompt at 13; Sync does one pass of the mixed group: 2 + 2 + 1 + 1.
  assert (own.step_s, own.tail_s, own.sync_step_s) == (14.5, 3, 17.5)
  assert own.speedup == 17.5 / 14.5 and own.bound == 17.5 / 11.5
  sync = release.predict(update, 'batch', {})
  assert sync.step_s == sync.sync_step_s == 17.5
  # By group nothing of the uniform one is computed, and the mixed one starts with its last reward.
  assert release.predict(update, 'group', {}).step_s == 10 + 5 + 1.5
  shares = {'forward': release.Shares(0.5, 1.0), 'turn': release.Shares(0.5, 2.0)}
  # Half of each source at its turns (0.5 s each), the rest with its content: at 9 s, when the last turn comes, 0.5 s are waiting.
  forward = release.predict(update, 'forward', shares)
  assert forward.step_s == pytest.approx(9 + 0.5 + 1.5 + 1 + 1.5) and forward.lane_busy_s.sum() == own.lane_busy_s.sum()
  assert release.predict(update, 'turn', shares).lane_busy_s.sum() == pytest.approx(own.lane_busy_s.sum() + 8)
  with pytest.raises(types.ConfigError, match='give --turn_share'):
    release.predict(update, 'turn', {})
  with pytest.raises(types.ConfigError, match="'token' is unknown"):
    release.predict(update, 'token', {})


def test_packed_sources_lanes_and_runs_by_turns(tmp_path):
  packed = (learner('prompt', 10, 11, 0, ready=0, work='forward'),
            learner('source', 11, 14, 0, ready=9, members=(0, 1), work='final'), learner('source', 10, 12, 1, ready=8, lane=1, members=(0, 1), work='final'))
  update, = release.updates(write_run(tmp_path / 'packed', packed, 'sync', end_s=14, measured_s=15.5))
  assert update.granularity == 'batch' and update.lanes == 2 and release.predict(update, 'batch', {}).step_s == 15.5
  load = release.workload(update, {})
  assert load.service_s.tolist() == [1.5, 1.5, 1, 1] and load.lane.tolist() == [0, 0, 1, 1]
  assert release.predict(update, 'trajectory', {}).lane_end_s.tolist() == [10.5, 9]

  turns = (learner('forward', 2, 3, 0, 0, 2), learner('forward', 3, 4, 0, 1, 3), *source(4, 6, 0, 0, 4), *source(9, 11, 0, 1, 9))
  by_turns = release.updates(write_run(tmp_path / 'forward', turns, granularity='forward'))
  assert release.early_share(by_turns) == pytest.approx(2 / 6)
  assert release.predict(by_turns[0], 'forward', {}).step_s == 12.5  # as it ran, without any cost given
  cheaper = release.workload(by_turns[0], {'forward': release.Shares(1 / 3, 1.5)})
  assert cheaper.service_s.tolist() == pytest.approx([2, 2, 0, 0])


def test_turns_wait_for_their_scores(tmp_path):
  update, = release.updates(write_run(tmp_path, STREAMED, objective='opd', scores={(0, 0, 0): 3.5, (1, 0, 1): 7.0}))
  load = release.workload(update, {})
  assert load.turn_ready_s.tolist() == [3.5, 4, 3, 9, 4, 6, 6, 8]  # the last score of a trajectory comes with its content at latest
  assert update.closed_s(0) == 9 and not update.dropped(1)


def test_a_run_that_samples_ahead_is_replayed_from_where_its_learner_was_free(tmp_path):
  # The learner is free at 8, waits for the last reward at 10, works up to 16, and P is 1.5.
  run = write_run(tmp_path / 'async', SYNC, 'async', end_s=16, measured_s=None)
  fields = {f: None for f in metrics.UpdateRecord.__dataclass_fields__}
  with run:
    run.open(run.read_config())
    run.append_metrics({**fields, 'kind': 'update', 'update': 0, 'step_s': 10.0, 'time_s': T0 + 18})
  update, = release.updates(run)
  assert update.ahead and update.granularity == 'batch' and update.rollout_s == 2 and release.predict(update, 'batch', {}).step_s == 2 + 6 + 1.5
  # fully_async: its second update takes a group that was planned for the first, as its group 0.
  other = write_run(tmp_path / 'fully_async', (), 'fully_async')
  with other:
    other.open(other.read_config())
    other.append_batch(1, [(0, 1)])
    for span in (*source(12, 14, 0, 0, 6), learner('optimizer', 14, 15, -1), learner('publish', 15, 15.5, -1)):
      other.append_span(dataclasses.replace(span, update=1))
    other.append_metrics({**fields, 'kind': 'update', 'update': 1, 'step_s': 4.0, 'time_s': T0 + 16})
  update, = release.updates(other)
  assert [(t.update, t.group, t.reward) for t in update.trajectories] == [(1, 0, 0.5)] * 2 and update.rollout_s < 0.01
  assert release.predict(update, 'batch', {}).step_s == pytest.approx(2 + 1.5, abs=0.01)


def test_what_cannot_be_replayed_is_refused(tmp_path):
  update, = release.updates(write_run(tmp_path / 'async', SYNC, 'async', end_s=16))
  with pytest.raises(types.ConfigError, match='samples ahead'):
    release.predict(update, 'trajectory', {})
  with pytest.raises(types.ConfigError, match='earlier version'):
    release.updates(write_run(tmp_path / 'old', (learner('prompt', 0, 1, 0, ready=0), *STREAMED)))
  with rundir.RunDirectory(tmp_path / 'empty') as run:
    run.open({'schedule': {'name': 'sync'}, 'objective': {'name': 'grpo'}})
  with pytest.raises(types.ConfigError, match='no complete update'):
    release.updates(run)


def test_the_command_prints_a_table_the_gap_and_draws_timelines(tmp_path):
  write_run(tmp_path / 'stream', STREAMED), write_run(tmp_path / 'sync', SYNC, 'sync', end_s=16, measured_s=18)
  result = subprocess.run(
      [sys.executable, '-m', 'experiments.replay', f'--run={tmp_path}/sync,{tmp_path}/stream', '--forward_share=0.5', f'--figure={tmp_path}/f.svg'],
      cwd=ROOT, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  figures = json.loads(result.stdout.splitlines()[-1])
  stream = figures[f'{tmp_path}/stream']
  assert stream['granularity'] == 'trajectory' and set(stream['predicted']) == {'batch', 'group', 'trajectory', 'forward'}
  own = stream['predicted']['trajectory']
  assert own['step_s'] == 14.5 and own['measured_step_s'] == 15 and own['gap_percent'] == pytest.approx(100 * 0.5 / 15, abs=1e-3)
  assert 'measured_step_s' not in stream['predicted']['group'] and figures[f'{tmp_path}/sync']['predicted']['batch']['gap_percent'] > 0
  assert 'trajectory *' in result.stdout and 'left out: turn' in result.stdout
  text = ET.parse(tmp_path / 'f.svg').getroot()
  assert text.tag.endswith('svg')
  refused = subprocess.run([sys.executable, '-m', 'experiments.replay', f'--run={tmp_path}'], cwd=ROOT, capture_output=True, text=True)
  assert refused.returncode == 1 and 'is not a run directory' in refused.stderr and 'Traceback' not in refused.stderr


def test_timelines_have_one_bin_width_and_leave_gaps_between_updates_out(tmp_path):
  runs = [schedules.of_run(write_run(tmp_path / 'stream', STREAMED)), schedules.of_run(write_run(tmp_path / 'sync', SYNC, 'sync', end_s=16))]
  assert [r.name for r in runs] == ['thundersync (stream)', 'sync (sync)']
  stream, sync = schedules.timelines(runs)
  assert stream.bin_s == sync.bin_s and stream.end_s == 14.5 and sync.end_s == 17.5 - 1  # Sync's first span is a request at 1 s
  busy = lambda line: line.learner.sum() * line.bin_s
  assert busy(stream) == pytest.approx(11) and busy(sync) == pytest.approx(7) and stream.steps_s == (14,)
  assert stream.idle()[1] == pytest.approx(1 - 11 / 14.5) and np.all((0 <= stream.rollout) & (stream.rollout <= 1 + 1e-9))
  later = [types.Span(**{**vars(s), 'update': 1, 'start_s': s.start_s + 500, 'end_s': s.end_s + 500}) for s in runs[0].spans]
  twice = schedules.Recorded('twice', (*runs[0].spans, *later))
  line, = schedules.timelines([twice])
  assert line.end_s == pytest.approx(29) and line.steps_s == pytest.approx((14, 28.5)) and busy(line) == pytest.approx(22)
  assert len(schedules.timelines([twice, runs[1]])[0].steps_s) == 1  # as many updates as all have
  with pytest.raises(types.ConfigError, match='a picture ends in one of'):
    schedules.save(tmp_path / 'picture.txt', runs)


def test_the_report_shows_other_runs_on_the_same_axis(tmp_path):
  run, other = write_run(tmp_path / 'stream', STREAMED), write_run(tmp_path / 'sync', SYNC, 'sync', end_s=16)
  assert collect.collect(run)['schedules'] == []
  shown = collect.collect(run, beside=[other])['schedules']
  assert [v['name'] for v in shown] == ['thundersync (stream)', 'sync (sync)'] and shown[0]['bin'] == shown[1]['bin']
  assert max(shown[0]['learner']) == 100 and shown[1]['steps'] == [16.0]
  with rundir.RunDirectory(tmp_path / 'empty') as empty:
    empty.open({'schedule': {'name': 'sync'}})
  with pytest.raises(types.ConfigError, match='no learner work in its trace'):
    collect.collect(run, beside=[empty])


def test_flops_of_an_update_are_one_pass_over_what_was_computed():
  model, buckets = ModelConfig(vocab_size=11, width=6, ffn_width=10, layers=2, heads=2, kv_heads=1, head_dim=4), Buckets((4, 24, 32))
  count = lambda *spans, remat=2048: ledger.update_flops(spans, TRAJECTORIES, model, buckets, remat)
  one = flops.source_gradient(model, 1, 24, 4, 24)  # 20 tokens in a bucket of 24 behind a prompt of 2 in one of 4
  alone, fold = source(0, 1, 0, 0, 0)
  assert count(alone, fold) == one and count(learner('forward', 0, 1, 0, 0), alone) == one
  packed = learner('source', 0, 1, 0, members=(0, 1), work='final')
  assert count(packed) == flops.source_gradient(model, 2, 24, 4, 24) and count(packed, remat=8).recomputed > 0
  first, last = (learner('prompt', 0, 1, 0, work=work, tokens=2) for work in ('forward', 'backward'))
  assert count(first, last) == flops.segment_forward(model, 1, 4, 0) + flops.segment_gradient(model, 1, 4, 0)
  root, behind = learner('prompt', 0, 1, -1, work='forward', tokens=1), learner('prompt', 0, 1, 0, work='forward', tokens=1)
  assert count(root, behind) == flops.segment_forward(model, 1, 4, 0) + flops.segment_forward(model, 1, 4, 4)
