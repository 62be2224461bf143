"""A learner of several processes, all started with the same command but for their number.

    python -m experiments.train ... --config.distributed.coordinator=host:port --config.distributed.processes=2 --config.distributed.process=0
    python -m experiments.train ... --config.distributed.coordinator=host:port --config.distributed.processes=2 --config.distributed.process=1

Process 0 does what a run of one process does.  The others have lanes (`schedule.lanes` each) and shards of the state, no run directory
and no engines; they end with process 0.
"""

from __future__ import annotations

import contextlib
import signal
from typing import Iterator

import jax

from experiments import learner, wiring
from ts_jax import types
from ts_jax.streaming import barrier, host_memory, layout as layout_lib, remote

_SHUTDOWN_S = 15  # that a process which ends waits for the others to end


def start(config) -> None:
  """Lets JAX find the other processes; before it is used for anything else.

  Raises:
    ConfigError: a setting is missing, or does not go with several processes.
  """
  settings = config.distributed
  if settings.processes < 1 or not 0 <= settings.process < settings.processes:
    raise types.ConfigError(f'config.distributed.process={settings.process} must be from 0 to below processes={settings.processes}')
  if settings.processes == 1:
    return
  if ':' not in settings.coordinator:
    raise types.ConfigError(f'config.distributed.coordinator={settings.coordinator!r} must be host:port of process 0')
  if config.schedule.name == 'async':
    raise types.ConfigError("schedule 'async' keeps two sets of parameters in a checkpoint, which a learner of several processes cannot: set "
                            'config.distributed.processes=1, or another schedule')
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(settings.coordinator, settings.processes, settings.process, shutdown_timeout_seconds=_SHUTDOWN_S)


def _host(config) -> str:
  return config.distributed.coordinator.rpartition(':')[0]


@contextlib.contextmanager
def others(config) -> Iterator[remote.Others]:
  """In process 0: the other processes, which end with the block; none, where the config has one process."""
  found = remote.meet(_host(config), config.schedule.lanes) if config.distributed.processes > 1 else remote.Others()
  try:
    yield found
  finally:
    found.close()


class _Masters:
  """See `remote.Masters`; the steps are those of `trainer.Trainer`, in its order."""

  def __init__(self, config, layout: layout_lib.Layout, state: barrier.LearnerState):
    self._optimizer, self._kind = learner.optimizer(config), config.schedule.accumulator
    self._layout, self._state = layout, state
    self.params = layout.whole(state.params)

  def step(self, sums, normaliser):
    self.params = None
    direction = barrier.reduce_lanes(self._kind, sums, normaliser, self._layout)
    del sums
    self._state, _ = barrier.apply(self._optimizer, self._state, direction, self._layout)
    self.params = self._layout.whole(self._state.params)

  def gather(self):
    barrier.on_host(self._state, self._layout)


def serve(config) -> dict:
  """In every other process: its lanes at work until process 0 has ended the run."""
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)  # meant for all processes: process 0 still needs this one, for its last checkpoint
  policy, layout = learner.policy(config), learner.layout(config)
  host_memory.keep_freed_memory()
  wiring.compile_cache()
  student = wiring.load_student(config)
  with remote.join(_host(config)) as connection:
    _, (state, prompts, longest) = remote.receive(connection)
    masters = _Masters(config, layout, barrier.place(state, layout))
    lanes = learner.prepared_lanes(config, student, learner.with_memory(policy, config, student, longest), masters.params, prompts, longest)
    del state
    remote.serve(connection, lanes, masters)
  return {'process': config.distributed.process}
