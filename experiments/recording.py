"""Records real batches for experiments that compare schedules on identical data: rollouts of the untrained student."""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import Sequence

from experiments import engines as engines_lib, wiring
from ts_jax import types
from ts_jax.models import weights
from ts_jax.telemetry import progress as progress_lib, rundir


# What sampling does not depend on: experiments compare these on one recording.
_LEARNER = ('schedule', 'objective', 'learner', 'optimizer', 'equivalence')


def _learner_settings(config) -> list[str]:
  return [f'{part}.{key}' for part in _LEARNER if part in config for key in config[part]]


def record(config, folder: pathlib.Path, updates: int, engine_cores: Sequence[int] | None = None) -> rundir.RunDirectory:
  """Makes (or finds) a run directory with the trajectories of `updates` batches at policy version 0.

  Args:
    config: as for training.
    folder: of the recording; reused when it holds these batches already.
    updates: batches wanted.
    engine_cores: cores of the engine; default: those of this process.
  """
  run = rundir.RunDirectory(folder)
  size = config.batch.prompts * config.batch.group_size
  with run:
    run.open(config, may_change=('updates', *_learner_settings(config)))
    missing = [k for k in range(updates) if len(run.read_trajectories(k)) < size]
    if missing:
      _sample(config, run, missing, engine_cores or sorted(os.sched_getaffinity(0)))
  return run


def _sample(config, run: rundir.RunDirectory, updates: list[int], engine_cores: Sequence[int]) -> None:
  student = wiring.load_student(config)
  cache = wiring.compile_cache()
  events: list = []
  with contextlib.ExitStack() as stack:
    box = stack.enter_context(wiring.sandbox(config))
    tasks = wiring.load_tasks(config, run.path, student)
    exchange = stack.enter_context(engines_lib.exchange_folder(config, student, run.path))
    engines = stack.enter_context(engines_lib.rollout_engines(config, student, engine_cores, run.logs, exchange, cache))
    found = [engines_lib.load_teacher(config, student, engine_cores, sorted(os.sched_getaffinity(0)), name) for name in types.SCORERS]
    teachers, references = (stack.enter_context(engines_lib.teachers(config, scorer, run.logs, cache)) for scorer in found)
    for replicas in (engines, teachers, references):
      replicas.wait_started()
    engines.publisher.publish(student.params(), student.config, 0)
    agents = stack.enter_context(wiring.agent_pool(config, student, box, engines.serving, events.append,
                                                   {'teacher': teachers.serving, 'reference': references.serving}))
    run.write_manifest({**rundir.environment_facts(), 'model': config.model.source, 'model_folder': str(student.folder),
                        'model_checksum': weights.weights_checksum(student.folder),
                        'task_families': {t.task_id: t.family for t in tasks.all}, 'sandbox': box.backend.description,
                        'seed': config.seed})
    with progress_lib.Progress(len(updates), 'record batches', 'batches') as progress:
      for update in updates:
        for trajectory in agents.submit_update(update, 0, wiring.plan_update(config, tasks, update)).result():
          run.append_trajectory(trajectory)
        for event in events:
          if isinstance(event, types.Span):
            run.append_span(event)
        events.clear()
        progress.advance()


def batch(run: rundir.RunDirectory, update: int) -> types.LogicalBatch:
  """One recorded update as a logical batch."""
  groups: dict[int, list[types.Trajectory]] = {}
  for t in run.read_trajectories(update):
    groups.setdefault(t.group, []).append(t)
  return types.LogicalBatch(update, 0, tuple(
      types.Group(g, members[0].task_id, members[0].prompt_ids, tuple(members)) for g, members in sorted(groups.items())))
