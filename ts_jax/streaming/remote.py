"""Learner lanes of other processes: process 0 says what is done, and a lane elsewhere looks to it like one of its own.

Process 0 runs the update, with everything that is not a lane: scheduler, records, rollout.  Each other process has lanes, a record of
the inputs and its shards of the state.  It takes calls over one connection, in the order in which they were made, and answers those
of its lanes.  At the barrier arrays meet in collectives that all processes enter, each when it is told.

A connection carries pickled objects between the processes of one run; they prove to each other that they know its key, which
process 0 makes up and shares through the collectives.
"""

from __future__ import annotations

from concurrent import futures
import contextlib
import dataclasses
from multiprocessing import connection as connections
import queue
import secrets
import threading
import traceback
from typing import Any, Protocol, Sequence

import jax
from jax.experimental import multihost_utils
import numpy as np

from ts_jax import types
from ts_jax.kernels import fold
from ts_jax.streaming import inputs as inputs_lib, lane as lane_lib, mismatch as mismatch_lib, scheduler

_KEY_BYTES = 32
_STOPPED_S = 30.0
_NOTICED_S = 5.0  # a connection may close after a collective that fails with it


@dataclasses.dataclass(frozen=True)
class _Failure:
  """What ended a call, with its traceback."""

  text: str


class RemoteLane:
  """A lane of another process, with the methods of `lane.Lane` that an update calls.

  Attributes:
    index: lane number.
    device: tells it from every other lane.
    host: process that it is in.
    mismatch: of the update's sources, once it gave its rest.
  """

  def __init__(self, process: 'Process', index: int):
    self._process, self.index, self.device, self.host = process, index, (process.index, index), process.index
    self.mismatch = mismatch_lib.Mismatch()

  def begin(self, update: int, params, inputs: inputs_lib.Inputs) -> None:
    """See `Lane.begin`; the parameters are those that its process has."""
    del params
    if self is self._process.lanes[0]:
      self._process.begin(update, inputs)

  def run(self, work: scheduler.Work, parts: Sequence[lane_lib.Parts] = ()) -> lane_lib.Result:
    """See `Lane.run`."""
    return self._process.ask(self.index, 'run', work, parts)

  def rest(self) -> lane_lib.Parts:
    """See `Lane.rest`."""
    parts, self.mismatch = self._process.ask(self.index, 'rest')
    return parts

  def finish(self) -> None:
    """See `Lane.finish`; the sum stays where it is."""
    self._process.ask(self.index, 'finish')


class Process:
  """Another process, as process 0 sees it.

  Attributes:
    index: of the process.
    lanes: its lanes.
  """

  def __init__(self, index: int, connection: connections.Connection, lanes: Sequence[int]):
    """Args: the process, the connection to it, and the numbers of its lanes."""
    self.index, self._over = index, threading.Event()
    self._connection, self._sending = connection, threading.Lock()
    self._answers: dict[int, queue.SimpleQueue] = {lane: queue.SimpleQueue() for lane in lanes}
    self.lanes = [RemoteLane(self, lane) for lane in lanes]
    threading.Thread(target=self._read, name=f'process {index}', daemon=True).start()

  @property
  def ended(self) -> bool:
    """It is no more."""
    return self._over.is_set()

  def tell(self, call: str, *arguments) -> None:
    """Has the process do something that it does not answer.

    Raises:
      TsJaxError: it has ended.
    """
    try:
      with self._sending:
        self._connection.send((call, arguments))
    except OSError:
      self._over.set()
    self.check()

  def check(self, within_s: float = 0.0) -> None:
    """Raises TsJaxError if the process has ended, or ends within some time."""
    if self._over.wait(within_s):
      raise types.TsJaxError(f'process {self.index} of the learner has ended; its own output says why.  Start all processes again: the run '
                             'resumes at its last checkpoint')

  def ask(self, lane: int, call: str, *arguments) -> Any:
    """What a lane answers to a call.

    Raises:
      TsJaxError: the lane failed, or its process has ended.
    """
    self.tell('lane', lane, call, arguments)
    answer = self._answers[lane].get()
    if isinstance(answer, _Failure):
      raise types.TsJaxError(f'lane {lane} in process {self.index} of the learner failed:\n{answer.text}')
    self.check()
    return answer

  def begin(self, update: int, inputs: inputs_lib.Inputs) -> None:
    """Begins an update on all its lanes, which get to know all inputs from now on."""
    inputs.mirror(lambda name, *arguments: self.tell('inputs', name, arguments))
    self.tell('begin', update, list(inputs.plans.values()))

  def close(self) -> None:
    """Lets the process end, and waits for that for a while."""
    with contextlib.suppress(types.TsJaxError):
      self.tell('stop')
    self._over.wait(_STOPPED_S)
    self._connection.close()

  def _read(self) -> None:
    with jax.enable_x64(True):  # or exact sums would be cut to 32 bits where they arrive
      while True:
        try:
          lane, answer = self._connection.recv()
        except (EOFError, OSError):
          self._over.set()
          for answers in self._answers.values():
            answers.put(None)
          return
        self._answers[lane].put(answer)


