"""Sweeps: every combination once, checked before anything runs, resumable, with one table; real processes, of a small experiment."""

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from hypothesis import given, settings, strategies as st
import pytest

from experiments import cells
from ts_jax import types

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A module beside the experiments: `experiments` is a namespace only here, so that the tests need no file in the real folder.
TOY = '''
"""Prints a figure of its settings; counts its runs in the cell's folder."""
import json, pathlib, sys, time
from absl import flags
from ml_collections import config_flags
from experiments import cli
_CONFIG = config_flags.DEFINE_config_file('config', None, '', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', None, '', required=True)
_SCALE = flags.DEFINE_float('scale', 1.0, '')
def main():
  folder = pathlib.Path(_WORKDIR.value)
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / 'runs.txt', 'a') as f:
    f.write('x')
  c = _CONFIG.value
  print(json.dumps({'earlier': True}))
  if c.name == 'broken' and not (pathlib.Path(c.repair).exists() if c.repair else False):
    print('the flux capacitor is missing', file=sys.stderr)
    sys.exit(3)
  if c.name == 'slow':
    time.sleep(60)
  print(json.dumps({'value': c.part.size * _SCALE.value, 'nested': {'name': c.name, 'rows': list(c.rows)}}))
  print('the end')
if __name__ == '__main__':
  cli.run(main)
'''
CONFIG = '''
from ml_collections import config_dict
def get_config(arg=''):
  return config_dict.create(name='plain', part=config_dict.create(size=2, rate=0.5), rows=(4, 1), flag=False, repair=arg)
'''


@pytest.fixture
def toy(tmp_path):
  """Function that runs the sweep on the toy experiment."""
  package = tmp_path / 'path' / 'experiments'
  package.mkdir(parents=True)
  for path in (ROOT / 'experiments').glob('*.py'):
    (package / path.name).symlink_to(path)
  (package / 'toy.py').write_text(TOY)
  (tmp_path / 'toy_config.py').write_text(CONFIG)

  def command(*arguments, config='toy_config.py'):
    return [sys.executable, '-m', 'experiments.sweep', '--module=toy', f'--config={config}', f'--workdir={tmp_path}/sweep', *arguments]

  def call(*arguments, **options):
    return subprocess.run(command(*arguments, **options), cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=400)

  environment = os.environ | {'PYTHONPATH': f'{tmp_path / "path"}:{ROOT}'}
  call.command, call.environment, call.folder = command, environment, tmp_path
  return call


def rows(folder):
  with open(folder / 'sweep' / 'results.csv', newline='') as f:
    return list(csv.DictReader(f))


def test_a_sweep_runs_every_cell_once_records_failures_and_goes_on_where_it_was(toy):
  axes = '--product=config.part.size=2,3', '--zip=config.name=plain,broken;scale=1,10', '--set=config.rows=(8, 2)'
  first = toy(*axes, config=f'toy_config.py:{toy.folder}/repaired')
  assert first.returncode == 1, first.stderr
  summary = json.loads(first.stdout.splitlines()[-1])
  assert {k: summary[k] for k in ('cells', 'done', 'failed', 'ran')} == {'cells': 4, 'done': 2, 'failed': 2, 'ran': 4}
  found = rows(toy.folder)
  assert [(r['config.part.size'], r['config.name'], r['state'], r['value'], r['nested.rows']) for r in found] == [
      ('2', 'plain', 'done', '2.0', '[8, 2]'), ('2', 'broken', 'failed', '', ''), ('3', 'plain', 'done', '3.0', '[8, 2]'), ('3', 'broken', 'failed', '', '')]
  assert found[1]['error'] == 'status 3' and 'the flux capacitor is missing' in first.stderr and 'ETA' in first.stderr
  broken = [json.loads(p.read_text()) for p in (toy.folder / 'sweep' / 'cells').glob('*/result.json')]
  assert sum('flux capacitor' in r.get('log_end', '') for r in broken) == 2
  assert 'part.size' in first.stdout and 'plain' in first.stdout  # the table

  (toy.folder / 'repaired').touch()
  again = toy(*axes, '--product=config.flag=false,true', config=f'toy_config.py:{toy.folder}/repaired')
  assert again.returncode == 0, again.stderr
  assert json.loads(again.stdout.splitlines()[-1])['ran'] == 6  # flag=false is what the earlier cells were
  assert [r['value'] for r in rows(toy.folder)] == ['2.0', '20.0', '2.0', '20.0', '3.0', '30.0', '3.0', '30.0']
  counts = sorted(len(p.read_text()) for p in (toy.folder / 'sweep' / 'cells').glob('*/run/runs.txt'))
  assert counts == [1, 1, 1, 1, 1, 1, 2, 2]


