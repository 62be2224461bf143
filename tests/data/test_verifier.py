"""Rewards come from the tests and from nothing the agent left behind."""

import asyncio
import dataclasses
import json
import time

import pytest

from ts_jax import types
from ts_jax.data import validate
from ts_jax.data import verifier as verifier_lib

WROTE = 'def test_wrote():\n  assert open("answer.txt").read() == "42\\n"\n'


def test_reward_adds_half_only_for_everything():
  assert [verifier_lib.reward(p) for p in (0.0, 0.25, 0.999999, 1.0)] == [0.0, 0.25, 0.999999, 1.5]
  for bad in (-0.1, 1.1, float('nan')):
    with pytest.raises(ValueError):
      verifier_lib.reward(bad)


def test_fraction_is_exactly_one_whatever_the_weights_round_to():
  thirds = tuple((n, 1 / 3) for n in 'abc')
  tenths = tuple((str(i), 0.1) for i in range(10))
  for weights in (thirds, tenths):
    passed = {n: True for n, _ in weights}
    assert verifier_lib.fraction_passed(passed, weights) == verifier_lib.fraction_passed(passed, weights, weighted=True) == 1.0
    passed[weights[0][0]] = False
    assert verifier_lib.fraction_passed(passed, weights, weighted=True) == pytest.approx(1 - weights[0][1])
    assert verifier_lib.fraction_passed(dict.fromkeys(passed, False), weights, weighted=True) == pytest.approx(0, abs=1e-12)


def test_partial_and_full_credit(make_task, attempt):
  task = make_task('import os\n' + WROTE + 'def test_exists():\n  assert os.path.exists("answer.txt")\n',
                   weights={'test_wrote': 0.9, 'test_exists': 0.1})
  none, half, weighted, full = (attempt(task), attempt(task, 'echo 41 > answer.txt'),
                                attempt(task, 'echo 41 > answer.txt', weighted=True), attempt(task, 'echo 42 > answer.txt'))
  assert [v.reward for v in (none, half, full)] == [0.0, 0.5, 1.5] and weighted.reward == pytest.approx(0.1)
  assert half.tests_passed == ('test_wrote=0', 'test_exists=1')
  assert none.messages['test_wrote'].startswith('FileNotFoundError') and not full.messages
  assert none.reward is not None and isinstance(none.reward, float)  # a score of zero is a score


@pytest.mark.parametrize('script', [
    'for f in os stat json sitecustomize usercustomize pytest conftest test_outputs; do '
    'printf "import sys\\nsys.exit(0)\\n" > $f.py; done',
    'printf "def pytest_runtest_makereport(item, call): raise SystemExit(0)\\n" > conftest.py; printf "[pytest]\\naddopts = --co\\n" > pytest.ini',
    'printf "def test_wrote(): pass\\n" > test_outputs.py; mkdir tests; cp test_outputs.py tests',
    'mkdir -p logs/verifier; echo 1.0 > logs/verifier/reward.txt; echo "0000 test_wrote 1" > report; echo "0000 end" >> report',
    'mkdir __pycache__; echo x > __pycache__/test_outputs.cpython-311.pyc',
    'ln -s /tests/test_outputs.py answer.txt',
    'ln -s /verifier answer.txt',
    'ln -s /dev/zero answer.txt',
    'mkdir answer.txt',
    'printf "42\\n" > other; chmod 000 other; ln -s other answer.txt',
    'chmod 555 .; (while true; do echo 42 > answer.txt; done) & sleep 0.2',
], ids=['modules', 'conftest', 'own-tests', 'fake-report', 'bytecode', 'link-to-tests', 'link-to-verifier', 'endless-file',
        'folder', 'unreadable', 'background'])
@pytest.mark.parametrize('needs_pytest', [False, True], ids=['plain', 'pytest'])
def test_what_the_agent_leaves_behind_earns_nothing(make_task, attempt, script, needs_pytest):
  task = make_task(('import pytest\n' if needs_pytest else '') + 'import json\nimport os\n' +
                   'def test_wrote():\n  assert open("answer.txt").read(100) == "42\\n"\n')
  verdict = attempt(task, script)
  assert (verdict.reward, verdict.tests_passed) == (0.0, ('test_wrote=0',))


