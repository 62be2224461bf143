"""A real sandbox, generated tasks, and a way to write a task by hand."""

import asyncio
import json

import pytest

from ts_jax.agents import sandbox as sandbox_lib
from ts_jax.data import generator
from ts_jax.data import tasks as tasks_lib
from ts_jax.data import verifier as verifier_lib


@pytest.fixture(scope='session')
def sandbox(tmp_path_factory):
  backend = sandbox_lib.Sandbox.probe()
  # Hostile scripts run in it: they would signal and write to every process of an unconfined machine.
  assert backend.tool != 'none', 'these tests must never run unconfined'
  with sandbox_lib.Sandbox(backend, folder=tmp_path_factory.mktemp('sandbox')) as box:
    yield box


@pytest.fixture(scope='session')
def generated(tmp_path_factory):
  """Three tasks of every family."""
  root = tmp_path_factory.mktemp('generated') / 'tasks'
  return tasks_lib.load_tasks(generator.generate(root, instances=3))


@pytest.fixture
def make_task(tmp_path):
  """Function from test code (and optional files, weights, solution) to a loaded task."""
  def make(tests: str, *, files=None, weights=None, solution='true', name='task', settings=''):
    folder = tmp_path / name
    for sub in ('environment/files', 'tests', 'solution'):
      (folder / sub).mkdir(parents=True)
    (folder / 'task.toml').write_text('version = "1.0"\n' + settings)
    (folder / 'instruction.md').write_text('Do it.\n')
    (folder / 'environment' / 'Dockerfile').write_text('FROM debian:12-slim\n')
    for path, text in (files or {}).items():
      (folder / 'environment' / 'files' / path).write_text(text)
    (folder / 'tests' / 'test_outputs.py').write_text(tests)
    if weights is None:
      names, _ = tasks_lib.find_tests(folder / 'tests' / 'test_outputs.py')
      weights = {n: 1 / len(names) for n in names}
    (folder / 'tests' / 'weights.json').write_text(json.dumps(weights))
    (folder / 'solution' / 'solve.sh').write_text(solution + '\n')
    return tasks_lib.load_task(folder)
  return make


@pytest.fixture
def attempt(sandbox):
  """Function (task, agent's script, verifier settings) -> verdict; the script runs in the task's work folder first."""
  def run(task, script='', **settings):
    async def go():
      space = sandbox.new_workspace(task.files_folder)
      try:
        if script:
          await sandbox.run_once(['bash', '-c', script], space.workdir, timeout_s=10.0)
        return await verifier_lib.Verifier(sandbox, **settings)(task, space.workdir)
      finally:
        space.remove()
    return asyncio.run(go())
  return run
