"""Assembles the report page from its parts and a run's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Sequence

from ts_jax import types
from ts_jax.telemetry import jsonlines
from ts_jax.telemetry import rundir
from ts_jax.telemetry.report import collect

_PARTS = Path(__file__).parent / 'assets'
_SCRIPTS = ('base.js', 'charts.js', 'overview.js', 'timeline.js', 'schedules.js', 'browser.js', 'main.js')


def build_report(run: rundir.RunDirectory, output: str | Path | None = None, caps: collect.Caps = collect.Caps(),
                 beside: Sequence[rundir.RunDirectory] = ()) -> Path:
  """Writes the report of a finished, interrupted or running run.

  Args:
    run: the run directory; only read.
    output: the HTML file; default report.html in the run directory.
    caps: how much of a very long run the page carries.
    beside: other runs, whose timelines stand under this one's; only read.

  Returns:
    The file.

  Raises:
    ConfigError: a folder is not a run directory, or a file in it is damaged.
    TsJaxError: the page cannot be written.
  """
  if not run.path.is_dir():
    raise types.ConfigError(f'{run.path} is not a folder: give the work folder of a run')
  path = Path(output) if output else run.report
  jsonlines.write_atomically(path, render(collect.collect(run, caps, beside)))
  return path


def render(data: dict[str, Any]) -> str:
  """Returns the page as HTML.  Nothing in it refers to another file."""
  parts = {
      '/*STYLE*/': (_PARTS / 'style.css').read_text('utf-8'),
      '/*DATA*/': embed(data),
      '/*SCRIPT*/': '\n'.join((_PARTS / s).read_text('utf-8') for s in _SCRIPTS),
  }
  pieces = [(_PARTS / 'page.html').read_text('utf-8')]
  for marker, text in parts.items():  # split at the marker rather than replace: data may contain a later marker
    before, after = pieces.pop().split(marker)
    pieces += [before, text, after]
  return ''.join(pieces)


def embed(data: Any) -> str:
  """Returns JSON that may stand inside a script element: '<' is escaped, so nothing in it ends the element or opens a comment."""
  text = json.dumps(data, separators=(',', ':'), ensure_ascii=True, allow_nan=False)
  return text.replace('<', '\\u003c').replace('>', '\\u003e').replace('&', '\\u0026')
