"""Cells of a sweep: the settings that its axes combine to, each checked before anything runs, and the figures of their output."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import re
import subprocess
import sys
from typing import Any, Mapping, Sequence

from absl import flags
from ml_collections import config_flags

from ts_jax import types
from ts_jax.telemetry import rundir

_SYNTAX = 'write NAME=VALUE,VALUE,... where NAME is a flag of the experiment or config.KEY, for instance config.batch.prompts=2,4'
_NAME = re.compile(r'[A-Za-z_]\w*(\.\w+)*')
_CLOSING = {')': '(', ']': '[', '}': '{'}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One combination.

  Attributes:
    name: what varies, and the digest; names the folder of a new cell.
    digest: of experiment, resolved config and other flags.
    varied: flag or config key -> value of what the axes set.
    arguments: command line of the experiment, without its folder.
  """

  name: str
  digest: str
  varied: Mapping[str, str]
  arguments: tuple[str, ...]


def product_axis(text: str) -> list[dict[str, str]]:
  """Points of `NAME=VALUE,VALUE`.

  Raises:
    ConfigError: no name, no value, or one value twice.
  """
  name, values = _setting(text)
  if len(set(values)) < len(values):
    raise types.ConfigError(f'{text!r} has a value twice: every cell runs once')
  return [{name: value} for value in values]


def zip_axis(text: str) -> list[dict[str, str]]:
  """Points of `NAME=VALUE,VALUE;NAME=VALUE,VALUE`: the n-th values go together.

  Raises:
    ConfigError: no name or value, a name twice, or lists of different lengths.
  """
  columns = [_setting(part) for part in _split(text, ';')]
  lengths = [(name, len(values)) for name, values in columns]
  if len({count for _, count in lengths}) > 1 or len(dict(lengths)) < len(lengths):
    raise types.ConfigError(f'--zip={text} joins lists of {lengths} values: give each name once, and as many values as the others')
  return [dict(zip([name for name, _ in columns], point)) for point in zip(*(values for _, values in columns))]


def setting(text: str) -> tuple[str, str]:
  """`NAME=VALUE`, the value as it is.

  Raises:
    ConfigError: no name, or no value.
  """
  name, equals, value = text.partition('=')
  name = name.strip().removeprefix('--')
  if not equals or not _NAME.fullmatch(name):
    raise types.ConfigError(f'{text!r} sets nothing: {_SYNTAX}')
  if '.' in name and not name.startswith('config.'):
    raise types.ConfigError(f'{text!r}: settings of the config begin with "config.": write config.{name}')
  return name, value


def _setting(text: str) -> tuple[str, list[str]]:
  name, values = setting(text)
  if not values.strip():
    raise types.ConfigError(f'{text!r} names no values: {_SYNTAX}')
  return name, _split(values, ',')


def combine(axes: Sequence[Sequence[Mapping[str, str]]]) -> list[dict[str, str]]:
  """Every combination of points, the last axis fastest.

  Raises:
    ConfigError: two axes set the same name.
  """
  names = [name for axis in axes for name in axis[0]]
  twice = sorted({n for n in names if names.count(n) > 1})
  if twice:
    raise types.ConfigError(f'{twice} are set by more than one of --product, --zip and --set: name each once')
  return [dict(itertools.chain(*(p.items() for p in points))) for points in itertools.product(*axes)]


def checked(module: str, config: str, axes: Sequence[Sequence[Mapping[str, str]]], fixed: Mapping[str, str]) -> list[Cell]:
  """The cells of a sweep, config settings checked against the config.

  Args:
    module: the experiment.
    config: config file with its argument, '' for an experiment without one.
    axes: points of each axis.
    fixed: settings of all cells.

  Raises:
    ConfigError: an unknown key (with those that look like it), a value of another type, an unusable config file.
  """
  known = flat(_parsed(config, {})) if config else {}
  cells = []
  for varied in combine([*axes, [fixed]] if fixed else axes):
    settings = dict(varied)
    overrides = {k: v for k, v in settings.items() if k.startswith('config.')}
    if overrides and not config:
      raise types.ConfigError(f'{sorted(overrides)} are settings of a config, and there is none: give --config')
    _check_keys(overrides, known, config)
    resolved = _parsed(config, overrides) if config else {}
    arguments = ([f'--config={config}'] if config else []) + [f'--{k}={v}' for k, v in settings.items()]
    shown = {k: v for k, v in settings.items() if k not in fixed}
    plain = {k: v for k, v in settings.items() if k not in overrides}
    digest = hashlib.sha256(json.dumps([module, resolved, plain], sort_keys=True).encode()).hexdigest()[:8]
    slug = re.sub(r'[^\w.=,+-]+', '_', ','.join(f'{k.rsplit(".", 1)[-1]}={v}' for k, v in shown.items()))[:80]
    cells.append(Cell(f'{slug}-{digest}', digest, shown, tuple(arguments)))
  if len({c.digest for c in cells}) < len(cells):
    raise types.ConfigError('two cells have the same settings: values that differ in writing only, for instance 1 and 1.0, are one')
  return cells


