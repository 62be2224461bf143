"""The trace of a run: trace.jsonl, one `ts_jax.types.Span` a line.  `KINDS` and `Span` are its schema; `read` checks it.

Rollout work has no lane.  A turn has an 'engine' request, a 'tool' call if it held a command, and a score of each scorer; a
trajectory has one 'verify'.  Learner work has the lane that ran it, the task of its group and the policy version it was
computed at.  What a source leaves for later are the fold of a held gradient, the reduction of its group, and its prompt's
backward pass; `sources` brings them together.  The barrier's work (`BARRIER`) follows the last of all lanes' work.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Iterable, Mapping, Sequence

from ts_jax import types
from ts_jax.telemetry import jsonlines

KINDS: Mapping[str, str] = {
    'engine': 'request that sampled a turn',
    'tool': "command of a turn",
    'teacher': "teacher's score of a turn",
    'reference': "reference model's score of a turn",
    'verify': 'tests of a finished trajectory, up to its reward',
    'forward': 'layers run forward over turns of a running trajectory',
    'turn': 'turns of a running trajectory differentiated',
    'source': 'trajectories differentiated, or what was left of them',
    'prompt': 'shared ids, forward (before what stands behind them) or backward (after it); of no group: those all prompts share',
    'fold': 'a gradient added to a sum',
    'reduce': "a group's sums become its part of the direction; of no group: those of the batch",
    'optimizer': 'lanes reduced, one optimizer step',
    'publish': 'new weights to every replica, up to the last acknowledgement',
    'compile': 'compilation within an update',
}
ROLLOUT = ('engine', 'tool', 'teacher', 'reference', 'verify')
LEARNER = ('forward', 'turn', 'source', 'prompt', 'fold', 'reduce')
BARRIER = ('optimizer', 'publish')
_WORK = {'source': ('final', 'known', 'content'), 'prompt': ('forward', 'backward'), 'fold': ('', 'held')}
_PLAIN = {'str': str, 'int': int, 'float': (int, float)}


@dataclasses.dataclass(frozen=True)
class SourceRecord(types.Record):
  """One piece of an objective source's service.  Times in seconds on the run's clock.

  Attributes:
    update, task, group: where it belongs.
    members: its trajectories, index within the group; several ran as one batch.
    turn: last turn included where turns of a running trajectory were worked on, else -1.
    version: policy version it was computed at.
    lane: learner lane.
    kind: 'source', 'turn' or 'forward'.
    work: what was known when a source started: 'final', 'known', 'content'.
    ready_s: when its inputs were fixed.
    start_s, end_s: service.
    tokens, scored: tokens processed, and scored ones among them.
    deferred_s: when the last work it had left for later was done: its trajectory's completion, its fold, its group's reduction
      and its prompt's backward pass.  `end_s` where nothing was left.
  """

  update: int
  task: str
  group: int
  members: tuple[int, ...]
  turn: int
  version: int
  lane: int
  kind: str
  work: str
  ready_s: float
  start_s: float
  end_s: float
  tokens: int
  scored: int
  deferred_s: float


def read(lines: jsonlines.JsonLines) -> list[types.Span]:
  """Every span of a trace, in the order written.

  Raises:
    ConfigError: a line is not a span; the message names file, line, field and value.
  """
  return [_span(values, f'{lines.path}:{number}') for number, values in enumerate(lines.read(), 1)]


def by_update(spans: Iterable[types.Span]) -> dict[int, list[types.Span]]:
  """Spans of each update, ascending, by start."""
  updates: dict[int, list[types.Span]] = {}
  for span in sorted(spans, key=lambda s: (s.update, s.start_s, s.end_s)):
    updates.setdefault(span.update, []).append(span)
  return updates


def sources(spans: Sequence[types.Span]) -> list[SourceRecord]:
  """The source records of a trace, by start of service."""
  ends: dict[tuple[int, int, int], float] = {}  # of what a trajectory (index), or its whole group (-1), leaves for later
  for s in spans:
    closing = s.kind == 'reduce' or (s.kind == 'prompt' and s.work == 'backward')
    for index in (-1,) if closing else s.members:
      at = s.update, s.group, index
      ends[at] = max(s.end_s, ends.get(at, s.end_s))
  records = []
  for s in sorted(spans, key=lambda s: (s.start_s, s.lane)):
    if s.kind in ('source', 'turn', 'forward'):
      members = s.members or (s.index,)
      later = [ends.get((s.update, group, i), s.end_s) for group, i in (*((s.group, m) for m in members), (s.group, -1), (-1, -1))]
      records.append(SourceRecord(s.update, s.task, s.group, members, s.turn, s.version, s.lane, s.kind, s.work, s.ready_s, s.start_s,
                                  s.end_s, s.tokens, s.scored, max(s.end_s, *later)))
  return records


def _span(values: Any, where: str) -> types.Span:
  def require(condition: bool, what: str) -> None:
    if not condition:
      raise types.ConfigError(f'{where} is no span: {what}.  Was it written by another version, or damaged?  Delete that line, or the file')

  require(isinstance(values, dict), f'{values!r} is not an object')
  hints = typing.get_type_hints(types.Span)
  fields = {f.name: f for f in dataclasses.fields(types.Span)}
  unknown = sorted(set(values) - set(fields))
  missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
  require(not unknown, f'unknown fields {unknown}')
  require(not missing, f'fields {missing} are missing')
  for name, value in values.items():
    require(_fits(hints[name], value), f'{name}={value!r} is not of type {fields[name].type}')
  span = types.Span.from_json(values)
  require(span.kind in KINDS, f'kind={span.kind!r} is none of {list(KINDS)}')
  require(span.start_s <= span.end_s, f'it ends at {span.end_s}, before its start at {span.start_s}')
  for name in ('tokens', 'scored'):
    require(getattr(span, name) >= 0, f'{name}={getattr(span, name)} is negative')
  for name in ('update', 'group', 'index', 'turn', 'lane', 'version'):
    require(getattr(span, name) >= -1, f'{name}={getattr(span, name)} is neither a number from 0 on nor -1')
  require(all(m >= 0 for m in span.members), f'members={list(span.members)} holds a negative index')
  require(span.group >= 0 or span.index < 0, f'index={span.index} without a group')
  require(span.lane >= 0 or span.kind not in LEARNER, f'kind={span.kind!r} without a lane')
  # Earlier traces have no `work`.
  require(span.work in ('', *_WORK.get(span.kind, ())), f'work={span.work!r} does not go with kind={span.kind!r}')
  return span


def _fits(hint: Any, value: Any) -> bool:
  if typing.get_origin(hint) is tuple:
    return isinstance(value, list) and all(_fits(typing.get_args(hint)[0], v) for v in value)
  return isinstance(value, _PLAIN[hint.__name__]) and not isinstance(value, bool) and (not isinstance(value, float) or math.isfinite(value))
