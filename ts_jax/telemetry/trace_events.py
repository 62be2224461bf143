"""A trace in the Trace Event Format, which chrome://tracing and https://ui.perfetto.dev open.

Processes are the stages (rollout slots, tools, teacher, verifier, learner, barrier), their threads are rows: one a learner lane; work
that ran side by side is packed into the fewest rows.  Arrows lead from the last rollout work of a trajectory to its source.

Reference: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from typing import Any, Sequence

from ts_jax import types
from ts_jax.telemetry import trace

# Stages from top to bottom: name, kinds, name of a row.
_STAGES = (
    ('update', (), 'updates'),
    ('engine', ('engine',), 'slot'),
    ('tools', ('tool',), 'tool'),
    ('teacher', ('teacher',), 'score'),
    ('reference', ('reference',), 'score'),
    ('verifier', ('verify',), 'verifier'),
    ('learner', (*trace.LEARNER, 'compile'), 'lane'),
    ('optimizer', ('optimizer',), 'optimizer'),
    ('publication', ('publish',), 'publication'),
)
_UPDATES, _LEARNER = 0, [name for name, _, _ in _STAGES].index('learner')
_ARGS = ('update', 'group', 'index', 'turn', 'lane', 'tokens', 'task', 'version', 'scored', 'work')


def trace_events(spans: Sequence[types.Span]) -> dict[str, Any]:
  """Returns the JSON object of a trace file.

  Args:
    spans: of one or more updates.

  Returns:
    Times are microseconds after the first span.  Events carry what the span holds as `args`; those of one row do not overlap.
  """
  spans = sorted(spans, key=lambda s: (s.start_s, -s.end_s))
  origin = spans[0].start_s if spans else 0.0
  stage_of = {kind: number for number, (_, kinds, _) in enumerate(_STAGES) for kind in kinds}
  placed = []  # (stage, row, span)
  for number, (_, kinds, _) in enumerate(_STAGES):
    mine = [s for s in spans if s.kind in kinds]
    rows = [max(s.lane, 0) for s in mine] if number == _LEARNER else pack(mine)
    placed += [(number, row, s) for row, s in zip(rows, mine)]
  events = [_complete(stage, row, s, origin) for stage, row, s in placed]
  updates = _whole_updates(spans)
  events += [_complete(_UPDATES, row, s, origin) for row, s in zip(pack(updates), updates)]
  events += _arrows(placed, origin)
  used = sorted({(e['pid'], e['tid']) for e in events})
  return {'traceEvents': _names(used) + sorted(events, key=lambda e: (e['ts'], e['pid'], e['tid'])), 'displayTimeUnit': 'ms'}


def pack(spans: Sequence[types.Span]) -> list[int]:
  """Row of each span, given by start: the lowest that is free again."""
  ends: list[float] = []
  rows = []
  for s in spans:
    row = next((r for r, end in enumerate(ends) if end <= s.start_s), len(ends))
    ends[row:row + 1] = [s.end_s]
    rows.append(row)
  return rows


def _whole_updates(spans: Sequence[types.Span]) -> list[types.Span]:
  """One span an update, from its first work to its last."""
  return [types.Span('update', min(s.start_s for s in mine), max(s.end_s for s in mine), update)
          for update, mine in trace.by_update(spans).items() if update >= 0]


def _complete(stage: int, row: int, span: types.Span, origin: float) -> dict[str, Any]:
  args: dict[str, Any] = {k: v for k in _ARGS if (v := getattr(span, k)) not in (-1, '')}
  if span.members:
    args['members'] = list(span.members)
  if span.ready_s >= 0:
    args |= {'ready_us': _us(span.ready_s - origin), 'waited_us': _us(max(0.0, span.start_s - span.ready_s))}
  return {'ph': 'X', 'name': _name(span), 'cat': span.kind, 'pid': stage, 'tid': row, 'ts': _us(span.start_s - origin),
          'dur': max(0.0, round(_us(span.end_s - origin) - _us(span.start_s - origin), 3)), 'args': args}


def _name(span: types.Span) -> str:
  if span.kind == 'update':
    return f'update {span.update}'
  where = '' if span.group < 0 else f' {span.group}' if span.index < 0 else f' {span.group}.{span.index}'
  if span.index < 0 and span.members:
    where += f'.({",".join(map(str, span.members))})'
  work = f' {span.work}' if span.kind == 'prompt' and span.work else ''
  return f'{span.kind}{work}{where}' + (f' turn {span.turn}' if span.turn >= 0 else '')


def _arrows(placed: Sequence[tuple[int, int, types.Span]], origin: float) -> list[dict[str, Any]]:
  """From the last rollout work before a source's start to the source, for each of its trajectories."""
  done: dict[tuple[int, int, int], list[tuple[int, int, types.Span]]] = {}
  for place in placed:
    if place[2].kind in trace.ROLLOUT:
      done.setdefault((place[2].update, place[2].group, place[2].index), []).append(place)
  events = []
  for stage, row, s in placed:
    if s.kind != 'source':
      continue
    for member in s.members or (s.index,):
      before = [p for p in done.get((s.update, s.group, member), ()) if p[2].end_s <= s.start_s]
      if before:
        from_stage, from_row, last = max(before, key=lambda p: p[2].end_s)
        common = {'name': 'released', 'cat': 'release', 'id': f'{s.update}.{s.group}.{member}'}
        # An arrow binds to the event that encloses its time: the start of the last rollout work, of which the end is exclusive.
        events += [{**common, 'ph': 's', 'pid': from_stage, 'tid': from_row, 'ts': _us(last.start_s - origin)},
                   {**common, 'ph': 'f', 'bp': 'e', 'pid': stage, 'tid': row, 'ts': _us(s.start_s - origin)}]
  return events


def _names(used: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
  """Metadata events that name and order processes and threads."""
  meta = lambda name, pid, args, tid=0: {'ph': 'M', 'name': name, 'pid': pid, 'tid': tid, 'ts': 0, 'args': args}
  events = []
  for stage in sorted({pid for pid, _ in used}):
    events += [meta('process_name', stage, {'name': _STAGES[stage][0]}), meta('process_sort_index', stage, {'sort_index': stage})]
  for stage, row in used:
    events += [meta('thread_name', stage, {'name': f'{_STAGES[stage][2]} {row}'}, row),
               meta('thread_sort_index', stage, {'sort_index': row}, row)]
  return events


def _us(seconds: float) -> float:
  return round(seconds * 1e6, 3)
