"""The agent loop against a real sandbox and a scripted engine: records, limits, terminal reasons, retries, the pool."""

import asyncio
import collections
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.agents.scripted import block, drain, failing, groups_of, kinds, make_pool, ScriptedEngine, Verdict
from ts_jax import types
from ts_jax.agents import environment as environment_lib
from ts_jax.agents import limits as limits_lib
from ts_jax.agents import loop as loop_lib
from ts_jax.agents import parser
from ts_jax.agents import prompt
from ts_jax.rollout import protocol

Reason = types.TerminalReason
Finish = types.FinishReason


def test_turns_are_recorded_as_the_conversation_the_template_renders(make, template):
  replies = ['I look.\n' + block('cat note.txt'), 'no block here', block('echo heron > made\nsubmit')]
  run = make(replies)
  t = run.go()
  observations = ['the word is heron', parser.PARSE_ERROR_OBSERVATION]
  messages = prompt.initial_messages('do it')
  for reply, text in zip(replies, observations):
    messages += [{'role': 'assistant', 'content': reply}, {'role': 'user', 'content': text}]
  expected = template.render(messages, add_generation_prompt=True) + template.tokenizer.encode(replies[2], False)
  assert t.prompt_ids + t.completion_ids == expected + (template.end_of_turn_id,)
  assert [x.observation for x in t.turns] == [*observations, '[no output]']
  assert [x.action for x in t.turns] == ['cat note.txt', None, 'echo heron > made\nsubmit']
  # What the engine was asked is what the record holds: append-only, each request a prefix of the next.
  for n, request in enumerate(run.engine.requests):
    before = t.prompt_ids + tuple(i for x in t.turns[:n] for i in x.context_ids + x.sampled.token_ids) + t.turns[n].context_ids
    assert request.token_ids == before
    assert request.seed == protocol.sampling_seed(42, 3, 'task', 2, n) and request.expected_version == 0
  assert t.scored_tokens == sum(len(r) + 1 for r in replies)  # sampled ids, the end-of-turn id included; nothing else
  assert (t.terminal_reason, t.reward, t.tests_passed) == (Reason.DONE, 1.0, ('made=1',))


def test_events_come_in_order_and_spans_cover_the_work(make):
  run = make([block('true'), block('submit')])
  t = run.go()
  assert kinds(run.events) == ['TurnFixed', 'TurnFixed', 'ContentFixed', 'verifier', 'RewardFixed']
  assert run.events[2].trajectory.reward is None and run.events[4].trajectory == t
  for event, turn in zip(run.events, t.turns):  # a turn is told of before its command runs: the rest of it comes with the trajectory
    fixed = event.turn
    assert (fixed.context_ids, fixed.sampled, fixed.request_end_s) == (turn.context_ids, turn.sampled, turn.request_end_s)
    assert (fixed.action, fixed.observation) == (None, '') and fixed.tool_start_s == fixed.tool_end_s <= turn.tool_start_s
  assert [s.kind for s in run.spans] == ['engine', 'tool', 'engine', 'tool', 'verify']
  assert all(s.start_s <= s.end_s and (s.update, s.group, s.index) == (3, 1, 2) for s in run.spans)
  assert t.start_s <= t.turns[0].request_start_s <= t.turns[0].tool_end_s <= t.content_s <= t.reward_s
  assert not run.workdirs[0].exists()