def test_an_interrupted_sweep_leaves_no_process_and_goes_on(toy):
  child = subprocess.Popen(toy.command('--product=config.name=plain,slow'), cwd=toy.folder, env=toy.environment, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True)
  started = lambda: list((toy.folder / 'sweep' / 'cells').glob('name=slow*/run/runs.txt'))
  deadline = time.monotonic() + 240
  while not started() and child.poll() is None and time.monotonic() < deadline:
    time.sleep(0.1)
  child.send_signal(signal.SIGTERM)
  _, said = child.communicate(timeout=120)
  assert child.returncode == 130 and 'the same command goes on' in said and 'Traceback' not in said, said
  assert subprocess.run(['pgrep', '-f', str(toy.folder / 'sweep' / 'cells')], capture_output=True).returncode == 1
  assert [(r['config.name'], r['state']) for r in rows(toy.folder)] == [('plain', 'done'), ('slow', 'not run')]
  late = toy('--product=config.name=plain,slow', '--cell_timeout_s=3')
  assert json.loads(late.stdout.splitlines()[-1])['ran'] == 1 and rows(toy.folder)[1]['error'] == 'longer than --cell_timeout_s=3'


@pytest.mark.parametrize('arguments, message', [
    (['--product=config.part.sise=1,2'], 'config.part.sise is no setting of toy_config.py: did you mean config.part.size'),
    (['--product=scale=1,fast'], "'fast'"),
    (['--product=scal=1,2'], "Unknown command line flag 'scal'"),
    (['--product=scale=1,2', '--folder_flag=folder'], '--folder_flag names the flag that takes the folder of a cell')])
def test_what_is_wrong_is_said_before_anything_runs(toy, arguments, message):
  refused = toy(*arguments)
  assert refused.returncode == 1 and message in refused.stderr and 'Traceback' not in refused.stderr, refused.stderr
  assert not (toy.folder / 'sweep').exists()


@pytest.mark.parametrize('product, message', [
    ('config.size=1', 'did you mean config.part.size'), ('config.part=1', 'it is a section; set one of its keys'),
    ('config.part.size=1,two', r'config.part.size=two does not fit .*, where it is 2 \(int\)'),
    ('config.part.size=1,2.5', 'config.part.size=2.5 does not fit'), ('config.flag=maybe', r'where it is False \(bool\)'),
    ('config.part.size=3,03', 'two cells have the same settings')])
def test_settings_are_checked_against_the_config(tmp_path, product, message):
  (tmp_path / 'toy_config.py').write_text(CONFIG)
  with pytest.raises(types.ConfigError, match=message):
    cells.checked('toy', str(tmp_path / 'toy_config.py'), [cells.product_axis(product)], {'config.name': 'plain'})


def test_axes():
  assert cells.product_axis('config.rows=(4, 1),(1,)') == [{'config.rows': '(4, 1)'}, {'config.rows': '(1,)'}]
  assert cells.product_axis("config.name='a,b',c") == [{'config.name': "'a,b'"}, {'config.name': 'c'}]
  assert cells.zip_axis('config.seed=1,1;scale=2,3') == [{'config.seed': '1', 'scale': '2'}, {'config.seed': '1', 'scale': '3'}]
  for make, text, message in (
      (cells.product_axis, 'config.seed', 'sets nothing'), (cells.product_axis, 'config.seed=', 'names no values'),
      (cells.product_axis, 'batch.prompts=1', 'write config.batch.prompts'), (cells.product_axis, 'config.seed=1,1', 'a value twice'),
      (cells.product_axis, 'config.rows=(4,1', r"an open \("), (cells.zip_axis, 'config.seed=1,2;scale=1', 'as many values'),
      (cells.zip_axis, 'scale=1;scale=2', 'each name once')):
    with pytest.raises(types.ConfigError, match=message):
      make(text)
  with pytest.raises(types.ConfigError, match='by more than one of'):
    cells.combine([[{'a': '1'}], [{'b': '1', 'a': '2'}]])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4))
def test_combinations_are_all_and_distinct(shapes):
  axes = [[{f'{n}_{k}': f'{p}' for k in range(keys)} for p in range(points)] for n, (points, keys) in enumerate(shapes)]
  found = cells.combine(axes)
  assert len({tuple(sorted(f.items())) for f in found}) == len(found)
  count = 1
  for points, _ in shapes:
    count *= points
  assert len(found) == count and all(len(f) == sum(k for _, k in shapes) for f in found)


def test_the_real_configs_are_checked():
  axis = cells.product_axis('config.schedule.pack_rows=(1,),(2, 1)')
  found = cells.checked('train', str(ROOT / 'configs/smoke.py'), [axis], {'config.seed': '7'})
  assert [c.varied for c in found] == [{'config.schedule.pack_rows': '(1,)'}, {'config.schedule.pack_rows': '(2, 1)'}]
  assert found[0].arguments[1:] == ('--config.schedule.pack_rows=(1,)', '--config.seed=7') and found[0].name != found[1].name
  with pytest.raises(types.ConfigError, match='did you mean config.schedule.granularity'):
    cells.checked('train', str(ROOT / 'configs/smoke.py'), [cells.product_axis('config.schedule.granularty=turn')], {})
  with pytest.raises(types.ConfigError, match='cannot be used'):
    cells.checked('train', str(ROOT / 'configs/absent.py'), [axis], {})
  with pytest.raises(types.ConfigError, match='give --config'):
    cells.checked('scaling', '', [axis], {})


def test_the_last_json_object_counts():
  assert cells.last_object('{"a": 1}\n{"b": 2}\n{broken\nend') == {'b': 2}
  assert cells.last_object('nothing\n[1]') is None
