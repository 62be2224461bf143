"""A teacher beside the loop: exact ids, scores beside tools and later turns, failures that end the update, cancellation."""

import asyncio
import dataclasses
import secrets
import time

import pytest

from tests.agents.scripted import block, drain, groups_of, kinds, make_pool, ScriptedEngine
from ts_jax import types
from ts_jax.agents import teacher as teacher_lib
from ts_jax.rollout import client as client_lib
from ts_jax.rollout import replicas
from ts_jax.rollout import supervision


class FakeTeacher:
  """Gives every id a log-prob that tells its position, after `wait(turn)`; `answer(turn, log_probs)` may spoil it."""

  def __init__(self, wait=lambda turn: asyncio.sleep(0), answer=lambda turn, log_probs: log_probs):
    self.wait, self.answer = wait, answer
    self.calls = []  # (token_ids, start, request_id)
    self.closed = False

  async def score(self, token_ids, start, request_id='', salt=''):
    self.calls.append((token_ids, start, request_id))
    turn = int(request_id.split('-')[3])
    await self.wait(turn)
    return self.answer(turn, log_probs(start, len(token_ids)))

  async def close(self):
    self.closed = True


def log_probs(start, end):
  return tuple(-1.0 - i / 1024 for i in range(start, end))


def log(run):
  """Makes spans and events of a run one list, in the order in which they came; returns it."""
  run.spans = run.events
  return run.events


def names(everything):
  """'engine 0', 'TurnFixed 0', ... of the list that `log` makes."""
  shown = []
  for e in everything:
    if isinstance(e, types.Span):
      shown.append(f'{e.kind} {e.turn}')
    elif isinstance(e, types.TurnFixed):
      shown.append(f'TurnFixed {e.turn.index}')
    elif isinstance(e, types.TurnScored):
      shown.append(f'TurnScored {e.turn}')
    else:
      shown += kinds([e])
  return shown


REPLIES = [block('true'), 'no block here', block('touch made; submit')]


def test_each_turns_new_tokens_are_scored_with_the_students_exact_ids(make):
  teacher = FakeTeacher()
  run = make(REPLIES, teacher=teacher)
  t = run.go()
  assert len(teacher.calls) == len(t.turns) == 3
  for turn, request, (token_ids, start, request_id) in zip(t.turns, run.engine.requests, teacher.calls):
    assert token_ids == request.token_ids + turn.sampled.token_ids and start == len(request.token_ids)
    assert request_id == request.request_id  # one name on both sides
    assert turn.teacher_log_probs == log_probs(start, len(token_ids))
  n = len(t.prompt_ids)
  assert t.completion_teacher_log_probs == tuple(
      p if sampled else 0.0 for p, sampled in zip(log_probs(n, n + len(t.completion_ids)), t.completion_mask))
  scored = {e.turn: e for e in run.events if isinstance(e, types.TurnScored)}
  assert {n: e.log_probs for n, e in scored.items()} == {x.index: x.teacher_log_probs for x in t.turns}
  assert all((e.update, e.group, e.index) == (3, 1, 2) for e in scored.values())
  content, reward = (next(e.trajectory for e in run.events if isinstance(e, kind)) for kind in (types.ContentFixed, types.RewardFixed))
  assert [x.teacher_log_probs for x in content.turns] == [x.teacher_log_probs for x in reward.turns] == list(
      x.teacher_log_probs for x in t.turns)
  assert all(e.turn.teacher_log_probs is None for e in run.events if isinstance(e, types.TurnFixed))
  spans = [s for s in run.spans if s.kind == 'teacher']
  assert [(s.turn, s.tokens, s.ready_s) for s in spans] == [(x.index, len(x.sampled.token_ids), x.request_end_s) for x in t.turns]
  assert all(s.ready_s <= s.start_s <= s.end_s <= t.content_s for s in spans)


def test_a_reference_scores_beside_the_teacher(make):
  half = lambda turn, log_probs: tuple(p / 2 for p in log_probs)
  run = make(REPLIES, teacher=FakeTeacher(), reference=FakeTeacher(answer=half))
  t = run.go()
  for turn in t.turns:
    assert turn.reference_log_probs == half(0, turn.teacher_log_probs)
  assert t.completion_reference_log_probs == half(0, t.completion_teacher_log_probs)
  for scorer in types.SCORERS:
    assert {e.turn: e.log_probs for e in run.events if isinstance(e, types.TurnScored) and e.scorer == scorer} == {
        x.index: x.scores[scorer] for x in t.turns}
    assert [s.turn for s in run.spans if s.kind == scorer] == [0, 1, 2]


def test_what_a_reference_says_is_checked_and_named(make):
  run = make(REPLIES, reference=FakeTeacher(answer=lambda turn, log_probs: log_probs[1:]))
  with pytest.raises(teacher_lib.TeacherError, match="the reference's answer for turn 0"):
    run.go()


