"""The run directory: what is written is read back, also after a kill, and only one process writes."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import ml_collections
import pytest

from ts_jax import types
from ts_jax.models import safetensors_file
from ts_jax.telemetry import jsonlines
from ts_jax.telemetry import rundir


def trajectory(update=0, group=0, index=0, observation='ok', reward=1.5):
  sampled = types.SampledTokens((5, 6), (-0.25, -1.5), update, update, types.FinishReason.STOP)
  turn = types.Turn(0, (), sampled, (True, False), action='ls', observation=observation)
  return types.Trajectory(update, group, index, 'copy/1', update, (1, 2, 3), (turn,), types.TerminalReason.DONE, reward, ('a=1', 'b=0'), 1.0, 2.0, 3.0)


def span(update, kind='engine'):
  return types.Span(kind, 1.25, 2.5, update, 1, 2, 3, tokens=7, ready_s=1.0)


@pytest.fixture
def run(tmp_path):
  with rundir.RunDirectory(tmp_path / 'run') as run:
    run.open({'updates': 4, 'seed': 1})
    yield run


def test_records_read_back_as_they_were_written(run):
  hostile = 'tab\t "quote" \u2028 \ud800 \x00 漢字'
  trajectories = [trajectory(0, 1, 0), trajectory(0, 0, 1, observation=hostile), trajectory(1)]
  for t in trajectories:
    run.append_trajectory(t)
  run.append_span(span(0))
  run.append_metrics({'kind': 'update', 'update': 0, 'reward_mean': 0.5})
  again = rundir.RunDirectory(run.path)  # a reader beside the writer, before anything is closed
  assert again.read_trajectories(0) == [trajectories[1], trajectories[0]]
  assert again.read_trajectories(1) == [trajectories[2]]
  assert again.updates_with_trajectories() == [0, 1]
  assert again.read_trace() == [span(0)]
  assert again.read_metrics() == [{'kind': 'update', 'update': 0, 'reward_mean': 0.5}]
  assert again.read_config() == {'updates': 4, 'seed': 1}


def test_an_unfinished_last_line_is_ignored_and_cut_before_the_next_append(run):
  run.append_trajectory(trajectory(0, 0, 0))
  run.append_trajectory(trajectory(0, 0, 1))
  run.close()
  file = run.trajectories / 'update_000000.jsonl'
  data = file.read_bytes()
  for cut in (1, 2, 50, len(data) // 2 - 1):  # the newline alone; a few characters; nearly the whole line
    file.write_bytes(data[:-cut])
    assert run.read_trajectories(0) == [trajectory(0, 0, 0)]
  run.open({'updates': 4, 'seed': 1})
  run.append_trajectory(trajectory(0, 0, 2))
  assert [t.index for t in run.read_trajectories(0)] == [0, 2]


def test_a_file_that_holds_only_an_unfinished_line_reads_empty(tmp_path):
  lines = jsonlines.JsonLines(tmp_path / 'x.jsonl')
  lines.path.write_bytes(b'{"a":' + b'1' * 200_000)
  assert not list(lines.read())
  lines.append({'b': 2})
  assert list(lines.read()) == [{'b': 2}]


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path):
  lines = jsonlines.JsonLines(tmp_path / 'x.jsonl')
  lines.path.write_bytes(b'{"a":1}\n{"a"\n{"a":3}\n')
  with pytest.raises(types.ConfigError, match=r'x\.jsonl:2'):
    list(lines.read())


def test_resume_drops_what_will_run_again(run):
  for update in range(4):
    run.append_metrics({'kind': 'eval', 'split': 'dev', 'update': update})
    run.append_metrics({'kind': 'update', 'update': update})
    run.append_span(span(update))
    run.append_trajectory(trajectory(update))
  run.resume_at(2)
  assert [(r['kind'], r['update']) for r in run.read_metrics()] == [('eval', 0), ('update', 0), ('eval', 1), ('update', 1), ('eval', 2)]
  assert [s.update for s in run.read_trace()] == [0, 1]
  assert run.updates_with_trajectories() == [0, 1]
  run.append_metrics({'kind': 'update', 'update': 2})  # writing goes on in the same object
  run.append_trajectory(trajectory(2))
  assert run.read_metrics()[-1]['update'] == 2 and run.updates_with_trajectories() == [0, 1, 2]


def test_resume_can_keep_the_finished_trajectories_of_the_interrupted_update(run):
  for update in (1, 2):
    run.append_trajectory(trajectory(update))
  run.resume_at(1, keep_trajectories=1)
  assert run.read_trajectories(1) == [trajectory(1)] and run.updates_with_trajectories() == [1]


def test_of_two_records_of_one_trajectory_or_update_the_later_counts(run):
  run.append_trajectory(trajectory(reward=0.5))
  run.append_trajectory(trajectory(reward=1.5))
  run.append_metrics({'kind': 'eval', 'split': 'dev', 'update': 1, 'reward_mean': 0.1})
  run.append_metrics({'kind': 'eval', 'split': 'dev', 'update': 1, 'reward_mean': 0.2})
  assert [t.reward for t in run.read_trajectories(0)] == [1.5]
  assert [r['reward_mean'] for r in run.read_metrics()] == [0.2]


def test_two_writers_of_one_folder_are_refused_with_the_pid(run):
  with pytest.raises(types.ConfigError, match=f'process {os.getpid()}'):
    rundir.RunDirectory(run.path).open({'updates': 4, 'seed': 1})
  run.close()
  with rundir.RunDirectory(run.path) as other:
    assert other.open({'updates': 4, 'seed': 1})


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
  code = ('import sys, time\nfrom ts_jax.telemetry import rundir\nr = rundir.RunDirectory(sys.argv[1])\nr.open({"updates": 1})\n'
          'print("open", flush=True)\ntime.sleep(60)\n')
  child = subprocess.Popen([sys.executable, '-c', code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
  try:
    assert child.stdout.readline() == 'open\n'
    with pytest.raises(types.ConfigError, match=f'process {child.pid}'):
      rundir.RunDirectory(tmp_path).open({'updates': 1})
  finally:
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
  assert (tmp_path / 'run.lock').read_text() == f'{child.pid}\n'
  with rundir.RunDirectory(tmp_path) as run:
    assert run.open({'updates': 1})


def test_another_config_is_refused_naming_the_keys_and_leaves_no_lock(tmp_path):
  with rundir.RunDirectory(tmp_path) as run:
    assert not run.open(ml_collections.ConfigDict({'updates': 10, 'batch': {'size': (2, 3), 'flag': True}, 'note': 'a'}))
  other = rundir.RunDirectory(tmp_path)
  with pytest.raises(types.ConfigError, match=r'batch\.flag: True there, 1 now; batch\.new: \(not set\) there, 4 now; updates: 10 there, 9 now'):
    other.open({'updates': 9, 'batch': {'size': [2, 3], 'flag': 1, 'new': 4}, 'note': 'b'}, may_change=('note',))
  with other:
    other.open({'updates': 20, 'batch': {'size': [2, 3], 'flag': True}, 'note': 'b'}, may_change=('note',))
    assert other.read_config()['updates'] == 20


def test_the_manifest_keeps_earlier_starts_and_refuses_another_model(run):
  facts = rundir.environment_facts()
  assert facts['versions']['jax'] and facts['python'] and facts['cpu_count'] > 0
  run.write_manifest({**facts, 'seed': 1, 'model_checksum': 'abc', 'task_digests': {'t': '1'}, 'folder': pathlib.Path('/m')})
  run.write_manifest({**facts, 'seed': 1, 'model_checksum': 'abc', 'task_digests': {'t': '1'}, 'command': ['again']})
  manifest = run.read_manifest()
  assert manifest['command'] == ['again'] and len(manifest['earlier_starts']) == 1
  with pytest.raises(types.ConfigError, match="model_checksum was 'abc' and is now 'def'"):
    run.write_manifest({**facts, 'model_checksum': 'def'})


def test_a_full_disk_is_an_error_that_names_the_file(run):
  run.metrics.path.symlink_to('/dev/full')
  with pytest.raises(safetensors_file.DiskFullError, match=r'no space left on the disk of .*metrics\.jsonl.*free some'):
    run.append_metrics({'kind': 'update', 'update': 0})
  run.metrics.path.unlink()
  run.append_metrics({'kind': 'update', 'update': 1})
  assert [r['update'] for r in run.read_metrics()] == [1]


def test_a_work_folder_below_a_file_is_an_error_that_names_it(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(types.TsJaxError, match='cannot write .*file/run'):
    rundir.RunDirectory(tmp_path / 'file' / 'run').open({})


def test_writing_without_opening_is_refused(tmp_path):
  with pytest.raises(types.TsJaxError, match='not open for writing'):
    rundir.RunDirectory(tmp_path).append_span(span(0))


def test_a_value_that_json_does_not_have_is_not_written(run):
  with pytest.raises(ValueError):
    run.append_metrics({'kind': 'update', 'update': 0, 'grad_norm': float('nan')})
  with pytest.raises(ValueError):
    run.append_span(dataclasses.replace(span(0), end_s=float('inf')))
  assert run.read_metrics() == [] and run.read_trace() == []


def test_configs_become_plain_json():
  config = ml_collections.ConfigDict({'a': (1, 2), 'b': {'c': None}})
  plain = rundir.plain_config({'x': config, 3: pathlib.Path('/p')})
  assert json.loads(json.dumps(plain)) == plain == {'x': {'a': [1, 2], 'b': {'c': None}}, '3': '/p'}
