"""Heat maps and scatter plots over logarithmic axes as one SVG file."""

from __future__ import annotations

import dataclasses
import io
from typing import Sequence

import matplotlib
from matplotlib import figure as figure_lib, ticker
import numpy as np

_COLOURS = 'viridis'


@dataclasses.dataclass(frozen=True)
class Axis:
  """A logarithmic axis: the grid's positions (evenly spaced in the logarithm) and the marked ones."""

  label: str
  grid: np.ndarray
  ticks: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Heatmap:
  """values [y grid, x grid] over two axes."""

  title: str
  x: Axis
  y: Axis
  values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Scatter:
  """Points (x, y) of equal quantities: `hollow` and `filled` circles about the diagonal, each [points, 2]."""

  title: str
  x_label: str
  y_label: str
  hollow: np.ndarray
  filled: np.ndarray


def draw(title: str, rows: Sequence[Sequence[Heatmap | Scatter]], low: float, high: float, levels: Sequence[float]) -> str:
  """Returns the SVG of panels in rows; colours run from `low` to `high`, contours stand at `levels`."""
  columns = max(map(len, rows))
  written = io.StringIO()
  with matplotlib.rc_context({'font.size': 8, 'axes.titlesize': 9, 'svg.hashsalt': 'ts_jax'}):
    picture = figure_lib.Figure(figsize=(3.1 * columns + 0.8, 2.7 * len(rows) + 0.4), layout='constrained')
    picture.suptitle(title, fontsize=11)
    shown = None
    places = picture.subplots(len(rows), columns, squeeze=False)
    for row, axes in zip(rows, places):
      for panel, place in zip(row, axes):
        if isinstance(panel, Heatmap):
          shown = _heatmap(place, panel, low, high, levels)
        else:
          _scatter(place, panel, low, high)
      for place in axes[len(row):]:
        place.set_axis_off()
    if shown is not None:
      bar = picture.colorbar(shown, ax=places, shrink=1 / len(rows), aspect=14, anchor=(0, 1), format='%g×')
      bar.ax.hlines(levels, 0, 1, colors=_inks(levels, low, high), linewidths=0.8)
    picture.savefig(written, format='svg', dpi=150, metadata={'Title': title, 'Date': None})
  return written.getvalue()


def _inks(levels: Sequence[float], low: float, high: float) -> list[str]:
  return ['white' if v < low + 0.65 * (high - low) else 'black' for v in levels]  # the upper colours are light


def _heatmap(place, panel: Heatmap, low: float, high: float, levels: Sequence[float]):
  shown = place.pcolormesh(panel.x.grid, panel.y.grid, panel.values, vmin=low, vmax=high, cmap=_COLOURS, shading='gouraud', rasterized=True)
  drawn = [v for v in levels if panel.values.min() < v < panel.values.max()]
  if drawn:
    place.contour(panel.x.grid, panel.y.grid, panel.values, levels=drawn, colors=_inks(drawn, low, high), linewidths=0.8, alpha=0.75)
  place.set(xscale='log', yscale='log', title=panel.title, xlabel=panel.x.label, ylabel=panel.y.label)
  for axis, marked in ((place.xaxis, panel.x.ticks), (place.yaxis, panel.y.ticks)):
    axis.set_major_locator(ticker.FixedLocator(marked))
    axis.set_major_formatter(ticker.FormatStrFormatter('%g'))
    axis.set_minor_locator(ticker.NullLocator())
  return shown


def _scatter(place, panel: Scatter, low: float, high: float) -> None:
  place.plot((low, high), (low, high), color='#999999', linewidth=0.8, zorder=0)
  for points, face in ((panel.hollow, 'none'), (panel.filled, '#261a54')):
    if len(points):
      place.scatter(*points.T, s=8, facecolors=face, edgecolors='#24808e' if face == 'none' else face, linewidths=0.7)
  place.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, xlim=(low, high), ylim=(low, high), aspect='equal')
