"""Predicted speedup over Sync by batch size, horizon and rollout / learner time: Figures 7b, 8, 9 and 10 of ThunderSyncRL.

    python -m experiments.scaling --workdir=runs/scaling

Analytical throughout, from the parameters of Appendix F.5.  Figure 8's open circles are replays of workloads drawn from the
model, in place of measured traces.  Beside the paper's GRPO and OPD stands granularity `forward`.  Prints the figures' numbers
as tables and ends with one JSON object; expect 1.84 (GRPO) and 1.97 (OPD) at balance and 256 trajectories.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from typing import Mapping, Sequence

from absl import flags
import numpy as np

from experiments import cli, heatmap
from ts_jax import types
from ts_jax.theory import discrepancy, jobs, release, replay, sampling, waves

_WORKDIR = flags.DEFINE_string('workdir', 'runs/scaling', 'Folder of the figures.')
_CAPACITY = flags.DEFINE_integer('capacity', 128, 'Q, trajectories that roll out at once.', lower_bound=1)
_GROUP_SIZE = flags.DEFINE_integer('group_size', 8, 'm, trajectories of a GRPO group.', lower_bound=1)
_CLOSURE = flags.DEFINE_float('closure_fraction', 0.02, 'beta, GRPO service that waits for the group.', lower_bound=0, upper_bound=1)
_DEFERRED = flags.DEFINE_float('deferred_fraction', 0.45, 'delta, OPD service that waits for completion.', lower_bound=0, upper_bound=1)
_EXPONENT = flags.DEFINE_float('service_exponent', 0.49, 'gamma, growth of service with completion time.', lower_bound=0)
_SUFFIX = flags.DEFINE_float('suffix', 0.05, 'kappa_w, serial suffix over the duration of a wave.', lower_bound=0)
_FORWARD = flags.DEFINE_float('forward_fraction', 0.35, 'Service `forward` releases at turns.', lower_bound=0, upper_bound=1)
_FORWARD_WORK = flags.DEFINE_float('forward_work', 1.0, 'Service of `forward` over one full pass.', lower_bound=1e-6)
_TURN_WORK = flags.DEFINE_float('turn_work', 1.75, 'Service of turns with replay over one full pass.', lower_bound=1e-6)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the drawn workloads.', lower_bound=0)
_REPETITIONS = flags.DEFINE_integer('repetitions', 2, 'Drawn workloads per configuration of Figure 8.', lower_bound=1)

RATIOS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)  # rollout / learner time, Appendix F.5
BATCHES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
TURNS = (10, 15, 20, 30, 40, 60, 100, 150, 200, 300)
_CONTOURS = (1.2, 1.4, 1.6, 1.8, 1.9, 1.95)
_GRID = 73
_RATIO_AXIS = heatmap.Axis('rollout / learner time', np.geomspace(0.3, 4.0, _GRID), (0.3, 0.5, 1, 2, 4))
_BATCH_AXIS = heatmap.Axis('trajectories per update', np.geomspace(64, 2048, _GRID), (64, 128, 256, 512, 1024, 2048))
_TURN_AXIS = heatmap.Axis('turns', np.geomspace(10, 300, _GRID), (10, 30, 100, 300))
_LONG_TURN_AXIS = heatmap.Axis('turns', np.geomspace(1, 300, _GRID), (1, 4, 10, 20, 100, 300))


@dataclasses.dataclass(frozen=True)
class Cell:
  """One configuration of Figure 8 with its speedups; `measured` where a wall clock ran."""

  mode: str
  sweep: str
  batch: int
  turns: int
  analytical: float
  trace: float
  measured: float | None = None


def granularities() -> dict[str, release.Granularity]:
  """What the figures' panels compare."""
  return {
      'GRPO': release.grpo(_CLOSURE.value), 'OPD': release.opd(_DEFERRED.value),
      'GRPO forward': release.forward(_FORWARD.value, _CLOSURE.value, _FORWARD_WORK.value),
      'OPD forward': release.forward(_FORWARD.value, work=_FORWARD_WORK.value),
  }


def law(granularity: release.Granularity, turns: int) -> release.ReleaseLaw:
  """The release law at the flags' group size and service exponent."""
  return release.ReleaseLaw(granularity, turns, _GROUP_SIZE.value, _EXPONENT.value)


def predict(granularity: release.Granularity, batch: np.ndarray, turns: int, ratio: np.ndarray) -> np.ndarray:
  """Speedup over Sync (Equations 26 and 28), the arguments' common shape."""
  return waves.speedup(law(granularity, turns), waves.of_batch(batch, _CAPACITY.value, ratio, _SUFFIX.value))


def by_turns(granularity: release.Granularity, grid: np.ndarray, batch: np.ndarray, ratio: np.ndarray) -> np.ndarray:
  """[turns of `grid`, columns] speedups; turns are whole numbers, so that neighbours of a fine grid may be one value."""
  rounded = [round(a) for a in grid]
  rows = {a: predict(granularity, batch, a, ratio) for a in set(rounded)}
  return np.stack([np.broadcast_to(rows[a], np.broadcast(batch, ratio).shape) for a in rounded])


