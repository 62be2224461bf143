"""Writes families of small shell tasks in the folder format of `ts_jax.data.tasks`."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pathlib
import random
import shutil
import string
import sys
import tempfile
import textwrap
from typing import Iterable, Mapping

from ts_jax import types
from ts_jax.data import families as families_lib
from ts_jax.data.families import base, folders, notes, single, words

HELD_OUT_FAMILY = families_lib.HELD_OUT
FAMILIES = tuple(f.name for f in families_lib.ALL if f.name != HELD_OUT_FAMILY)
MANIFEST = 'generator.json'

_MAX_DRAWS = 50  # redraws per instance before a family counts as exhausted

_TASK_TOML = '''version = "1.0"

[metadata]
family = "{family}"
source = "{source}"
level = {level}
category = "terminal"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1024
storage_mb = 1024
'''

_DOCKERFILE = '''FROM python:3.11-slim
COPY files/ /testbed/
WORKDIR /testbed
'''

# Harbor's entry point; ts_jax runs test_outputs.py itself.
_TEST_SH = '''#!/bin/bash
cd /testbed && mkdir -p /logs/verifier && python3 -I - <<'END'
import json
tests = {}
exec(compile(open('/tests/test_outputs.py').read(), 'test_outputs.py', 'exec'), tests)
passed = 0.0
for name, weight in json.load(open('/tests/weights.json')).items():
  try:
    tests[name]()
    passed += weight
  except Exception as error:
    print(name, 'failed:', error)
passed = round(passed, 6)
json.dump({'reward': passed + 0.5 * (passed == 1)}, open('/logs/verifier/reward.json', 'w'))
END
'''


def generate(root: str | pathlib.Path, families: Iterable[str] = (*FAMILIES, HELD_OUT_FAMILY),
             instances: int | Mapping[str, int] = 60, seed: int = 0, variants: int = 2) -> pathlib.Path:
  """Writes the tasks under `root`, unless exactly these are there already.

  The values of a family's instances depend on its name, `seed` and the instance's number alone: adding a family or
  instances leaves the others as they were.

  Args:
    root: folder of its own; made anew when it holds tasks generated from other inputs.
    families: names from `FAMILIES` and `HELD_OUT_FAMILY`.
    instances: task folders per family, or family -> number of task folders.
    seed: of the drawn values.
    variants: phrasings per source instance (at most those a family has).

  Returns:
    `root`.

  Raises:
    ConfigError: an unknown family, a number out of range, a family with fewer different instances than asked for, or a
      folder that holds something the generator did not write.
  """
  root, names = pathlib.Path(root), tuple(dict.fromkeys(families))
  unknown = [n for n in names if n not in families_lib.BY_NAME]
  if unknown or not names:
    raise types.ConfigError(f'unknown task families {unknown}: choose from {sorted(families_lib.BY_NAME)}')
  counts = {n: instances if isinstance(instances, int) else instances.get(n, 0) for n in names}
  if min(counts.values()) < 1:
    raise types.ConfigError(f'instances per family {counts} must be at least 1 each')
  if variants < 1:
    raise types.ConfigError(f'variants={variants} must be at least 1')
  inputs = {'counts': counts, 'seed': seed, 'variants': variants, 'code': _code_digest()}
  digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
  if _stored_digest(root) == digest:
    return root
  _write_all(root, counts, seed, variants, {'digest': digest, **inputs})
  return root


def _stored_digest(root: pathlib.Path) -> str | None:
  """Digest of the tasks in `root`, None when there are none; refuses a folder that is not the generator's."""
  manifest = root / MANIFEST
  if manifest.is_file():
    try:
      return json.loads(manifest.read_text())['digest']
    except (json.JSONDecodeError, KeyError) as e:
      raise types.ConfigError(f'{manifest} is damaged ({e!r}): delete {root} and the tasks are generated again') from e
  if root.exists() and (not root.is_dir() or any(root.iterdir())):
    raise types.ConfigError(f'{root} is not a folder of generated tasks (no {MANIFEST}): give an empty or new folder')
  return None


