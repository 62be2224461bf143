"""Writes a run's trace as a file for https://ui.perfetto.dev or chrome://tracing.

    python -m experiments.trace --run=runs/quickstart-42 --out=trace.json

Rows are learner lanes, engine requests by slot, tools, verifier, teacher, optimizer and publication.  `--sources` writes one
JSON line for each source beside it: task, trajectories, version, lane, readiness, service, scored tokens, deferred completion.
"""

from __future__ import annotations

import json
import pathlib

from absl import flags

from experiments import cli
from ts_jax import types
from ts_jax.telemetry import jsonlines, rundir, trace, trace_events

_RUN = flags.DEFINE_string('run', None, 'Run directory.', required=True)
_OUT = flags.DEFINE_string('out', None, 'File to write.  Default: trace.json in the run directory.')
_SOURCES = flags.DEFINE_string('sources', None, 'File for the source records, JSON lines; none by default.')
_UPDATES = flags.DEFINE_list('updates', None, 'Numbers of the updates to write; all by default.')


def chosen(spans: list[types.Span], updates: list[str] | None) -> list[types.Span]:
  """Spans of the updates asked for.

  Raises:
    ConfigError: no such update.
  """
  there = sorted({s.update for s in spans if s.update >= 0})
  if not updates:
    wanted = there
  else:
    try:
      wanted = [int(u) for u in updates]
    except ValueError:
      raise types.ConfigError(f'--updates={",".join(updates)} must be numbers, for instance --updates=0,3') from None
  missing = sorted(set(wanted) - set(there))
  if missing or not there:
    raise types.ConfigError(f'the trace of {_RUN.value} has no spans of updates {missing or "at all"}; it has {there}')
  return [s for s in spans if s.update in set(wanted)]


def main() -> None:
  run = rundir.RunDirectory(_RUN.value)
  run.read_config()  # that it is a run directory
  spans = chosen(run.read_trace(), _UPDATES.value)
  events = trace_events.trace_events(spans)
  path = pathlib.Path(_OUT.value) if _OUT.value else run.path / 'trace.json'
  jsonlines.write_atomically(path, json.dumps(events, separators=(',', ':')))
  records = trace.sources(spans)
  if _SOURCES.value:
    jsonlines.write_atomically(pathlib.Path(_SOURCES.value), ''.join(json.dumps(r.to_json()) + '\n' for r in records))
  print(f'{path.resolve()}: open it at https://ui.perfetto.dev')
  print(json.dumps({'updates': len({s.update for s in spans}), 'spans': len(spans), 'events': len(events['traceEvents']),
                    'sources': len(records)}))


if __name__ == '__main__':
  cli.run(main)
