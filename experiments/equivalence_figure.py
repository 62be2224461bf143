"""Figure 11 of ThunderSyncRL from our own measurements: a row of three panels for each objective."""

from __future__ import annotations

import json
import pathlib
from typing import Sequence

import matplotlib
from matplotlib import figure as figure_lib, ticker
import numpy as np

from experiments import update_errors

OBJECTIVES = ('grpo', 'opd')
_NAMES = {'grpo': 'GRPO', 'opd': 'OPD'}
_SYNC, _OURS, _REFERENCE = '#c2591b', '#1f5fa8', '#555555'


def save(stem: pathlib.Path, name: str, granularity: str, errors: update_errors.Errors) -> list[pathlib.Path]:
  """Draws an objective's row, and all rows whose data lie beside it.

  Args:
    stem: path and beginning of the files' names: '<stem>-<name>.svg', '.png' and '.json', '<stem>.svg' and '.png'.
    name: the objective.
    granularity: of the streamed schedule that panels (a) and (b) show.
    errors: its figures.

  Returns:
    The pictures written.
  """
  stem.parent.mkdir(parents=True, exist_ok=True)
  row = {'objective': name, 'granularity': granularity, 'samples': {k: v.tolist() for k, v in errors.samples.items()},
         **{k: v for k, v in vars(errors).items() if k != 'samples'}}
  _data(stem, name).write_text(json.dumps(row), 'utf-8')
  written = _write(stem.with_name(f'{stem.name}-{name}'), [row])
  found = [json.loads(_data(stem, n).read_text('utf-8')) for n in OBJECTIVES if _data(stem, n).exists()]
  return written + (_write(stem, found) if len(found) == len(OBJECTIVES) else [])


def _data(stem: pathlib.Path, name: str) -> pathlib.Path:
  return stem.with_name(f'{stem.name}-{name}.json')


def _write(stem: pathlib.Path, rows: Sequence[dict]) -> list[pathlib.Path]:
  paths = [stem.with_name(f'{stem.name}{ending}') for ending in ('.svg', '.png')]
  with matplotlib.rc_context({'font.size': 9, 'axes.titlesize': 10, 'svg.hashsalt': 'ts_jax'}):
    picture = draw(rows)
    for path in paths:
      picture.savefig(path, dpi=160)
  return paths


def draw(rows: Sequence[dict]) -> figure_lib.Figure:
  """The figure of saved rows (see `save`); panels are lettered as in the paper."""
  picture = figure_lib.Figure(figsize=(11.4, 3.7 * len(rows)), layout='constrained')
  for row, panels in zip(rows, picture.subplots(len(rows), 3, squeeze=False)):
    first = 3 * OBJECTIVES.index(row['objective']) if row['objective'] in OBJECTIVES else 0
    letters, name = 'abcdef'[first:first + 3], _NAMES.get(row['objective'], row['objective'])
    _identical(panels[0], row)
    _precision(panels[1], row)
    _gaps(panels[2], row)
    titles = ('FP32: identical gradients', 'BF16 vs FP32 gradient', 'Parameter gap per update')
    for letter, title, panel in zip(letters, titles, panels):
      panel.set_title(f'({letter}) {name}. {title}')
  picture.supxlabel('Points are coordinates of the first batch direction, drawn with a chance proportional to their size; dashed diagonals: '
                    'equality', fontsize=8, color='#555555')
  return picture


def _identical(panel, row: dict) -> None:
  chosen, scale = row['granularity'], _exponent(row)
  _diagonal(panel, row)
  panel.scatter(*(np.asarray(row['samples'][k]) / scale for k in ('sync', 'streamed')), s=7, color=_OURS, alpha=0.5, linewidths=0)
  panel.set(xlabel=f'Sync gradient{_times(scale)}', ylabel=f'Streamed gradient{_times(scale)}')
  panel.text(0.04, 0.96, f'cosine = 1 − {row["cosine"][chosen]:.1e}\nrel. error = {row["float32"][chosen]:.2e}', va='top',
             transform=panel.transAxes)


def _precision(panel, row: dict) -> None:
  scale = _exponent(row)
  _diagonal(panel, row)
  x = np.asarray(row['samples']['sync']) / scale
  for key, label, colour, marker in (('sync_bfloat16', 'Sync (BF16)', _SYNC, 's'), ('streamed_bfloat16', 'Streamed (BF16)', _OURS, 'o')):
    error = row['bfloat16']['batch' if key == 'sync_bfloat16' else row['granularity']]
    panel.scatter(x, np.asarray(row['samples'][key]) / scale, s=9, marker=marker, facecolors='none', edgecolors=colour, linewidths=0.6,
                  alpha=0.6, label=f'{label}, rel. error {error:.3g}')
  panel.set(xlabel=f'FP32 Sync gradient{_times(scale)}', ylabel=f'BF16 gradient{_times(scale)}')
  panel.legend(loc='upper left', frameon=False, fontsize=8, handletextpad=0.2, borderaxespad=0.2)


def _gaps(panel, row: dict) -> None:
  chosen = row['granularity']
  updates = np.arange(1, len(row['precision_gap']) + 1)
  panel.plot(updates, row['precision_gap'], color=_REFERENCE, linestyle='--', marker='s', markersize=4, label='Sync: BF16 vs FP32')
  panel.plot(updates, row['bfloat16_gap'], color=_SYNC, marker='^', markersize=4, label='BF16: streamed vs Sync')
  for granularity, gaps in row['gap'].items():
    own = granularity == chosen
    panel.plot(updates, gaps, color=_OURS, alpha=1 if own else 0.35, linewidth=1.5 if own else 0.9, marker='o', markersize=4 if own else 2,
               label=f'FP32: streamed vs Sync ({granularity})' if own else None)
  others = [g for g in row['gap'] if g != chosen]
  if others:
    panel.plot([], [], color=_OURS, alpha=0.35, linewidth=0.9, marker='o', markersize=2, label=f'the same: {", ".join(others)}')
  panel.set(yscale='log', ylim=(1e-7, 1e3), xlabel='Update k (replayed rollouts)',
            ylabel=r'$\|\theta_k^\mathrm{streamed}-\theta_k^\mathrm{sync}\|\,/\,\|\theta_k^\mathrm{sync}-\theta_0\|$')
  panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  panel.grid(axis='y', linewidth=0.4, alpha=0.5)
  panel.legend(loc='upper left', frameon=False, fontsize=8)


def _diagonal(panel, row: dict) -> None:
  """Equality, over a square range that holds all samples."""
  reach = 1.08 * max(np.abs(v).max() for v in row['samples'].values()) / _exponent(row)
  panel.plot((-reach, reach), (-reach, reach), color='#999999', linestyle='--', linewidth=0.8, zorder=0)
  panel.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect='equal')


def _exponent(row: dict) -> float:
  """The power of ten that the row's coordinates are shown in."""
  return 10.0 ** np.floor(np.log10(max(np.abs(v).max() for v in row['samples'].values())))


def _times(scale: float) -> str:
  power = round(np.log10(scale))
  return rf' ($\times 10^{{{power}}}$)' if power else ''