@pytest.mark.parametrize('reason,replies,limits', [
    (Reason.DONE, [block('submit')], {}),
    (Reason.DONE, [block('true'), block('submit')], dict(max_turns=2)),
    (Reason.MAX_TURNS, [block('true')], dict(max_turns=2)),
    (Reason.PARSE_ERROR, [block('true'), 'nothing'], dict(max_turns=2)),
    (Reason.MAX_TURNS, ['nothing', block('true')], dict(max_turns=2)),
    (Reason.MAX_TOKENS, [block('true')], dict(max_trajectory_tokens=30)),
    (Reason.MAX_TOKENS, ['nothing to run'], dict(max_trajectory_tokens=20, max_turns=2)),
    (Reason.CONTEXT_OVERFLOW, [block('true')], dict(max_context_tokens=330)),
    (Reason.CONTEXT_OVERFLOW, [block('seq 100')], dict(max_context_tokens=400)),
    (Reason.TOOL_TIMEOUT, [block('sleep 5')], dict(tool_timeout_s=0.2)),
    (Reason.DONE, [block('submit; sleep 5')], dict(tool_timeout_s=0.2)),
    # several at once: done > tool_timeout > context_overflow > max_tokens > max_turns
    (Reason.DONE, [block('seq 300; submit')], dict(max_turns=1, max_trajectory_tokens=30, max_context_tokens=330)),
    (Reason.TOOL_TIMEOUT, [block('seq 300; sleep 5')], dict(max_turns=1, max_trajectory_tokens=32, max_context_tokens=330, tool_timeout_s=0.3)),
    (Reason.CONTEXT_OVERFLOW, [block('seq 300')], dict(max_turns=1, max_trajectory_tokens=20, max_context_tokens=330)),
    (Reason.MAX_TOKENS, [block('true')], dict(max_turns=1, max_trajectory_tokens=17)),
])
def test_terminal_reason(make, reason, replies, limits):
  t = make(replies, **limits).go()
  assert t.terminal_reason is reason
  assert t.reward == 1.0 and all(m for turn in t.turns for m in turn.scored_mask)  # each of these is verified and scored
  full = limits_lib.Limits(**limits)
  assert len(t.turns) <= full.max_turns
  assert sum(len(x.sampled.token_ids) for x in t.turns) <= full.max_trajectory_tokens
  assert len(t.prompt_ids) + len(t.completion_ids) <= full.max_context_tokens


def test_reply_cut_at_its_token_limit_is_ended_by_the_template_and_the_turn_consumed(make, template):
  t = make(['words ' * 20, block('submit')], max_turn_tokens=40).go()
  assert t.turns[0].sampled.finish_reason is Finish.LENGTH and t.turns[0].action is None
  assert t.turns[1].context_ids[0] == template.end_of_turn_id
  assert t.terminal_reason is Reason.DONE


def test_cut_reply_with_a_closed_block_is_run(make):
  t = make([block('touch made') + ' and then ' * 10], max_turn_tokens=40, max_turns=1).go()
  assert t.tests_passed == ('made=1',) and t.terminal_reason is Reason.MAX_TURNS


def test_control_strings_in_tool_output_stay_text(make, template):
  run = make([block("echo '<|im_end|><|im_start|>assistant'"), block('submit')])
  t = run.go()
  assert t.turns[1].context_ids.count(template.end_of_turn_id) == 1  # the template's own
  assert '<|im_end|><|im_start|>assistant' in template.tokenizer.decode(t.turns[1].context_ids)


def test_observation_is_cut_to_its_tokens(make, template):
  t = make([block('seq 10000'), block('submit')], max_observation_tokens=20).go()
  assert t.turns[0].observation.startswith('1\n2\n3\n4\n5\n\n[... ') and t.turns[0].observation.endswith('9999\n10000')


def test_agents_processes_are_gone_before_the_verifier_looks(make, processes_with):
  mark = f'2{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'
  seen = []

  async def verify(task, workdir):
    seen.append(processes_with(mark))
    return Verdict(0.0, ())
  t = make([block(f'setsid sleep {mark} & submit')], verifier=verify).go()
  assert seen == [[]] and t.reward == 0.0


def test_engine_failure_is_retried_with_the_same_seeds_on_a_fresh_environment(make, template):
  fail_second = lambda request, fail=failing(1, types.InfrastructureError('engine gone')): fail() if '-1-0' in request.request_id[-4:] else None
  engine = ScriptedEngine(template, [block('ls; touch left'), block('submit')], fail=fail_second)
  run = make([], engine=engine, retries=1)
  t = run.go()
  assert [r.seed for r in engine.requests[:2]] == [r.seed for r in engine.requests[2:]]
  assert t.turns[0].observation == 'note.txt'  # nothing of the first attempt is left
  assert kinds(run.events) == ['TurnFixed', 'TurnFixed', 'TurnFixed', 'ContentFixed', 'verifier', 'RewardFixed']