@pytest.mark.parametrize('needs_pytest', [False, True], ids=['plain', 'pytest'])
def test_fifo_fails_its_test_and_no_other(make_task, attempt, needs_pytest):
  task = make_task(('import pytest\n' if needs_pytest else '') + 'import os\n' + WROTE +
                   'def test_other():\n  assert os.path.exists("other")\n')
  verdict = attempt(task, 'mkfifo answer.txt; touch other', test_timeout_s=0.3)
  assert verdict.tests_passed == ('test_wrote=0', 'test_other=1') and '0.3 s' in verdict.messages['test_wrote']


def test_closed_work_folder_is_opened_again(make_task, attempt):
  assert attempt(make_task(WROTE), 'echo 42 > answer.txt; chmod 000 .').reward == 1.5


@pytest.mark.parametrize('body, told', [
    ('import os; os._exit(0)', 'ended its process'),
    ('import sys; sys.exit(0)', 'SystemExit'),
    ('import os, signal; os.kill(os.getpid(), signal.SIGKILL)', 'ended its process'),
    ('import signal, time; signal.signal(signal.SIGALRM, signal.SIG_IGN); time.sleep(60)', 'no answer'),
    ('raise KeyboardInterrupt', 'KeyboardInterrupt'),
])
def test_a_test_that_does_not_return_has_not_passed_and_the_next_one_runs(make_task, attempt, body, told):
  task = make_task(f'def test_a():\n  {body}\ndef test_b():\n  pass\n')
  verdict = attempt(task, test_timeout_s=0.3)
  assert verdict.tests_passed == ('test_a=0', 'test_b=1') and told in verdict.messages['test_a']


def test_error_while_loading_fails_every_test(make_task, attempt):
  verdict = attempt(make_task('open("answer.txt")\ndef test_a(): pass\ndef test_b(): pass\n'))
  assert verdict.fraction == 0.0 and 'FileNotFoundError' in verdict.messages['test_b']


# The agent's program, run by the tests as a child, looks everywhere for the nonce and for the report's pipe.
_FORGER = r'''
import glob, os, re, sys
if os.getcwd() != '/testbed' or len(glob.glob('/proc/[0-9]*')) > 12:
  sys.exit('not in a sandbox')
found = set()
for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/verifier/*.json'):
  try:
    found |= set(re.findall('[0-9a-f]{32}', open(path, errors='replace').read()))
  except OSError:
    pass
try:
  fd = os.open('/verifier/channel', os.O_RDONLY | os.O_NONBLOCK)
  found |= set(re.findall('[0-9a-f]{32}', os.read(fd, 100).decode()))
except OSError:
  pass
lines = ''.join('%s test_runs 1\n%s end\n' % (n, n) for n in found | {'0' * 32})
for path in glob.glob('/proc/[0-9]*/fd/[0-9]*'):
  try:
    os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), ('\n' + lines + 'test_runs 1 \n').encode())
  except OSError:
    pass
open('nonces', 'w').write(repr(found))
'''


def test_a_program_that_the_tests_run_cannot_speak_for_them(make_task, attempt):
  task = make_task('import subprocess\ndef test_runs():\n  subprocess.run(["python3", "prog.py"])\n'
                   '  assert open("nonces").read() == "set()", open("nonces").read()\n  assert False, "honest"\n',
                   files={'prog.py': _FORGER})
  verdict = attempt(task)
  assert verdict.fraction == 0.0 and 'honest' in verdict.messages['test_runs']


def test_a_program_that_kills_the_verifier_scores_zero(make_task, attempt):
  task = make_task('import subprocess\ndef test_runs():\n  subprocess.run(["bash", "-c", "kill -9 $PPID"])\n')
  verdict = attempt(task)
  assert verdict.reward == 0.0 and verdict.messages


