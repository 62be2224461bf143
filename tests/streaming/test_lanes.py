"""Several lanes: work at the same time, sources taken from another lane's group, errors and interruptions."""

import dataclasses
import queue
import threading

import jax
import numpy as np
import pytest

from experiments import offline
from tests.streaming import cases
from ts_jax import types
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.streaming import barrier, executor, inputs as inputs_lib, lane as lane_lib, scheduler, update

STUDENT = dataclasses.replace(cases.TINY, layers=1)
REWARDS = (0.0, 1.5, 0.5)


@pytest.fixture(scope='module')
def params():
  return cases.tiny_params('float32', config=STUDENT)


def policy_of(objective=policy_gradient.PolicyGradient(), exact=True):
  return scheduler.Policy(direct=not exact, admission_cap=2, objective=objective)


def make_lanes(number, policy, accumulator='exact', spread=True, shared=()):
  devices = jax.devices()
  return [cases.make_lane(i, policy=policy, accumulator=accumulator, config=STUDENT, device=devices[i] if spread else None, shared=shared)
          for i in range(number)]


def one_group(objective):
  """A group of three, its prompt behind a shared prefix."""
  batch = offline.random_batch(np.random.default_rng(5), groups=1, size=3, scored_rate=1.0, teacher=objective.needs_teacher, shared=7)
  rewarded = tuple(dataclasses.replace(t, reward=REWARDS[t.index]) for t in batch.trajectories)
  return types.LogicalBatch(0, 0, (dataclasses.replace(batch.groups[0], trajectories=rewarded),))


def works(objective):
  """Sources of `one_group`: one with a pending verdict, which is folded later, where the objective has rewards."""
  if not objective.needs_rewards:
    return [[scheduler.SourceWork(0, (i,), scheduler.Service.FINAL, coefficients=(1.0,))] for i in range(3)]
  return [[scheduler.SourceWork(0, (0,), scheduler.Service.KNOWN, reward=REWARDS[0])],
          [scheduler.SourceWork(0, (1,), scheduler.Service.CONTENT), scheduler.FoldHeld(0, 1, REWARDS[1])],
          [scheduler.SourceWork(0, (2,), scheduler.Service.KNOWN, reward=REWARDS[2])]]


def closed(params, objective, takers, accumulator='exact'):
  """Direction of `one_group`, which lane 0 owns; `takers[i]` is the lane that works on source i."""
  batch = one_group(objective)
  lanes = make_lanes(max(takers) + 1, policy_of(objective), accumulator, shared=batch.groups[0].prompt_ids[:7])
  inputs = inputs_lib.Inputs(offline.plans(batch))
  for lane in lanes:
    lane.begin(0, params, inputs)
  for t in batch.trajectories:
    inputs.register(t)
  for taker, items in zip(takers, works(objective)):
    for work in items:
      lanes[taker].run(work)
  parts = [lanes[i].run(scheduler.HandOver(0)).parts for i in sorted(set(takers) - {0})]
  assert all(part != lane_lib.Parts() for part in parts)
  lanes[0].run(scheduler.CloseGroup(0, REWARDS), parts)
  rest = [lane.rest() for lane in lanes]
  lanes[0].finish_statistics([r.statistics for r in rest if r.statistics is not None], REWARDS)
  lanes[0].finish_shared_prefix([r.adjoint for r in rest if r.adjoint is not None])
  return barrier.reduce_lanes(accumulator, [lane.finish() for lane in lanes])


OBJECTIVES = {'grpo': policy_gradient.PolicyGradient(), 'clipped': policy_gradient.PolicyGradient(advantage_clip=0.9),
              'batch': policy_gradient.PolicyGradient('mean', baseline='batch'), 'opd': distillation.Distillation()}


@pytest.mark.parametrize('name', OBJECTIVES)
def test_sources_taken_from_another_lanes_group_change_no_bit(params, name):
  wanted = closed(params, OBJECTIVES[name], (0, 0, 0))
  assert any(np.any(x) for x in jax.tree.leaves(wanted))
  for takers in ((0, 1, 0), (2, 1, 1)):  # the owner has a part, or nothing of its own
    assert offline.bits(closed(params, OBJECTIVES[name], takers)) == offline.bits(wanted)


