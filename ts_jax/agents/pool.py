"""Many trajectories at once, on an event loop in a thread of its own, so that the learner keeps the main thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import traceback
from typing import Any, Callable, Collection, Mapping, Sequence

from ts_jax import types
from ts_jax.agents import loop as loop_lib
from ts_jax.rollout import replicas

_START_DEADLINE_S = 30.0
_CLOSE_DEADLINE_S = 60.0
_log = logging.getLogger(__name__)

Groups = Sequence[tuple[types.GroupPlan, Any]]


class AgentPool:
  """Runs the trajectories of updates under a concurrency limit.

  Trajectories start group by group, updates in the order they were submitted.  One keeps its slot until its content is fixed;
  its verification then runs under a limit of its own.  The first error that retries do not cure ends its update: the remaining
  trajectories are cancelled and one `RolloutFailed` is emitted.  Use as a context manager: leaving it, also by Ctrl-C, ends every environment.
  """

  def __init__(self, setup: loop_lib.AgentSetup, engines: replicas.ReplicaSet, *, run_seed: int, concurrency: int,
               emit_event: loop_lib.EmitEvent, emit_span: loop_lib.EmitSpan, verify_concurrency: int | None = None,
               scorers: Mapping[str, replicas.ReplicaSet] | None = None):
    """Call `start` before `submit_update`.

    Args:
      setup: shared by all trajectories.
      engines: the rollout replicas, from now on this pool's; closed at the end.
      run_seed: root of the sampling seeds.
      concurrency: trajectories that sample at once.
      emit_event: receives rollout events, in the pool's thread; must not block (a queue's `put_nowait`).
      emit_span: receives spans, likewise.
      verify_concurrency: verifications at once; default `concurrency`.
      scorers: replicas of the teacher and the reference, by their names in `types.SCORERS`, likewise; they take the place of
        `setup.teacher` and `setup.reference`.

    Raises:
      ConfigError: a limit is not positive.
    """
    verify_concurrency = concurrency if verify_concurrency is None else verify_concurrency
    if concurrency < 1 or verify_concurrency < 1:
      raise types.ConfigError(f'concurrency={concurrency} and verify_concurrency={verify_concurrency} must be at least 1')
    self._setup, self._run_seed = setup, run_seed
    self._engines, self._scorers = engines, dict(scorers or {})
    self._limits = (concurrency, verify_concurrency)
    self._emit_event, self._emit_span = emit_event, emit_span
    self._thread = threading.Thread(target=self._run, name='agent-pool', daemon=True)
    self._ready = threading.Event()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._failure: BaseException | None = None

  def start(self) -> 'AgentPool':
    """Starts the thread.

    Raises:
      InfrastructureError: it did not come up.
    """
    self._thread.start()
    if not self._ready.wait(_START_DEADLINE_S) or self._failure is not None:
      why = self._failure or f'not within {_START_DEADLINE_S:.0f} s'
      raise types.InfrastructureError(f'the agent pool did not start: {why}') from self._failure
    return self

  def submit_update(self, update: int, policy_version: int, groups: Groups,
                    skip: Collection[tuple[int, int]] = (), newer_too: bool = False) -> concurrent.futures.Future:
    """Registers the trajectories of an update; they start as slots come free.  Returns at once, from any thread.

    Args:
      update: logical update k; negative for an evaluation, which nobody scores.
      policy_version: version every reply must state.
      groups: (plan, task) in the order they should start.
      skip: (group, index) of trajectories that exist already (an interrupted update being resumed).
      newer_too: replies may also state newer versions: weights are published while they are sampled.

    Returns:
      A future of the sampled trajectories with rewards, by group then index; it fails with the error that ended the update.

    Raises:
      ConfigError: a task appears twice (its trajectories would share their sampling seeds) or does not fit its plan.
      InfrastructureError: the pool is not running.
    """
    ids = [plan.task_id for plan, _ in groups]
    if len(set(ids)) != len(ids):
      raise types.ConfigError(f'update {update} samples task {next(i for i in ids if ids.count(i) > 1)} in two groups: their '
                              'trajectories would have equal seeds. Make one larger group')
    for plan, task in groups:
      if plan.task_id != task.task_id:
        raise types.ConfigError(f'group {plan.index} is planned for task {plan.task_id} but was given {task.task_id}')
    if self._loop is None or not self._thread.is_alive():
      raise types.InfrastructureError('the agent pool is not running: call start(), and submit nothing after close()')
    return asyncio.run_coroutine_threadsafe(self._run_update(update, policy_version, list(groups), frozenset(skip), newer_too), self._loop)

  def close(self) -> None:
    """Cancels what runs, ends its environments and the thread.  Idempotent.

    Raises:
      InfrastructureError: the thread did not end in time.
    """
    if self._loop is None or not self._thread.is_alive():
      return
    try:
      self._loop.call_soon_threadsafe(self._stop.set)
    except RuntimeError:
      pass  # the loop closed by itself in this instant
    self._thread.join(_CLOSE_DEADLINE_S)
    if self._thread.is_alive():
      raise types.InfrastructureError(f'the agent pool did not end within {_CLOSE_DEADLINE_S:.0f} s')

  def __enter__(self) -> 'AgentPool':
    return self if self._thread.is_alive() else self.start()

  def __exit__(self, *exc) -> None:
    self.close()

  def _run(self) -> None:
    try:
      asyncio.run(self._main())
    except BaseException as e:  # the thread's last stop: an error here must reach the run, not vanish with the thread
      self._failure = e
      if self._ready.is_set():
        self._emit_event(types.RolloutFailed(-1, f'the agent pool ended: {_describe(e)}'))
    finally:
      self._ready.set()

  async def _main(self) -> None:
    self._stop = asyncio.Event()
    self._slots, self._verify_slots = (asyncio.Semaphore(n) for n in self._limits)
    self._updates: set[asyncio.Task] = set()
    self._starting = asyncio.Lock()  # an update's trajectories wait until those submitted before it have started
    self._loop = asyncio.get_running_loop()
    self._ready.set()
    try:
      await self._stop.wait()
    finally:
      for task in self._updates:
        task.cancel()
      await asyncio.gather(*self._updates, return_exceptions=True)
      for engines in (self._engines, *self._scorers.values()):
        await engines.close()

  async def _run_update(self, update: int, policy_version: int, groups: Groups,
                        skip: frozenset[tuple[int, int]], newer_too: bool) -> tuple[types.Trajectory, ...]:
    this = asyncio.current_task()
    self._updates.add(this)
    this.add_done_callback(self._updates.discard)
    running: list[asyncio.Task] = []
    try:
      async with asyncio.TaskGroup() as trajectories, self._starting:
        for plan, task in groups:
          for index in (i for i in range(plan.size) if (plan.index, i) not in skip):
            await self._slots.acquire()
            release = _once(self._slots.release)
            assignment = loop_lib.Assignment(update, plan.index, index, task, plan.prompt_ids, policy_version, self._run_seed, newer_too)
            running.append(trajectories.create_task(self._run_trajectory(assignment, release)))
            running[-1].add_done_callback(lambda _, release=release: release())
    except BaseExceptionGroup as failures:
      first = _first(failures)
      _log.error('update %d: rollout failed\n%s', update, ''.join(traceback.format_exception(first)))
      self._emit_event(types.RolloutFailed(update, _describe(first)))
      raise first from None
    return tuple(t.result() for t in running)

  async def _run_trajectory(self, assignment: loop_lib.Assignment, release: Callable[[], None]) -> types.Trajectory:
    """One trajectory with sessions of its own; `release` is called when it samples no more."""
    group = (assignment.update, assignment.group)
    with contextlib.ExitStack() as stack:
      engine = stack.enter_context(self._engines.session(group))
      scorers = dict.fromkeys(types.SCORERS) if assignment.update < 0 else {
          name: stack.enter_context(scorer.session(group)) for name, scorer in self._scorers.items()}

      def sampled() -> None:
        engine.release()
        release()

      return await loop_lib.run_trajectory(
          assignment, dataclasses.replace(self._setup, **scorers), engine, emit_event=self._emit_event, emit_span=self._emit_span,
          on_content=sampled, verify_slots=self._verify_slots)


def _once(call: Callable[[], None]) -> Callable[[], None]:
  calls = [call]
  return lambda: calls.pop()() if calls else None


def _first(group: BaseExceptionGroup) -> BaseException:
  error: BaseException = group
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return error


def _describe(error: BaseException) -> str:
  """One message for people: ours as they are, anything else with its type and place."""
  if isinstance(error, types.TsJaxError):
    return f'{type(error).__name__}: {error}'
  frames = traceback.extract_tb(error.__traceback__)
  place = f' ({frames[-1].filename}:{frames[-1].lineno})' if frames else ''
  return f'{type(error).__name__}: {error}{place}'
