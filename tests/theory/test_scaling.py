"""`python -m experiments.scaling` writes its figures and prints the paper's numbers; contours are where they should be."""

import json
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from experiments import heatmap

ROOT = pathlib.Path(__file__).resolve().parents[2]


def scaling(*arguments):
  return subprocess.run([sys.executable, '-m', 'experiments.scaling', *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120,
                        env=os.environ | {'PYTHONPATH': str(ROOT)})


def test_figures_tables_and_key_figures(tmp_path):
  result = scaling(f'--workdir={tmp_path}', '--repetitions=1')
  assert result.returncode == 0, result.stderr[-2000:]
  figures = json.loads(result.stdout.splitlines()[-1])
  assert round(figures['grpo_256'], 2) == 1.84 and round(figures['grpo_2048'], 2) == 1.98
  assert round(figures['opd_256_turns_10'], 3) == 1.967 and round(figures['opd_256_turns_300'], 3) == 1.975
  assert round(figures['opd_2048'], 2) == 2.00
  assert round(figures['grpo_64_peak'], 2) == 1.71 and round(figures['opd_64_peak'], 2) == 1.95
  assert round(figures['off_balance_least'], 2) == 1.34 and round(figures['off_balance_greatest'], 2) == 1.36
  assert figures['model_gap_percent_mean'] < 1.6
  for name in ('7b', '8', '9', '10'):
    svg = ET.parse(tmp_path / f'figure_{name}.svg').getroot()
    assert len(svg.findall('.//{*}image')) > 4, name
    assert f'Figure {name}' in svg.find('{*}title').text
  assert 'Figure 7b' in result.stdout and '1.839' in result.stdout


@pytest.mark.parametrize('flag, told', [('--forward_fraction=0.99', 'turn=0.99 and closure=0.02'), ('--capacity=0', '--capacity')])
def test_a_bad_flag_is_one_line(flag, told, tmp_path):
  result = scaling(f'--workdir={tmp_path}', flag)
  assert result.returncode != 0 and told in result.stderr + result.stdout and 'Traceback' not in result.stderr


def test_contour_follows_its_level():
  x, y = np.meshgrid(np.arange(9), np.arange(7))
  segments = np.array(list(heatmap.contour(x + 0.5 * y, 4.2))).reshape(-1, 2)
  np.testing.assert_allclose(segments @ [1, 0.5], 4.2)
  assert segments[:, 1].min() == 0 and segments[:, 1].max() == 6
  assert not list(heatmap.contour(x * 1.0, 20.0))
