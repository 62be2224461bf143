"""How a command is confined: the argument lists of each sandbox backend, and the probe that chooses one.

A backend is two facts: the tool (bubblewrap, unshare, or nothing) and how the process gives up privileges:

* run by root, every sandbox gets a user id of its own (so that the process limit counts that sandbox alone; the kernel
  exempts root from it) and no capability;
* run by anyone else, a user namespace does both.

Inside, the root is an empty read-only tmpfs with the system bound read-only, no network device but loopback, private
process ids, `/tmp` and `/home/agent` of bounded size, and the work folder at `/testbed`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
from typing import Mapping, Sequence

from ts_jax import types

WORK_DIR = '/testbed'
HOME_DIR = '/home/agent'
TOOL_DIR = '/opt/agent/bin'
FLAG_DIR = '/run/agent'
SEARCH_PATH = f'{TOOL_DIR}:/usr/local/bin:/usr/bin:/bin'
_OUTER_PATH = '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'
_DEVICES = ('null', 'zero', 'full', 'random', 'urandom')
_FIRST_USER, _USER_COUNT = 40000, 20000  # below 65536: also mapped where the whole machine is a container
_PROBE_DEADLINE_S = 10.0


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
  """Limits of one sandbox.  Memory, CPU time, file size and open files count per process.

  Attributes:
    memory_bytes: address space of each process.
    processes: processes and threads of the whole sandbox.
    file_bytes: largest file that can be written.
    cpu_s: CPU seconds of each process.
    open_files: descriptors of each process.
    tmp_bytes: size of each of /tmp, /dev/shm and the home folder.
    output_bytes: kept of one command's output (first and last half); the rest is read and dropped.
  """

  memory_bytes: int = 1 << 30
  processes: int = 64
  file_bytes: int = 64 << 20
  cpu_s: int = 300
  open_files: int = 512
  tmp_bytes: int = 64 << 20
  output_bytes: int = 256 << 10

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value <= 0:
        raise types.ConfigError(f'sandbox limit {field.name}={value} must be positive')

  def ulimit_script(self) -> str:
    """Bash lines that apply the limits (hard and soft) to the shell that runs them."""
    return (f'ulimit -v {self.memory_bytes // 1024} && ulimit -f {self.file_bytes // 1024} && ulimit -t {self.cpu_s} '
            f'&& ulimit -c 0 && ulimit -n {self.open_files} && ulimit -u {self.processes}')


@dataclasses.dataclass(frozen=True)
class Bind:
  """One folder or file of the host, made visible inside."""

  host: str
  inside: str
  writable: bool = False


@dataclasses.dataclass(frozen=True)
class Backend:
  """The confinement in use.

  Attributes:
    tool: 'bubblewrap', 'unshare' or 'none'.
    as_root: privileges are given up by switching to a private user id, not by a user namespace.
  """

  tool: str
  as_root: bool

  @property
  def description(self) -> str:
    """What is said at run start."""
    if self.tool == 'none':
      return ('none: commands run on this machine with its files and network in reach (allowed by allow_unsandboxed); '
              'children that leave their process group outlive an attempt')
    if self.as_root:
      return f'{self.tool}, a private user id per sandbox'
    exempt = ' (run by root: the kernel exempts it from the limit on processes)' if os.geteuid() == 0 else ''
    return f'{self.tool}, a user namespace per sandbox{exempt}'

  def argv(self, command: Sequence[str], *, binds: Sequence[Bind], limits: SandboxLimits, user_id: int,
           mount_point: str) -> list[str]:
    """Argument list that runs `command` confined, under `limits`, in the work folder.

    Args:
      command: what to run, as seen inside.
      binds: must hold the bind of `WORK_DIR`.
      limits: applied before `command` starts; it cannot raise them.
      user_id: identity inside; used when `as_root`.
      mount_point: an empty folder of the host that holds none of `binds` (unshare builds its root there, seen by nobody).
    """
    limited = ['bash', '--noprofile', '--norc', '-c', limits.ulimit_script() + ' && exec "$@"', 'limits', *command]
    if self.tool == 'bubblewrap':
      return self._bubblewrap(limited, binds, limits, user_id)
    if self.tool == 'unshare':
      return self._unshare(limited, binds, limits, user_id, mount_point)
    work = next(b.host for b in binds if b.inside == WORK_DIR)
    # The address-space and size limits hold here too; the process limit would count the whole user, so it does not.
    script = f'cd {shlex.quote(work)} && ' + limits.ulimit_script().rsplit(' && ', 1)[0] + ' && exec "$@"'
    shown = [_on_host(a, binds) for a in command]
    return ['setpriv', '--pdeathsig', 'KILL', 'bash', '--noprofile', '--norc', '-c', script, 'limits', *shown]

  def _drop(self, user_id: int) -> list[str]:
    drop = ['setpriv', '--bounding-set=-all', '--inh-caps=-all', '--ambient-caps=-all', '--no-new-privs']
    if self.as_root:
      drop += ['--reuid', str(user_id), '--regid', str(user_id), '--clear-groups']
    return drop

  def _bubblewrap(self, command, binds, limits, user_id) -> list[str]:
    argv = ['bwrap', '--unshare-ipc', '--unshare-pid', '--unshare-net', '--unshare-uts', '--unshare-cgroup-try',
            '--die-with-parent', '--new-session', '--hostname', 'sandbox'] if self.as_root else [
                'bwrap', '--unshare-user', '--uid', '1000', '--gid', '1000', '--unshare-ipc', '--unshare-pid',
                '--unshare-net', '--unshare-uts', '--unshare-cgroup-try', '--cap-drop', 'ALL', '--die-with-parent',
                '--new-session', '--hostname', 'sandbox']
    argv += ['--tmpfs', '/', '--ro-bind', '/usr', '/usr', '--perms', '0755', '--dir', '/etc']
    for link, target in _system_links():
      argv += ['--symlink', target, link] if target else ['--ro-bind', link, link]
    for path in _system_files():
      argv += ['--ro-bind', path, path]
    argv += ['--dev', '/dev', '--proc', '/proc']
    for path in ('/tmp', '/dev/shm', HOME_DIR):
      argv += ['--perms', '1777', '--size', str(limits.tmp_bytes), '--tmpfs', path]
    for parent in sorted({p for b in binds for p in _parents(b.inside)}):  # bwrap alone would close them to others
      argv += ['--perms', '0755', '--dir', parent]
    for bind in binds:
      argv += ['--bind' if bind.writable else '--ro-bind', bind.host, bind.inside]
    argv += ['--remount-ro', '/', '--chdir', WORK_DIR]
    return argv + (self._drop(user_id) if self.as_root else []) + command

  def _unshare(self, command, binds, limits, user_id, mount_point) -> list[str]:
    q = shlex.quote
    lines = ['umask 022', 'set -e', 'mount --make-rprivate /', 'R="$1"; shift', 'mount -t tmpfs -o mode=0755 tmpfs "$R"',
             'mkdir -p "$R"/usr "$R"/etc "$R"/proc "$R"/dev "$R"/home', 'ro() { mount --rbind "$1" "$R$2"; '
             'mount -o remount,bind,ro "$R$2" 2>/dev/null || mount -o remount,bind,ro,nosuid,nodev "$R$2"; }', 'ro /usr /usr']
    for link, target in _system_links():
      lines.append(f'ln -s {q(target)} "$R"{q(link)}' if target else f'mkdir -p "$R"{q(link)}; ro {q(link)} {q(link)}')
    for path in _system_files():
      make = f'mkdir -p "$R"{q(path)}' if os.path.isdir(path) else f'mkdir -p "$R"{q(os.path.dirname(path))}; : > "$R"{q(path)}'
      lines.append(f'{make}; ro {q(path)} {q(path)}')
    for name in _DEVICES:
      lines.append(f': > "$R"/dev/{name}; mount --bind /dev/{name} "$R"/dev/{name}')
    lines += ['ln -s /proc/self/fd "$R"/dev/fd', 'ln -s fd/0 "$R"/dev/stdin', 'ln -s fd/1 "$R"/dev/stdout',
              'ln -s fd/2 "$R"/dev/stderr']
    for path in ('/tmp', '/dev/shm', HOME_DIR):
      lines.append(f'mkdir -p "$R"{path}; mount -t tmpfs -o mode=1777,size={limits.tmp_bytes},nosuid,nodev tmpfs "$R"{path}')
    for bind in binds:
      inside = q(bind.inside)
      make = (f'mkdir -p "$R"{inside}' if os.path.isdir(bind.host) else
              f'mkdir -p "$R"{q(os.path.dirname(bind.inside))}; : > "$R"{inside}')
      lines.append(f'{make}; ' + (f'mount --rbind {q(bind.host)} "$R"{inside}' if bind.writable else f'ro {q(bind.host)} {inside}'))
    # pivot_root onto itself stacks the old root under the new one; the lazy unmount then drops it.
    lines += ['mount -t proc -o nosuid,nodev,noexec proc "$R"/proc', 'mount -o remount,bind,ro "$R"', 'cd "$R"',
              f'PATH={_OUTER_PATH} pivot_root . .', 'umount -l .', f'cd {q(WORK_DIR)}',
              'exec "$@"']
    namespaces = ['--mount', '--pid', '--fork', '--kill-child', '--net', '--ipc', '--uts']
    if not self.as_root:
      namespaces = ['--user', '--map-root-user', *namespaces]
    return ['setpriv', '--pdeathsig', 'KILL', 'unshare', *namespaces, 'bash', '--noprofile', '--norc', '-c', '\n'.join(lines),
            'sandbox', mount_point, *self._drop(user_id), *command]


def inner_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
  """Environment variables of a confined process; nothing of the run's own environment is passed on."""
  env = {'HOME': HOME_DIR, 'PATH': SEARCH_PATH, 'USER': 'agent', 'LOGNAME': 'agent', 'LANG': 'C.UTF-8', 'TERM': 'dumb',
         'TMPDIR': '/tmp', 'PYTHONDONTWRITEBYTECODE': '1', 'SHELL': '/bin/bash'}
  env.update(extra or {})
  return env


