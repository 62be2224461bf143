"""Runs an experiment for every combination of settings, one after another, and makes one table of results.

    python -m experiments.sweep --module=train --config=configs/smoke.py --workdir=runs/sweep \\
        --product=config.schedule.name=sync,thundersync --zip='config.batch.prompts=2,4;config.batch.group_size=8,4' --set=config.updates=2

Each --product and each --zip is an axis; a sweep has every combination of their points.  A --product has one setting's values,
a --zip those of several settings that change together.  A setting is config.KEY or another flag of the experiment; commas inside
brackets belong to a value.  --set holds for all cells.  All of it is checked before the first cell starts.

Cells have folders of their own below WORKDIR/cells: log.txt, result.json, and the run itself in run/ (given to the experiment by the
flag that --folder_flag names).  Started again, a sweep goes on where it was: a finished cell does not run again, a failed one
does.  The last JSON line a cell prints is its row of results.csv.  A cell whose settings or config changed is another cell.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, Mapping, Sequence

from absl import flags

from experiments import cells as cells_lib, cli
from ts_jax import types
from ts_jax.telemetry import jsonlines, progress as progress_lib

_MODULE = flags.DEFINE_string('module', 'train', 'Experiment to run: a module of experiments/.')
_CONFIG = flags.DEFINE_string('config', '', 'Config file of the experiment, with its argument if it takes one.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the sweep; made if needed, continued if it holds one.', required=True)
_PRODUCT = flags.DEFINE_multi_string('product', [], 'An axis: NAME=VALUE,VALUE,...')
_ZIP = flags.DEFINE_multi_string('zip', [], 'An axis of settings that change together: NAME=VALUE,...;NAME=VALUE,...')
_SET = flags.DEFINE_multi_string('set', [], 'NAME=VALUE for all cells.')
_FOLDER_FLAG = flags.DEFINE_string('folder_flag', 'workdir', "The experiment's flag that takes the cell's folder; empty: none.")
_TIMEOUT = flags.DEFINE_float('cell_timeout_s', 0.0, 'Longest time of one cell; 0: no limit.', lower_bound=0)

_LOG_END = 2000  # characters kept of a failed cell's log
_GRACE_S = 60.0  # for an interrupted cell to save what it has


def planned() -> list[cells_lib.Cell]:
  """The cells that the flags ask for, checked.

  Raises:
    ConfigError: an axis, a setting or a flag is wrong; nothing has run then.
  """
  axes = [cells_lib.product_axis(text) for text in _PRODUCT.value] + [cells_lib.zip_axis(text) for text in _ZIP.value]
  fixed = dict(map(cells_lib.setting, _SET.value))
  if not axes:
    raise types.ConfigError('there is nothing to sweep over: give at least one --product or --zip')
  cells = cells_lib.checked(_MODULE.value, _CONFIG.value, axes, fixed)
  cells_lib.check_flags(_MODULE.value, cells, _FOLDER_FLAG.value)
  return cells


def run(cell: cells_lib.Cell, folder: pathlib.Path) -> dict[str, Any]:
  """Runs one cell as a process of its own and records how it ended; nothing is recorded of one that was interrupted."""
  folder.mkdir(parents=True, exist_ok=True)
  log = folder / 'log.txt'
  into = [f'--{_FOLDER_FLAG.value}={folder / "run"}'] if _FOLDER_FLAG.value else []
  command = [sys.executable, '-m', f'experiments.{_MODULE.value}', *cell.arguments, *into]
  begin, timed_out = time.time(), False
  with open(log, 'wb') as output:
    # A session of its own: an interrupt from the terminal is passed on once, by us.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
      child.wait(_TIMEOUT.value or None)
    except subprocess.TimeoutExpired:
      timed_out = True
    finally:
      _end(child)
  text = log.read_text('utf-8', 'replace')
  figures = cells_lib.last_object(text) if child.returncode == 0 and not timed_out else None
  result = {'state': 'done' if child.returncode == 0 and not timed_out else 'failed', 'seconds': round(time.time() - begin, 2),
            'returncode': child.returncode, 'settings': dict(cell.varied), 'command': command, 'figures': figures or {}}
  if result['state'] == 'failed':
    result['error'] = f'longer than --cell_timeout_s={_TIMEOUT.value:g}' if timed_out else f'status {child.returncode}'
    result['log_end'] = text[-_LOG_END:]
  elif figures is None:
    result['error'] = 'printed no JSON object'
  jsonlines.write_atomically(folder / 'result.json', json.dumps(result, indent=2) + '\n')
  return result


def _end(child: subprocess.Popen) -> None:
  """Lets a child that still runs save and end, then ends what is left of its session."""
  if child.poll() is None:
    child.send_signal(signal.SIGINT)
    try:
      child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
      pass
  try:
    os.killpg(child.pid, signal.SIGKILL)
  except ProcessLookupError:
    pass
  child.wait()


def folder_of(cell: cells_lib.Cell, parent: pathlib.Path) -> pathlib.Path:
  """The folder of a cell; one that an earlier sweep made under another name (other axes) is found again."""
  return next(iter(sorted(parent.glob(f'*-{cell.digest}'))), parent / cell.name)


def earlier(folder: pathlib.Path) -> dict[str, Any] | None:
  """What was recorded of a cell, None of one that never ended.

  Raises:
    ConfigError: the record is damaged.
  """
  path = folder / 'result.json'
  if not path.exists():
    return None
  try:
    return json.loads(path.read_text('utf-8'))
  except ValueError as e:
    raise types.ConfigError(f'{path} is not JSON ({e}): delete it, and the cell runs again') from e


def table(cells: Sequence[cells_lib.Cell], results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
  """One row a cell: its settings, how it ended, its figures (nested ones by dotted names)."""
  rows = []
  for cell in cells:
    result = results.get(cell.name, {'state': 'not run'})
    own = {'state': result['state'], 'seconds': result.get('seconds'), 'error': result.get('error')}
    rows.append({**cell.varied, **own, **{f'result.{k}' if k in cell.varied or k in own else k: v
                                          for k, v in cells_lib.flat(result.get('figures', {})).items()}})
  columns = list(dict.fromkeys(k for row in rows for k in row))
  return [{c: row.get(c) for c in columns if c != 'error' or any(r.get('error') for r in rows)} for row in rows]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
  """The table as CSV; an empty field is no value."""
  written = io.StringIO()
  writer = csv.DictWriter(written, list(rows[0]), lineterminator='\n')
  writer.writeheader()
  writer.writerows([{k: json.dumps(v) if isinstance(v, (list, bool)) else v for k, v in row.items()} for row in rows])
  return written.getvalue()


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
  """The table in aligned columns."""
  show = lambda v: '--' if v is None else f'{v:.4g}' if isinstance(v, float) else str(v)
  lines = [[k.removeprefix('config.') for k in rows[0]], *([show(v) for v in row.values()] for row in rows)]
  widths = [max(map(len, column)) for column in zip(*lines)]
  return '\n'.join('  '.join(text.rjust(width) for text, width in zip(line, widths)) for line in lines)


def main() -> None:
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  cells, folder = planned(), pathlib.Path(_WORKDIR.value).resolve()
  with jsonlines.explained(folder):
    (folder / 'cells').mkdir(parents=True, exist_ok=True)
  folders = {c.name: folder_of(c, folder / 'cells') for c in cells}
  found = {name: earlier(path) for name, path in folders.items()}
  results = {name: r for name, r in found.items() if r is not None and r['state'] == 'done'}
  waiting = [c for c in cells if c.name not in results]
  print(f'{len(cells)} cells, {len(results)} of them done before', file=sys.stderr)
  path = folder / 'results.csv'
  try:
    with progress_lib.Progress(len(waiting), f'sweep of {_MODULE.value}', 'cells') as progress:
      for cell in waiting:
        results[cell.name] = result = run(cell, folders[cell.name])
        how = progress_lib.format_duration(result['seconds'])
        progress.line.lasting(f'{cell.name}: {result["state"]} after {how}' + (f' ({result["error"]})' if 'error' in result else ''))
        if result['state'] == 'failed':
          progress.line.lasting(f'  {folders[cell.name] / "log.txt"} ends: ' + ' | '.join(result['log_end'].splitlines()[-3:]))
        jsonlines.write_atomically(path, as_csv(table(cells, results)))
        progress.advance()
  except KeyboardInterrupt:
    print(f'\nInterrupted after {len(results)} of {len(cells)} cells; the same command goes on.', file=sys.stderr)
    sys.exit(130)
  rows = table(cells, results)
  jsonlines.write_atomically(path, as_csv(rows))
  failed = sum(r['state'] == 'failed' for r in results.values())
  print(as_text(rows))
  print(f'results: {path}')
  print(json.dumps({'cells': len(cells), 'done': len(cells) - failed, 'failed': failed, 'ran': len(waiting), 'results': str(path)}))
  if failed:
    sys.exit(1)


if __name__ == '__main__':
  cli.run(main)
