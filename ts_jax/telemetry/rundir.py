"""A run directory: everything a run leaves behind, in files that a person can read and a resume can trust.

    config.json                      resolved config
    manifest.json                    versions, machine, model, tasks, sandbox, seed
    metrics.jsonl                    one `ts_jax.telemetry.metrics` record a line
    tensorboard/                     the same scalars as TensorBoard events
    trace.jsonl                      one `ts_jax.types.Span` a line
    trajectories/update_000000.jsonl one `ts_jax.types.Trajectory` a line, appended as its reward arrives, by the update it was planned for
    batches.jsonl                    schedule fully_async: which groups each update took, as [planned update, group]
    checkpoints/                     written by the trainer
    logs/                            engine logs
    report.html                      written by `experiments.report`

One process at a time writes: it holds the lock.  Readers need none.
"""

from __future__ import annotations

import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any, Iterable, Mapping

from ts_jax import types
from ts_jax.telemetry import jsonlines
from ts_jax.telemetry import trace as trace_lib

_TRAJECTORY_FILE = re.compile(r'update_(\d{6,})\.jsonl')
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy', 'orbax-checkpoint', 'tokenizers', 'ts_jax')
_MISSING = '(not set)'
# What a resume may not find changed: another model, seed or task set would make it another run.
_FIXED_FACTS = ('model_checksum', 'seed', 'task_digests')


