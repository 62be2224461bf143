"""Replays recorded traces through Equation 14 of ThunderSyncRL: step time, tail and speedup at every granularity.

    python -m experiments.replay --run=runs/quickstart-42
    python -m experiments.replay --run=runs/sync,runs/stream --figure=runs/schedules.svg

R, P and the service of each source are a run's own; what changes is when work is released.  Speedups are over the Sync that does one
full pass over each trajectory and skips groups without a reward difference.  A run's own granularity (marked *) has its measured
step beside it: the difference is what the runtime adds to its trace (d of Equation 29).  Of `async` and `fully_async` runs, whose
updates overlap, only that difference is told: R is what the learner, once free, still waited for.  `turn` and `forward` need the share
of service that they do early, from `experiments.bench_granularity` or from a run recorded at them.  `--figure` draws the runs'
timelines under each other, as Figure 3 does.  `--peak_flops_per_s` adds active MFU by the operator ledger.  Ends with one JSON
object, by run.
"""

from __future__ import annotations

import json
import pathlib
from typing import Mapping, Sequence

from absl import flags
import numpy as np

from experiments import cli, ledger, release
from ts_jax import types
from ts_jax.models import flops, weights
from ts_jax.streaming import scheduler
from ts_jax.streaming.buckets import Buckets
from ts_jax.telemetry import rundir, trace
from ts_jax.telemetry.report import schedules
from ts_jax.theory import discrepancy

_RUNS = flags.DEFINE_list('run', None, 'Run directories, made by experiments.train.', required=True)
_GRANULARITIES = flags.DEFINE_list('granularities', None, f'Of {", ".join(scheduler.GRANULARITIES)}; by default all whose costs are known.')
_SHARES = {name: (flags.DEFINE_float(f'{name}_share', None, f'Fraction of the service of `{name}` that is done when turns arrive.', 0, 1),
                  flags.DEFINE_float(f'{name}_work', work, f'Service of `{name}` over one full pass.', 1e-6))
           for name, work in (('turn', 1.75), ('forward', 1.0))}
_SKIP = flags.DEFINE_integer('skip', 0, 'First updates to leave out, while caches and compilations settle.', lower_bound=0)
_PEAK = flags.DEFINE_list('peak_flops_per_s', None, 'Peak rate of each trainer device, for active MFU (Equation 10); none: not computed.')
_FIGURE = flags.DEFINE_string('figure', None, 'Picture to write: timelines of all runs, .svg or .png.')


def shares(updates: Sequence[release.Update]) -> dict[str, release.Shares]:
  """Costs of working on turns, as flags give them and the trace holds them."""
  own, known = updates[0].granularity, {}
  for name, (share, work) in _SHARES.items():
    value = share.value if share.value is not None or own != name else release.early_share(updates)
    if value is not None:
      known[name] = release.Shares(value, work.value)
  return known


def predictions(updates: Sequence[release.Update], costs: Mapping[str, release.Shares]) -> dict[str, dict[str, float]]:
  """Means over updates, by granularity."""
  own = updates[0].granularity
  known = [g for g in scheduler.GRANULARITIES if g not in _SHARES or g in costs or g == own]
  names = _GRANULARITIES.value or [own] * updates[0].ahead or known + [own] * (own not in known)
  table = {}
  for name in names:
    found = [release.predict(u, name, costs) for u in updates]
    mean = lambda values: float(np.mean(list(values)))
    step = mean(f.step_s for f in found)
    table[name] = {'step_s': step, 'tail_s': mean(f.tail_s for f in found), 'service_s': mean(f.lane_busy_s.max() for f in found),
                   'speedup': mean(f.sync_step_s for f in found) / step, 'bound': mean(f.sync_step_s for f in found) / mean(
                       max(f.rollout_s, f.sync_step_s - f.rollout_s - f.suffix_s) + f.suffix_s for f in found)}
    measured = [(u.step_s, f.step_s, f.sync_step_s) for u, f in zip(updates, found) if name == own and u.step_s is not None]
    if measured:
      steps, traced, sync = map(np.array, zip(*measured))
      gap = discrepancy.summarize(discrepancy.runtime_difference(sync / traced, sync / steps))
      table[name] |= {'measured_step_s': float(steps.mean()), 'measured_speedup': float(sync.mean() / steps.mean()),
                      'gap_percent': gap.mean, 'gap_percent_absolute': gap.mean_absolute, 'gap_percent_largest': gap.largest_absolute}
  return table