class Others(list[Process]):
  """The processes beside process 0, in their order; none, where it is alone."""

  @property
  def lanes(self) -> list[RemoteLane]:
    """Their lanes."""
    return [lane for process in self for lane in process.lanes]

  @property
  def ended(self) -> bool:
    """One of them has ended."""
    return any(process.ended for process in self)

  def tell(self, call: str, *arguments) -> None:
    """Has all of them do something; process 0 then does its part of it.

    Raises:
      TsJaxError: one has ended.
    """
    for process in self:
      process.tell(call, *arguments)

  @contextlib.contextmanager
  def together(self):
    """For what all processes do together: where one has ended, that is the error, and not what it came to in a collective."""
    try:
      yield
    except (types.TsJaxError, OverflowError):  # all processes find these
      raise
    except Exception:
      for process in self:
        process.check(_NOTICED_S)
      raise

  def close(self) -> None:
    """Lets them end."""
    for process in self:
      process.close()


def meet(host: str, lanes: int) -> Others:
  """In process 0: connects to all other processes, which `join`.

  Args:
    host: under which they reach this process.
    lanes: of each process.
  """
  key = secrets.token_bytes(_KEY_BYTES)
  with connections.Listener((host, 0), backlog=jax.process_count(), authkey=key) as listener:
    _share(key, listener.address[1])
    found = Others()
    for _ in range(1, jax.process_count()):
      connection = listener.accept()
      index = connection.recv()
      found.append(Process(index, connection, range(index * lanes, (index + 1) * lanes)))
  return Others(sorted(found, key=lambda process: process.index))


def join(host: str) -> connections.Connection:
  """In every other process: the connection to process 0, which `meet`s it."""
  key, port = _share()
  connection = connections.Client((host, port), authkey=key)
  connection.send(jax.process_index())
  return connection


def _share(key: bytes = bytes(_KEY_BYTES), port: int = 0) -> tuple[bytes, int]:
  """Process 0's key and port, in all processes."""
  told = multihost_utils.broadcast_one_to_all(np.asarray([*key, *divmod(port, 256)], np.int32))
  *key, high, low = (int(x) for x in told)
  return bytes(key), 256 * high + low


def receive(connection: connections.Connection) -> tuple[str, tuple]:
  """The next call of process 0: (name, arguments).

  Raises:
    TsJaxError: it has ended.
  """
  try:
    with jax.enable_x64(True):
      return connection.recv()
  except (EOFError, OSError):
    raise types.TsJaxError('process 0 of the learner has ended; its own output says why') from None


class Masters(Protocol):
  """The state of another process: `params` are whole on its lanes' devices."""

  params: Any

  def step(self, sums: Sequence[fold.Sum], normaliser: float) -> None:
    """Takes part in the barrier, with the sums of its lanes."""

  def gather(self) -> None:
    """Takes part in bringing the state together."""


def serve(connection: connections.Connection, lanes: Sequence[lane_lib.Lane], masters: Masters) -> None:
  """Does in another process what process 0 says, until it says to stop.

  Raises:
    TsJaxError: process 0 has ended.
  """
  by_index, sums = {lane.index: lane for lane in lanes}, {}
  sending = threading.Lock()
  inputs = inputs_lib.Inputs(())

  def answer(index: int, call: str, arguments: tuple) -> None:
    lane, result = by_index[index], None
    try:
      match call:
        case 'run':
          result = lane.run(*arguments)
        case 'rest':
          result = lane.rest(), lane.mismatch
        case 'finish':
          sums[index] = lane.finish()
    except BaseException:
      result = _Failure(traceback.format_exc())
    with contextlib.suppress(OSError), sending:  # where process 0 has ended, `receive` says so
      connection.send((index, result))

  with contextlib.ExitStack() as stack:
    threads = {index: stack.enter_context(futures.ThreadPoolExecutor(1, f'lane {index}')) for index in by_index}
    while True:
      call, arguments = receive(connection)
      match call:
        case 'begin':
          update, plans = arguments
          inputs = inputs_lib.Inputs(plans)
          for lane in lanes:
            lane.begin(update, masters.params, inputs)
        case 'inputs':
          name, values = arguments
          getattr(inputs, name)(*values)
        case 'lane':
          threads[arguments[0]].submit(answer, *arguments)
        case 'step':
          masters.step([sums.pop(index) for index in sorted(by_index)], *arguments)
        case 'gather':
          masters.gather()
        case 'stop':
          return
