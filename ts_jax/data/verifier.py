"""The reward of a finished attempt: its tests, run where the agent could not have prepared anything.

The agent's processes are dead.  The tests run in a fresh sandbox over its work folder, with a copy of the test files
bound read-only and an interpreter that reads nothing from that folder.  The result is accepted only with a nonce that
exists nowhere in the sandbox once the tests run; exit codes decide nothing.

A test file that imports the agent's own Python code into its process trusts that code; have it run as a child instead.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import secrets
import shutil
import sys
import tempfile
from typing import Any, Mapping, Protocol, Sequence

from ts_jax import types
from ts_jax.data import tasks as tasks_lib

_RUNNER = pathlib.Path(__file__).with_name('verify_main.py')
_SYSTEM_PYTHON = '/usr/bin/python3'
_START_MARGIN_S = 10.0  # sandbox and interpreter start, on top of the time the tests get


class SandboxLike(Protocol):
  """What is needed of `ts_jax.agents.sandbox.Sandbox`."""

  async def run_once(self, argv: Sequence[str], workdir: str | os.PathLike, ro_binds: Mapping[str, str] | None = None,
                     timeout_s: float = 60.0, env: Mapping[str, str] | None = None) -> Any:
    """Runs one command in a fresh sandbox; returns `output`, `exit_code`, `timed_out`."""

  def new_workspace(self, files: pathlib.Path | None = None) -> Any:
    """Makes a work folder; returns `workdir` and `remove()`."""


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the tests said.

  Attributes:
    reward: r = p + 0.5 [p = 1].
    fraction: p, the (weighted) fraction of passed tests.
    tests_passed: 'name=1' or 'name=0', in file order.
    messages: test name -> why it failed.
  """

  reward: float
  fraction: float
  tests_passed: tuple[str, ...]
  messages: Mapping[str, str]

  @property
  def solved(self) -> bool:
    """Every test passed."""
    return self.fraction == 1.0


def reward(fraction: float) -> float:
  """SETA's reward: r = p + 0.5 [p = 1] (ThunderSyncRL, Appendix D)."""
  if not 0.0 <= fraction <= 1.0:
    raise ValueError(f'fraction of passed tests {fraction} is outside [0, 1]')
  return fraction + 0.5 * (fraction == 1.0)


def fraction_passed(passed: Mapping[str, bool], test_weights: Sequence[tuple[str, float]], weighted: bool = False) -> float:
  """p: the fraction of `test_weights`' tests that passed; exactly 1.0 when all did.

  Args:
    passed: test name -> outcome, for every test.
    test_weights: (name, weight), weights sum to 1.
    weighted: use the weights; equal otherwise.
  """
  if all(passed[name] for name, _ in test_weights):
    return 1.0
  if weighted:
    # A test of weight zero may fail without cost: what is left of rounding must not hide that.
    return 1.0 - min(1.0, sum(w for name, w in test_weights if not passed[name]))
  return sum(passed[name] for name, _ in test_weights) / len(test_weights)


class Verifier:
  """Runs tests; call it with a task and a work folder.  Shared by all attempts of a run."""

  def __init__(self, sandbox: SandboxLike, *, weighted: bool = False, test_timeout_s: float = 10.0):
    """Args: the run's sandbox; whether weights.json counts; seconds each test may take before it has failed.

    Raises:
      ConfigError: no interpreter that a sandbox can use.
    """
    if test_timeout_s <= 0:
      raise types.ConfigError(f'test_timeout_s={test_timeout_s} must be positive')
    self._sandbox, self._weighted, self._test_timeout_s = sandbox, weighted, test_timeout_s
    self._plain_python = _plain_interpreter()

  async def __call__(self, task: tasks_lib.Task, workdir: str | os.PathLike) -> Verdict:
    """Verifies the final state of an attempt whose processes have ended.

    Raises:
      InfrastructureError: the tests could not be run (sandbox, interpreter, disk).  Never because of what the work
        folder holds.
      ConfigError: the task needs pytest and it is not installed.
    """
    python, site = _pytest_interpreter(task) if task.uses_pytest else (self._plain_python, None)
    nonce = secrets.token_hex(16)
    names = [name for name, _ in task.test_weights]
    folder, channel = _prepare(task, workdir, nonce)
    try:
      binds = {str(folder): '/verifier', str(folder / 'tests'): '/tests', **_interpreter_binds(python)}
      if site is not None:
        binds[site] = site
      argv = [python, '-I', '-S', '-B', '/verifier/verify_main.py', '/verifier/channel', '/tests/test_outputs.py',
              f'{self._test_timeout_s:g}', f'{task.verifier_timeout_s:g}', site or '-', *names]
      result = await self._sandbox.run_once(argv, workdir, binds, task.verifier_timeout_s + _START_MARGIN_S,
                                            {'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'})
    finally:
      os.close(channel)
      shutil.rmtree(folder, ignore_errors=True)
    outcomes, messages = _read_report(result, nonce, names, task)
    fraction = fraction_passed(outcomes, task.test_weights, self._weighted)
    return Verdict(reward(fraction), fraction, tuple(f'{n}={int(outcomes[n])}' for n in names), messages)


