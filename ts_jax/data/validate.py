"""Executable validation (Appendix C.2): doing nothing must not solve a task, its reference solution must.

A task that fails is removed from every schedule's cohort before shuffling; its difficulty never removes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import pathlib
import time
from typing import Any, Callable, Mapping, Sequence

from ts_jax import types
from ts_jax.data import splits, tasks as tasks_lib, verifier as verifier_lib

VALID, EXCLUDED = 'valid', 'excluded'
_SETUP_TIMEOUT_S = 120.0
_SOLUTION_TIMEOUT_S = 120.0
_TAIL_CHARS = 300
_PROGRESS_PERIOD_S = 1.0


@dataclasses.dataclass(frozen=True)
class Outcome(types.Record):
  """Result of one task.

  Attributes:
    task_id, source, digest: what was validated.
    outcome: 'valid' or 'excluded'.
    reason: empty when valid.
    no_op_fraction: p of the untouched work folder; -1 when it was not reached.
    reference_fraction: p after the reference solution; -1 when it was not reached.
    seconds: wall time.
  """

  task_id: str
  source: str
  digest: str
  outcome: str
  reason: str
  no_op_fraction: float
  reference_fraction: float
  seconds: float


@dataclasses.dataclass(frozen=True)
class Validation:
  """Outcomes of a task list, in its order."""

  outcomes: tuple[Outcome, ...]

  @property
  def excluded(self) -> tuple[Outcome, ...]:
    """Those that failed."""
    return tuple(o for o in self.outcomes if o.outcome == EXCLUDED)

  def keep(self, tasks: Sequence[tasks_lib.Task]) -> tuple[tasks_lib.Task, ...]:
    """Returns the tasks found valid, in the given order."""
    valid = {o.task_id for o in self.outcomes if o.outcome == VALID}
    return tuple(t for t in tasks if t.task_id in valid)


async def validate_tasks(tasks: Sequence[tasks_lib.Task], sandbox: verifier_lib.SandboxLike, *, concurrency: int = 4,
                         progress: Callable[[str], None] | None = None,
                         manifest: str | os.PathLike | None = None) -> Validation:
  """Runs the no-op and the reference of every task, each from a fresh work folder.

  Args:
    tasks: what to validate.
    sandbox: see `SandboxLike`.
    concurrency: tasks at once.
    progress: called with a line of text about once a second and at the end.
    manifest: where the result manifest (JSON) is written.

  Raises:
    InfrastructureError: a sandbox or the verifier failed; no task is judged by that.
    ConfigError: the manifest cannot be written, or pytest is needed and missing.
  """
  verifier = verifier_lib.Verifier(sandbox)
  slots, start_s, finished = asyncio.Semaphore(max(1, concurrency)), time.monotonic(), []
  last_line_s = start_s

  async def one(task):
    nonlocal last_line_s
    async with slots:
      outcome = await validate_task(task, sandbox, verifier)
    finished.append(outcome)
    now_s = time.monotonic()
    if progress is not None and (now_s - last_line_s >= _PROGRESS_PERIOD_S or len(finished) == len(tasks)):
      last_line_s = now_s
      bad = sum(o.outcome == EXCLUDED for o in finished)
      eta_s = (now_s - start_s) / len(finished) * (len(tasks) - len(finished))
      progress(f'validated {len(finished)}/{len(tasks)} tasks, {bad} excluded, ETA {eta_s:.0f} s')
    return outcome

  async with _first_error() as group:
    running = [group.create_task(one(t)) for t in tasks]
  result = Validation(tuple(r.result() for r in running))
  if manifest is not None:
    _write_manifest(pathlib.Path(manifest), tasks, result)
  return result


async def validate_task(task: tasks_lib.Task, sandbox: verifier_lib.SandboxLike, verifier: verifier_lib.Verifier) -> Outcome:
  """Validates one task; see `validate_tasks`."""
  start_s, no_op, reference = time.monotonic(), -1.0, -1.0

  def outcome(reason):
    return Outcome(task.task_id, task.source, task.digest, EXCLUDED if reason else VALID, reason, no_op, reference,
                   round(time.monotonic() - start_s, 3))

  for solve in (False, True):
    space = await asyncio.to_thread(sandbox.new_workspace, task.files_folder)
    try:
      reason = await _run_script(sandbox, space.workdir, task.setup_script, '/setup', _SETUP_TIMEOUT_S)
      if not reason and solve:
        reason = await _run_script(sandbox, space.workdir, task.path / 'solution' / 'solve.sh', '/solution', _SOLUTION_TIMEOUT_S)
      if reason:
        return outcome(reason)
      verdict = await verifier(task, space.workdir)
    finally:
      await asyncio.to_thread(space.remove)
    if not solve:
      no_op = verdict.fraction
      if verdict.solved:
        return outcome('the tests pass although nothing was done')
    else:
      reference = verdict.fraction
      if not verdict.solved:
        return outcome('the reference solution fails ' + '; '.join(f'{n}: {m}' for n, m in verdict.messages.items()))
  return outcome('')


async def _run_script(sandbox, workdir, script: pathlib.Path | None, inside: str, timeout_s: float) -> str:
  """Runs a script of the task; returns why it failed, '' when it did not (or there is none)."""
  if script is None:
    return ''
  result = await sandbox.run_once(['bash', f'{inside}/{script.name}'], workdir, {str(script.parent): inside}, timeout_s)
  if result.timed_out:
    return f'{script.name} took more than {timeout_s:g} s'
  if result.exit_code != 0:
    return f'{script.name} ended with exit code {result.exit_code}: {result.output[-_TAIL_CHARS:].strip()}'
  return ''


class _first_error(asyncio.TaskGroup):
  """A task group that raises the first error itself instead of a group of them."""

  async def __aexit__(self, *exc: Any):
    try:
      return await super().__aexit__(*exc)
    except BaseExceptionGroup as e:
      raise e.exceptions[0] from e


def verifier_revision() -> str:
  """SHA-256 (hex) over the code that decides a verdict."""
  folder = pathlib.Path(verifier_lib.__file__).parent
  return hashlib.sha256(b'\0'.join((folder / n).read_bytes() for n in ('verifier.py', 'verify_main.py'))).hexdigest()


def _write_manifest(path: pathlib.Path, tasks: Sequence[tasks_lib.Task], result: Validation) -> None:
  kept = result.keep(tasks)
  content: Mapping[str, Any] = {
      'verifier_revision': verifier_revision(), 'tasks': len(tasks), 'valid': len(kept), 'excluded': len(result.excluded),
      'list_digest': splits.list_digest(kept), 'outcomes': [o.to_json() for o in result.outcomes]}
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.{path.name}.new')
    temporary.write_text(json.dumps(content, indent=1) + '\n', encoding='utf-8')
    os.replace(temporary, path)
  except OSError as e:
    raise types.ConfigError(f'cannot write the validation manifest {path}: {e}. Free space or choose another path') from e