class RunDirectory:
  """The files of one run.  Constructing one touches nothing.

  Attributes:
    path: the folder.
  """

  def __init__(self, path: str | Path):
    self.path = Path(path).expanduser()
    self.config_path = self.path / 'config.json'
    self.manifest_path = self.path / 'manifest.json'
    self.checkpoints = self.path / 'checkpoints'
    self.logs = self.path / 'logs'
    self.tensorboard = self.path / 'tensorboard'
    self.trajectories = self.path / 'trajectories'
    self.report = self.path / 'report.html'
    self.metrics = jsonlines.JsonLines(self.path / 'metrics.jsonl')
    self.trace = jsonlines.JsonLines(self.path / 'trace.jsonl')
    self.batches = jsonlines.JsonLines(self.path / 'batches.jsonl')
    self._open_trajectories: tuple[int, jsonlines.JsonLines] | None = None
    self._lock: Any = None

  # --- opening for writing

  def open(self, config: Mapping[str, Any] | Any, may_grow: Iterable[str] = ('updates',), may_change: Iterable[str] = ()) -> bool:
    """Creates the folder or reopens it for a resume, and takes its lock.

    Args:
      config: resolved config (a mapping or an ml_collections ConfigDict).
      may_grow: dotted keys whose number may be larger than stored.
      may_change: dotted keys that may differ from what is stored.

    Returns:
      True when the folder already held a run.

    Raises:
      ConfigError: another process writes here, or the stored config differs.
      TsJaxError: the folder cannot be written.
    """
    with jsonlines.explained(self.path):
      for folder in (self.path, self.checkpoints, self.logs, self.trajectories):
        folder.mkdir(parents=True, exist_ok=True)
    self._acquire()
    try:
      plain = plain_config(config)
      existed = self.config_path.exists()
      if existed:
        self._check_config(plain, frozenset(may_grow), frozenset(may_change))
      jsonlines.write_atomically(self.config_path, json.dumps(plain, indent=2) + '\n')
    except Exception:
      self.close()
      raise
    return existed

  def close(self) -> None:
    """Closes every file and gives the lock back."""
    self.metrics.close()
    self.trace.close()
    self.batches.close()
    if self._open_trajectories:
      self._open_trajectories[1].close()
      self._open_trajectories = None
    if self._lock is not None:
      lock, self._lock = self._lock, None
      lock.truncate(0)
      fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may still hold the same open file
      lock.close()

  def __enter__(self) -> 'RunDirectory':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def resume_at(self, update: int, keep_trajectories: int = 0) -> None:
    """Drops the records of updates that will run again.

    An evaluation record is kept up to and including `update`: it describes a policy that had `update` updates.

    Args:
      update: next update to run (0-based).
      keep_trajectories: of how many updates, from `update` on, finished trajectories are kept, for a trainer that uses them again.
    """
    self.metrics.keep(lambda r: r.get('update', -1) < update + (r.get('kind') == 'eval'))
    self.trace.keep(lambda r: r['update'] < update)
    self.batches.keep(lambda r: r['update'] < update)
    if self._open_trajectories:
      self._open_trajectories[1].close()
      self._open_trajectories = None
    for number in self.updates_with_trajectories():
      if number >= update + keep_trajectories:
        self._trajectory_file(number).unlink()

  # --- writing

  def write_manifest(self, facts: Mapping[str, Any]) -> None:
    """Writes manifest.json; what an earlier start had written stays under 'earlier_starts'.

    Args:
      facts: from `environment_facts`, with the run's own: model, model_folder, model_checksum, task_digests,
        task_families, sandbox, seed.

    Raises:
      ConfigError: the model, the seed or a task differs from the earlier start.
    """
    facts = json.loads(json.dumps(facts, default=str))
    earlier = self.read_manifest() if self.manifest_path.exists() else None
    starts = []
    if earlier is not None:
      for key in _FIXED_FACTS:
        if key in earlier and key in facts and earlier[key] != facts[key]:
          raise types.ConfigError(f'{self.manifest_path}: {key} was {_short(earlier[key])} and is now {_short(facts[key])}: this is '
                                  'another run.  Give it another work folder')
      starts = earlier.pop('earlier_starts', [])
      # Task digests are large and, as just checked, the same.
      starts.append({k: v for k, v in earlier.items() if k not in ('task_digests', 'task_families')})
    jsonlines.write_atomically(self.manifest_path, json.dumps({**facts, 'earlier_starts': starts}, indent=2) + '\n')

  def append_trajectory(self, trajectory: types.Trajectory) -> None:
    """Appends a rewarded trajectory to the file of its update."""
    self._require_lock()
    if self._open_trajectories is None or self._open_trajectories[0] != trajectory.update:
      if self._open_trajectories:
        self._open_trajectories[1].close()
      self._open_trajectories = (trajectory.update, jsonlines.JsonLines(self._trajectory_file(trajectory.update)))
    self._open_trajectories[1].append(trajectory.to_json())

  def append_span(self, span: types.Span) -> None:
    """Appends one interval to the trace."""
    self._require_lock()
    self.trace.append(span.to_json())

  def append_batch(self, update: int, groups: Iterable[tuple[int, int]]) -> None:
    """Appends which groups an update took, (planned update, group) each."""
    self._require_lock()
    self.batches.append({'update': update, 'groups': [list(g) for g in groups]})

  def append_metrics(self, record: Mapping[str, Any]) -> None:
    """Appends one metrics record; `metrics.MetricsWriter` writes TensorBoard too."""
    self._require_lock()
    self.metrics.append(record)

  # --- reading

  def read_config(self) -> dict[str, Any]:
    """Returns config.json."""
    return _read_json(self.config_path)

  def read_manifest(self) -> dict[str, Any]:
    """Returns manifest.json."""
    return _read_json(self.manifest_path)

  def read_metrics(self) -> list[dict[str, Any]]:
    """Returns the metrics records; of two for one update (and split) the later one counts."""
    latest = {}
    for record in self.metrics.read():
      key = (record.get('kind'), record.get('update'), record.get('split'))
      latest.pop(key, None)
      latest[key] = record
    return list(latest.values())

  def read_trace(self) -> list[types.Span]:
    """Returns every span, in the order written.

    Raises:
      ConfigError: a line is not a span.
    """
    return trace_lib.read(self.trace)

  def read_batches(self) -> dict[int, tuple[tuple[int, int], ...]]:
    """Returns the (planned update, group) pairs that each update took, where they are not those planned for it."""
    return {r['update']: tuple((planned, group) for planned, group in r['groups']) for r in self.batches.read()}

  def updates_with_trajectories(self) -> list[int]:
    """Returns the updates that have a trajectory file, ascending."""
    if not self.trajectories.is_dir():
      return []
    return sorted(int(m[1]) for p in self.trajectories.iterdir() if (m := _TRAJECTORY_FILE.fullmatch(p.name)))

  def read_trajectories(self, update: int) -> list[types.Trajectory]:
    """Returns the trajectories planned for one update by group then index; of two records of one, the later one counts."""
    latest = {}
    for values in jsonlines.JsonLines(self._trajectory_file(update)).read():
      trajectory = types.Trajectory.from_json(values)
      latest[trajectory.key] = trajectory
    return [latest[k] for k in sorted(latest)]

  # --- details

  def _trajectory_file(self, update: int) -> Path:
    return self.trajectories / f'update_{update:06d}.jsonl'

  def _require_lock(self) -> None:
    if self._lock is None:
      raise types.TsJaxError(f'{self.path} is not open for writing: call open() first')

  def _acquire(self) -> None:
    """Takes the lock.  The kernel gives it back when its holder dies, so a pid left in the file never blocks anyone."""
    if self._lock is not None:
      raise types.ConfigError(f'{self.path} is already open for writing in this process')
    path = self.path / 'run.lock'
    with jsonlines.explained(path):
      lock = open(path, 'a+', encoding='ascii')
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      lock.seek(0)
      holder = lock.read().strip() or 'unknown'
      lock.close()
      raise types.ConfigError(f'{self.path} is being written by process {holder}.  Wait for it, end it, or give this run another '
                              'work folder') from e
    lock.seek(0)
    lock.truncate(0)
    with jsonlines.explained(path):
      lock.write(f'{os.getpid()}\n')
      lock.flush()
    self._lock = lock

  def _check_config(self, config: Mapping[str, Any], may_grow: frozenset[str], may_change: frozenset[str]) -> None:
    stored, now = _flatten(self.read_config()), _flatten(config)
    differences = []
    for key in sorted(stored.keys() | now.keys()):
      before, after = stored.get(key, _MISSING), now.get(key, _MISSING)
      grown = key in may_grow and isinstance(before, (int, float)) and isinstance(after, (int, float)) and after >= before
      # 1 and 1.0 are one value; True and 1 are not.
      same = before == after and isinstance(before, bool) == isinstance(after, bool)
      if not same and not grown and key not in may_change:
        differences.append(f'{key}: {_short(before)} there, {_short(after)} now')
    if differences:
      raise types.ConfigError(f'{self.path} holds a run with another config ({"; ".join(differences)}).  Give this run another work '
                              'folder, or the stored values to resume')