def test_without_a_teacher_nothing_is_scored(make):
  run = make(REPLIES)
  t = run.go()
  assert t.completion_teacher_log_probs is None and not any(isinstance(e, types.TurnScored) for e in run.events)


def test_a_turn_is_scored_while_its_command_runs(make):
  run = make([block('sleep 0.3'), block('submit')], teacher=FakeTeacher())
  order = log(run)
  run.go()
  shown = names(order)
  assert shown[:5] == ['engine 0', 'TurnFixed 0', 'teacher 0', 'TurnScored 0', 'tool 0'], shown


def test_later_turns_do_not_wait_for_a_score_and_content_waits_for_all(make):
  async def until_all_turns_were_sampled(turn):
    while 'TurnFixed 2' not in names(order) or (turn == 0 and 'TurnScored 2' not in names(order)):
      await asyncio.sleep(0.01)
  run = make(REPLIES, teacher=FakeTeacher(until_all_turns_were_sampled))
  order = log(run)
  run.go()
  shown = names(order)
  assert shown.index('TurnFixed 2') < shown.index('TurnScored 1') and shown.index('TurnScored 2') < shown.index('TurnScored 0')
  assert shown[-4:] == ['ContentFixed', 'verifier', 'verify -1', 'RewardFixed']
  assert max(i for i, e in enumerate(shown) if e.startswith('TurnScored')) < shown.index('ContentFixed')


def test_a_turn_without_sampled_ids_is_not_scored_and_extends_the_context(make, template):
  class Silent(ScriptedEngine):
    async def generate(self, request):
      reply = await super().generate(request)
      return types.SampledTokens((), (), 0, 0, types.FinishReason.LENGTH) if request.request_id.split('-')[3] == '1' else reply
  teacher = FakeTeacher()
  t = make([], engine=Silent(template, REPLIES), teacher=teacher).go()
  assert [c[2].split('-')[3] for c in teacher.calls] == ['0', '2']
  assert t.turns[1].teacher_log_probs is None and len(t.completion_teacher_log_probs) == len(t.completion_ids)
  assert teacher.calls[1][0] == t.prompt_ids + t.completion_ids


@pytest.mark.parametrize('spoil, told', [
    (lambda values: values[:-1] + (float('nan'),), 'teacher log-prob nan of sampled id'),
    (lambda values: (float('-inf'),) + values[1:], 'teacher log-prob -inf of sampled id 0'),
    (lambda values: (0.5,) + values[1:], 'teacher log-prob 0.5 of sampled id 0 .* positive'),
    (lambda values: values[1:], r'\d+ teacher log-probs for \d+ sampled ids'),
    (lambda values: values + (-1.0,), r'\d+ teacher log-probs for \d+ sampled ids'),
    (lambda values: None, 'NoneType'),
    (lambda values: (None,) + values[1:], 'NoneType'),
])
def test_an_unusable_answer_stops_the_trajectory_and_is_not_asked_for_again(make, spoil, told):
  teacher = FakeTeacher(answer=lambda turn, values: spoil(values) if turn == 1 else values)
  run = make(REPLIES, teacher=teacher, retries=2)
  with pytest.raises(teacher_lib.TeacherError, match=rf'turn 1 of trajectory \(3, 1, 2\) is unusable.*{told}') as e:
    run.go()
  assert not isinstance(e.value, types.InfrastructureError)
  assert all(request.request_id.endswith('-0') for request in run.engine.requests)  # first attempts only
  assert len([c for c in teacher.calls if c[2].split('-')[3] == '1']) == 1
  assert not {'ContentFixed', 'TurnScored 1'} & set(names(run.events))


def raising(error):
  def answer(turn, values):
    raise error
  return answer


@pytest.mark.parametrize('error, kind, told', [
    (types.InfrastructureError('engine http://127.0.0.1:9: gone'), types.InfrastructureError, 'did not score.*127.0.0.1:9: gone'),
    (types.ConfigError('too long'), types.ConfigError, 'refused to score.*too long'),
    (ZeroDivisionError('a bug'), ZeroDivisionError, 'a bug'),
])
def test_a_teacher_that_fails_is_named_and_the_trajectory_is_not_sampled_again(make, error, kind, told):
  run = make(REPLIES, teacher=FakeTeacher(answer=raising(error)), retries=2)
  with pytest.raises(kind, match=told) as e:
    run.go()
  if isinstance(error, types.TsJaxError):
    assert 'turn 0 of trajectory (3, 1, 2)' in str(e.value) and e.value.__cause__ is error
  assert all(request.request_id.endswith('-0') for request in run.engine.requests)
  assert 'ContentFixed' not in kinds(run.events)