def test_float_sums_of_taken_sources_differ_by_rounding(params):
  wanted = closed(params, OBJECTIVES['grpo'], (0, 0, 0), 'float32')
  assert offline.relative_error(closed(params, OBJECTIVES['grpo'], (2, 1, 1), 'float32'), wanted) < 1e-6


def test_a_group_that_was_handed_over_leaves_nothing(params):
  batch = one_group(OBJECTIVES['grpo'])
  lane, = make_lanes(1, policy_of())
  inputs = inputs_lib.Inputs(offline.plans(batch))
  lane.begin(0, params, inputs)
  inputs.register(batch.trajectories[0])
  lane.run(works(OBJECTIVES['grpo'])[0][0])
  lane.run(scheduler.HandOver(0))
  assert lane.run(scheduler.HandOver(0)).parts == lane_lib.Parts()
  assert not any(np.any(x) for x in jax.tree.leaves(lane.finish().leaves))  # and no group is open


@pytest.mark.parametrize('number', [2, 4])
def test_lanes_on_devices_of_their_own_give_the_bits_of_one(params, number):
  batch = offline.random_batch(np.random.default_rng(11), groups=5, size=2, shared=7)
  shared = lane_lib.shared_prefix([g.prompt_ids for g in batch.groups], at_least=1)
  wanted, _ = offline.batch_direction(batch, params, make_lanes(1, policy_of(), shared=shared), policy_of(), 'exact')
  events = queue.Queue()
  feed = threading.Thread(target=lambda: [events.put(e) for e in offline.shuffled_arrival(batch, np.random.default_rng(number))])
  feed.start()
  result = update.run_update(0, 0, params, offline.plans(batch), events, make_lanes(number, policy_of(), shared=shared), policy_of())
  feed.join()
  assert offline.bits(barrier.reduce_lanes('exact', result.sums, result.normaliser)) == offline.bits(wanted)
  assert len({s.lane for s in result.spans}) == number and result.mismatch.tokens


def lane_threads():
  return [t for t in threading.enumerate() if t.name.startswith('lane ')]


class Watched(lane_lib.Lane):
  """A lane that meets others in its first piece of work, and one that fails there."""

  together: threading.Barrier | None = None
  error: Exception | None = None

  def run(self, work, parts=()):
    if self.together is not None:
      self.together.wait(60)
      self.together = None
    if self.error is not None:
      raise self.error
    return super().run(work, parts)


def watched(number, monkeypatch):
  monkeypatch.setattr(lane_lib, 'Lane', Watched)
  return make_lanes(number, policy_of())


def test_lanes_work_at_the_same_time(params, monkeypatch):
  batch = offline.random_batch(np.random.default_rng(11), groups=2, size=2, scored_rate=1.0)
  lanes = watched(2, monkeypatch)
  lanes[0].together = lanes[1].together = threading.Barrier(2)  # broken after a minute, unless both are at work
  offline.batch_direction(batch, params, lanes, policy_of(), 'exact')
  assert not lane_threads()


def test_an_error_in_a_lane_stops_the_update_with_its_traceback(params, monkeypatch):
  batch = offline.random_batch(np.random.default_rng(11), groups=2, size=2, scored_rate=1.0)
  lanes = watched(2, monkeypatch)
  lanes[1].error = RuntimeError('a lane failed')
  with pytest.raises(RuntimeError, match='a lane failed') as raised:
    offline.batch_direction(batch, params, lanes, policy_of(), 'exact')
  assert [e.name for e in raised.traceback][-1] == 'run' and not lane_threads()


def test_an_interruption_ends_the_threads(params):
  batch = offline.random_batch(np.random.default_rng(11), groups=2, size=2, scored_rate=1.0)
  events = queue.Queue()
  for event in offline.shuffled_arrival(batch, np.random.default_rng(0))[:-1]:
    events.put(event)

  def observe(event):
    if isinstance(event, types.Span):
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    update.run_update(0, 0, params, offline.plans(batch), events, make_lanes(2, policy_of()), policy_of(), observe=observe)
  assert not lane_threads()


def test_lanes_that_share_a_device_run_in_turn(params):
  lanes, done = make_lanes(2, policy_of(), spread=False), []
  with executor.Executor(0, lanes, done.append):
    assert not lane_threads()