def draw_cells(rng: np.random.Generator, mode: str, granularity: release.Granularity) -> list[Cell]:
  """Figure 8's configurations: each a drawn workload, replayed, and predicted from its own R, L and P."""
  cells = []
  grid = [('batch', b, 40) for b in BATCHES] + [('horizon', 512, a) for a in TURNS]
  for (sweep, batch, turns), ratio, _ in itertools.product(grid, RATIOS, range(_REPETITIONS.value)):
    release_law = law(granularity, turns)
    workload = sampling.sample(rng, release_law, batch, _CAPACITY.value, ratio)
    service_s = workload.lane_service_s(1)
    trace = replay.replay(*jobs.release(granularity, workload), suffix_s=_SUFFIX.value, sync_service_s=service_s)
    shape = waves.of_times(batch, _CAPACITY.value, trace.rollout_s, float(service_s[0]), trace.suffix_s)
    cells.append(Cell(mode, sweep, batch, turns, float(waves.speedup(release_law, shape)), trace.speedup))
  return cells


def figure_7b(modes: Mapping[str, release.Granularity]) -> str:
  """Batch size by horizon at equal stage times."""
  panels = [heatmap.Heatmap(name, _BATCH_AXIS, _LONG_TURN_AXIS, by_turns(g, _LONG_TURN_AXIS.grid, _BATCH_AXIS.grid, 1.0))
            for name, g in modes.items()]
  return _draw('Figure 7b: predicted speedup over Sync, rollout / learner time = 1', [panels[:2], panels[2:]])


def figure_8(modes: Mapping[str, release.Granularity], cells: Sequence[Cell]) -> str:
  """Time ratio by batch size and by horizon, and the replays against their predictions."""
  rows = []
  for name, g in modes.items():
    mine = [c for c in cells if c.mode == name]
    rows.append([
        heatmap.Heatmap(f'{name}, 40 turns', _RATIO_AXIS, _BATCH_AXIS, predict(g, _BATCH_AXIS.grid[:, None], 40, _RATIO_AXIS.grid)),
        heatmap.Heatmap(f'{name}, 512 trajectories', _RATIO_AXIS, _TURN_AXIS, by_turns(g, _TURN_AXIS.grid, 512, _RATIO_AXIS.grid)),
        heatmap.Scatter(name, 'analytical speedup', 'speedup of replay', np.array([(c.analytical, c.trace) for c in mine]),
                        np.array([(c.analytical, c.measured) for c in mine if c.measured is not None])),
    ])
  return _draw('Figure 8: predicted speedup over Sync, and replays of drawn workloads', rows)


def figure_9(modes: Mapping[str, release.Granularity]) -> str:
  """Time ratio by horizon, a panel for each batch size."""
  rows = [[heatmap.Heatmap(f'{name}, {b} trajectories', _RATIO_AXIS, _TURN_AXIS, by_turns(g, _TURN_AXIS.grid, b, _RATIO_AXIS.grid))
           for b in (256, 512, 1024, 2048)] for name, g in modes.items()]
  return _draw('Figure 9: predicted speedup over Sync, by time ratio and horizon', rows)


def figure_10(modes: Mapping[str, release.Granularity]) -> str:
  """Time ratio by batch size, a panel for each horizon."""
  rows = [[heatmap.Heatmap(f'{name}, {a} turns', _RATIO_AXIS, _BATCH_AXIS, predict(g, _BATCH_AXIS.grid[:, None], a, _RATIO_AXIS.grid))
           for a in (10, 30, 100, 300)] for name, g in modes.items()]
  return _draw('Figure 10: predicted speedup over Sync, by time ratio and batch size', rows)


def print_tables(modes: Mapping[str, release.Granularity], cells: Sequence[Cell]) -> None:
  """Prints the numbers the figures are drawn from."""
  horizons = lambda g, turns: turns if g.turn else (1,)
  named = lambda g, a: f'{a:>5}' if g.turn else '  any'
  batches = (64, 128, 256, 512, 1024, 2048)
  print('Figure 7b: speedup over Sync at rollout / learner time 1\n')
  print(f'{"":14}{"turns":>5}' + ''.join(f'{f"B={b}":>8}' for b in batches))
  for name, g in modes.items():
    for a in horizons(g, (1, 4, 10, 20, 100, 300)):
      print(f'{name:14}{named(g, a)}' + ''.join(f'{v:8.3f}' for v in predict(g, np.array(batches), a, 1.0)))
  ratios = (0.3, *RATIOS, 4.0)
  print('\nFigures 8 (B = 512), 9 and 10: speedup over Sync by rollout / learner time r; the peak and where it stands\n')
  print(f'{"":14}{"turns":>5}{"B":>6}' + ''.join(f'{f"r={r:g}":>8}' for r in ratios) + f'{"peak":>8}{"at r":>7}')
  for name, g in modes.items():
    for a, b in itertools.product(horizons(g, (10, 30, 40, 100, 300)), batches):
      best, where = peak(g, b, a)
      print(f'{name:14}{named(g, a)}{b:6}' + ''.join(f'{v:8.3f}' for v in predict(g, b, a, np.array(ratios))) + f'{best:8.3f}{where:7.2f}')
  print('\nFigure 8: analytical speedup against the replay of drawn workloads, difference in percent (e of Equation 29)\n')
  print(f'{"":14}{"sweep":9}{"cells":>6}{"mean":>8}{"largest":>9}')
  for name, sweep in itertools.product(modes, ('batch', 'horizon')):
    mine = [c for c in cells if (c.mode, c.sweep) == (name, sweep)]
    s = model_gap(mine)
    print(f'{name:14}{sweep:9}{len(mine):6}{s.mean:8.2f}{s.largest_absolute:9.2f}')
  print(f'\nAgainst the Sync that does the cheapest pass, r = 1, 40 turns; turns with replay do {_TURN_WORK.value:g} of its work\n')
  print(f'{"":22}' + ''.join(f'{f"B={b}":>8}' for b in batches))
  cheapest = {'complete groups': release.group(), 'GRPO': modes['GRPO'], 'OPD turns with replay': replayed_turns()}
  cheapest |= {n: g for n, g in modes.items() if 'forward' in n}
  for name, g in cheapest.items():
    print(f'{name:22}' + ''.join(f'{v:8.3f}' for v in predict(g, np.array(batches), 40, 1.0)))


