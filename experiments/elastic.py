"""Elastic granularity against every fixed one, on simulated updates: the scheduler itself, with work that takes as long as was measured.

    python -m experiments.elastic --config=configs/study.py

Every configuration of the study of Appendix F.5 of ThunderSyncRL is drawn and run under each fixed granularity, `turn` left out (it
does nearly all of its work twice), and under `elastic`, which goes on with the costs that it learned on another draw.  Costs of work
are relative to one pass over a trajectory (`experiments.bench_granularity`).  Two traces are apart: trajectories that all last about
as long, in one wave, which is the paper's worst case for GRPO, and groups whose members end together.  Ends with one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Callable, Sequence

from absl import flags
from ml_collections import config_flags
import numpy as np

from experiments import cli, learner, study_cells
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.streaming import forward_trajectories, scheduler, simulation
from ts_jax.streaming.buckets import Buckets
from ts_jax.telemetry import progress as progress_lib

_CONFIG = config_flags.DEFINE_config_file('config', None, 'The cells; see configs/study.py.', lock_config=True)
_EVERY = flags.DEFINE_integer('every', 1, 'Every so-many-th cell is simulated.', lower_bound=1)
_EARLY = flags.DEFINE_float('early', 0.25, 'Turns run forward, per token, over one pass.', lower_bound=0)
_LATE = flags.DEFINE_float('late', 0.74, 'What is then left at completion, over one pass.', lower_bound=0)
_PACKED = flags.DEFINE_float('packed', 0.95, 'Four sources in one batch over four by themselves.', lower_bound=0)
_FOLD_TOKENS = flags.DEFINE_float('fold_tokens', 8, 'Tokens of one pass that take as long as adding a gradient to one sum.', lower_bound=0)
_KEPT = flags.DEFINE_integer('kept', 64, 'Running trajectories that may hold early work at once.', lower_bound=1)
flags.mark_flags_as_required(['config'])

_FIXED = tuple(g for g in scheduler.GRANULARITIES if g != 'turn')
_OBJECTIVES = {'grpo': policy_gradient.PolicyGradient(), 'opd': distillation.Distillation()}


def service(arrivals: Sequence[simulation.Arrival], seconds: float, prompt_tokens: int, pad: Callable[[int], int]) -> simulation.Service:
  """Costs at which one pass over every trajectory takes `seconds`."""
  whole = seconds / sum(pad(a.tokens) for a in arrivals)
  return simulation.Service(whole, _EARLY.value * whole, _LATE.value * whole, packed={4: _PACKED.value}, fold_s=_FOLD_TOKENS.value * whole,
                            prompt_s=prompt_tokens * whole / 4, pad=pad)


def policy(granularity: str, objective: str, buckets: Buckets) -> scheduler.Policy:
  """Of a simulated run."""
  return scheduler.Policy(granularity, pack_rows=(1,) if granularity in ('turn', 'forward') else (4, 1), kept_cap=_KEPT.value,
                          objective=_OBJECTIVES[objective], piece_lengths=forward_trajectories.piece_lengths(buckets))


def draw(cell: study_cells.Cell, study, rng: np.random.Generator) -> list[simulation.Arrival]:
  """Trajectories of successive waves that take 1 s each, as in the study."""
  made = []
  for n, finished in enumerate(rng.uniform(size=cell.batch)):
    ends = n // study.capacity + finished * np.arange(1, cell.turns + 1) / cell.turns
    made.append(_arrival(n, study.group_size, ends, rng.poisson(study_cells.turn_tokens(study, finished), cell.turns), rng))
  return made


def one_wave(study, spread: float, together: bool, rng: np.random.Generator) -> list[simulation.Arrival]:
  """One wave of sixteen groups; durations have a mean of 1 s and deviate by `spread`, members of a group alike where `together`."""
  size, turns, sigma = study.group_size, 20, np.sqrt(np.log(1 + spread**2))
  lasts = np.exp(rng.normal(-sigma**2 / 2, sigma, 16 if together else 16 * size))
  lasts = np.repeat(lasts, size) * rng.uniform(1, 1.005, 16 * size) if together else lasts
  return [_arrival(n, size, d * np.arange(1, turns + 1) / turns, rng.poisson(study.turn_tokens, turns), rng) for n, d in enumerate(lasts)]


def _arrival(n: int, group_size: int, ends: np.ndarray, tokens: np.ndarray, rng: np.random.Generator) -> simulation.Arrival:
  turns = tuple(zip(ends.tolist(), np.maximum(tokens, 2).tolist()))
  return simulation.Arrival(n // group_size, n % group_size, turns, float(ends[-1]), float(ends[-1]) * 1.001, float(rng.uniform(0, 1.5)))


def steps(arrivals: Sequence[simulation.Arrival], before: Sequence[simulation.Arrival], seconds: float, objective: str,
          prompt_tokens: int, buckets: Buckets) -> dict[str, float]:
  """Step time by granularity; `before`: the update whose costs `elastic` knows."""
  cost, elastic = service(arrivals, seconds, prompt_tokens, buckets.pad), policy(scheduler.ELASTIC, objective, buckets)
  found = {g: simulation.simulate(arrivals, cost, policy(g, objective, buckets)).step_s for g in _FIXED}
  learned = simulation.simulate(before, cost, elastic).costs
  return found | {scheduler.ELASTIC: simulation.simulate(arrivals, cost, elastic, costs=learned).step_s}


@dataclasses.dataclass(frozen=True)
class Row:
  """One configuration's step times."""

  cell: study_cells.Cell
  steps: dict[str, float]

  @property
  def over_best(self) -> float:
    """Of `elastic` over the best fixed granularity."""
    return self.steps[scheduler.ELASTIC] / min(self.steps[g] for g in _FIXED)

  def over(self, granularity: str) -> float:
    """Of `elastic` over one granularity."""
    return self.steps[scheduler.ELASTIC] / self.steps[granularity]