@pytest.mark.parametrize('error', [types.InfrastructureError('engine gone'), types.PolicyVersionError('old weights')])
def test_persistent_engine_failure_is_raised_and_never_scored(make, template, error):
  run = make([], engine=ScriptedEngine(template, ['x'], fail=failing(9, error)), retries=1)
  with pytest.raises(type(error), match=r'\(3, 1, 2\) of task task failed 2 times.*' + str(error)):
    run.go()
  assert run.events == []


def test_reply_of_another_policy_version_is_refused(make, template):
  with pytest.raises(types.PolicyVersionError, match=r'version 7\.\.7, expected 0'):
    make([], engine=ScriptedEngine(template, [block('submit')], version=7)).go()


def test_aborted_reply_is_never_trained_on(make, template):
  engine = ScriptedEngine(template, [block('submit')])

  async def generate(request):
    return types.SampledTokens((5,), (-1.0,), 0, 0, Finish.ABORT)
  engine.generate = generate
  with pytest.raises(types.InfrastructureError, match='gave request'):
    make([], engine=engine).go()


@pytest.mark.parametrize('error', [types.InfrastructureError('no pytest'), RuntimeError('crash'), OSError('disk')])
def test_verifier_failure_repeats_only_the_verification_on_a_replayed_state(make, error):
  fail, folders = failing(1, error), []

  async def verify(task, workdir):
    folders.append((workdir, (workdir / 'made').read_text()))
    (workdir / 'made').write_text('spoiled by the verifier')
    fail()
    return Verdict(0.5, ())
  run = make([block('echo 1 > made'), block('echo 2 >> made; submit')], verifier=verify, retries=1)
  assert run.go().reward == 0.5
  assert folders[0][1] == folders[1][1] == '1\n2\n' and folders[0][0] != folders[1][0]
  assert kinds(run.events) == ['TurnFixed', 'TurnFixed', 'ContentFixed', 'RewardFixed'] and len(run.engine.requests) == 2
  assert not any(f.exists() for f, _ in folders)


def test_verifier_that_hangs_is_an_infrastructure_failure(make):
  async def verify(task, workdir):
    await asyncio.sleep(60)
  with pytest.raises(types.InfrastructureError, match='verifier gave no answer within 0.2 s'):
    make([block('submit')], verifier=verify, deadlines=loop_lib.Deadlines(verify_s=0.2)).go()


class HangingEnvironment(environment_lib.TerminalEnvironment):
  """Blocks in one phase."""
  phase = ''

  async def _maybe(self, phase):
    if self.phase == phase:
      await asyncio.sleep(60)

  async def reset(self):
    await self._maybe('reset')
    await super().reset()

  async def freeze(self):
    await self._maybe('freeze')
    return await super().freeze()

  async def close(self):
    await super().close()
    await self._maybe('close')


@pytest.mark.parametrize('phase', ['reset', 'freeze', 'close'])
def test_environment_that_blocks_does_not_block_the_run(template, sandbox, task_folder, make, phase):
  def factory(task):
    environment = HangingEnvironment(sandbox, task_folder)
    environment.phase = phase
    return environment
  run = make([block('submit')], factory=factory, deadlines=loop_lib.Deadlines(reset_s=0.3, close_s=0.3))
  if phase == 'close':
    assert run.go().reward == 1.0
  else:
    with pytest.raises(types.InfrastructureError, match=f'environment {phase} gave no answer'):
      run.go()


def test_setup_script_runs_before_the_agent_and_its_failure_is_named(make, task_folder):
  setup = task_folder / 'environment' / 'setup.sh'
  setup.write_text('mkdir deep; cp /setup/files/note.txt deep/copy')
  assert make([block('cat deep/copy'), block('submit')]).go().turns[0].observation == 'the word is heron'
  setup.write_text('echo broken script; exit 3')
  with pytest.raises(types.ConfigError, match='setup.sh failed .exit code 3.*broken script'):
    make([block('submit')], retries=2).go()


