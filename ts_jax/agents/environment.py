"""What the agent loop needs of an environment, and the terminal one."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Protocol

from ts_jax import types
from ts_jax.agents import sandbox as sandbox_lib
from ts_jax.agents import shell as shell_lib

_SETUP_DEADLINE_S = 120.0


class Environment(Protocol):
  """One attempt's world.  Used by one coroutine; every method may be cancelled, `close` then still has to be called."""

  async def reset(self) -> None:
    """Makes the initial state.  Raises InfrastructureError when it cannot."""

  async def step(self, command: str, timeout_s: float) -> shell_lib.CommandResult:
    """Runs one action.  After a timeout no further action is possible."""

  async def freeze(self) -> pathlib.Path:
    """Ends every process of the agent and returns the state's folder, ready for the verifier."""

  async def close(self) -> None:
    """Ends every process and removes the state.  Idempotent; works after a failed reset."""


class TerminalEnvironment:
  """A shell in /testbed, which starts as a copy of the task's `environment/files`.

  `environment/setup.sh`, where there is one, runs in the sandbox before the agent starts; it sees the `environment`
  folder at /setup, read-only.
  """

  def __init__(self, sandbox: sandbox_lib.Sandbox, task_folder: str | pathlib.Path):
    """Args: the run's sandbox; the task's folder on the host."""
    self._sandbox, self._folder = sandbox, pathlib.Path(task_folder)
    self._workspace: sandbox_lib.Workspace | None = None
    self._shell: shell_lib.Shell | None = None

  async def reset(self) -> None:
    """Copies the files, runs the setup script, starts the shell.

    Raises:
      InfrastructureError: the copy or the shell failed.
      ConfigError: the setup script failed (the task is at fault: trying again does not help).
    """
    files, setup = self._folder / 'environment' / 'files', self._folder / 'environment' / 'setup.sh'
    self._workspace = await asyncio.to_thread(self._sandbox.new_workspace, files if files.is_dir() else None)
    if setup.is_file():
      done = await self._sandbox.run_once(['bash', '/setup/setup.sh'], self._workspace.workdir, {str(setup.parent): '/setup'},
                                          _SETUP_DEADLINE_S)
      if done.exit_code != 0:
        raise types.ConfigError(f'{setup} failed (exit code {done.exit_code}): {done.output[-500:]!r}. Correct the script')
    self._shell = self._sandbox.open_shell(self._workspace)
    await self._shell.start()

  async def step(self, command: str, timeout_s: float) -> shell_lib.CommandResult:
    """Runs one command in the persistent shell."""
    return await self._shell.run(command, timeout_s)

  async def freeze(self) -> pathlib.Path:
    """Ends the shell and all its processes; returns the work folder on the host."""
    await self._shell.close()
    return self._workspace.workdir

  async def close(self) -> None:
    """Ends the shell and removes the work folder."""
    if self._shell is not None:
      self._shell.kill()
      await self._shell.close()
    if self._workspace is not None:
      workspace, self._workspace = self._workspace, None
      await asyncio.to_thread(workspace.remove)
