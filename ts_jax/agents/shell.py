"""One persistent bash per attempt, spoken to through pipes and never blocking the event loop.

Each command is parsed, then sent as `eval '<quoted command>' </dev/null`, followed by a random end marker with the exit
code, so that neither an unbalanced quote, nor an open heredoc, nor a program that reads its input can swallow what comes next.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import pathlib
import re
import secrets
import shlex
import signal
import time
from typing import Callable, Sequence

from ts_jax import types

_READ_BYTES = 1 << 18
_START_DEADLINE_S = 20.0
_KILL_DEADLINE_S = 5.0
# Once a command has printed more than is kept, reading slows down so that a flood does not take a core from the engine.
_FLOOD_PAUSE_S = 0.0005
_RESULT_FD = 200  # kept by the shell for its end marker; closed in the commands it runs


@dataclasses.dataclass(frozen=True)
class CommandResult:
  """What one command did.

  Attributes:
    output: stdout and stderr in the order written, undecodable bytes replaced; the middle is left out past the cap.
    exit_code: None when the command timed out.
    timed_out: the command outlived its limit; the process tree has been ended.
    submitted: the command ran `submit`.
    truncated: bytes were left out of `output`.
    start_s, end_s: seconds on the run's clock.
  """

  output: str
  exit_code: int | None
  timed_out: bool = False
  submitted: bool = False
  truncated: bool = False
  start_s: float = 0.0
  end_s: float = 0.0


class OutputBuffer:
  """Keeps the first and the last half of `limit` bytes of a stream of any length."""

  def __init__(self, limit: int):
    self._half = max(1, limit // 2)
    self._head = bytearray()
    self._tail: collections.deque[bytes] = collections.deque()
    self._tail_bytes = 0
    self.total = 0

  def feed(self, data: bytes) -> None:
    """Appends bytes, dropping from the middle of what is held."""
    self.total += len(data)
    room = self._half - len(self._head)
    if room > 0:
      self._head += data[:room]
      data = data[room:]
    if data:
      self._tail.append(data)
      self._tail_bytes += len(data)
      while self._tail_bytes - len(self._tail[0]) >= self._half:
        self._tail_bytes -= len(self._tail.popleft())

  @property
  def dropped(self) -> int:
    """Bytes left out."""
    return max(0, self.total - len(self._head) - self._half)

  def text(self) -> str:
    """The stream as text; a character cut by the elision is left out whole, other bad bytes are replaced."""
    tail = b''.join(self._tail)
    if not self.dropped:
      return (bytes(self._head) + tail).decode('utf-8', errors='replace')
    head, tail = _without_partial_end(bytes(self._head)), _without_partial_start(tail[-self._half:])
    return (head.decode('utf-8', errors='replace') + f'\n[... {self.total - len(head) - len(tail)} bytes left out ...]\n' +
            tail.decode('utf-8', errors='replace'))


def _without_partial_end(data: bytes) -> bytes:
  for back in range(1, min(4, len(data)) + 1):
    byte = data[-back]
    if byte & 0xC0 != 0x80:  # the last byte that starts a character
      need = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
      return data if need <= back else data[:-back]
  return data


def _without_partial_start(data: bytes) -> bytes:
  start = 0
  while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
    start += 1
  return data[start:]


async def spawn(argv: Sequence[str], env: dict[str, str], stdin: int) -> asyncio.subprocess.Process:
  """Starts a child in a session of its own with stdout and stderr on one pipe.

  Raises:
    InfrastructureError: it could not be started.
  """
  try:
    return await asyncio.create_subprocess_exec(*argv, env=env, stdin=stdin, stdout=asyncio.subprocess.PIPE,
                                                stderr=asyncio.subprocess.STDOUT, start_new_session=True, limit=_READ_BYTES)
  except OSError as e:
    raise types.InfrastructureError(f'cannot start the sandbox program {argv[0]!r}: {e}') from e


async def drain(process: asyncio.subprocess.Process, buffer: OutputBuffer) -> None:
  """Reads until the process has ended and its output is complete."""
  while data := await process.stdout.read(_READ_BYTES):
    buffer.feed(data)
    if buffer.dropped and process.returncode is None:
      await asyncio.sleep(_FLOOD_PAUSE_S)
  await process.wait()


def kill_tree(process: asyncio.subprocess.Process) -> None:
  """Sends SIGKILL to everything `process` confines; returns at once.

  The confined processes hang off the first process of their own process-id namespace, the sandbox program's only child.
  Killing that one first means the sandbox program ends only when all of them are gone.
  """
  if process.returncode is not None:
    return
  try:
    children = [int(p) for p in pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()]
  except (OSError, ValueError):
    children = []
  for pid in children:
    _signal(os.kill, pid)
  if not children:
    _signal(os.killpg, process.pid)


def _signal(send: Callable[[int, int], None], pid: int) -> None:
  try:
    send(pid, signal.SIGKILL)
  except ProcessLookupError:
    pass  # it ended by itself
  except PermissionError:
    pass  # a set-user-id child; the kill of its parent follows


async def end_tree(process: asyncio.subprocess.Process, group: bool = False) -> None:
  """Kills and waits for everything `process` confines.

  Args:
    process: the sandbox program.
    group: also signal its process group (no process-id namespace holds the children).
  """
  if process.returncode is None:
    if group:
      _signal(os.killpg, process.pid)
      process._transport.close()  # children that left the group may hold the pipe open for ever
    else:
      kill_tree(process)
    try:
      # The event loop reports the end only after the end of the output: what is left of a flood must be read.
      await asyncio.wait_for(drain(process, OutputBuffer(2)), _KILL_DEADLINE_S)
    except asyncio.TimeoutError:
      _signal(os.killpg, process.pid)
      process._transport.close()
      await process.wait()
  process._transport.close()


class Shell:
  """A persistent bash in a sandbox.  One command at a time.

  Working folder, variables and functions carry over between commands; a command that ends the shell itself (`exit`,
  `exec`) gets a fresh one for the next command.
  """

  def __init__(self, argv: Sequence[str], env: dict[str, str], *, output_bytes: int, submit_flag: pathlib.Path,
               kill_group: bool = False):
    """Use `Sandbox.open_shell`.

    Args:
      argv: sandbox program and its arguments, ending in a bash that reads commands from its input.
      env: environment of the shell.
      output_bytes: kept of one command's output.
      submit_flag: file on the host that `submit` creates.
      kill_group: the backend has no process-id namespace.
    """
    self._argv, self._env = list(argv), dict(env)
    self._output_bytes, self._flag, self._kill_group = output_bytes, submit_flag, kill_group
    self._process: asyncio.subprocess.Process | None = None
    self._closed = False

  async def start(self) -> None:
    """Starts the shell and waits until it answers.

    Raises:
      InfrastructureError: it did not answer; the message holds what it printed.
    """
    self._process = await spawn(self._argv, self._env, asyncio.subprocess.PIPE)
    buffer = OutputBuffer(4096)
    try:
      code = await asyncio.wait_for(self._exchange(f'exec {_RESULT_FD}>&1\n', buffer, f'>&{_RESULT_FD}'), _START_DEADLINE_S)
    except asyncio.TimeoutError:
      await self._end()
      raise types.InfrastructureError(f'sandbox shell gave no answer in {_START_DEADLINE_S:.0f} s: {buffer.text()!r}') from None
    except BaseException:
      await self._end()
      raise
    if code is None:
      await self._end()
      raise types.InfrastructureError(f'sandbox shell ended while starting: {buffer.text().strip()!r}')

  async def run(self, command: str, timeout_s: float) -> CommandResult:
    """Runs one command.

    Args:
      command: bash text, any number of lines.
      timeout_s: seconds it may take; afterwards the process tree is ended and later commands are refused.

    Returns:
      Its result; `timed_out` and `exit_code=None` past the limit.

    Raises:
      InfrastructureError: the shell is closed or could not be started again.
    """
    if self._closed:
      raise types.InfrastructureError('the shell of this attempt has been closed: a command cannot follow a timeout or close')
    if self._process is None:
      await self.start()
    self._flag.unlink(missing_ok=True)
    start_s = time.time()
    buffer = OutputBuffer(self._output_bytes)
    # A NUL cannot be part of a bash command line; the quoted text is always one complete word.
    quoted = shlex.quote(command.replace('\0', ''))
    # Parsed by a bash of its own first: some malformed commands corrupt the memory of a bash that evaluates them.
    to_result = f'>&{_RESULT_FD} 2>&1 {_RESULT_FD}>&-'
    line = f'/bin/bash -O extglob -n <<<{quoted} {to_result} && builtin eval {quoted} </dev/null {to_result}\n'
    timed_out, code = False, None
    try:
      async with asyncio.timeout(timeout_s):
        code = await self._exchange(line, buffer, f'>&{_RESULT_FD}')
        if code is None:  # the command ended the shell
          code = await self._process.wait()
    except TimeoutError:
      timed_out, code = True, None
      await self.close()
    except BaseException:
      self.kill()
      raise
    if code is not None and self._process is not None and self._process.returncode is not None:
      await self._end()
    return CommandResult(output=buffer.text(), exit_code=code, timed_out=timed_out, submitted=self._flag.exists(),
                         truncated=buffer.dropped > 0, start_s=start_s, end_s=time.time())

  def kill(self) -> None:
    """Signals the process tree and returns at once; `close` must follow."""
    self._closed = True
    if self._process is None:
      return
    if self._kill_group:
      _signal(os.killpg, self._process.pid)
    else:
      kill_tree(self._process)

  async def close(self) -> None:
    """Ends the shell and every process it started, and waits for them.  Idempotent."""
    self._closed = True
    await self._end()

  async def _end(self) -> None:
    process, self._process = self._process, None
    if process is not None:
      await end_tree(process, self._kill_group)

  async def _exchange(self, line: str, buffer: OutputBuffer, redirect: str) -> int | None:
    """Sends one line, then collects output up to its end marker.

    Returns:
      The exit code, or None when the stream ended first.
    """
    nonce = secrets.token_hex(16)
    # The marker is written in two halves: echoed input (set -v, an error message) never holds the joined form.
    text = line + f"builtin printf '%s%s:%d;' '{nonce[:16]}' '{nonce[16:]}' \"$?\" {redirect}\n"
    process = self._process
    try:
      process.stdin.write(text.encode('utf-8', errors='replace'))
      await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
      pass  # the shell is gone: the reads below find the end of the stream
    marker, pending = re.compile(nonce.encode() + rb':(\d+);'), b''
    keep = len(nonce) + 8
    while True:
      data = await process.stdout.read(_READ_BYTES)
      if not data:
        buffer.feed(pending)
        return None
      pending += data
      found = marker.search(pending)
      if found:
        buffer.feed(pending[:found.start()])
        return int(found.group(1))
      if len(pending) > keep:
        buffer.feed(pending[:-keep])
        pending = pending[-keep:]
      if buffer.dropped:
        await asyncio.sleep(_FLOOD_PAUSE_S)