def _prepare(task: tasks_lib.Task, workdir: str | os.PathLike, nonce: str) -> tuple[pathlib.Path, int]:
  """Lays out /verifier.  Returns its folder and the open write end of the channel, which holds the nonce."""
  try:
    os.chmod(workdir, 0o755)  # the agent may have closed it to itself
    folder = pathlib.Path(tempfile.mkdtemp(prefix='ts_jax-verifier-'))
  except OSError as e:
    raise types.InfrastructureError(f'cannot prepare the verification of {task.task_id}: {e}') from e
  try:
    # Copied with open modes: the sandbox's user is another one, whatever umask wrote the task.
    shutil.copyfile(_RUNNER, folder / 'verify_main.py')
    shutil.copytree(task.tests_folder, folder / 'tests', copy_function=shutil.copyfile)
    for root, _, files in os.walk(folder):
      os.chmod(root, 0o755)
      for name in files:
        os.chmod(os.path.join(root, name), 0o644)
    os.mkfifo(folder / 'channel')
    os.chmod(folder / 'channel', 0o644)
    channel = os.open(folder / 'channel', os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    os.write(channel, nonce.encode())
    return folder, channel
  except (OSError, shutil.Error) as e:
    shutil.rmtree(folder, ignore_errors=True)
    raise types.InfrastructureError(f'cannot prepare the verification of {task.task_id}: {e}') from e


def _read_report(result: Any, nonce: str, names: Sequence[str], task: tasks_lib.Task) -> tuple[dict[str, bool], dict[str, str]]:
  lines = [line[len(nonce) + 1:] for line in result.output.split('\n') if line.startswith(nonce + ' ')]
  if 'ready' not in lines:
    raise types.InfrastructureError(f'verifier of {task.task_id} did not start (exit code {result.exit_code}, timed out '
                                    f'{result.timed_out}): {result.output[-500:]!r}')
  if result.timed_out:
    raise types.InfrastructureError(f'verifier of {task.task_id} gave no report within {task.verifier_timeout_s:g} s')
  outcomes, messages = dict.fromkeys(names, False), {}
  # Without an end, something that the tests ran has killed the verifier: nothing has passed.
  if 'end' not in lines:
    return outcomes, dict.fromkeys(names, 'the verifier was ended before it could report')
  for line in lines:
    name, _, rest = line.partition(' ')
    if name in outcomes and rest[:1] in ('0', '1'):
      outcomes[name] = rest[0] == '1'
      if not outcomes[name]:
        messages[name] = rest[2:]
  return outcomes, messages


def _plain_interpreter() -> str:
  if os.access(_SYSTEM_PYTHON, os.X_OK):
    return _SYSTEM_PYTHON
  python = os.path.join(sys.base_prefix, 'bin', f'python{sys.version_info.major}.{sys.version_info.minor}')
  if os.access(python, os.X_OK):
    return python
  raise types.ConfigError(f'the verifier finds no Python interpreter ({_SYSTEM_PYTHON}, {python}): install python3')


def _pytest_interpreter(task: tasks_lib.Task) -> tuple[str, str]:
  """This process's interpreter, and the folder pytest is imported from."""
  spec = importlib.util.find_spec('pytest')
  if spec is None or spec.origin is None:
    raise types.ConfigError(f'the tests of task {task.path} use pytest, which is not installed: pip install pytest')
  python = os.path.join(sys.base_prefix, 'bin', f'python{sys.version_info.major}.{sys.version_info.minor}')
  if not os.access(python, os.X_OK):
    raise types.ConfigError(f'the tests of task {task.path} use pytest, but the interpreter {python} does not exist')
  return python, str(pathlib.Path(spec.origin).parents[1])


def _interpreter_binds(python: str) -> dict[str, str]:
  """Makes an interpreter outside the system folders visible at its own path."""
  prefix = os.path.dirname(os.path.dirname(python))
  return {} if prefix == '/usr' or prefix.startswith('/usr/') else {prefix: prefix}
