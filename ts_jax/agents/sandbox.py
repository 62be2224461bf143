"""Work folders and confined processes: what an attempt's commands, its setup and its tests run in."""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import itertools
import os
import pathlib
import shutil
import stat
import tempfile
import time
from typing import Mapping, Sequence

from ts_jax import types
from ts_jax.agents import backends
from ts_jax.agents import shell as shell_lib

SandboxLimits = backends.SandboxLimits
_ROOT_PREFIX = 'ts_jax-sandbox-'
_SUBMIT = '#!/bin/sh\n: 2>/dev/null > "${AGENT_FLAGS:-%s}/submitted"\nexit 0\n'


class Workspace:
  """The files of one attempt on the host.

  Attributes:
    workdir: becomes /testbed inside.
    user_id: owner of the files (the sandbox's private user where the backend has one).
  """

  def __init__(self, folder: pathlib.Path, user_id: int):
    self.folder, self.user_id = folder, user_id
    self.workdir, self.flags = folder / 'work', folder / 'flags'

  @property
  def submit_flag(self) -> pathlib.Path:
    """Exists once `submit` has run."""
    return self.flags / 'submitted'

  def remove(self) -> None:
    """Deletes the files, whatever permissions the agent left on them."""
    _remove_tree(self.folder)


class Sandbox:
  """Starts confined processes over private work folders.  One per run, shared by all attempts.

  Every process dies with this one, however it ends.  Folders are removed by `close`, at exit, or, after a kill, by the
  next run's start.
  """

  def __init__(self, backend: backends.Backend, limits: SandboxLimits | None = None, folder: str | None = None):
    """Creates the run's temporary folder and removes those of runs that were killed.

    Args:
      backend: from `Sandbox.probe`.
      limits: limits of each sandbox.
      folder: where temporary folders go; default the system's.

    Raises:
      ConfigError: the folder cannot be written.
    """
    self.backend, self.limits = backend, limits or SandboxLimits()
    parent = pathlib.Path(folder or tempfile.gettempdir())
    try:
      _sweep(parent)
      self._root = pathlib.Path(tempfile.mkdtemp(prefix=_ROOT_PREFIX, dir=parent))
      self._lock = open(self._root / 'lock', 'w')  # held while this process lives: tells a sweep that it does
      fcntl.flock(self._lock, fcntl.LOCK_EX)
      (self._root / 'tools').mkdir()
      (self._root / 'mount').mkdir()
      submit = self._root / 'tools' / 'submit'
      submit.write_text(_SUBMIT % backends.FLAG_DIR)
      submit.chmod(0o755)
      (self._root / 'tools').chmod(0o755)
      self._group = self._root / 'group'
      self._group.write_text('root:x:0:\n')
    except OSError as e:
      raise types.ConfigError(f'the sandbox folder under {parent} cannot be made: {e}. Free space there or set TMPDIR to a '
                              'writable folder') from e
    self._owner, self._numbers = os.getpid(), itertools.count()
    atexit.register(self.close)

  @staticmethod
  def probe(backend: str = 'auto', *, allow_unsandboxed: bool = False, limits: SandboxLimits | None = None) -> backends.Backend:
    """Chooses the backend by trying it; see `backends.probe`.  Raises ConfigError with the remedy when none works."""
    return backends.probe(backend, allow_unsandboxed=allow_unsandboxed, limits=limits)

  def new_workspace(self, files: pathlib.Path | None = None) -> Workspace:
    """Makes a fresh work folder.  Blocking (file copies): call it off the event loop.

    Args:
      files: folder whose content is copied in, symbolic links kept as links.

    Raises:
      InfrastructureError: the copy failed.
    """
    number = next(self._numbers)
    user = backends.private_user(number) if self.backend.as_root else os.geteuid()
    space = Workspace(self._root / f'attempt-{number}', user)
    try:
      space.folder.mkdir()
      space.flags.mkdir()
      if files is None:
        space.workdir.mkdir()
      else:
        shutil.copytree(files, space.workdir, symlinks=True)
      space.workdir.chmod(0o755)
      if self.backend.as_root:
        _give(space.flags, user)
        _give(space.workdir, user)
    except (OSError, shutil.Error) as e:
      space.remove()
      raise types.InfrastructureError(f'cannot make a work folder from {files}: {e}') from e
    return space

  def open_shell(self, workspace: Workspace, env: Mapping[str, str] | None = None) -> shell_lib.Shell:
    """Returns a persistent shell over a workspace; it starts with `await shell.start()` or its first command.

    Raises:
      InfrastructureError: the sandbox program has disappeared.
    """
    argv = self._argv(['bash', '--noprofile', '--norc'], workspace.workdir, workspace.user_id, {}, workspace.flags)
    return shell_lib.Shell(argv, self._env(env, workspace.flags), output_bytes=self.limits.output_bytes,
                           submit_flag=workspace.submit_flag, kill_group=self.backend.tool == 'none')

  async def run_once(self, argv: Sequence[str], workdir: str | os.PathLike, ro_binds: Mapping[str, str] | None = None,
                     timeout_s: float = 60.0, env: Mapping[str, str] | None = None) -> shell_lib.CommandResult:
    """Runs one command in a fresh sandbox over an existing work folder.  The attempt's shell must have been closed.

    Args:
      argv: program and arguments, as seen inside; the current folder is /testbed (= `workdir`).
      workdir: folder on the host, writable inside.  One owned by root is given to a private user first.
      ro_binds: host path -> path inside, read-only.
      timeout_s: seconds before the process tree is ended.
      env: variables added to the sandbox's own (PATH, HOME, LANG, ...).

    Returns:
      Output (capped), exit code (None on timeout, 128 + signal when killed by one).

    Raises:
      InfrastructureError: the sandbox could not be started, or a path does not exist.
    """
    workdir = pathlib.Path(workdir)
    for path in (workdir, *(ro_binds or {})):
      if not os.path.exists(path):
        raise types.InfrastructureError(f'sandbox: {path} does not exist')
    user = workdir.stat().st_uid
    if self.backend.as_root and user == 0:
      user = backends.private_user(next(self._numbers))
      await asyncio.to_thread(_give, workdir, user)
    full = self._argv(argv, workdir, user, ro_binds or {}, None)
    start_s = time.time()
    process = await shell_lib.spawn(full, self._env(env), asyncio.subprocess.DEVNULL)
    buffer, timed_out = shell_lib.OutputBuffer(self.limits.output_bytes), False
    try:
      async with asyncio.timeout(timeout_s):
        await shell_lib.drain(process, buffer)
    except TimeoutError:
      timed_out = True
    finally:
      # Shielded: a cancelled caller must still leave no process.
      await asyncio.shield(shell_lib.end_tree(process, self.backend.tool == 'none'))
    code = process.returncode
    if code is not None and code < 0:
      code = 128 - code
    return shell_lib.CommandResult(output=buffer.text(), exit_code=None if timed_out else code, timed_out=timed_out,
                                   truncated=buffer.dropped > 0, start_s=start_s, end_s=time.time())

  def close(self) -> None:
    """Removes every folder of this run.  Idempotent; a forked child's call does nothing."""
    if os.getpid() != self._owner or self._lock.closed:
      return
    _remove_tree(self._root)
    self._lock.close()
    atexit.unregister(self.close)

  def __enter__(self) -> 'Sandbox':
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _env(self, extra: Mapping[str, str] | None, flags: pathlib.Path | None = None) -> dict[str, str]:
    env = backends.inner_environment(extra)
    if self.backend.tool == 'none':
      env['PATH'] = env['PATH'].replace(backends.TOOL_DIR, str(self._root / 'tools'))
      env['AGENT_FLAGS'] = str(flags)
    return env

  def _argv(self, command, workdir, user_id, ro_binds, flags) -> list[str]:
    inside_user = user_id if self.backend.as_root else 1000 if self.backend.tool == 'bubblewrap' else 0
    passwd = self._root / f'passwd-{inside_user}'
    if not passwd.exists():
      passwd.write_text(f'root:x:0:0:root:/:/bin/sh\nagent:x:{inside_user}:{inside_user}:agent:{backends.HOME_DIR}:/bin/bash\n')
    binds = [backends.Bind(str(self._root / 'tools'), backends.TOOL_DIR), backends.Bind(str(passwd), '/etc/passwd'),
             backends.Bind(str(self._group), '/etc/group'), backends.Bind(os.fspath(workdir), backends.WORK_DIR, True)]
    if flags is not None:
      binds.append(backends.Bind(str(flags), backends.FLAG_DIR, True))
    binds += [backends.Bind(os.fspath(host), inside) for host, inside in ro_binds.items()]
    argv = self.backend.argv(command, binds=binds, limits=self.limits, user_id=user_id, mount_point=str(self._root / 'mount'))
    return backends.resolve_tool(argv)


def _give(folder: pathlib.Path, user: int) -> None:
  os.lchown(folder, user, user)
  for root, folders, files in os.walk(folder):
    for name in folders + files:
      os.lchown(os.path.join(root, name), user, user)


def _remove_tree(folder: pathlib.Path) -> None:
  """Deletes a tree, first restoring access to folders that the agent closed to its owner."""
  shutil.rmtree(folder, ignore_errors=True)
  if not folder.exists():
    return
  for root, folders, _ in os.walk(folder, topdown=True):
    for name in folders:
      path = os.path.join(root, name)
      if not os.path.islink(path):
        os.chmod(path, stat.S_IRWXU)
  shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: pathlib.Path) -> None:
  """Removes the folders of runs that no longer live: their lock can be taken."""
  for root in parent.glob(_ROOT_PREFIX + '*'):
    try:
      with open(root / 'lock') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_tree(root)
    except OSError:
      continue  # alive, being made, or another user's