def replayed_turns() -> release.Granularity:
  """OPD's turns with the service they need beyond one full pass."""
  return release.opd(_DEFERRED.value, _TURN_WORK.value)


def peak(granularity: release.Granularity, batch: int, turns: int) -> tuple[float, float]:
  """(largest speedup, time ratio where it stands) over r from 0.3 to 4."""
  full = min(1.0, batch / _CAPACITY.value) * granularity.work  # the streamed service fills the wave: the formula's kink
  ratios = np.clip(np.append(np.geomspace(0.3, 4.0, 301), full * np.linspace(0.9, 1.1, 201)), 0.3, 4.0)
  speedups = predict(granularity, batch, turns, ratios)
  return float(speedups.max()), float(ratios[speedups.argmax()])


def model_gap(cells: Sequence[Cell]) -> discrepancy.Summary:
  """Difference of analytical prediction and replay, percent."""
  return discrepancy.summarize(discrepancy.model_difference(np.array([c.analytical for c in cells]), np.array([c.trace for c in cells])))


def key_figures(modes: Mapping[str, release.Granularity], cells: Sequence[Cell]) -> dict[str, float]:
  """The figures that Appendix F states, and ours beside them."""
  grpo, opd = modes['GRPO'], modes['OPD']
  off_balance = [predict(g, np.array([b for b in BATCHES if b >= _CAPACITY.value] or [_CAPACITY.value]), 40, r)
                 for g in (grpo, opd) for r in (0.35, 2.8)]
  gap = model_gap([c for c in cells if c.mode in ('GRPO', 'OPD')])
  at_balance = lambda g, b, a: float(predict(g, b, a, 1.0))
  return {
      'grpo_256': at_balance(grpo, 256, 40), 'grpo_2048': at_balance(grpo, 2048, 40),
      'opd_256_turns_10': at_balance(opd, 256, 10), 'opd_256_turns_300': at_balance(opd, 256, 300),
      'opd_2048': at_balance(opd, 2048, 40),
      'grpo_64_peak': peak(grpo, 64, 40)[0], 'grpo_64_peak_at': peak(grpo, 64, 40)[1],
      'opd_64_peak': peak(opd, 64, 40)[0], 'opd_64_peak_at': peak(opd, 64, 40)[1],
      'off_balance_least': float(np.min(off_balance)), 'off_balance_greatest': float(np.max(off_balance)),
      'grpo_forward_256': at_balance(modes['GRPO forward'], 256, 40), 'opd_forward_256': at_balance(modes['OPD forward'], 256, 40),
      'opd_replayed_turns_256': at_balance(replayed_turns(), 256, 40),
      'model_gap_percent_mean': gap.mean, 'model_gap_percent_largest': gap.largest_absolute,
  }


def _draw(title: str, rows: Sequence[Sequence[heatmap.Heatmap | heatmap.Scatter]]) -> str:
  return heatmap.draw(title, rows, 1.0, 2.0, _CONTOURS)


def main() -> None:
  try:
    modes = granularities()
  except ValueError as e:
    raise types.ConfigError(f'{e}: change --forward_fraction or --closure_fraction') from e
  rng = np.random.default_rng(_SEED.value)
  cells = [c for name, g in modes.items() for c in draw_cells(rng, name, g)]
  folder = pathlib.Path(_WORKDIR.value)
  folder.mkdir(parents=True, exist_ok=True)
  figures = {'7b': figure_7b(modes), '8': figure_8(modes, cells), '9': figure_9(modes), '10': figure_10(modes)}
  for name, svg in figures.items():
    (folder / f'figure_{name}.svg').write_text(svg, 'utf-8')
  print_tables(modes, cells)
  print(f'\nfigures: {folder.resolve()}/figure_*.svg')
  print(json.dumps({k: round(v, 4) for k, v in key_figures(modes, cells).items()}))


if __name__ == '__main__':
  cli.run(main)
