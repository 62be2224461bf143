"""How far predictions of one cell lie apart: the two measures of Equation 29 of ThunderSyncRL.

A cell has three speedups: from the release law (analytical), from the replay of its recorded releases (trace), and from the
wall clock.  The first measure is the release model's error, the second what the runtime adds beyond its own trace.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Summary:
  """Percent, over cells."""

  mean: float
  mean_absolute: float
  largest_absolute: float


def model_difference(analytical: np.ndarray, trace: np.ndarray) -> np.ndarray:
  """e = 100 |trace - analytical| / analytical, percent, [cells]."""
  analytical, trace = _paired(analytical=analytical, trace=trace)
  return 100 * np.abs(trace - analytical) / analytical


def runtime_difference(trace: np.ndarray, measured: np.ndarray) -> np.ndarray:
  """d = 100 (trace - measured) / trace, percent, [cells]; negative where the wall clock beat the replay."""
  trace, measured = _paired(trace=trace, measured=measured)
  return 100 * (trace - measured) / trace


def summarize(differences: np.ndarray) -> Summary:
  """Mean, mean absolute and largest absolute difference.

  Raises:
    ValueError: no cells.
  """
  values = np.asarray(differences, np.float64)
  if not values.size:
    raise ValueError('no cells to summarize: every configuration is missing or infeasible')
  return Summary(float(values.mean()), float(np.abs(values).mean()), float(np.abs(values).max()))


def _paired(**speedups: np.ndarray) -> list[np.ndarray]:
  arrays = {name: np.asarray(v, np.float64) for name, v in speedups.items()}
  if len({a.shape for a in arrays.values()}) > 1:
    raise ValueError(f'{ {n: a.shape for n, a in arrays.items()} }: the measures compare cell by cell, give one speedup of each a cell')
  for name, a in arrays.items():
    wrong = ~(np.isfinite(a) & (a > 0))
    if np.any(wrong):
      raise ValueError(f'{name} has a speedup of {a[wrong][0]}: leave missing cells out of both arrays')
  return list(arrays.values())
