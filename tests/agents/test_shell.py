"""The persistent shell: what commands can and cannot do to it, to the machine, and to the run's memory."""

import asyncio
import resource
import secrets
import time

import pytest

from ts_jax import types
from ts_jax.agents import sandbox as sandbox_lib
from ts_jax.agents import shell as shell_lib


def run_commands(sandbox, *commands, timeout_s=10.0):
  """Runs commands in one shell; returns their results."""
  async def main():
    shell = sandbox.open_shell(sandbox.new_workspace())
    try:
      return [await shell.run(c, timeout_s) for c in commands]
    finally:
      await shell.close()
  return asyncio.run(main())


def test_state_carries_over_between_commands(sandbox):
  results = run_commands(sandbox, 'cd /tmp; export A=5; f() { echo "f $1"; }', 'echo $A $PWD; f x', 'exit_code() { return 3; }; exit_code')
  assert results[1].output == '5 /tmp\nf x\n'
  assert [r.exit_code for r in results] == [0, 0, 3]


MALFORMED = ['echo "open', "echo 'open", 'cat <<EOF\ntext', 'for i in 1 2', 'if true', '(', 'echo $(', '{', '}', ')', 'echo `', 'case x in',
             'echo \\', '# comment', '', ';', 'a=(', 'echo $((', 'function f {', '\0', 'echo \udc80', '\r', '<<', "$'"]
READERS = ['cat', 'read x; echo "[$x]"', 'bash', 'python3 -c "import sys; sys.stdin.read()"', 'sort',
           'while read line; do echo "$line"; done']


@pytest.mark.parametrize('commands', [MALFORMED, READERS], ids=['malformed', 'reading input'])
def test_command_neither_wedges_the_shell_nor_eats_what_follows(sandbox, commands):
  results = run_commands(sandbox, *(c for command in commands for c in (command, 'echo alive')))
  for command, result, after in zip(commands, results[::2], results[1::2]):
    assert not result.timed_out and 'printf' not in result.output, command
    assert (after.output, after.exit_code) == ('alive\n', 0), command


@pytest.mark.parametrize('command,code', [('exit 7', 7), ('kill -9 $$', 137), ('exec true', 0), ('set -e; false', 1)])
def test_command_that_ends_the_shell_reports_its_code_and_a_fresh_shell_follows(sandbox, command, code):
  first, second = run_commands(sandbox, 'echo before > kept; ' + command, 'cat kept')
  assert (first.exit_code, first.timed_out) == (code, False)
  assert second.output == 'before\n'


@pytest.mark.parametrize('command', ['exec > /dev/null', 'exec 2>&1 >/dev/null <&-', 'exec 200>&-', 'set -v; set -x', 'printf() { :; }'])
def test_redirecting_the_shell_itself_does_not_lose_it(sandbox, command):
  _, second = run_commands(sandbox, command, 'set +xv 2>/dev/null; echo alive')
  assert second.output.endswith('alive\n') and second.exit_code == 0


def test_submit_counts_wherever_it_runs_and_for_its_command_only(sandbox):
  runs = ['submit', 'true && submit', 'false\nsubmit', 'false; submit', '(cd /tmp && submit)', "bash -c 'submit'",
          'echo x | xargs submit', 'submit; exit 3', 'submit; exec true']
  does_not_run = ['false && submit', 'echo submit', '# submit', 'cat <<E\nsubmit\nE', 'true || submit', 'echo "submit']
  assert [r.submitted for r in run_commands(sandbox, *runs)] == [True] * len(runs)
  assert not any(r.submitted for r in run_commands(sandbox, *does_not_run))
  assert [r.submitted for r in run_commands(sandbox, 'submit', 'true')] == [True, False]


def test_stdout_and_stderr_keep_their_order(sandbox):
  assert run_commands(sandbox, 'echo a; echo b >&2; echo c')[0].output == 'a\nb\nc\n'


def test_undecodable_output_is_replaced(sandbox):
  assert run_commands(sandbox, r"printf 'a\xff\xc3'")[0].output == 'a\ufffd\ufffd'


def test_multibyte_output_survives_chunk_borders(sandbox):
  result = run_commands(sandbox, "python3 -c \"print('x' + '€' * 60000, end='')\"")[0]
  assert result.output == 'x' + '€' * 60000


def test_long_output_keeps_head_and_tail(sandbox):
  result = run_commands(sandbox, 'echo first; head -c 20000000 /dev/zero | tr "\\0" x; echo; echo last')[0]
  assert result.truncated and result.exit_code == 0
  assert result.output.startswith('first\n') and result.output.endswith('\nlast\n') and 'bytes left out' in result.output
  assert len(result.output.encode()) < sandbox.limits.output_bytes + 200


