"""Heat maps and scatter plots as one SVG file, without a drawing library."""

from __future__ import annotations

import base64
import dataclasses
import html
import struct
from typing import Iterator, Sequence
import zlib

import numpy as np

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP_X, _GAP_Y = 190, 150, 64, 74, 62, 74
_COLOURS = np.array([[38, 26, 84], [53, 78, 140], [36, 128, 142], [58, 176, 116], [170, 214, 66], [253, 231, 90]], float)
_INK = '#222'


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
  width = _LEFT + max(map(len, rows)) * (_WIDTH + _GAP_X) + 50
  height = _TOP + len(rows) * (_HEIGHT + _GAP_Y)
  parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           f'font-family="Helvetica, Arial, sans-serif" font-size="11" fill="{_INK}"><title>{html.escape(title)}</title>'
           f'<rect width="100%" height="100%" fill="#fff"/>', _text(_LEFT, 26, title, size=15)]
  for r, row in enumerate(rows):
    for c, panel in enumerate(row):
      parts.append(f'<g transform="translate({_LEFT + c * (_WIDTH + _GAP_X)} {_TOP + r * (_HEIGHT + _GAP_Y)})">')
      parts += _heatmap(panel, low, high, levels) if isinstance(panel, Heatmap) else _scatter(panel, low, high)
      parts.append('</g>')
  ramp = np.linspace(high, low, 64)[:, None]
  x = width - 78
  parts.append(f'<g transform="translate({x} {_TOP})">{_image(ramp, low, high, 12, _HEIGHT)}')
  parts += [_text(18, _HEIGHT * (1 - at) + 4, f'{low + at * (high - low):g}×') for at in np.linspace(0, 1, 6).round(2)]
  return ''.join([*parts, '</g></svg>\n'])


def contour(values: np.ndarray, level: float) -> Iterator[tuple[float, float, float, float]]:
  """Segments (x0, y0, x1, y1) of a contour in grid units, by marching squares with linear interpolation."""
  above = values >= level
  corners = np.stack([above[:-1, :-1], above[:-1, 1:], above[1:, 1:], above[1:, :-1]])
  for j, i in zip(*np.nonzero(corners.any(0) & ~corners.all(0))):
    square = [(i, j), (i + 1, j), (i + 1, j + 1), (i, j + 1)]
    crossings = []
    for (x0, y0), (x1, y1) in zip(square, square[1:] + square[:1]):
      a, b = values[y0, x0], values[y1, x1]
      if (a >= level) != (b >= level):
        t = (level - a) / (b - a)
        crossings.append((x0 + t * (x1 - x0), y0 + t * (y1 - y0)))
    for (x0, y0), (x1, y1) in zip(crossings[::2], crossings[1::2]):
      yield float(x0), float(y0), float(x1), float(y1)


def _heatmap(panel: Heatmap, low: float, high: float, levels: Sequence[float]) -> list[str]:
  ny, nx = panel.values.shape
  dx, dy = _WIDTH / (nx - 1), _HEIGHT / (ny - 1)
  # Pixels are centred on the grid's points, so that the outer half of the border pixels lies outside the frame.
  parts = [f'<svg width="{_WIDTH}" height="{_HEIGHT}"><g transform="translate({-dx / 2:.3f} {-dy / 2:.3f})">',
           _image(panel.values[::-1], low, high, _WIDTH + dx, _HEIGHT + dy), '</g>']
  for level in levels:
    path = ''.join(f'M{x0 * dx:.1f} {_HEIGHT - y0 * dy:.1f}L{x1 * dx:.1f} {_HEIGHT - y1 * dy:.1f}'
                   for x0, y0, x1, y1 in contour(panel.values, level))
    ink = '#fff' if level < low + 0.65 * (high - low) else _INK  # the upper colours are light
    parts.append(f'<path d="{path}" stroke="{ink}" stroke-opacity=".75" fill="none"/>')
  parts.append('</svg>')
  across = lambda axis, v: np.log(v / axis.grid[0]) / np.log(axis.grid[-1] / axis.grid[0])
  return parts + _frame(panel.title, panel.x.label, panel.y.label, [(f'{v:g}', across(panel.x, v)) for v in panel.x.ticks],
                        [(f'{v:g}', across(panel.y, v)) for v in panel.y.ticks])


def _scatter(panel: Scatter, low: float, high: float) -> list[str]:
  place = lambda v: (v - low) / (high - low)
  parts = [f'<path d="M0 {_HEIGHT}L{_WIDTH} 0" stroke="#999"/>']
  for points, style in ((panel.hollow, 'fill="none" stroke="#24808e"'), (panel.filled, 'fill="#261a54"')):
    parts += [f'<circle cx="{place(x) * _WIDTH:.1f}" cy="{_HEIGHT - place(y) * _HEIGHT:.1f}" r="2" {style}/>' for x, y in points]
  ticks = [(f'{v:g}', place(v)) for v in np.linspace(low, high, 6).round(2)]
  return parts + _frame(panel.title, panel.x_label, panel.y_label, ticks, ticks)


def _frame(title: str, x_label: str, y_label: str, x_ticks, y_ticks) -> list[str]:
  parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="{_INK}"/>', _text(_WIDTH / 2, -8, title, 'middle', 12),
           _text(_WIDTH / 2, _HEIGHT + 32, x_label, 'middle'),
           f'<g transform="translate(-44 {_HEIGHT / 2}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>']
  for label, at in x_ticks:
    parts.append(f'<path d="M{at * _WIDTH:.1f} {_HEIGHT}v4" stroke="{_INK}"/>{_text(at * _WIDTH, _HEIGHT + 16, label, "middle")}')
  for label, at in y_ticks:
    parts.append(f'<path d="M0 {_HEIGHT * (1 - at):.1f}h-4" stroke="{_INK}"/>{_text(-7, _HEIGHT * (1 - at) + 4, label, "end")}')
  return parts


def _image(values: np.ndarray, low: float, high: float, width: float, height: float) -> str:
  """An <image> of the values' colours, first row on top."""
  place = np.clip((values - low) / (high - low), 0, 1) * (len(_COLOURS) - 1)
  below = np.minimum(place.astype(int), len(_COLOURS) - 2)
  part = (place - below)[..., None]
  pixels = (_COLOURS[below] * (1 - part) + _COLOURS[below + 1] * part).round().astype(np.uint8)
  rows = b''.join(b'\0' + row.tobytes() for row in pixels)  # 0: the row is not filtered
  chunk = lambda kind, data: struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
  header = struct.pack('>2I5B', values.shape[1], values.shape[0], 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
  png = b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b'')
  return (f'<image width="{width:.3f}" height="{height:.3f}" preserveAspectRatio="none" '
          f'href="data:image/png;base64,{base64.b64encode(png).decode()}"/>')


def _text(x: float, y: float, text: str, anchor: str = 'start', size: int = 11) -> str:
  return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(text)}</text>'
