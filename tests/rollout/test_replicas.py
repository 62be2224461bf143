"""Two engine processes as one: kill -9, a hang, a wrong version; nothing is lost and nothing waits for a restart."""

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest

from tests.rollout import tiny_engine
from tests.rollout.tiny_engine import prompt
from ts_jax import types
from ts_jax.rollout import client as client_lib, publication, replicas, supervision, watch
from ts_jax.rollout.client import GenerateRequest

VERSION = 5


@pytest.fixture(scope='module')
def may_come_back():
  """While cleared, an engine that was killed does not get its weights, and so stays away."""
  event = threading.Event()
  event.set()
  return event


@pytest.fixture(scope='module')
def engines(start_engine, may_come_back, tmp_path_factory):
  """Two engines that serve version 5; a killed one comes back at it."""
  publisher = publication.Publisher([], tmp_path_factory.mktemp('exchange'))

  def bring_up(control) -> None:
    may_come_back.wait()
    publisher.bring_up_to_date(control)

  engines = [start_engine(wait=False, bring_up=bring_up) for _ in range(2)]
  for engine in engines:
    engine.wait_started()
    publisher.add(engine)
  publisher.publish(tiny_engine.random_params(1), tiny_engine.CONFIG, VERSION)
  yield engines
  for engine in engines:
    engine.stop()
  publisher.close()


@pytest.fixture
def pair(engines):
  """Both, ready."""
  for engine in engines:
    engine.wait_ready(60)
  return engines


def readiness(engine):
  async def wait():
    while not engine.ready.is_set():
      await asyncio.sleep(0.05)
  return wait


@contextlib.asynccontextmanager
async def serving(engines, timeout_s=120.0, **kwargs):
  made = replicas.ReplicaSet([
      client_lib.EngineClient(e.url, patient=False, await_ready=readiness(e), **kwargs) for e in engines], timeout_s, slack=2)
  try:
    yield made
  finally:
    await made.close()


async def decoded(engine) -> int:
  return (await asyncio.to_thread(engine.control.health))['decoded_tokens']


def turns(group: int, member: int, expected: int | None = VERSION):
  return [GenerateRequest(prompt(group, 30) + (7 + turn,), 90, seed=100 * group + 10 * member + turn, expected_version=expected,
                          ignore_eos=True, request_id=f'0-{group}-{member}-{turn}-0') for turn in range(2)]


async def trajectory(made, group, member):
  """Two turns by one session, and the second's score."""
  with made.session(group) as session:
    replies = [await session.generate(r) for r in turns(group, member)]
    ids = turns(group, member)[1].token_ids + replies[1].token_ids
    return replies, await session.score(ids, 31)


KEYS = [(g, m) for g in range(3) for m in range(2)]


def test_a_killed_replica_loses_nothing_and_nobody_waits_for_it(pair, may_come_back):
  async def go():
    async with serving(pair) as made:
      undisturbed = await asyncio.gather(*(trajectory(made, *k) for k in KEYS))
      assert made.state.homes == {}
      before = [await decoded(e) for e in pair]
      calls = [asyncio.create_task(trajectory(made, *k)) for k in KEYS]
      while any([await decoded(e) < b + 20 for e, b in zip(pair, before)]):  # both are in the middle of requests
        await asyncio.sleep(0.005)
      victim = pair[0].pid
      may_come_back.clear()
      try:
        os.kill(victim, signal.SIGKILL)
        os.kill(victim, 0)  # a zombie until the supervisor has seen it
        return undisturbed, await asyncio.wait_for(asyncio.gather(*calls), 60)  # by the other replica alone
      finally:
        may_come_back.set()

  undisturbed, disturbed = asyncio.run(go())
  for (replies, scores), (again, scored) in zip(undisturbed, disturbed):
    assert [r.token_ids for r in again] == [r.token_ids for r in replies]
    assert {(r.version_start, r.version_end) for r in again} == {(VERSION, VERSION)}
    assert scored == pytest.approx(scores, abs=1e-5)


def test_sessions_stick_and_a_replica_that_came_back_serves_again(pair):
  async def go():
    async with serving(pair) as made:
      with made.session('a') as first, made.session('b') as second:
        await first.generate(turns(0, 0)[0])
        await second.generate(turns(1, 0)[0])
        assert sorted(made.state.homes.values()) == [0, 1]
        home = made.state.homes['a', first]
        victim = pair[home].pid
        os.kill(victim, signal.SIGKILL)
        await first.generate(turns(0, 0)[1])
        assert made.state.homes['a', first] == 1 - home  # moved
        while made.state.down or pair[home].pid == victim or not pair[home].ready.is_set():
          await asyncio.sleep(0.05)
        with made.session('c') as third:
          await third.generate(turns(2, 0)[0])
          assert made.state.homes['c', third] == home
      assert made.state.homes == {}
  asyncio.run(asyncio.wait_for(go(), 120))