def test_endless_output_takes_no_memory_and_ends_with_its_timeout(sandbox):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  start = time.time()
  result = run_commands(sandbox, 'cat /dev/zero', timeout_s=1.5)[0]
  assert result.timed_out and result.truncated and time.time() - start < 5
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kilobytes


def test_timeout_ends_every_descendant(sandbox, processes_with):
  mark = f'{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'
  command = f'(setsid sleep 7{mark} &); nohup sleep 7{mark} >/dev/null 2>&1 & trap "" TERM INT HUP; sleep 7{mark}'
  result = run_commands(sandbox, command, timeout_s=0.5)[0]
  assert result.timed_out and result.exit_code is None
  assert not processes_with(f'sleep 7{mark}')


def test_closing_ends_background_children(sandbox, processes_with):
  mark = f'8{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'
  seen = []

  async def main():
    shell = sandbox.open_shell(sandbox.new_workspace())
    assert (await shell.run(f'setsid sleep {mark} & disown', 5)).exit_code == 0
    deadline = time.time() + 10
    while not seen and time.time() < deadline:
      seen.extend(processes_with(f'sleep {mark}'))
    await shell.close()
  asyncio.run(main())
  assert seen and not processes_with(f'sleep {mark}')


def test_cancelling_a_command_leaves_no_process(sandbox, processes_with):
  mark = f'9{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'

  async def main():
    shell = sandbox.open_shell(sandbox.new_workspace())
    await shell.start()
    running = asyncio.create_task(shell.run(f'sleep {mark}', 60))
    while not processes_with(f'sleep {mark}'):
      await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
      await running
    await shell.close()
  asyncio.run(main())
  assert not processes_with(f'sleep {mark}')


def test_command_after_a_timeout_is_refused(sandbox):
  with pytest.raises(types.InfrastructureError, match='closed'):
    run_commands(sandbox, 'sleep 5', 'true', timeout_s=0.2)


def test_waiting_command_blocks_nobody(sandbox):
  async def main():
    shells = [sandbox.open_shell(sandbox.new_workspace()) for _ in range(6)]
    start = time.time()
    await asyncio.gather(*(s.run('sleep 0.5', 10) for s in shells))
    took = time.time() - start
    await asyncio.gather(*(s.close() for s in shells))
    return took
  assert asyncio.run(main()) < 2.0


def test_fork_bomb_stays_inside_its_sandbox(backend, tmp_path, processes_with):
  if not backend.as_root and 'exempts' in backend.description:
    raise AssertionError('this machine offers root no private user ids: the process limit cannot hold')
  limits = sandbox_lib.SandboxLimits(processes=24)
  with sandbox_lib.Sandbox(backend, limits, folder=tmp_path) as sandbox:
    async def main():
      bombed, other = (sandbox.open_shell(sandbox.new_workspace()) for _ in range(2))
      await other.start()
      bomb = asyncio.create_task(bombed.run('f() { f | f & }; f 2>/dev/null; sleep 30', 1.0))
      await asyncio.sleep(0.5)
      count = len(processes_with(str(tmp_path)))
      answer = await other.run('echo alive', 10)
      result = await bomb
      await asyncio.gather(bombed.close(), other.close())
      return count, answer, result
    count, answer, _ = asyncio.run(main())
    assert answer.output == 'alive\n'
    assert count <= 24 + 8  # those of the bomb, and the two sandbox programs
    assert not processes_with(str(tmp_path))


@pytest.mark.parametrize('command,text', [
    ('python3 -c "x = bytearray(2 << 30)"', 'MemoryError'),
    ('head -c 100000000 /dev/zero > big', 'File size limit'),
    ('ulimit -u 100000', 'cannot modify limit'),
])
def test_resource_limit_holds(sandbox, command, text):
  result = run_commands(sandbox, command)[0]
  assert result.exit_code != 0 and text in result.output


def test_cpu_limit_holds(backend, tmp_path):
  with sandbox_lib.Sandbox(backend, sandbox_lib.SandboxLimits(cpu_s=1), folder=tmp_path) as sandbox:
    result = run_commands(sandbox, 'python3 -c "while True: pass"', timeout_s=8)[0]
  assert not result.timed_out and result.exit_code == 137


def test_output_buffer_never_cuts_a_character():
  text = 'aé€😀' * 50
  for limit in range(2, 60):
    for chunk in (1, 3, 7, 1000):
      buffer = shell_lib.OutputBuffer(limit)
      data = text.encode()
      for i in range(0, len(data), chunk):
        buffer.feed(data[i:i + chunk])
      kept = buffer.text()
      assert '\ufffd' not in kept
      head, rest = kept.split('\n[... ')
      count, tail = rest.split(' bytes left out ...]\n')
      assert text.startswith(head) and text.endswith(tail)
      assert len(head.encode()) + int(count) + len(tail.encode()) == len(data)
