"""The guardian of a server's processes: nothing is left, whoever ends first."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ts_jax.rollout.vllm import guardian

# A server of two processes, as vLLM's, that ignores what it is asked.
_STUBBORN = ('import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nchild = os.fork()\n'
             'if child: print(os.getpid(), child, flush=True)\ntime.sleep(100)\n')


def start(body: str, parent: int | None = None, cores: str = ''):
  command = [sys.executable, guardian.__file__, str(parent or os.getpid()), cores, sys.executable, '-c', body]
  return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def gone(pid: int) -> bool:
  return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_gone(*pids: int) -> None:
  end = time.monotonic() + 15
  while not all(map(gone, pids)):
    assert time.monotonic() < end, f'{[p for p in pids if not gone(p)]} are still there'
    time.sleep(0.05)


def test_ends_every_process_when_asked(monkeypatch):
  process = start(_STUBBORN)
  pids = [int(p) for p in process.stdout.readline().split()]
  process.terminate()
  wait_gone(process.pid, *pids)
  process.wait()


def test_ends_every_process_when_the_parent_dies():
  script = f'import subprocess, sys, os\nsubprocess.Popen([sys.executable, {guardian.__file__!r}, str(os.getpid()), "", sys.executable, "-c", {_STUBBORN!r}])\nimport time; time.sleep(100)'
  parent = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE, text=True, start_new_session=True)
  pids = [int(p) for p in parent.stdout.readline().split()]
  parent.kill()
  parent.wait()
  wait_gone(*pids)


def test_what_a_dead_server_leaves_behind_ends_too():
  process = start(_STUBBORN)
  first, second = (int(p) for p in process.stdout.readline().split())
  os.kill(first, signal.SIGKILL)
  wait_gone(second, process.pid)
  assert process.wait() == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, 'sched_getaffinity'), reason='cores are pinned on Linux only')
def test_pins_the_server():
  process = start('import os; print(*os.sched_getaffinity(0), flush=True)', cores='0')
  assert process.stdout.readline() == '0\n'
  process.wait()


def test_refuses_a_parent_that_has_ended():
  process = start('print("started")', parent=2**22 - 3)
  assert process.wait() != 0 and process.stdout.read() == ''


def test_needs_the_standard_library_only():
  loaded = subprocess.run([sys.executable, '-S', '-c', f'import runpy; runpy.run_path({guardian.__file__!r})'], check=False)
  assert loaded.returncode == 0 and pathlib.Path(guardian.__file__).exists()