def active_mfu(run: rundir.RunDirectory, updates: Sequence[release.Update], peaks: Sequence[float]) -> dict[str, float]:
  """Credited FLOPs of an update, and active MFU over its measured step; means over updates whose step was measured (Equation 11)."""
  config, traced = run.read_config()['learner'], trace.by_update(run.read_trace())
  model, buckets = weights.load_config(run.read_manifest()['model_folder']), Buckets(tuple(config['buckets']))
  measured = [u for u in updates if u.step_s is not None]
  if not measured:
    raise types.ConfigError(f'{run.path} has no metrics of its updates, so no measured step time: leave --peak_flops_per_s out')
  counts = [ledger.update_flops(traced[u.number], u.trajectories, model, buckets, config['remat_tokens']).credited for u in measured]
  mfu = flops.average_active_mfu(counts, [u.step_s for u in measured], peaks)
  print(f'active MFU {mfu:.2%}: {np.mean(counts) / 1e12:.3f} TFLOP credited an update\n')
  return {'credited_flops': float(np.mean(counts)), 'active_mfu': mfu}


def peak_rates() -> list[float]:
  """`--peak_flops_per_s` as numbers.

  Raises:
    ConfigError: one is not a positive number.
  """
  try:
    rates = [float(r) for r in _PEAK.value or ()]
  except ValueError:
    rates = [0.0]
  if not all(r > 0 for r in rates):
    raise types.ConfigError(f'--peak_flops_per_s={",".join(_PEAK.value)} must be positive numbers, one a device, for instance 2.25e15')
  return rates


def print_table(path: str, updates: Sequence[release.Update], table: Mapping[str, Mapping[str, float]]) -> None:
  """Prints one run's predictions."""
  mean = lambda values: float(np.mean(list(values)))
  own, first = updates[0].granularity, updates[0]
  print(f'{path}: {len(updates)} updates of {len(first.trajectories)} trajectories on {first.lanes} lane{"s" * (first.lanes > 1)}, '
        f'released by {own}; R {mean(u.rollout_s for u in updates):.2f} s, P {mean(u.suffix_s for u in updates):.2f} s')
  print(f'{"granularity":13}{"service s":>10}{"step s":>9}{"tail s":>9}{"speedup":>9}{"bound":>8}{"measured s":>12}{"gap %":>8}')
  for name, row in table.items():
    beside = f'{row["measured_step_s"]:12.2f}{row["gap_percent"]:8.1f}' if 'measured_step_s' in row else ''
    print(f'{name + " *" * (name == own):13}{row["service_s"]:10.2f}{row["step_s"]:9.2f}{row["tail_s"]:9.2f}{row["speedup"]:9.3f}'
          f'{row["bound"]:8.3f}{beside}')
  left = [g for g in _SHARES if g not in table]
  if first.ahead:
    print('sampled ahead: R is what was left to wait for, and there is no speedup over a Sync to tell')
  elif left:
    print(f'left out: {" and ".join(left)}, whose share of early service is not known: {" ".join(f"--{g}_share" for g in left)}')
  print()


def main() -> None:
  result, runs, peaks = {}, [], peak_rates()
  for path in _RUNS.value:
    run = rundir.RunDirectory(path)
    updates = release.updates(run)[_SKIP.value:]
    if not updates:
      raise types.ConfigError(f'{path} has no complete update after the first {_SKIP.value}: lower --skip')
    table = predictions(updates, shares(updates))
    print_table(path, updates, table)
    result[path] = {'updates': len(updates), 'granularity': updates[0].granularity, 'lanes': updates[0].lanes,
                    'rollout_s': float(np.mean([u.rollout_s for u in updates])), 'suffix_s': float(np.mean([u.suffix_s for u in updates])),
                    'predicted': table}
    if peaks:
      result[path] |= active_mfu(run, updates, peaks)
    runs.append(run)
  if _FIGURE.value:
    figure = schedules.save(pathlib.Path(_FIGURE.value), [schedules.of_run(run) for run in runs])
    print(f'figure: {figure.resolve()}')
  print(json.dumps(cli.rounded(result)))


if __name__ == '__main__':
  cli.run(main)
