"""Checks that streamed updates are the batch-synchronous update.

    python -m experiments.equivalence --config=configs/smoke.py
    python -m experiments.equivalence --config=configs/equivalence.py:grpo

Real trajectories of the student are recorded first (and kept in --recording for the next time).  A config like
`configs/smoke.py` compares one update with whole sequences (`whole_sequences`).  One with a section `equivalence` replays
consecutive batches as Appendix G of ThunderSyncRL does: first directions and parameter gaps of every granularity against
Sync, in float32 and bfloat16 (`update_errors`), equal bits with exact sums (`equal_bits`), and Figure 11.
"""

from __future__ import annotations

import json
import pathlib

from absl import flags
import jax
from ml_collections import config_flags

from experiments import cli, equal_bits, equivalence_figure, replayed_updates, update_errors, whole_sequences, wiring
from ts_jax.telemetry import progress as progress_lib

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Model, tasks and batch sizes; see configs/.', lock_config=True)
_RECORDING = flags.DEFINE_string('recording', None, 'Folder of the recorded batches; default: runs/recording, or behind a config with a '
                                 'section `equivalence` a folder of its objective.')
_GROUPS = flags.DEFINE_integer('groups', 3, 'Recorded groups with a reward difference to compare with whole sequences.')
_ORDERS = flags.DEFINE_integer('orders', None, 'Random arrival orders whose parameters must have equal bits; default: 20, or '
                               'config.equivalence.orders.', lower_bound=1)
_FIGURE = flags.DEFINE_string('figure', 'runs/equivalence', 'Path and beginning of the names of the figure and its data.')
flags.mark_flags_as_required(['config'])

# Appendix G, B200: relative error and 1 - cosine of g_0 in float32, relative error in bfloat16 of Sync and ThunderSyncRL.
_PAPER = {'grpo': (5.1e-7, 1.3e-13, 0.0077, 0.0096), 'opd': (1.1e-6, 6.3e-13, 0.042, 0.012)}
_PAPER_GAP = 6e-5  # after ten updates


def replayed_equivalence(config, recording: pathlib.Path) -> None:
  """Appendix G: prints the figures beside the paper's, draws Figure 11; the last line is one JSON object."""
  student, settings = wiring.load_student(config), config.equivalence
  batches = replayed_updates.recorded_batches(config, recording, config.updates)
  trajectories = [t for b in batches for t in b.trajectories]
  print(f'{len(batches)} batches, {len(trajectories)} trajectories, {sum(t.scored_tokens for t in trajectories)} scored tokens; '
        f'objective {config.objective.name}')
  with progress_lib.Progress(update_errors.count(batches), 'replay in float32 and bfloat16', 'updates') as progress:
    errors = update_errors.measure(config, student, batches, recording, progress.advance)
  bits = _equal_bits(config, student, batches, _ORDERS.value or settings.orders)
  figures = _figures(errors, bits)
  _print(config, errors, bits, figures)
  for path in equivalence_figure.save(pathlib.Path(_FIGURE.value), config.objective.name, config.schedule.granularity, errors):
    print(f'figure: {path}')
  print(json.dumps(figures))


def _equal_bits(config, student: wiring.Student, batches, orders: int) -> dict[str, dict[str, equal_bits.EqualBits]]:
  """By model: 'small' is random and repeats often, 'student' is the real one."""
  settings, lanes = config.equivalence, tuple(config.equivalence.lanes)
  small = replayed_updates.small_student(student, settings.layers, settings.width)
  some = batches[:settings.student_updates]
  updates = equal_bits.count(len(batches), orders, lanes, settings.lane_orders)
  with progress_lib.Progress(updates, 'exact sums, small student', 'updates') as progress:
    found = {'small': equal_bits.compare(config, small, batches, orders, lanes, settings.lane_orders, progress.advance)}
  with progress_lib.Progress(equal_bits.count(len(some), settings.student_orders), 'exact sums, student', 'updates') as progress:
    found['student'] = equal_bits.compare(config, student, some, settings.student_orders, advance=progress.advance)
  return found