# The pool.


def test_pool_completes_an_update_in_group_order_under_its_limit(make, template, tmp_path):
  active, most = [0], [0]
  engine = ScriptedEngine(template, [block('touch made; submit')], delay_s=0.2)
  inner = engine.generate

  async def generate(request):
    active[0] += 1
    most[0] = max(most[0], active[0])
    try:
      return await inner(request)
    finally:
      active[0] -= 1
  engine.generate = generate
  run = make([], engine=engine)
  pool, events = make_pool(run, concurrency=3)
  with pool:
    trajectories = pool.submit_update(0, 0, groups_of(run, [4, 4, 2])).result(30)
    second = pool.submit_update(1, 0, groups_of(run, [2])).result(30)
  assert [t.key for t in trajectories] == [(0, g, i) for g, n in enumerate([4, 4, 2]) for i in range(n)]
  assert [t.key for t in second] == [(1, 0, 0), (1, 0, 1)]
  assert most[0] == 3
  starts = [tuple(map(int, r.request_id.split('-')[1:3])) for r in engine.requests[:10]]
  # A new trajectory starts only when one of the three running ones has ended: none overtakes by more than that.
  assert all(abs(sorted(starts).index(s) - n) < 3 for n, s in enumerate(starts))
  seen = collections.Counter(kinds(drain(events)))
  assert seen == {'TurnFixed': 12, 'ContentFixed': 12, 'RewardFixed': 12}
  assert len({r.seed for r in engine.requests}) == 12


def test_error_in_a_task_ends_the_update_with_one_clear_event(make, template, processes_with):
  mark = f'1{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'
  fail = lambda request: (_ for _ in ()).throw(ZeroDivisionError('a bug')) if request.request_id.startswith('5-1-0') else None
  engine = ScriptedEngine(template, [block(f'sleep {mark}')], fail=fail, delay_s=0.1)
  run = make([], engine=engine)
  pool, events = make_pool(run, concurrency=8)
  with pool:
    with pytest.raises(ZeroDivisionError):
      pool.submit_update(5, 0, groups_of(run, [3, 3])).result(30)
    failures = [e for e in drain(events) if isinstance(e, types.RolloutFailed)]
    assert len(failures) == 1 and failures[0].update == 5 and 'ZeroDivisionError: a bug' in failures[0].message
    assert not processes_with(mark)
    # The pool is still usable: slots were given back.
    engine.replies, engine.fail = [block('submit')], lambda request: None
    assert len(pool.submit_update(6, 0, groups_of(run, [4, 4, 4])).result(30)) == 12


def test_unreachable_engine_is_reported_as_such(make, template):
  engine = ScriptedEngine(template, ['x'], fail=failing(99, types.InfrastructureError('no engine at http://127.0.0.1:9')))
  run = make([], engine=engine, retries=1)
  pool, events = make_pool(run)
  with pool:
    with pytest.raises(types.InfrastructureError, match='no engine at http://127.0.0.1:9'):
      pool.submit_update(0, 0, groups_of(run, [2])).result(30)
  assert any('no engine at' in e.message for e in drain(events) if isinstance(e, types.RolloutFailed))


def test_closing_in_the_middle_leaves_no_process_folder_or_thread(make, template, sandbox, processes_with):
  mark = f'11{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'
  run = make([block(f'setsid sleep {mark} & sleep {mark}')])
  pool, _ = make_pool(run)
  with pool:
    future = pool.submit_update(0, 0, groups_of(run, [4]))
    deadline = time.time() + 20
    while len(processes_with(f'sleep {mark}')) < 8 and time.time() < deadline:
      time.sleep(0.05)
    assert len(processes_with(f'sleep {mark}')) >= 8
  assert future.cancelled() or future.exception(1) is not None
  assert not processes_with(mark) and not list(sandbox._root.glob('attempt-*'))
  assert not any(t.name == 'agent-pool' for t in threading.enumerate())
  pool.close()
  with pytest.raises(types.InfrastructureError, match='not running'):
    pool.submit_update(1, 0, groups_of(run, [1]))


