"""The study: the paper's cells, real updates with their three speedups, resumed where it was, and workloads drawn in their place."""

import csv
import json
import subprocess
import sys
import xml.etree.ElementTree as ET

from configs import study as study_config
from experiments import study_cells
from tests.experiments.conftest import ROOT

SMALL = ('--config.study.capacity=2', '--config.study.group_size=2', '--config.study.batches=(2,4)', '--config.study.turns_of_batches=2',
         '--config.study.turns=(2,)', '--config.study.batch_of_turns=4', '--config.study.ratios=(1.0,)', '--config.study.repetitions=1',
         '--config.study.calibration_updates=1', '--config.study.turn_tokens=8', '--config.study.width=16', '--config.study.ffn_width=16',
         '--config.study.layers=1', '--config.study.vocab_size=32', '--config.learner.buckets=(32,)')


def study(workdir, *settings):
  return subprocess.run([sys.executable, '-m', 'experiments.study', '--config=configs/study.py', f'--workdir={workdir}', *SMALL, *settings],
                        cwd=ROOT, capture_output=True, text=True, timeout=540)


def test_the_cells_are_the_papers():
  config = study_config.get_config()
  cells = study_cells.cells(config.study)
  assert len(cells) == len(set(cells)) == len({c.name for c in cells}) == 588
  assert sum(c.objective == 'opd' for c in cells) == 294 and sum(c.sweep == 'batch' for c in cells) == 2 * 154
  assert {c.batch for c in cells} == {b // 16 for b in (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)}
  assert len(study_cells.executed(config.study, cells)) == 588
  config.study.executed_every = 5
  walls = study_cells.executed(config.study, cells)
  assert len(walls) == 118 and {c.ratio for c in walls} == set(config.study.ratios)


def test_cells_are_executed_or_drawn_and_a_study_goes_on_where_it_was(tmp_path):
  result = study(tmp_path, '--config.study.executed_every=2')
  assert result.returncode == 0, result.stderr[-3000:]
  figures = json.loads(result.stdout.splitlines()[-1])
  assert figures['cells'] == 6 and figures['executed'] == 3 and figures['analytical_gap_percent'] >= 0
  rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
  ran = [r for r in rows if r['measured']]
  assert len(rows) == 6 and {r['objective'] for r in rows} == {'grpo', 'opd'}
  for r in ran:
    trace, measured = float(r['trace']), float(r['measured'])
    assert abs(float(r['d']) - 100 * (trace - measured) / trace) < 1e-6
    assert abs(measured - float(r['sync_step_s']) / float(r['step_s'])) < 1e-6
    assert float(r['step_s']) > float(r['rollout_s']) > 0 and 0.5 < float(r['analytical']) < 2.1
  assert ET.parse(tmp_path / 'figure.svg').getroot().tag.endswith('svg')
  calibrations = [json.loads(line) for line in (tmp_path / 'calibrations.jsonl').open()]
  assert {(c['objective'], c['turns']) for c in calibrations} == {('grpo', 2), ('opd', 2)}
  early = {c['objective']: c['turn'] for c in calibrations}
  assert early['grpo'] == 0 <= early['opd'] < 1 and all(c['work'] > 0.3 for c in calibrations)

  lines = (tmp_path / 'cells.jsonl').read_text().splitlines(keepends=True)
  (tmp_path / 'cells.jsonl').write_text(''.join(lines[:-1]) + lines[-1][:20])  # killed while it wrote
  again = study(tmp_path, '--config.study.executed_every=2')
  assert again.returncode == 0, again.stderr[-3000:]
  resumed = (tmp_path / 'cells.jsonl').read_text().splitlines(keepends=True)
  assert resumed[:-1] == lines[:-1] and len(resumed) == len(lines)
  other = study(tmp_path, '--config.study.executed_every=3')
  assert other.returncode == 1 and 'executed_every' in other.stderr and 'Traceback' not in other.stderr