def test_a_failed_score_interrupts_a_running_command(make, processes_with):
  mark = f'3{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'
  run = make([block(f'sleep {mark}')], teacher=FakeTeacher(answer=raising(types.InfrastructureError('gone'))))
  begin = time.time()
  with pytest.raises(teacher_lib.TeacherFailed):
    run.go()
  assert time.time() - begin < 20 and not processes_with(mark)


def test_an_abandoned_attempts_scores_are_cancelled_and_awaited_before_the_next(make, template):
  order = []

  async def wait(turn):
    if teacher.calls[-1][2].endswith('-0'):  # of the first attempt
      try:
        await asyncio.sleep(60)
      finally:
        await asyncio.sleep(0.05)
        order.append('cancelled')

  def fail(request):
    order.append(request.request_id[-3:])
    if request.request_id.endswith('-1-0'):
      raise types.InfrastructureError('engine gone')
  teacher = FakeTeacher(wait)
  run = make([], engine=ScriptedEngine(template, [block('true'), block('submit')], fail=fail), teacher=teacher, retries=1)
  t = run.go()
  assert order == ['0-0', '1-0', 'cancelled', '0-1', '1-1']
  assert [c[:2] for c in teacher.calls[:1]] == [c[:2] for c in teacher.calls[1:2]]  # the same question again
  assert [n for n in names(run.events) if n.startswith('TurnScored')] == ['TurnScored 0', 'TurnScored 1']
  assert all(x.teacher_log_probs for x in t.turns)


def test_a_cancelled_trajectory_leaves_no_score_behind(make):
  ended = []

  async def wait(turn):
    try:
      await asyncio.sleep(60)
    finally:
      ended.append(turn)
  run = make([block('true'), block('submit')], teacher=FakeTeacher(wait))
  pool, events = make_pool(run)
  with pool:
    pool.submit_update(0, 0, groups_of(run, [1]))
    while len(run.engine.requests) < 2:
      time.sleep(0.01)
  assert sorted(ended) in ([0], [0, 1])
  assert not {'ContentFixed', 'TurnScored'} & set(kinds(drain(events)))


# The pool.


def test_groups_stay_with_one_teacher_replica_and_clients_are_closed(make):
  teachers = [FakeTeacher(lambda turn: asyncio.sleep(0.3)) for _ in range(2)]
  run = make([block('submit')])
  pool, _ = make_pool(run, concurrency=6, scorers={'teacher': replicas.ReplicaSet(teachers)})
  with pool:
    trajectories = pool.submit_update(0, 0, groups_of(run, [2, 2, 2])).result(30)
  served = [{c[2].split('-')[1] for c in t.calls} for t in teachers]
  assert not served[0] & served[1] and served[0] | served[1] == {'0', '1', '2'} and all(served)
  assert all(t.completion_teacher_log_probs for t in trajectories) and all(t.closed for t in teachers)


@pytest.mark.parametrize('own', [True, False])
def test_evaluations_are_not_scored(make, own):
  teacher = FakeTeacher()
  run = make([block('submit')], teacher=teacher if own else None)
  pool, _ = make_pool(run, scorers={} if own else {'teacher': replicas.ReplicaSet([teacher])})
  with pool:
    (t,) = pool.submit_update(-1, 0, groups_of(run, [1])).result(30)
  assert teacher.calls == [] and t.completion_teacher_log_probs is None and t.reward == 1.0


def test_a_score_holds_no_engine_slot(make):
  async def until_both_are_sampled(turn):
    while len(run.engine.requests) < 2:
      await asyncio.sleep(0.01)
  run = make([block('submit')], teacher=FakeTeacher(until_both_are_sampled))
  pool, _ = make_pool(run, concurrency=1)
  with pool:
    assert len(pool.submit_update(0, 0, groups_of(run, [2])).result(30)) == 2


def test_an_unreachable_teacher_ends_the_update_after_its_clients_deadline(make):
  url = f'http://127.0.0.1:{supervision.free_port()}'
  run = make([block('submit')])
  run.setup = dataclasses.replace(run.setup, retries=2)
  pool, events = make_pool(run, scorers={'teacher': replicas.ReplicaSet([client_lib.EngineClient(url, patient=False)], timeout_s=0.5)})
  with pool:
    with pytest.raises(types.InfrastructureError, match=rf'turn 0 of trajectory \(4, 0, 0\): engine {url}.*within 0.5 s'):
      pool.submit_update(4, 0, groups_of(run, [1])).result(30)
  assert len(run.engine.requests) == 1
  failures = [e for e in drain(events) if isinstance(e, types.RolloutFailed)]
  assert len(failures) == 1 and failures[0].update == 4 and 'the teacher did not score turn 0' in failures[0].message