def _code_digest() -> str:
  sources = [inspect.getsource(m) for m in (sys.modules[__name__], base, folders, notes, single, words, families_lib)]
  return hashlib.sha256('\0'.join(sources).encode()).hexdigest()


def _write_all(root, counts, seed, variants, manifest) -> None:
  try:
    root.parent.mkdir(parents=True, exist_ok=True)
    new = pathlib.Path(tempfile.mkdtemp(prefix=f'.{root.name}-', dir=root.parent))
  except OSError as e:
    raise types.ConfigError(f'cannot write tasks beside {root}: {e}. Free space there or choose another folder') from e
  try:
    for name, count in counts.items():
      _write_family(new, families_lib.BY_NAME[name], count, seed, variants)
    _write(new / MANIFEST, json.dumps(manifest, indent=2) + '\n')
    # Whatever the umask: a sandbox reads solutions and setup files as another user.
    for folder, _, files in os.walk(new):
      os.chmod(folder, 0o755)
      for name in files:
        os.chmod(os.path.join(folder, name), 0o644)
    if root.exists():
      shutil.rmtree(root)  # holds our manifest, or is empty
    os.replace(new, root)
  except OSError as e:
    raise types.ConfigError(f'cannot write tasks to {root}: {e}. Free space there or choose another folder') from e
  finally:
    shutil.rmtree(new, ignore_errors=True)


def _write_family(root: pathlib.Path, family: base.Family, count: int, seed: int, variants: int) -> None:
  variants = min(variants, len(family.phrasings))
  seen: set[tuple] = set()
  for written in range(count):
    source_number, variant = divmod(written, variants)
    if variant == 0:
      values = _draw(family, seed, source_number, seen)
    source = f'{family.name}-{source_number:04d}'
    # Rotated, so that every phrasing is used whatever the number of variants.
    phrasing = family.phrasings[(source_number * variants + variant) % len(family.phrasings)]
    _write_task(root / f'{source}-{string.ascii_lowercase[variant]}', family, values, phrasing, source)


def _draw(family: base.Family, seed: int, number: int, seen: set[tuple]) -> base.Values:
  for attempt in range(_MAX_DRAWS):
    values = family.draw(random.Random(f'{family.name}/{seed}/{number}/{attempt}'))
    key = tuple(sorted(values.items()))
    if key not in seen:
      seen.add(key)
      return values
  raise types.ConfigError(f'task family {family.name} has too few different instances for number {number}: ask for fewer, or '
                          'for more variants of each')


def _write_task(folder: pathlib.Path, family: base.Family, values: base.Values, phrasing: str, source: str) -> None:
  checks = family.checks(values)
  tests = base.HELPERS + ''.join(f'\n\ndef test_{c.name}():\n{textwrap.indent(c.body, "  ")}\n' for c in checks)
  share = 1 / len(checks)
  weights = {f'test_{c.name}': round(share, 6) for c in checks[:-1]}
  weights[f'test_{checks[-1].name}'] = round(1 - sum(weights.values()), 6)
  _write(folder / 'task.toml', _TASK_TOML.format(family=family.name, source=source, level=family.level))
  _write(folder / 'instruction.md', phrasing.format(**values) + '\n')
  _write(folder / 'environment' / 'Dockerfile', _DOCKERFILE)
  (folder / 'environment' / 'files').mkdir()
  for path, content in family.files(values).items():
    _write(folder / 'environment' / 'files' / path, content)
  _write(folder / 'tests' / 'test_outputs.py', tests)
  _write(folder / 'tests' / 'weights.json', json.dumps(weights, indent=2) + '\n')
  _write(folder / 'tests' / 'test.sh', _TEST_SH)
  _write(folder / 'solution' / 'solve.sh', f'#!/bin/bash\n{family.solution(values)}\n')


def _write(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text, encoding='utf-8')
