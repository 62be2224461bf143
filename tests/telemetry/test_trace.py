"""Traces are checked when they are read, and become source records and trace events of the structure that viewers expect."""

import collections
import json
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings, strategies as st
import pytest

from ts_jax import types
from ts_jax.telemetry import jsonlines, trace, trace_events

ROOT = Path(__file__).resolve().parents[2]
SPAN = types.Span('source', 1.0, 2.0, 0, 0, 1, lane=0, tokens=9, ready_s=0.5, task='copy-1', version=3, scored=4, members=(1,), work='known')


def test_a_span_reads_back_as_it_was_written(tmp_path):
  lines = jsonlines.JsonLines(tmp_path / 'trace.jsonl')
  earlier = types.Span('prompt', 0.0, 1.0, 0, -1, lane=0)
  lines.append(SPAN.to_json())
  lines.append({k: v for k, v in earlier.to_json().items() if k not in ('task', 'version', 'scored', 'members', 'work')})
  assert trace.read(lines) == [SPAN, earlier]


@pytest.mark.parametrize('change, message', [
    ({'kind': 'sauce'}, "kind='sauce' is none of"), ({'end_s': 0.5}, 'ends at 0.5, before its start at 1.0'),
    ({'tokens': 1.5}, 'tokens=1.5 is not of type int'), ({'lane': True}, 'lane=True is not of type int'),
    ({'start_s': '1'}, "start_s='1' is not of type float"), ({'lane': -1}, "kind='source' without a lane"),
    ({'group': -1}, 'index=1 without a group'), ({'work': 'forward'}, "work='forward' does not go with kind='source'"),
    ({'scored': -3}, 'scored=-3 is negative'), ({'members': [1.0]}, r'members=\[1.0\] is not of type'), ({'version': -2}, 'version=-2'),
    ({'members': [-1]}, 'negative index'), ({'colour': 'red'}, r"unknown fields \['colour'\]"), ({'update': None}, 'update=None is not of type int')])
def test_a_line_that_is_no_span_is_named(tmp_path, change, message):
  lines = jsonlines.JsonLines(tmp_path / 'trace.jsonl')
  lines.append(SPAN.to_json())
  lines.append(SPAN.to_json() | change)
  with pytest.raises(types.ConfigError, match=rf'trace.jsonl:2 is no span: .*{message}'):
    trace.read(lines)


def test_missing_fields_and_other_json_are_named(tmp_path):
  lines = jsonlines.JsonLines(tmp_path / 'trace.jsonl')
  lines.append({'kind': 'engine'})
  with pytest.raises(types.ConfigError, match=r"fields \['start_s', 'end_s', 'update'\] are missing"):
    trace.read(lines)
  (tmp_path / 'trace.jsonl').write_text('[1]\n')
  with pytest.raises(types.ConfigError, match=r':1 is no span: \[1\] is not an object'):
    trace.read(lines)


def test_deferred_completion_is_the_end_of_what_a_source_left():
  at = dict(update=0, group=0, lane=0)
  spans = [
      types.Span('turn', 0.0, 1.0, index=0, turn=0, **at), types.Span('source', 2.0, 3.0, index=0, members=(0,), work='content', **at),
      types.Span('source', 3.0, 4.0, index=-1, members=(1, 2), work='final', **at), types.Span('fold', 6.0, 6.5, index=0, members=(0,), work='held', **at),
      types.Span('source', 4.0, 5.0, 0, 1, 0, lane=0, members=(0,), work='final')]
  records = trace.sources(spans)
  assert [(r.kind, r.members, r.end_s, r.deferred_s) for r in records] == [
      ('turn', (0,), 1.0, 6.5), ('source', (0,), 3.0, 6.5), ('source', (1, 2), 4.0, 4.0), ('source', (0,), 5.0, 5.0)]
  closed = trace.sources([*spans, types.Span('reduce', 7.0, 8.0, work='', **at), types.Span('prompt', 8.0, 9.0, work='backward', **at)])
  assert [r.deferred_s for r in closed] == [9.0, 9.0, 9.0, 5.0]