def check_flags(module: str, cells: Sequence[Cell], folder_flag: str) -> None:
  """Lets the experiment itself parse the first cell, and one cell for every other value of its own flags.

  Raises:
    ConfigError: there is no such experiment, or it refuses an argument.
  """
  seen: set[tuple[str, str]] = set()
  for n, cell in enumerate(cells):
    own = {(k, v) for k, v in cell.varied.items() if not k.startswith('config.')}
    if n and own <= seen:
      continue
    seen |= own
    folder = [f'--{folder_flag}=/nowhere'] if folder_flag else []
    done = subprocess.run([sys.executable, '-m', f'experiments.{module}', *cell.arguments, *folder, '--only_check_args'],
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
      said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith(('Pass --help', 'configs/defaults.py'))]
      why = said[-1] if said else f'status {done.returncode}'
      if folder_flag and f"'{folder_flag}'" in why:
        why += '.  --folder_flag names the flag that takes the folder of a cell; empty: none'
      raise types.ConfigError(f'experiments.{module} refuses cell {cell.name}: {why}')


def flat(values: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Nested mappings as dotted keys."""
  found: dict[str, Any] = {}
  for key, value in values.items():
    found.update(flat(value, f'{prefix}{key}.') if isinstance(value, Mapping) else {f'{prefix}{key}': value})
  return found


def last_object(text: str) -> dict[str, Any] | None:
  """The last line that is a JSON object, or None."""
  for line in reversed(text.splitlines()):
    if line.startswith('{'):
      try:
        return json.loads(line)
      except ValueError:
        pass
  return None


def _check_keys(overrides: Mapping[str, str], known: Mapping[str, Any], config: str) -> None:
  for key in overrides:
    name = key.removeprefix('config.')
    if name in known:
      continue
    near = difflib.get_close_matches(name, known, 3, 0.5) or [k for k in known if k.rsplit('.', 1)[-1] == name.rsplit('.', 1)[-1]]
    inside = [k for k in known if k.startswith(f'{name}.')]
    hint = (f'it is a section; set one of its keys, {inside[:4]}' if inside else
            f'did you mean {" or ".join(f"config.{k}" for k in near)}?' if near else 'configs/defaults.py lists every setting')
    raise types.ConfigError(f'{key} is no setting of {config}: {hint}')


def _parsed(config: str, overrides: Mapping[str, str]) -> dict[str, Any]:
  """The resolved config, as the experiment's own flag would make it."""
  values, argv = flags.FlagValues(), ['sweep', f'--config={config}', *(f'--{k}={v}' for k, v in overrides.items())]
  config_flags.DEFINE_config_file('config', lock_config=True, flag_values=values, sys_argv=argv)
  try:
    values(argv)
    return rundir.plain_config(values.config)
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError, SyntaxError) as e:
    if not overrides:
      raise types.ConfigError(f'--config={config} cannot be used: {" ".join(str(e).split())}') from e
    if len(overrides) > 1:
      for key, value in overrides.items():
        _parsed(config, {key: value})  # raises for the one that is at fault
    raise types.ConfigError(f'{", ".join(f"{k}={v}" for k, v in overrides.items())} does not fit {config}, where it is '
                            f'{_default(config, overrides)}: give a value of that type') from e


def _default(config: str, overrides: Mapping[str, str]) -> str:
  known = flat(_parsed(config, {}))
  return ', '.join(f'{known[k.removeprefix("config.")]!r} ({type(known[k.removeprefix("config.")]).__name__})' for k in overrides)


def _split(text: str, mark: str) -> list[str]:
  """Splits at marks outside brackets and quotes."""
  parts, depth, quote = [''], [], ''
  for c in text:
    if quote:
      quote = '' if c == quote else quote
    elif c in '"\'':
      quote = c
    elif c in _CLOSING.values():
      depth.append(c)
    elif c in _CLOSING and depth and depth[-1] == _CLOSING[c]:
      depth.pop()
    elif c == mark and not depth:
      parts.append('')
      continue
    parts[-1] += c
  if depth or quote:
    raise types.ConfigError(f'{text!r} has an open {depth[-1] if depth else quote}: close it')
  return [p.strip() for p in parts]
