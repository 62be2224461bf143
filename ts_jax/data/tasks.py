"""Terminal tasks in the folder format of SETA-Env and Harbor.

    <task id>/
      task.toml                   [metadata] family, source, level; [verifier] timeout_sec; the rest is for Harbor
      instruction.md              what the agent is asked
      environment/Dockerfile      the image for Harbor; `files/` beside it is the initial work folder, `setup.sh` optional
      tests/test_outputs.py       pytest-style functions test_*
      tests/weights.json          test name -> weight, sum 1
      solution/solve.sh           reference solution, run in the work folder
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import pathlib
import re
import tomllib
from typing import Any, Iterable, Mapping

from ts_jax import types

REQUIRED_FILES = ('task.toml', 'instruction.md', 'environment/Dockerfile', 'tests/test_outputs.py', 'tests/weights.json',
                  'solution/solve.sh')
DEFAULT_VERIFIER_TIMEOUT_S = 60.0
_EVOLUTION_SUFFIX = re.compile(r'[-_.]+evol(?:ved|ution)?[-_.]*\d*$', re.IGNORECASE)
_WEIGHT_SUM_TOLERANCE = 1e-3  # published weight files are rounded to a few decimals


@dataclasses.dataclass(frozen=True)
class Task:
  """One executable task.

  Attributes:
    task_id: the folder's name.
    family: kind of task (generated), else the category the task states, else 'terminal'.
    source: what it was made from; variants of one source never meet across a split.
    level: 1 (one command) and up; 0 when not stated.
    instruction: what the agent reads.
    path: the task's folder on the host.
    digest: SHA-256 over every file of the folder, names included.
    test_weights: (test name, weight) in the order of the test file; weights sum to 1.
    uses_pytest: the tests need pytest itself (fixtures, parametrisation, classes, imports of it).
    verifier_timeout_s: seconds the verifier may take in all.
  """

  task_id: str
  family: str
  source: str
  level: int
  instruction: str
  path: pathlib.Path
  digest: str
  test_weights: tuple[tuple[str, float], ...]
  uses_pytest: bool = False
  verifier_timeout_s: float = DEFAULT_VERIFIER_TIMEOUT_S

  @property
  def tests_folder(self) -> pathlib.Path:
    """Bound at /tests for the verifier alone."""
    return self.path / 'tests'

  @property
  def files_folder(self) -> pathlib.Path | None:
    """Initial content of the work folder, where the task has any."""
    folder = self.path / 'environment' / 'files'
    return folder if folder.is_dir() else None

  @property
  def setup_script(self) -> pathlib.Path | None:
    """Run in the sandbox before the agent starts, where the task has one."""
    script = self.path / 'environment' / 'setup.sh'
    return script if script.is_file() else None


def load_task(folder: str | pathlib.Path) -> Task:
  """Reads and checks one task folder.

  Raises:
    ConfigError: a file is missing or malformed; names the file and the folder.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise types.ConfigError(f'task folder {folder} does not exist: check data.root, or generate the tasks again')
  missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
  if missing:
    raise types.ConfigError(f'task folder {folder} lacks {", ".join(missing)}: restore it, or delete the task folder (for '
                            'generated tasks: delete their whole root, and it is made again)')
  settings = _read_toml(folder / 'task.toml')
  metadata = settings.get('metadata', {})
  instruction = _read_text(folder / 'instruction.md').strip()
  if not instruction:
    raise types.ConfigError(f'{folder / "instruction.md"} is empty: the agent would be asked nothing')
  names, uses_pytest = find_tests(folder / 'tests' / 'test_outputs.py')
  weights = _read_weights(folder / 'tests' / 'weights.json', names)
  timeout_s = settings.get('verifier', {}).get('timeout_sec', DEFAULT_VERIFIER_TIMEOUT_S)
  if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
    raise types.ConfigError(f'{folder / "task.toml"}: verifier.timeout_sec={timeout_s!r} must be a positive number of seconds')
  level = metadata.get('level', 0)
  if not isinstance(level, int):
    raise types.ConfigError(f'{folder / "task.toml"}: metadata.level={level!r} must be an integer')
  return Task(task_id=folder.name, family=str(metadata.get('family') or metadata.get('category') or 'terminal'),
              source=str(metadata.get('source') or _EVOLUTION_SUFFIX.sub('', folder.name)), level=level, instruction=instruction,
              path=folder.resolve(), digest=folder_digest(folder), test_weights=weights, uses_pytest=uses_pytest,
              verifier_timeout_s=float(timeout_s))