def test_structure_of_trace_events(finished_run):
  spans = finished_run.read_trace()
  written = json.loads(json.dumps(trace_events.trace_events(spans), allow_nan=False))
  assert written['displayTimeUnit'] == 'ms'
  phases = collections.defaultdict(list)
  for e in written['traceEvents']:
    assert {'ph', 'name', 'pid', 'tid', 'ts'} <= set(e) and e['ts'] >= 0
    phases[e['ph']].append(e)
  assert set(phases) == {'M', 'X', 's', 'f'}
  stages = {e['pid']: e['args']['name'] for e in phases['M'] if e['name'] == 'process_name'}
  assert {'update', 'engine', 'tools', 'verifier', 'learner', 'optimizer', 'publication'} == set(stages.values())
  rows = {(e['pid'], e['tid']) for e in phases['M'] if e['name'] == 'thread_name'}
  assert rows == {(e['pid'], e['tid']) for e in phases['X']}
  kinds = collections.Counter(e['cat'] for e in phases['X'])
  assert kinds.pop('update') == 5 and kinds == collections.Counter(s.kind for s in spans)
  assert len({e['tid'] for e in phases['X'] if e['cat'] == 'engine'}) == 12  # the run's slots
  arrows = {e['id']: e for e in phases['s']}
  assert len(arrows) == 5 * 12 and all(arrows[e['id']]['ts'] <= e['ts'] for e in phases['f']) and len(phases['f']) == len(arrows)
  source = next(e for e in phases['X'] if e['cat'] == 'source')
  assert source['args']['waited_us'] >= 0 and source['args']['group'] >= 0 and source['dur'] > 0


def overlapping(events):
  """Pairs of neighbours in a row of which the second starts before the first ends."""
  rows = collections.defaultdict(list)
  for e in events:
    if e['ph'] == 'X':
      rows[e['pid'], e['tid']].append((e['ts'], e['ts'] + e['dur']))
  return [(a, b) for row in rows.values() for a, b in zip(sorted(row), sorted(row)[1:]) if b[0] < a[1] - 1e-2]


INTERVALS = st.lists(st.tuples(st.sampled_from(['engine', 'tool', 'verify', 'teacher', 'optimizer', 'publish']), st.floats(1.7e9, 1.7e9 + 50),
                               st.floats(0, 5), st.integers(0, 2)), max_size=40)


@settings(deadline=None)
@given(INTERVALS)
def test_no_row_shows_two_things_at_once(rows):
  spans = [types.Span(kind, start, start + length, update, 0, 0) for kind, start, length, update in rows]
  events = trace_events.trace_events(spans)['traceEvents']
  assert not overlapping(events)
  assert sum(e['ph'] == 'X' and e['cat'] != 'update' for e in events) == len(spans)


def test_the_command_writes_the_file_and_refuses_what_is_not_there(finished_run, tmp_path):
  def call(*arguments):
    return subprocess.run([sys.executable, '-m', 'experiments.trace', *arguments], cwd=ROOT, capture_output=True, text=True)

  done = call(f'--run={finished_run.path}', f'--out={tmp_path}/t.json', '--updates=1,3', f'--sources={tmp_path}/s.jsonl')
  assert done.returncode == 0, done.stderr
  figures = json.loads(done.stdout.splitlines()[-1])
  events = json.loads((tmp_path / 't.json').read_text())['traceEvents']
  assert figures == {'updates': 2, 'spans': figures['spans'], 'events': len(events), 'sources': 24}
  assert {e['args']['update'] for e in events if e['ph'] == 'X'} == {1, 3}
  assert [json.loads(line)['update'] for line in (tmp_path / 's.jsonl').read_text().splitlines()] == [1] * 12 + [3] * 12
  refused = call(f'--run={finished_run.path}', '--updates=9')
  assert refused.returncode == 1 and 'no spans of updates [9]' in refused.stderr and 'Traceback' not in refused.stderr
  assert 'must be numbers' in call(f'--run={finished_run.path}', '--updates=x').stderr
  assert call(f'--run={tmp_path}').returncode == 1