def _figures(errors: update_errors.Errors, bits: dict[str, dict[str, equal_bits.EqualBits]]) -> dict:
  """What the JSON line says; the largest over granularities, or the least where equal ones are counted."""
  small = bits['small'].values()
  streamed = {k: v for k, v in errors.bfloat16.items() if k != 'batch'}
  return {
      'float32_relative_error': max(errors.float32.values()), 'one_minus_cosine': max(errors.cosine.values()),
      'parameter_gap': max(gaps[-1] for gaps in errors.gap.values()),
      'bf16_error_sync': errors.bfloat16['batch'], 'bf16_error_streamed': max(streamed.values()),
      'bit_equal_orders': min(s.equal for s in small),
      'bit_equal_lanes': sorted(set.intersection(*(set(s.equal_lanes) for s in small))),
      'by_granularity': {
          'float32_relative_error': errors.float32, 'one_minus_cosine': errors.cosine, 'parameter_gap': errors.gap,
          'bf16_error': errors.bfloat16},
      'bf16_parameter_gap': errors.bfloat16_gap, 'precision_parameter_gap': errors.precision_gap,
      'bits': {model: {g: {**vars(s), 'equal_lanes': s.equal_lanes} for g, s in found.items()} for model, found in bits.items()},
  }


def _print(config, errors: update_errors.Errors, bits, figures: dict) -> None:
  paper = _PAPER.get(config.objective.name, (float('nan'),) * 4)
  beside = lambda value, form='.2g': f'paper {value:{form}}' if value == value else 'not in the paper'
  print('\nFirst direction g_0 before clipping, and parameter gap after the last update (Equation 30), against Sync\n')
  print(f'{"":12}{"float32 error":>15}{"1 - cosine":>12}{"gap":>10}{"bfloat16 error":>16}')
  print(f'{"Sync":12}{"":15}{"":12}{"":10}{errors.bfloat16["batch"]:16.2%}')
  for granularity, error in errors.float32.items():
    print(f'{granularity:12}{error:15.1e}{errors.cosine[granularity]:12.1e}{errors.gap[granularity][-1]:10.1e}{errors.bfloat16[granularity]:16.2%}')
  print(f'\nlargest: float32 {figures["float32_relative_error"]:.2e} ({beside(paper[0])}), 1 - cosine {figures["one_minus_cosine"]:.1e} '
        f'({beside(paper[1])}), gap {figures["parameter_gap"]:.1e} (paper: below {_PAPER_GAP:.0e} over ten updates)')
  print(f'bfloat16 against float32 Sync: Sync {figures["bf16_error_sync"]:.2%} ({beside(paper[2], ".2%")}), streamed '
        f'{figures["bf16_error_streamed"]:.2%} ({beside(paper[3], ".2%")}); Sync\'s parameters between precisions '
        f'{errors.precision_gap[-1]:.1e}, between schedules in bfloat16 {errors.bfloat16_gap[-1]:.1e}\n')
  settings = config.equivalence
  names = {'small': f'random student of {settings.layers} layers, width {settings.width}, with the vocabulary of {config.model.source}',
           'student': config.model.source}
  for model, found in bits.items():
    print(f'equal bits with exact sums, {names[model]}:')
    for granularity, s in found.items():
      lanes = ''.join(f', {equal} of {s.lane_orders} on {n} lanes' for n, equal in s.lanes.items())
      print(f'  {granularity:11} {s.equal} of {s.orders} orders of {s.updates} updates on 1 lane{lanes}'
            f'{"; the bits of Sync" if s.like_sync and granularity != "batch" else ""}')


def main() -> None:
  config = _CONFIG.value
  replayed = 'equivalence' in config
  if replayed:  # before JAX starts
    jax.config.update('jax_num_cpu_devices', max(config.equivalence.lanes))
  wiring.compile_cache()
  folder = f'runs/equivalence-{config.objective.name}-recording' if replayed else 'runs/recording'
  recording = pathlib.Path(_RECORDING.value or folder).resolve()
  if replayed:
    replayed_equivalence(config, recording)
  else:
    whole_sequences.report(config, recording, _GROUPS.value, _ORDERS.value or 20)


if __name__ == '__main__':
  cli.run(main)
