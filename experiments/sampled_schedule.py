"""A schedule by itself on real engines, agents and tools, without a run directory: for measurements."""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import Any, Iterator, Sequence

from experiments import engines as engines_lib, learner, replayed_schedule, rollouts, schedules, trainer as trainer_lib, wiring
from ts_jax import types
from ts_jax.streaming import barrier, lane as lane_lib, scheduler
from ts_jax.telemetry import rundir


@contextlib.contextmanager
def rollout_side(config, student: wiring.Student, tasks: wiring.TaskSets, params: Any, folder: pathlib.Path, cores: Sequence[int],
                 arrivals: rollouts.Arrivals) -> Iterator[rollouts.Sampled]:
  """Fresh engines that serve `params` as version 0, with agents and their tools.

  Args:
    config: of a run.
    student: its model.
    tasks: its tasks.
    params: theta_0.
    folder: of engine logs; holds no trajectories.
    cores: of engines, agents and tools.
    arrivals: where events go.
  """
  cache, run = wiring.compile_cache(), rundir.RunDirectory(folder)
  usable = sorted({*os.sched_getaffinity(0), *cores})
  with contextlib.ExitStack() as stack:
    found = [engines_lib.load_teacher(config, student, cores, usable, name) for name in types.SCORERS]
    box = stack.enter_context(wiring.sandbox(config))
    exchange = stack.enter_context(engines_lib.exchange_folder(config, student, folder))
    engines = stack.enter_context(engines_lib.rollout_engines(config, student, cores, run.logs, exchange, cache))
    teachers, references = (stack.enter_context(engines_lib.teachers(config, scorer, run.logs, cache)) for scorer in found)
    for replicas in (engines, teachers, references):
      replicas.wait_started()
    engines.publisher.publish(params, student.config, 0)
    engines_lib.check_identity(config, student, engines, teachers, references)
    agents = wiring.agent_pool(config, student, box, engines.serving, arrivals.put,
                               {'teacher': teachers.serving, 'reference': references.serving})
    with wiring.on_cores(cores):  # tools are children of the agents' thread
      stack.enter_context(agents)
    yield rollouts.Sampled(config, student.config, tasks, engines.publisher, agents, run, arrivals.put)


def run(config, student: wiring.Student, tasks: wiring.TaskSets, lanes: Sequence[lane_lib.Lane], policy: scheduler.Policy,
        state: barrier.LearnerState, folder: pathlib.Path, cores: Sequence[int],
        updates: replayed_schedule.Updates | None = None) -> tuple[barrier.LearnerState, list[trainer_lib.Done]]:
  """Trains `config.updates` updates from the parameters there are, which count as version 0.

  Schedules that are run from equal parameters sample the same tasks with the same seeds.

  Args:
    config: of a run; its `schedule` is the one that runs.
    student: its model.
    tasks: its tasks.
    lanes, policy: made for that config.
    state: consumed.
    folder: of engine logs.
    cores: of engines, agents and tools.
    updates: is told of everything; default one that keeps what was done.

  Returns:
    (state behind the last update, what each update did when).
  """
  updates = replayed_schedule.Updates() if updates is None else updates
  arrivals = rollouts.Arrivals(updates, config.rollout.stall_timeout_s)
  state = state._replace(policy_version=0)
  layout = learner.layout(config)
  with rollout_side(config, student, tasks, layout.single(layout.whole(state.params)), folder, cores, arrivals) as rollout:
    trainer = trainer_lib.Trainer(config, learner.optimizer(config), state, lanes, policy, rollout, arrivals, updates,
                                  limits=learner.mismatch_limits(config), layout=layout)
    schedules.run(config, trainer)
  return trainer.state, list(updates)
