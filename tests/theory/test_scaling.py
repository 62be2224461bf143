"""`python -m experiments.scaling` writes its figures and prints the paper's numbers; contours are where they should be."""

import json
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ET

import matplotlib.contour
import matplotlib.figure
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


def test_contours_follow_their_levels_inside_the_panel():
  x, y = heatmap.Axis('x', np.geomspace(1, 100, 9), (1, 10, 100)), heatmap.Axis('y', np.geomspace(1, 10, 7), (1, 10))
  values = np.log10(x.grid) + 0.5 * np.log10(y.grid)[:, None]
  place = matplotlib.figure.Figure().subplots()
  heatmap._heatmap(place, heatmap.Heatmap('h', x, y, values), 0.0, 3.0, (1.3, 20.0))
  lines, = (c for c in place.collections if isinstance(c, matplotlib.contour.ContourSet))
  assert list(lines.levels) == [1.3]
  points = np.log10(np.concatenate([path.vertices for path in lines.get_paths()]))
  np.testing.assert_allclose(points @ [1, 0.5], 1.3, atol=0.02)  # straight lines between grid points
  assert points[:, 1].min() == 0 and abs(points[:, 1].max() - 1) < 1e-9