def load_tasks(root: str | pathlib.Path, families: Iterable[str] | None = None) -> tuple[Task, ...]:
  """Reads every task folder under `root`, sorted by identifier.

  Args:
    root: folder of task folders; entries beginning with '.' and plain files are passed over.
    families: keep these alone.

  Raises:
    ConfigError: no tasks, an unknown family, or any task is unusable.
  """
  root = pathlib.Path(root)
  if not root.is_dir():
    raise types.ConfigError(f'task root {root} does not exist: generate the tasks, or set data.root to a folder of task folders')
  folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith('.'))
  tasks = tuple(load_task(p) for p in folders)
  if not tasks:
    raise types.ConfigError(f'task root {root} holds no task folders: generate the tasks, or correct data.root')
  if families is None:
    return tasks
  wanted, known = set(families), {t.family for t in tasks}
  if wanted - known:
    raise types.ConfigError(f'task root {root} has no tasks of family {sorted(wanted - known)}: it has {sorted(known)}')
  return tuple(t for t in tasks if t.family in wanted)


def folder_digest(folder: pathlib.Path) -> str:
  """Returns the SHA-256 (hex) over names and contents of all files below `folder`, independent of listing order."""
  total = hashlib.sha256()
  for path in sorted(p for p in folder.rglob('*') if p.is_file() or p.is_symlink()):
    content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
    name = path.relative_to(folder).as_posix().encode()
    total.update(b'%d:%s%d:' % (len(name), name, len(content)))
    total.update(content)
  return total.hexdigest()


def find_tests(path: pathlib.Path) -> tuple[tuple[str, ...], bool]:
  """Lists the tests of a file without running it.

  Returns:
    Names in file order (functions, and `Class::method`), and whether pytest is needed to run them.

  Raises:
    ConfigError: it does not parse or holds no test.
  """
  try:
    tree = ast.parse(_read_text(path))
  except SyntaxError as e:
    raise types.ConfigError(f'{path} is not valid Python (line {e.lineno}: {e.msg})') from e
  names, uses_pytest = [], False
  for node in tree.body:
    if isinstance(node, ast.FunctionDef) and node.name.startswith('test'):
      names.append(node.name)
      uses_pytest |= bool(node.args.args or node.args.kwonlyargs or node.decorator_list)
    elif isinstance(node, ast.ClassDef) and node.name.startswith('Test'):
      names += [f'{node.name}::{n.name}' for n in node.body if isinstance(n, ast.FunctionDef) and n.name.startswith('test')]
      uses_pytest = True
    elif isinstance(node, ast.FunctionDef) and node.name in ('setup_module', 'teardown_module', 'setup_function'):
      uses_pytest = True
  uses_pytest |= any(
      isinstance(n, ast.Import) and any(a.name.split('.')[0] == 'pytest' for a in n.names) or
      isinstance(n, ast.ImportFrom) and (n.module or '').split('.')[0] == 'pytest' for n in ast.walk(tree))
  if not names:
    raise types.ConfigError(f'{path} defines no test_* function: nothing could earn a reward')
  return tuple(dict.fromkeys(names)), uses_pytest


def _read_weights(path: pathlib.Path, names: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
  try:
    weights: Mapping[str, Any] = json.loads(_read_text(path))
  except json.JSONDecodeError as e:
    raise types.ConfigError(f'{path} is not valid JSON: {e}') from e
  if not isinstance(weights, dict) or not all(isinstance(w, (int, float)) and w >= 0 and math.isfinite(w) for w in weights.values()):
    raise types.ConfigError(f'{path} must map test names to non-negative numbers')
  # Published files name class methods with or without their class.
  by_name = {name: weights.get(name, weights.get(name.split('::')[-1])) for name in names}
  unknown = sorted(set(weights) - set(names) - {n.split('::')[-1] for n in names})
  unweighted = [n for n, w in by_name.items() if w is None]
  if unknown or unweighted:
    raise types.ConfigError(f'{path} and test_outputs.py name different tests: no such test {unknown}, no weight for {unweighted}')
  total = sum(by_name.values())
  if abs(total - 1) > _WEIGHT_SUM_TOLERANCE:
    raise types.ConfigError(f'{path}: weights sum to {total:g}, not 1')
  return tuple((name, float(w) / total) for name, w in by_name.items())


def _read_toml(path: pathlib.Path) -> dict[str, Any]:
  try:
    return tomllib.loads(_read_text(path))
  except tomllib.TOMLDecodeError as e:
    raise types.ConfigError(f'{path} is not valid TOML: {e}') from e


def _read_text(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as e:
    raise types.ConfigError(f'{path} cannot be read: {e}') from e
