"""Timelines of several runs under each other on one time axis, as Figure 3 of ThunderSyncRL: where rollout and learner idle.

Above each run's axis stands how many engine requests are open, of the most that ever were, below it the share of learner lanes that
work; dashed lines are optimizer steps.  `of_run` and `timelines` make the data, which `save` draws with matplotlib and the report
page with its own script.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

from ts_jax import types
from ts_jax.telemetry import jsonlines
from ts_jax.telemetry import rundir
from ts_jax.telemetry import trace

MAX_UPDATES = 8
_BINS = 600  # of the longest run
_ROLLOUT, _LEARNER, _IDLE, _STEP = '#3f76c4', '#15826f', '#f0d9d9', '#555555'


@dataclasses.dataclass(frozen=True)
class Recorded:
  """A run's spans, and what to call it."""

  name: str
  spans: tuple[types.Span, ...]


@dataclasses.dataclass(frozen=True)
class Timeline:
  """What a picture of one run needs.  Time runs from the first span; what belongs to no update (evaluation, interruption) is left out.

  Attributes:
    name: of the run.
    bin_s: width of a bin, seconds; the same for all runs of a picture.
    rollout: [bins] open engine requests over the most that were open at once, in [0, 1].
    learner: [bins] share of lanes that work (the optimizer step is work of all of them).
    steps_s: ends of optimizer steps, seconds.
    end_s: end of the last span, seconds.
  """

  name: str
  bin_s: float
  rollout: np.ndarray
  learner: np.ndarray
  steps_s: tuple[float, ...]
  end_s: float

  def idle(self) -> tuple[float, float]:
    """(rollout's, learner's) share of the time without work, over the whole picture."""
    return tuple(float(1 - busy.sum() * self.bin_s / self.end_s) for busy in (self.rollout, self.learner))


def of_run(run: rundir.RunDirectory) -> Recorded:
  """Reads a run.

  Raises:
    ConfigError: not a run directory, a damaged trace, or one without learner work.
  """
  schedule = run.read_config().get('schedule', {})
  granularity = schedule.get('granularity', 'trajectory')
  by = '' if schedule.get('name') == 'sync' or granularity == 'trajectory' else f', by {granularity}'
  spans = tuple(s for s in run.read_trace() if s.update >= 0)
  if not any(s.kind in trace.LEARNER for s in spans):
    raise types.ConfigError(f'{run.path} has no learner work in its trace: give a run that made at least one update')
  return Recorded(f'{schedule.get("name", "run")}{by} ({run.path.name})', spans)


def timelines(runs: Sequence[Recorded], updates: int | None = None) -> list[Timeline]:
  """Timelines of the first updates of runs, the same number of each.

  Args:
    runs: at least one.
    updates: how many; by default as many as all have, at most `MAX_UPDATES`.
  """
  grouped = [trace.by_update(run.spans) for run in runs]
  count = min([MAX_UPDATES if updates is None else updates, *map(len, grouped)])
  chosen = [[s for update in sorted(g)[:count] for s in g[update]] for g in grouped]
  lengths = [float(_without_gaps(spans)(max(s.end_s for s in spans))) for spans in chosen]
  bin_s = max(max(lengths) / _BINS, 1e-6)
  return [_timeline(run.name, spans, bin_s) for run, spans in zip(runs, chosen)]


def save(path: Path, runs: Sequence[Recorded], updates: int | None = None) -> Path:
  """Draws runs under each other.

  Args:
    path: picture to write; its ending decides the format.
    runs, updates: as for `timelines`.

  Raises:
    ConfigError: an unknown ending.
    TsJaxError: the file cannot be written.
  """
  import matplotlib  # here: the report page needs none of it

  picture = draw(timelines(runs, updates))
  endings = sorted(picture.canvas.get_supported_filetypes())
  if path.suffix.lstrip('.') not in endings:
    raise types.ConfigError(f'{path}: a picture ends in one of {endings}')
  with jsonlines.explained(path), matplotlib.rc_context({'svg.hashsalt': 'ts_jax'}):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=160)
  return path