def resolve_tool(argv: Sequence[str]) -> list[str]:
  """Returns `argv` with its program's full path: the child's own PATH is the one of the sandbox."""
  found = shutil.which(argv[0], path=_OUTER_PATH)
  if found is None:
    raise types.InfrastructureError(f'sandbox program {argv[0]!r} is not installed')
  return [found, *argv[1:]]


def _system_links() -> list[tuple[str, str]]:
  """(path, target) of /bin, /lib...: symbolic links on a merged-/usr system, folders (empty target) elsewhere."""
  links = []
  for path in ('/bin', '/sbin', '/lib', '/lib64', '/lib32'):
    if os.path.islink(path):
      links.append((path, os.readlink(path)))
    elif os.path.isdir(path):
      links.append((path, ''))
  return links


def _system_files() -> list[str]:
  return [p for p in ('/etc/alternatives', '/etc/ld.so.cache', '/etc/localtime') if os.path.exists(p)]


def _parents(path: str) -> list[str]:
  parents = [str(p) for p in pathlib.PurePosixPath(path).parents]
  return [p for p in parents if p not in ('/', '/tmp') and not p.startswith(('/usr', '/proc', '/dev', WORK_DIR))]


def _on_host(argument: str, binds: Sequence[Bind]) -> str:
  """Without a mount namespace a path inside is written as the path on the host."""
  hosts = {b.inside: b.host for b in binds}
  names = '|'.join(re.escape(i) for i in sorted(hosts, key=len, reverse=True))
  return re.sub(rf'(?<![\w./-])({names})(?![\w.-])', lambda hit: hosts[hit.group(1)], argument)


