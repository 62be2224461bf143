"""Runs a task's tests inside the verifier's sandbox.  Standard library only; never imported by ts_jax.

    python3 -I -S verify_main.py <channel> <test file> <seconds per test> <seconds in all> <site folder or -> <test> ...

Three processes, so that nothing the tests start can speak for them:

* the reporter reads the nonce after it has split off the others, and alone holds the output pipe;
* the supervisor gives every test its time and starts anew after one that took its process down;
* the worker loads the test file and runs the tests.  Its standard streams lead nowhere.

All three close their memory and their descriptors to other processes; a program that a test starts is not so protected,
and that is what it is kept from.

Prints `<nonce> ready` and, at the end, `<nonce> <test> <1 or 0> <message>` per test and `<nonce> end`.
"""

import os
import select
import _signal as signal  # `signal` imports enum, which takes a while beside a verification
import sys
import time

_PR_SET_DUMPABLE = 4
_MESSAGE_CHARS = 300


class TestTimeout(BaseException):
  """Raised by the alarm; no `except Exception` of a test can swallow it."""


def arm(seconds):
  """Interrupts this process in `seconds`; 0 takes that back."""

  def on_alarm(signum, frame):
    raise TestTimeout('no answer within %g s' % seconds)

  signal.signal(signal.SIGALRM, on_alarm)
  signal.setitimer(signal.ITIMER_REAL, seconds)


def main():
  channel, path, per_test_s, total_s, site, *names = sys.argv[1:]
  report_fd = os.dup(1)  # not inheritable
  null = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(null, fd)
  hide_memory()
  go_read, go_write = os.pipe()
  result_read, result_write = os.pipe()
  if os.fork() == 0:
    os.close(report_fd)
    os.close(go_write)
    os.close(result_read)
    os.read(go_read, 1)
    supervise(path, float(per_test_s), float(total_s), site, names, result_write)
    os._exit(0)
  os.close(result_write)
  with open(channel, 'rb', buffering=0) as source:  # a FIFO: what has been read is gone
    nonce = source.read(64)
  os.write(report_fd, b'\n' + nonce + b' ready\n')
  os.write(go_write, b'!')
  lines = read_lines(result_read)
  os.write(report_fd, b''.join(nonce + b' ' + line + b'\n' for line in lines if line) + nonce + b' end\n')


def hide_memory():
  """Closes /proc/<pid>/{mem,fd,environ} to processes of the same user: here and in what is forked, until it executes."""
  try:
    import ctypes
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
  except (ImportError, OSError, AttributeError):
    pass  # an interpreter without ctypes: the kernel's ptrace policy is then the only guard


def read_lines(fd):
  """Everything up to the end of the pipe, by lines."""
  chunks = []
  while True:
    chunk = os.read(fd, 65536)
    if not chunk:
      return b''.join(chunks).split(b'\n')
    chunks.append(chunk)


def supervise(path, per_test_s, total_s, site, names, result_fd):
  """Writes one line per test; a worker that hangs or dies fails the test it was in and is replaced."""
  deadline = time.monotonic() + total_s
  remaining = list(names)
  while remaining:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
      os.close(read_fd)
      os.close(result_fd)
      os.setpgid(0, 0)
      work(path, per_test_s, site, remaining, write_fd)
      os._exit(0)
    os.close(write_fd)
    reason = b'the test ended its process'
    pending = b''
    while remaining:
      # The worker's own alarm comes first; this limit is for a hang that no signal handler can leave.
      wait_s = min(per_test_s + 1.0, deadline - time.monotonic())
      if wait_s <= 0 or not select.select([read_fd], [], [], wait_s)[0]:
        reason = b'no answer within %d s' % per_test_s if wait_s > 0 else b'the tests took too long together'
        break
      chunk = os.read(read_fd, 65536)
      if not chunk:
        break
      pending += chunk
      *lines, pending = pending.split(b'\n')
      for line in lines:
        if remaining and line.startswith(remaining[0].encode() + b' '):
          os.write(result_fd, line + b'\n')
          remaining.pop(0)
    try:
      os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
      pass
    os.waitpid(pid, 0)
    os.close(read_fd)
    if remaining:
      os.write(result_fd, remaining.pop(0).encode() + b' 0 ' + reason + b'\n')


def work(path, per_test_s, site, names, fd):
  """Runs tests in order, one line each as it ends."""
  if site != '-':
    work_with_pytest(path, per_test_s, site, names, fd)
    return
  scope = {'__name__': 'test_outputs', '__file__': path}
  failure = run_guarded(per_test_s, lambda: exec(compile(open(path, 'rb').read(), path, 'exec'), scope))
  for name in names:
    message = failure or run_guarded(per_test_s, lambda: scope[name]())
    os.write(fd, result_line(name, not message, message))


def run_guarded(per_test_s, call):
  """Returns '' when the call returns, else what went wrong."""
  try:
    arm(per_test_s)
    try:
      call()
    finally:
      arm(0)
  except BaseException as e:  # SystemExit included: a test that exits has not passed
    return '%s: %s' % (type(e).__name__, e) if str(e) else type(e).__name__
  return ''


def result_line(name, passed, message):
  text = ' '.join(message.split())[:_MESSAGE_CHARS]
  return ('%s %d %s\n' % (name, passed, text)).encode('utf-8', errors='replace')


def work_with_pytest(path, per_test_s, site, names, fd):
  """Runs the same tests through pytest: parametrised cases of one name must all pass, a skipped test has not passed."""
  sys.path.append(site)
  import pytest

  class Collect:
    """Turns pytest's reports into one line per named test, once all its cases are through."""

    def __init__(self):
      self.cases, self.failed = {}, {}

    def pytest_collection_modifyitems(self, items):
      items[:] = [item for item in items if self.name(item.nodeid) in names]
      for item in items:
        self.cases[self.name(item.nodeid)] = self.cases.get(self.name(item.nodeid), 0) + 1

    @staticmethod
    def name(nodeid):
      return nodeid.split('::', 1)[-1].split('[')[0]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
      arm(per_test_s)
      try:
        return (yield)
      finally:
        arm(0)

    def pytest_runtest_logreport(self, report):
      name = self.name(report.nodeid)
      if report.outcome != 'passed' or hasattr(report, 'wasxfail'):
        text = str(report.longrepr or report.outcome).strip().splitlines()
        self.failed.setdefault(name, next((l[1:].strip() for l in text if l.startswith('E ')), text[-1] if text else 'failed'))
      if report.when == 'teardown':
        self.cases[name] -= 1

  collect = Collect()
  failure = ''
  try:
    pytest.main(['-q', '-p', 'no:cacheprovider', '-c', os.devnull, '--rootdir', os.path.dirname(path), '--confcutdir',
                 os.path.dirname(path), path], plugins=[collect])
  except BaseException as e:
    failure = '%s: %s' % (type(e).__name__, e)
  for name in names:
    message = collect.failed.get(name) or ('' if collect.cases.get(name) == 0 else failure or 'did not run')
    os.write(fd, result_line(name, not message, message))


if __name__ == '__main__':
  main()
