"""Lanes behind a connection: the same update, and errors that say where they are from."""

import dataclasses
import multiprocessing
import os
import queue
import socket
import threading

import jax
import numpy as np
import pytest

from experiments import offline
from tests.streaming import cases
from ts_jax import types
from ts_jax.streaming import barrier, inputs as inputs_lib, remote, scheduler, update

STUDENT = dataclasses.replace(cases.TINY, layers=1)
POLICY = scheduler.Policy('forward', direct=False, admission_cap=2, kept_cap=2)


class Masters:
  """Keeps what its lanes have summed."""

  def __init__(self, params):
    self.params, self.sums, self.gathered = params, None, 0

  def step(self, sums, normaliser):
    self.sums = sums, normaliser

  def gather(self):
    self.gathered += 1


@pytest.fixture(scope='module')
def params():
  return cases.tiny_params('float32', config=STUDENT)


def make_lane(index):
  return cases.make_lane(index, accumulator='exact', policy=POLICY, config=STUDENT, device=jax.devices()[index])


def cut(connection):
  """Ends a connection as the system does when a process is killed."""
  with socket.socket(fileno=os.dup(connection.fileno())) as end:
    end.shutdown(socket.SHUT_RDWR)


class Served:
  """Another process's side, in a thread."""

  def __init__(self, params, *lanes):
    ours, self.connection = multiprocessing.Pipe()
    self.masters, self.error = Masters(params), None
    self.thread = threading.Thread(target=self._serve, args=(lanes,))
    self.thread.start()
    self.process = remote.Process(1, ours, [lane.index for lane in lanes])

  def _serve(self, lanes):
    try:
      remote.serve(self.connection, lanes, self.masters)
    except types.TsJaxError as error:
      self.error = error
    self.connection.close()


def test_a_lane_of_another_process_gives_the_bits_of_one(params):
  batch = offline.random_batch(np.random.default_rng(11), groups=3, size=2)
  wanted, _ = offline.batch_direction(batch, params, [make_lane(0)], POLICY, 'exact')
  served, events = Served(params, make_lane(1)), queue.Queue()
  for event in offline.shuffled_arrival(batch, np.random.default_rng(1)):
    events.put(event)
  result = update.run_update(0, 0, params, offline.plans(batch), events, [make_lane(0), *served.process.lanes], POLICY)
  others = remote.Others([served.process])
  others.tell('gather')
  others.tell('step', 0.5)
  others.close()
  served.thread.join()
  sums, normaliser = served.masters.sums
  assert normaliser == 0.5 and served.masters.gathered == 1 and served.error is None
  assert {s.lane for s in result.spans} == {0, 1} and len(result.sums) == len(sums) == 1
  assert 0 < served.process.lanes[0].mismatch.tokens < result.mismatch.tokens
  assert offline.bits(barrier.reduce_lanes('exact', [*result.sums, *sums])) == offline.bits(wanted)


def test_what_a_remote_lane_hands_over_keeps_its_bits(params):
  batch = offline.random_batch(np.random.default_rng(5), groups=1, size=2, scored_rate=1.0)
  inputs, served = inputs_lib.Inputs(offline.plans(batch)), Served(params, make_lane(1))
  local, (lane,) = make_lane(0), served.process.lanes
  for one in (local, lane):
    one.begin(0, params, inputs)
  inputs.register(batch.trajectories[0])
  work = scheduler.SourceWork(0, (0,), scheduler.Service.KNOWN, reward=0.5)
  local.run(work)
  lane.run(work)
  mine, theirs = (one.run(scheduler.HandOver(0)).parts for one in (local, lane))
  pairs = [(a, b) for a, b in zip(mine.statistics.sums, theirs.statistics.sums, strict=True)]
  assert pairs and all(offline.bits(a) == offline.bits(b) for a, b in pairs)
  assert {x.dtype for _, b in pairs for x in jax.tree.leaves(b.leaves)} == {np.dtype(np.int64)}
  served.process.close()
  served.thread.join()


def test_an_error_of_a_remote_lane_comes_with_its_traceback(params):
  served = Served(params, make_lane(1))
  served.process.begin(0, inputs_lib.Inputs([types.GroupPlan(0, 'task', (1, 2, 3), 1)]))
  with pytest.raises(types.TsJaxError, match=r'lane 1 in process 1 of the learner failed:(.|\n)*_source(.|\n)*KeyError'):
    served.process.lanes[0].run(scheduler.SourceWork(0, (0,), scheduler.Service.CONTENT))  # of a trajectory nobody told it
  served.process.close()
  served.thread.join()


def test_a_process_that_ended_is_named_by_whatever_waits_for_it(params):
  served = Served(params, make_lane(1))
  served.process.begin(0, inputs_lib.Inputs([types.GroupPlan(0, 'task', (1, 2, 3), 1)]))
  cut(served.connection)
  for _ in range(2):
    with pytest.raises(types.TsJaxError, match='process 1 of the learner has ended'):
      served.process.lanes[0].rest()
  with pytest.raises(types.TsJaxError, match='process 1 of the learner has ended'), remote.Others([served.process]).together():
    raise RuntimeError('connection reset in a collective')
  served.process.close()
  served.thread.join()


def test_the_end_of_process_0_is_an_error_of_the_others(params):
  served = Served(params, make_lane(1))
  cut(served.connection)
  served.thread.join()
  assert 'process 0 of the learner has ended' in str(served.error)