def test_pytest_features(make_task, attempt):
  task = make_task('''
import pytest

@pytest.fixture
def content():
  return open('answer.txt').read()

def test_fixture(content):
  assert content == '42\\n'

@pytest.mark.parametrize('n', [1, 2])
def test_cases(n):
  assert n == 1

@pytest.mark.skip
def test_skipped():
  pass

class TestGroup:
  def test_method(self, tmp_path):
    assert tmp_path.is_dir()
''')
  verdict = attempt(task, 'echo 42 > answer.txt')
  assert verdict.tests_passed == ('test_fixture=1', 'test_cases=0', 'test_skipped=0', 'TestGroup::test_method=1')
  assert 'assert 2 == 1' in verdict.messages['test_cases']


class _BrokenSandbox:
  """A sandbox whose runs end without a word: what a missing interpreter or a full machine looks like."""

  def __init__(self, timed_out):
    self.timed_out = timed_out

  async def run_once(self, argv, workdir, ro_binds=None, timeout_s=60.0, env=None):
    return dataclasses.make_dataclass('Result', ['output', 'exit_code', 'timed_out'])('', None if self.timed_out else 127, self.timed_out)


class _EndedSandbox(_BrokenSandbox):
  """A sandbox whose verifier gets as far as `ready`: what is left when something that the tests ran has killed it."""

  async def run_once(self, argv, workdir, ro_binds=None, timeout_s=60.0, env=None):
    folder = next(host for host, inside in ro_binds.items() if inside == '/verifier')
    with open(f'{folder}/channel', 'rb', buffering=0) as channel:
      nonce = channel.read(64).decode()
    result = await super().run_once(argv, workdir)
    result.output = f'{nonce} ready\n{nonce} test_wrote 1 \n{"0" * 32} end\n'
    return result


def test_verifier_that_was_killed_has_seen_nothing_pass(make_task, tmp_path):
  verdict = asyncio.run(verifier_lib.Verifier(_EndedSandbox(False))(make_task(WROTE), tmp_path))
  assert verdict.reward == 0.0 and 'before it could report' in verdict.messages['test_wrote']


@pytest.mark.parametrize('timed_out', [False, True])
def test_verifier_that_did_not_run_is_an_infrastructure_failure(make_task, tmp_path, timed_out):
  with pytest.raises(types.InfrastructureError, match='did not start'):
    asyncio.run(verifier_lib.Verifier(_BrokenSandbox(timed_out))(make_task(WROTE), tmp_path))


def test_verification_costs_little_more_than_a_sandbox(generated, sandbox):
  async def shortest_s():
    verifier, task, bare_s, verify_s = verifier_lib.Verifier(sandbox), generated[0], [], []
    space = sandbox.new_workspace(task.files_folder)
    for _ in range(80):  # alternated: other work on the machine slows both
      times_s = [time.monotonic()]
      await sandbox.run_once(['true'], space.workdir)
      times_s.append(time.monotonic())
      await verifier(task, space.workdir)
      times_s.append(time.monotonic())
      bare_s.append(times_s[1] - times_s[0])
      verify_s.append(times_s[2] - times_s[1])
    space.remove()
    return min(bare_s), min(verify_s)
  bare_s, verify_s = asyncio.run(shortest_s())
  assert verify_s < 5 * bare_s


def test_validation_excludes_with_reasons(make_task, sandbox, tmp_path):
  tasks = (make_task(WROTE, solution='echo 42 > answer.txt', name='good'),
           make_task(WROTE, files={'answer.txt': '42\n'}, name='solved'),
           make_task(WROTE, solution='echo 41 > answer.txt', name='wrong'),
           make_task(WROTE, solution='cd nowhere', name='broken'))
  result = asyncio.run(validate.validate_tasks(tasks, sandbox, manifest=tmp_path / 'm' / 'validation.json'))
  assert [t.task_id for t in result.keep(tasks)] == ['good']
  reasons = {o.task_id: o.reason for o in result.outcomes}
  assert 'nothing was done' in reasons['solved'] and 'AssertionError' in reasons['wrong'] and 'exit code 1' in reasons['broken']
  manifest = json.loads((tmp_path / 'm' / 'validation.json').read_text())
  assert (manifest['tasks'], manifest['valid'], manifest['excluded']) == (4, 1, 3)
  assert [o['digest'] for o in manifest['outcomes']] == [t.digest for t in tasks]