def print_table(rows: Sequence[Row]) -> None:
  """Step time of elastic over those of others, by objective and ratio of rollout to learner time."""
  print(f'{"":5}{"R/L":>6}{"cells":>7}{"best fixed: mean":>18}{"largest":>9}{"Sync: mean":>12}{"largest":>9}{"trajectory: mean":>18}{"least":>8}')
  for objective, ratio in sorted({(r.cell.objective, r.cell.ratio) for r in rows}):
    mine = [r for r in rows if (r.cell.objective, r.cell.ratio) == (objective, ratio)]
    best, sync, trajectory = ([r.over_best for r in mine], [r.over('batch') for r in mine], [r.over('trajectory') for r in mine])
    print(f'{objective:5}{ratio:6.2f}{len(mine):7}{np.mean(best):18.3f}{max(best):9.3f}{np.mean(sync):12.3f}{max(sync):9.3f}'
          f'{np.mean(trajectory):18.3f}{min(trajectory):8.3f}')


def main() -> None:
  study, seed, buckets = _CONFIG.value.study, _CONFIG.value.seed, learner.buckets(_CONFIG.value)
  cells, rows = study_cells.cells(study)[::_EVERY.value], []
  with progress_lib.Progress(len(cells), 'simulate', 'cells') as progress:
    for n, cell in enumerate(cells):
      rng = np.random.default_rng([seed, n])
      arrivals, before = draw(cell, study, rng), draw(cell, study, rng)
      rows.append(Row(cell, steps(arrivals, before, cell.batch / (cell.ratio * study.capacity), cell.objective, study.prompt_tokens,
                                   buckets)))
      progress.advance()
  print_table(rows)
  apart = {}
  for name, together in (('near_equal', False), ('together', True)):
    rng = np.random.default_rng([seed, len(cells), together])
    arrivals, before = (one_wave(study, 0.5 if together else 0.05, together, rng) for _ in range(2))
    apart[name] = steps(arrivals, before, max(a.reward_s for a in arrivals), 'grpo', study.prompt_tokens, buckets)
    speedups = ', '.join(f'{g} {apart[name]["batch"] / s:.3f}' for g, s in apart[name].items())
    print(f'{name.replace("_", " ")} trace, speedup over Sync at balance: {speedups}')
  near, together = apart['near_equal'], apart['together']
  print(json.dumps(cli.rounded({
      'cells': len(rows), 'largest_over_best_fixed': max(r.over_best for r in rows), 'mean_over_best_fixed': float(np.mean([r.over_best for r in rows])),
      'largest_over_sync': max(r.over('batch') for r in rows), 'near_equal_speedup': near['batch'] / near[scheduler.ELASTIC],
      'near_equal_speedup_trajectory': near['batch'] / near['trajectory'],
      'together_over_group': together[scheduler.ELASTIC] / together['group']}, 4)))


if __name__ == '__main__':
  cli.run(main)