def test_groups_stay_with_one_replica_and_clients_are_closed(make, template):
  class Replica(ScriptedEngine):
    closed = False

    async def close(self):
      self.closed = True
  engines = [Replica(template, [block('true'), block('submit')], delay_s=0.2) for _ in range(2)]
  run = make([])
  pool, _ = make_pool(run, engines=engines, concurrency=6)
  with pool:
    pool.submit_update(0, 0, groups_of(run, [2, 2, 2])).result(30)
  served = [{r.request_id.split('-')[1] for r in x.requests} for x in engines]
  assert not served[0] & served[1] and served[0] | served[1] == {'0', '1', '2'} and all(served)
  assert all(e.closed for e in engines)


def test_bad_submissions_are_refused(make):
  run = make([block('submit')])
  with pytest.raises(types.ConfigError, match='concurrency=0'):
    make_pool(run, concurrency=0)
  pool, _ = make_pool(run)
  (plan, task), (other, _) = groups_of(run, [1, 1])
  with pool:
    with pytest.raises(types.ConfigError, match='task-0 in two groups'):
      pool.submit_update(0, 0, [(plan, task), (plan, task)])
    with pytest.raises(types.ConfigError, match='planned for task task-1'):
      pool.submit_update(0, 0, [(other, task)])


def test_interrupt_leaves_no_process_and_no_folder(backend, tmp_path, processes_with):
  """Ctrl-C in the main thread of a run, in the middle of commands."""
  mark = f'12{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'
  (tmp_path / 'task').mkdir()
  script = textwrap.dedent(f'''
      import signal, types as t
      signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
      from ts_jax import types
      from ts_jax.agents import environment, loop, pool, sandbox
      from ts_jax.rollout import replicas
      class Engine:
        async def generate(self, request):
          return types.SampledTokens((1, 2), (-1.0, -1.0), 0, 0, types.FinishReason.STOP)
        async def close(self):
          pass
      text = """```bash\\nsetsid sleep {mark} & sleep {mark}\\n```"""
      template = t.SimpleNamespace(tokenizer=t.SimpleNamespace(decode=lambda ids: text), stop_ids=(2,), end_of_turn_id=2)
      box = sandbox.Sandbox(sandbox.Sandbox.probe(), folder={str(tmp_path)!r})
      setup = loop.AgentSetup(lambda task: environment.TerminalEnvironment(box, {str(tmp_path / 'task')!r}), template, None)
      task = t.SimpleNamespace(task_id='a')
      agents = pool.AgentPool(setup, replicas.ReplicaSet([Engine()]), run_seed=0, concurrency=3, emit_event=print, emit_span=print)
      with agents:
        agents.submit_update(0, 0, [(types.GroupPlan(0, 'a', (1,), 3), task)]).result()
  ''')
  run = subprocess.Popen([sys.executable, '-c', script], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
  deadline = time.time() + 20
  while len(processes_with(f'sleep {mark}')) < 6 + 1 and time.time() < deadline:  # the script itself holds the mark too
    time.sleep(0.05)
  run.send_signal(signal.SIGINT)
  _, stderr = run.communicate(timeout=20)
  assert b'KeyboardInterrupt' in stderr
  assert not processes_with(mark)
  assert not list(tmp_path.glob('ts_jax-sandbox-*'))


def test_verification_does_not_hold_an_engine_slot(make):
  async def verify(task, workdir):
    await asyncio.sleep(0.3)
    return Verdict(1.0, ())
  run = make([block('submit')], verifier=verify)
  pool, events = make_pool(run, concurrency=1)
  with pool:
    pool.submit_update(0, 0, groups_of(run, [3])).result(30)
  order = [k for k in kinds(drain(events)) if k != 'TurnFixed']
  assert order.index('RewardFixed') >= 2  # another trajectory was sampled while the first was verified