def test_a_replica_that_hangs_is_left_within_its_hang_timeout(pair):
  async def go():
    async with serving(pair, hang_timeout_s=1.0) as made:
      with made.session('a') as first:
        expected = await first.generate(turns(0, 0)[0])
        home = made.state.homes['a', first]
        os.kill(pair[home].pid, signal.SIGSTOP)
        try:
          start = time.monotonic()
          assert (await first.generate(turns(0, 0)[0])).token_ids == expected.token_ids
          assert made.state.homes['a', first] == 1 - home and time.monotonic() - start < 30
        finally:
          os.kill(pair[home].pid, signal.SIGCONT)
  asyncio.run(go())


def test_a_version_that_nobody_serves_is_an_error_after_a_few_answers(pair):
  async def go():
    async with serving(pair) as made:
      with made.session('a') as session:
        await session.generate(turns(0, 0, expected=9)[0])
  with pytest.raises(types.PolicyVersionError, match='failed 3 times.*version 5..5, expected 9'):
    asyncio.run(asyncio.wait_for(go(), 60))


def test_no_replica_at_all_ends_at_the_deadline_and_names_them():
  class Never:
    ready, url = asyncio.Event(), f'http://127.0.0.1:{supervision.free_port()}'

  async def go():
    async with serving([Never, Never], timeout_s=0.6) as made:
      with made.session('a') as session:
        await session.generate(turns(0, 0)[0])
  with pytest.raises(types.InfrastructureError, match=f'no reply within 0.6 s; not back: {Never.url}'):
    asyncio.run(go())


def test_replicas_that_are_given_up_end_a_call_at_once():
  url = f'http://127.0.0.1:{supervision.free_port()}'

  async def given_up():
    raise types.InfrastructureError('it died 6 times')

  async def go():
    made = replicas.ReplicaSet([client_lib.EngineClient(url, model='m', patient=False, await_ready=given_up)])
    try:
      with made.session('a') as session:
        await session.generate(turns(0, 0)[0])
    finally:
      await made.close()
  with pytest.raises(types.InfrastructureError, match='it died 6 times'):
    asyncio.run(asyncio.wait_for(go(), 20))


def test_an_engine_somebody_else_restarts_is_brought_to_the_current_version(start_engine, tmp_path):
  """Served elsewhere: it comes back with the weights it started with, at no version, and nobody there publishes."""
  publisher = publication.Publisher([], tmp_path / 'exchange')
  engine = start_engine(version=-1)
  watched = watch.WatchedEngine(engine.url, publisher)
  watched.start()
  publisher.add(watched)
  publisher.publish(tiny_engine.random_params(1), tiny_engine.CONFIG, VERSION)
  requests = [r for key in KEYS for r in turns(*key)]

  async def ask(made, request):
    with made.session(0) as session:
      return await session.generate(request)

  async def go():
    async with serving([watched]) as made:
      undisturbed = await asyncio.gather(*(ask(made, r) for r in requests))
      before = await decoded(engine)
      calls = [asyncio.create_task(ask(made, r)) for r in requests]
      while await decoded(engine) < before + 20:
        await asyncio.sleep(0.005)
      os.kill(engine.pid, signal.SIGKILL)
      return undisturbed, await asyncio.gather(*calls)

  try:
    undisturbed, disturbed = asyncio.run(asyncio.wait_for(go(), 120))
  finally:
    watched.stop()
  assert engine.restarts == 1
  assert [r.token_ids for r in disturbed] == [r.token_ids for r in undisturbed]
  assert {(r.version_start, r.version_end) for r in disturbed} == {(VERSION, VERSION)}


def test_a_watch_brings_back_a_version_that_went_back(engine, tmp_path):
  before = engine.control.weight_info()
  publisher = publication.Publisher([engine], tmp_path / 'exchange')
  watched = watch.WatchedEngine(engine.url, publisher)
  try:
    watched.start()
    publisher.publish(tiny_engine.random_params(0), tiny_engine.CONFIG, 8)
    watched._look()
    engine.control.set_version(3)
    end = time.monotonic() + 30
    while engine.control.weight_info().version != 8:
      assert time.monotonic() < end
      time.sleep(0.05)
  finally:
    watched.stop()
    engine.control.set_version(before.version)