def draw(lines: Sequence[Timeline]) -> Any:
  """The matplotlib figure of timelines."""
  from matplotlib import figure as figure_lib

  picture = figure_lib.Figure(figsize=(9.6, 1.55 * len(lines) + 0.9), layout='constrained')
  panels = picture.subplots(len(lines), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
  for panel, line in zip(panels, lines):
    _draw(panel, line)
  panels[-1].set(xlabel='seconds', xlim=(0, max(line.end_s for line in lines)))
  names = {'rollout busy': _ROLLOUT, 'learner busy': _LEARNER, 'idle': _IDLE}
  handles = [panels[0].fill_between([], [], color=colour, label=name, linewidth=0) for name, colour in names.items()]
  picture.legend(handles=handles, loc='outside upper right', ncols=3, frameon=False, fontsize=9)
  return picture


def _draw(panel: Any, line: Timeline) -> None:
  edges = np.append(np.arange(len(line.rollout)) * line.bin_s, line.end_s)
  panel.fill_between([0, line.end_s], -100, 100, color=_IDLE, linewidth=0)
  for busy, sign, colour in ((line.rollout, 100, _ROLLOUT), (line.learner, -100, _LEARNER)):
    panel.fill_between(edges, np.append(sign * busy, sign * busy[-1]), step='post', color=colour, linewidth=0)
  for at in line.steps_s:
    panel.axvline(at, color=_STEP, linestyle=(0, (3, 2)), linewidth=0.8)
  panel.axhline(0, color='black', linewidth=0.6)
  rollout, learner = line.idle()
  idle = f'idle: rollout {rollout:.0%}, learner {learner:.0%}'
  panel.set_title(f'{line.name}: {len(line.steps_s)} optimizer steps in {line.end_s:.1f} s; {idle}', fontsize=9, loc='left')
  panel.set(ylim=(-100, 100), yticks=(-100, 0, 100), yticklabels=('100 %', '0', '100 %'))
  panel.tick_params(labelsize=8)
  panel.spines[['top', 'right']].set_visible(False)


def _timeline(name: str, spans: Sequence[types.Span], bin_s: float) -> Timeline:
  clock = _without_gaps(spans)
  end_s = float(clock(max(s.end_s for s in spans)))
  bins = max(1, int(np.ceil(end_s / bin_s - 1e-9)))
  interval = lambda s: (float(clock(s.start_s)), float(clock(s.end_s)))
  engine = [interval(s) for s in spans if s.kind == 'engine']
  work = [s for s in spans if s.kind in trace.LEARNER]
  lanes = {s.lane for s in work} or {0}
  # The reduction over lanes and the optimizer step hold up all lanes.
  learner = [interval(s) for s in work] + [interval(s) for s in spans if s.kind == 'optimizer' for _ in lanes]
  return Timeline(name, bin_s, _busy(engine, bins, bin_s) / max(_most_at_once(engine), 1), _busy(learner, bins, bin_s) / len(lanes),
                  tuple(sorted(interval(s)[1] for s in spans if s.kind == 'optimizer')), end_s)


def _without_gaps(spans: Sequence[types.Span]) -> Callable[[float], float]:
  """From the run's clock to seconds spent within updates."""
  windows = sorted((min(s.start_s for s in mine), max(s.end_s for s in mine)) for mine in trace.by_update(spans).values())
  starts, ends = [windows[0][0]], [windows[0][1]]
  for start, end in windows[1:]:
    if start > ends[-1]:
      starts.append(start)
      ends.append(end)
    ends[-1] = max(ends[-1], end)
  spent = np.cumsum([0.0] + [end - start for start, end in zip(starts, ends)])
  knots = [t for window in zip(starts, ends) for t in window]
  return lambda t: np.interp(t, knots, np.repeat(spent, 2)[1:-1])


def _busy(intervals: Sequence[tuple[float, float]], bins: int, bin_s: float) -> np.ndarray:
  """[bins] mean number of intervals at work in each."""
  edges = np.arange(bins + 1) * bin_s
  covered = np.zeros(bins + 1)  # time at work before each edge
  for start, end in intervals:
    covered += np.clip(edges - start, 0.0, end - start)
  return np.diff(covered) / bin_s


def _most_at_once(intervals: Sequence[tuple[float, float]]) -> int:
  changes = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
  return int(np.max(np.cumsum([change for _, change in changes]), initial=0))