def private_user(counter: int) -> int:
  """User id of the sandbox numbered `counter` in this process."""
  return _FIRST_USER + (os.getpid() * 257 + counter) % _USER_COUNT


def probe(backend: str = 'auto', *, allow_unsandboxed: bool = False, limits: SandboxLimits | None = None) -> Backend:
  """Chooses the confinement by running a command in it.  Blocking; called once, at run start.

  Args:
    backend: 'auto' (the first of bubblewrap, unshare that works), 'bubblewrap', 'unshare' or 'none'.
    allow_unsandboxed: permits 'none', as a last resort of 'auto' or by name.
    limits: the limits the run will use; they are part of what is tried.

  Returns:
    A backend that has just run a command.

  Raises:
    ConfigError: nothing permitted works; says why and what to install or set.
  """
  if backend not in ('auto', 'bubblewrap', 'unshare', 'none'):
    raise types.ConfigError(f"sandbox backend {backend!r} is unknown: use 'auto', 'bubblewrap', 'unshare' or 'none'")
  if backend == 'none' and not allow_unsandboxed:
    raise types.ConfigError("sandbox backend 'none' gives the model's commands this machine's files and network: "
                            'set allow_unsandboxed=True to accept that, or install bubblewrap (make sandbox)')
  limits = limits or SandboxLimits()
  tools = {'auto': ('bubblewrap', 'unshare')}.get(backend, (backend,))
  failures = []
  for tool in tools:
    for as_root in ([True, False] if os.geteuid() == 0 else [False]):
      candidate = Backend(tool, as_root)
      failure = _try_backend(candidate, limits)
      if failure is None:
        return candidate
      failures.append(f'{tool} ({"private user id" if as_root else "user namespace"}): {failure}')
  if allow_unsandboxed and backend == 'auto':
    return Backend('none', False)
  raise types.ConfigError(
      f'no sandbox for the commands of the model (backend {backend!r}): ' + '; '.join(failures) +
      '. Install bubblewrap (apt-get install bubblewrap, or make sandbox), allow user namespaces for this user, or set '
      'allow_unsandboxed=True to run commands unconfined.')


def _try_backend(backend: Backend, limits: SandboxLimits) -> str | None:
  """Returns None when the backend runs a forking command and hides the host's files, else the reason."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='ts_jax-probe-'))
  try:
    user = private_user(0)
    work, mount_point = folder / 'work', folder / 'root'
    work.mkdir()
    mount_point.mkdir()
    if backend.as_root:
      os.chown(work, user, user)
    script = ': > written && cat written | cat && ! : 2>/dev/null > /usr/written && echo confined'
    if backend.tool == 'none':
      script = ': > written && cat written | cat && echo confined'
    argv = backend.argv(['bash', '-c', script], binds=[Bind(str(work), WORK_DIR, True)], limits=limits, user_id=user,
                        mount_point=str(mount_point))
    try:
      done = subprocess.run(resolve_tool(argv), env=inner_environment(), stdin=subprocess.DEVNULL, capture_output=True,
                            text=True, timeout=_PROBE_DEADLINE_S, check=False)
    except (types.InfrastructureError, OSError, subprocess.TimeoutExpired) as e:
      return str(e)
    if done.returncode == 0 and done.stdout.strip() == 'confined':
      return None
    return (done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]
  finally:
    shutil.rmtree(folder, ignore_errors=True)
