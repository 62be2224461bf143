"""The study of Appendix F.5 of ThunderSyncRL: analytical, trace and wall-clock speedup of each configuration side by side.

    python -m experiments.study --config=configs/study.py --workdir=runs/study

Each executed cell runs Sync and thundersync on one drawn workload: real scheduler, lane and gradients of a small student, rollouts
replayed at the drawn times.  Its trace speedup replays what thundersync's update recorded through Equation 14, its analytical one
takes the cell's R, L and P into the release law, whose parameters were calibrated before on other traces.  e is the release
model's difference to the trace, d what the runtime adds to its own trace (Equation 29).  The same command goes on after an
interruption.  Leaves results.csv and figure.svg; ends with one JSON object.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import pathlib
from typing import Sequence

from absl import flags
from ml_collections import config_flags
import numpy as np

from experiments import cells as sweep_cells, cli, heatmap, study_cells, wiring
from ts_jax import types
from ts_jax.streaming import host_memory
from ts_jax.telemetry import jsonlines, progress as progress_lib, rundir
from ts_jax.theory import discrepancy

_CONFIG = config_flags.DEFINE_config_file('config', None, 'The cells and the student; see configs/study.py.', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/study', 'Folder of the results; continued if it holds some.')
flags.mark_flags_as_required(['config'])

_PAPER = {'e': 'paper: mean 1.6, largest 10.6', 'd': 'paper: mean 6.5'}


def results(config, folder: pathlib.Path, cores: Sequence[int]) -> list[study_cells.Result]:
  """Every cell's result, in the order of `study_cells.cells`; what an earlier start has measured is not measured again."""
  every = study_cells.cells(config.study)
  walls = study_cells.executed(config.study, every)
  written, calibrated = (jsonlines.JsonLines(folder / f'{name}.jsonl') for name in ('cells', 'calibrations'))
  found = {r.cell: r for r in map(study_cells.Result.from_json, written.read())}
  known = {(c.objective, c.turns): c for c in map(study_cells.Calibration.from_json, calibrated.read())}
  with progress_lib.Progress(len(every), 'study', 'cells') as progress:
    progress.advance(len(found))
    for at, mine in itertools.groupby(every, key=lambda c: (c.objective, c.turns)):
      waiting = [c for c in mine if c not in found]
      if not waiting:
        continue
      bench = study_cells.Bench(config, *at, cores) if at not in known or walls.intersection(waiting) else None
      if at not in known:
        known[at] = bench.calibrate(config.seed)
        calibrated.append(known[at].to_json())
      for cell in waiting:
        rng = np.random.default_rng([config.seed, every.index(cell)])
        found[cell] = bench.execute(cell, known[at], rng) if cell in walls else study_cells.draw(cell, known[at], config.study, rng)
        written.append(found[cell].to_json())
        progress.advance()
  written.close(), calibrated.close()
  return [found[c] for c in every]


def model_gap(found: Sequence[study_cells.Result]) -> discrepancy.Summary:
  """e over cells, percent."""
  return discrepancy.summarize(discrepancy.model_difference(*_columns(found, 'analytical', 'trace')))


def runtime_gap(found: Sequence[study_cells.Result]) -> discrepancy.Summary:
  """d over executed cells, percent."""
  return discrepancy.summarize(discrepancy.runtime_difference(*_columns(found, 'trace', 'measured')))


def _columns(found: Sequence[study_cells.Result], *names: str) -> list[np.ndarray]:
  return [np.array([getattr(r, name) for r in found]) for name in names]


def write_table(path: pathlib.Path, found: Sequence[study_cells.Result]) -> None:
  """One row a cell, e and d beside the speedups."""
  rows = []
  for r in found:
    d = None if r.measured is None else float(discrepancy.runtime_difference([r.trace], [r.measured])[0])
    row = {'name': r.cell.name, **sweep_cells.flat(r.to_json()), 'e': float(discrepancy.model_difference([r.analytical], [r.trace])[0]), 'd': d}
    rows.append({k.removeprefix('cell.'): v for k, v in row.items()})
  text = io.StringIO()
  writer = csv.DictWriter(text, rows[0])
  writer.writeheader()
  writer.writerows(rows)
  jsonlines.write_atomically(path, text.getvalue())


def draw(found: Sequence[study_cells.Result]) -> str:
  """SVG: trace (hollow) and wall clock (filled) over the analytical speedup, a row for each objective."""
  values = [v for r in found for v in (r.analytical, r.trace, r.measured) if v is not None]
  rows = []
  for objective in dict.fromkeys(r.cell.objective for r in found):
    panels = []
    for sweep in ('batch', 'horizon'):
      mine = [r for r in found if (r.cell.objective, r.cell.sweep) == (objective, sweep)]
      panels.append(heatmap.Scatter(f'{objective}, by {sweep}', 'analytical speedup', 'trace, wall clock',
                                    np.array([(r.analytical, r.trace) for r in mine]),
                                    np.array([(r.analytical, r.measured) for r in mine if r.measured is not None])))
    rows.append(panels)
  return heatmap.draw('Speedup over Sync: predicted, replayed from the trace (hollow), measured (filled)', rows, min(values) - 0.05,
                      max(values) + 0.05, ())


def summary(found: Sequence[study_cells.Result]) -> dict[str, float]:
  """Prints the differences by objective and sweep; returns those over all cells."""
  print(f'{"":9}{"sweep":9}{"cells":>6}{"e mean":>9}{"e largest":>11}{"executed":>10}{"d mean":>9}{"d absolute":>12}{"d largest":>11}')
  figures: dict[str, float] = {}
  parts = sorted({(r.cell.objective, r.cell.sweep) for r in found}) + [('all', '')]
  for part in parts:
    mine = [r for r in found if part in ((r.cell.objective, r.cell.sweep), ('all', ''))]
    ran = [r for r in mine if r.measured is not None]
    e = model_gap(mine)
    line = f'{part[0]:9}{part[1]:9}{len(mine):6}{e.mean:9.2f}{e.largest_absolute:11.2f}{len(ran):10}'
    figures = {'cells': len(mine), 'executed': len(ran), 'analytical_gap_percent': e.mean, 'analytical_gap_percent_largest': e.largest_absolute}
    if ran:
      d = runtime_gap(ran)
      line += f'{d.mean:9.2f}{d.mean_absolute:12.2f}{d.largest_absolute:11.2f}'
      figures |= {'runtime_gap_percent': d.mean, 'runtime_gap_percent_absolute': d.mean_absolute,
                  'runtime_gap_percent_largest': d.largest_absolute}
    print(line)
  print(f'e ({_PAPER["e"]}): analytical against trace; d ({_PAPER["d"]}): wall clock below its own trace; percent\n')
  return figures


def main() -> None:
  config, folder = _CONFIG.value, pathlib.Path(_WORKDIR.value).resolve()
  if 'study' not in config:
    raise types.ConfigError('the config has no section `study`: use --config=configs/study.py or one made from it')
  learner_cores, rollout_cores = wiring.split_cores(config)
  os.sched_setaffinity(0, learner_cores)  # before JAX starts its threads
  host_memory.keep_freed_memory()
  wiring.compile_cache(0.0)  # many small functions
  with rundir.RunDirectory(folder) as run:
    run.open(config)
    found = results(config, folder, rollout_cores)
    write_table(folder / 'results.csv', found)
    jsonlines.write_atomically(folder / 'figure.svg', draw(found))
  print(f'{folder}/results.csv, {folder}/figure.svg\n')
  print(json.dumps(cli.rounded(summary(found), 5)))


if __name__ == '__main__':
  cli.run(main)