def environment_facts() -> dict[str, Any]:
  """Returns what the machine and its packages are: versions, platform, processor count, command line, start time."""
  versions = {}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = None
  return {
      'started': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
      'command': sys.argv,
      'python': platform.python_version(),
      'versions': versions,
      'platform': platform.platform(),
      'machine': platform.machine(),
      'cpu_count': os.cpu_count(),
      'usable_cpus': len(os.sched_getaffinity(0)),
      'memory_bytes': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
  }


def plain_config(config: Mapping[str, Any] | Any) -> dict[str, Any]:
  """Returns a config as JSON values: ConfigDicts and mappings as dicts, tuples as lists, keys and the rest as text."""
  if hasattr(config, 'to_dict'):
    config = config.to_dict()
  return _plain(config)


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping) or hasattr(value, 'to_dict'):
    items = value.items() if isinstance(value, Mapping) else value.to_dict().items()
    return {str(k): _plain(v) for k, v in items}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  return str(value)


def _flatten(values: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  flat = {}
  for key, value in values.items():
    if isinstance(value, Mapping) and value:
      flat.update(_flatten(value, f'{prefix}{key}.'))
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def _short(value: Any) -> str:
  text = value if value is _MISSING else repr(value)
  return text if len(text) <= 80 else text[:77] + '...'


def _read_json(path: Path) -> dict[str, Any]:
  try:
    return json.loads(path.read_text('utf-8'))
  except FileNotFoundError as e:
    raise types.ConfigError(f'{path} does not exist: {path.parent} is not a run directory') from e
  except ValueError as e:
    raise types.ConfigError(f'{path} is not JSON: {e}') from e
