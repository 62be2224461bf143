"""Runs a command and ends it, with all it started, when asked to or when the parent process ends: `guardian.py PARENT CORES COMMAND ...`.

A vLLM server is several processes, of which the kernel would end only the first with its parent.  Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

_GRACE_S = 4.0


def main() -> None:
  """Guards until the command ends."""
  parent, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
  if cores:
    os.sched_setaffinity(0, [int(c) for c in cores.split(',')])
  if sys.platform == 'linux':
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
  if os.getppid() != parent:
    sys.exit(f'the parent process {parent} has already ended')
  child = subprocess.Popen(command)

  def gone() -> bool:  # not Popen.poll: the handler interrupts Popen.wait, which holds its lock
    try:
      return os.waitpid(child.pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
      return True

  def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while not gone() and time.monotonic() < deadline:
      time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)  # whatever is left, and this process

  signal.signal(signal.SIGTERM, end)
  status = child.wait()
  print(f'the server ended with status {status}', file=sys.stderr, flush=True)
  os.killpg(0, signal.SIGKILL)


if __name__ == '__main__':
  main()
