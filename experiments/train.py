"""Trains a student on agentic tasks.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

Run the same command again to resume.  Every setting is in `configs/defaults.py`; override with --config.NAME=VALUE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys

from absl import flags
from ml_collections import config_flags

from experiments import cli
from ts_jax import types

_CONFIG = config_flags.DEFINE_config_file('config', None, 'What to run; see configs/.', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Run directory; made if needed, resumed if it holds this run.')
flags.mark_flags_as_required(['config', 'workdir'])

# What a resumed run may have other values of: no result depends on it beyond rounding, or only when a run stops.
_MAY_CHANGE = ('mismatch.warn', 'mismatch.stop', 'schedule.lanes', 'distributed.processes', 'distributed.process', 'distributed.coordinator')


def main() -> None:
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    print(json.dumps(train(_CONFIG.value, pathlib.Path(_WORKDIR.value).resolve())))
  except KeyboardInterrupt:
    command = 'python -m experiments.train ' + ' '.join(sys.argv[1:])
    print(f'\nInterrupted. Nothing is lost; resume with:\n  {command}', file=sys.stderr)
    sys.exit(130)


def train(config, workdir: pathlib.Path) -> dict:
  """Runs (or resumes) a training run and returns its closing figures."""
  # ---- Cores, before anything starts a thread ---------------------------------------------------------------------
  from experiments import wiring  # imports JAX: after the flags are known to be right

  everything = os.sched_getaffinity(0)
  learner_cores, engine_cores = wiring.split_cores(config)
  os.sched_setaffinity(0, learner_cores)
  from experiments import distributed

  try:
    distributed.start(config)
    if config.distributed.process > 0:
      return distributed.serve(config)
    with contextlib.ExitStack() as stack:
      return _train(config, workdir, wiring, engine_cores, everything, stack)
  finally:
    os.sched_setaffinity(0, everything)


def _train(config, workdir, wiring, engine_cores, everything, stack: contextlib.ExitStack) -> dict:
  from experiments import distributed, engines as engines_lib, journal as journal_lib, learner, rollouts, schedules, trainer as trainer_lib
  from ts_jax.evaluation import attempts
  from ts_jax.models import weights
  from ts_jax.rollout import replay as replay_lib
  from ts_jax.streaming import barrier, host_memory, layout as layout_lib
  from ts_jax.telemetry import checkpoints as checkpoints_lib, metrics, progress as progress_lib, report, rundir

  # ---- What could be wrong is checked first -------------------------------------------------------------------------
  policy, optimizer, limits = learner.policy(config), learner.optimizer(config), learner.mismatch_limits(config)
  layout = learner.layout(config)
  student = wiring.load_student(config)
  replaying = bool(config.rollout.replay)
  teacher, reference = (None if replaying else engines_lib.load_teacher(config, student, engine_cores, sorted(everything), name)
                        for name in types.SCORERS)
  box = None if replaying else stack.enter_context(wiring.sandbox(config))
  run = stack.enter_context(rundir.RunDirectory(workdir))
  resumed = run.open(config, may_change=_MAY_CHANGE)
  tasks = None if replaying else wiring.load_tasks(config, workdir, student)
  recording = rundir.RunDirectory(config.rollout.replay) if replaying else None
  if not replaying and config.tasks.validate:
    tasks = wiring.validated(tasks, box, workdir / 'validation.json')
  if replaying:
    families = recording.read_manifest().get('task_families', {})
    family_of = lambda task_id: families.get(task_id, task_id)
  else:
    families = {t.task_id: t.family for t in tasks.all}
    family_of = families.__getitem__

  print(wiring.describe(config, student, tasks, box, engine_cores,
                        *(scorer.description if scorer else '' for scorer in (teacher, reference))), file=sys.stderr)

  # ---- Engines start in the background while the learner compiles ------------------------------------------------------
  host_memory.keep_freed_memory()
  cache = wiring.compile_cache()
  engines = agents = None
  if not replaying:
    exchange = stack.enter_context(engines_lib.exchange_folder(config, student, workdir))
    engines = stack.enter_context(engines_lib.rollout_engines(config, student, engine_cores, run.logs, exchange, cache))
    print(f'publish   {engines.publisher.description}', file=sys.stderr)
    teachers, references = (stack.enter_context(engines_lib.teachers(config, found, run.logs, cache)) for found in (teacher, reference))

  others = stack.enter_context(distributed.others(config))
  state, sampling = barrier.init(optimizer, student.params(), layout_lib.Layout() if others else layout), None
  if others:  # what may be read from a checkpoint goes to all
    state = barrier.on_host(state)
  checkpoints = checkpoints_lib.Checkpoints(run.checkpoints, config.checkpoint.keep)
  stack.callback(checkpoints.close)
  first = 0
  if resumed and checkpoints.latest is not None:
    first, state, sampling = trainer_lib.restored(config, checkpoints, state)
    print(f'resuming  at update {first}', file=sys.stderr)
  if resumed:
    run.resume_at(first, keep_trajectories=1 + schedules.max_staleness(config))
  run.write_manifest({
      **rundir.environment_facts(), 'model': config.model.source, 'model_folder': str(student.folder),
      'model_checksum': weights.weights_checksum(student.folder), 'task_families': families,
      'task_digests': {} if replaying else {t.task_id: t.digest for t in tasks.all},
      'sandbox': 'none: replay' if replaying else box.backend.description, 'seed': config.seed, 'schedule': config.schedule.name})
  writer = metrics.MetricsWriter(run, first)
  stack.callback(writer.close)

  def recorded(update: int) -> list[types.Trajectory]:
    trajectories = recording.read_trajectories(update)
    if not trajectories:
      raise types.ConfigError(f'{recording.path} has no trajectories of update {update}: it recorded updates '
                              f'{recording.updates_with_trajectories()}; set config.updates accordingly')
    return trajectories

  if replaying:
    everything_recorded = [t for k in recording.updates_with_trajectories() for t in recording.read_trajectories(k)]
    for k in range(first, config.updates):
      recorded(k)  # that they are there
    prompts, longest = {t.prompt_ids for t in everything_recorded}, max(t.longest_completion for t in everything_recorded)
  else:
    prompts, longest = tasks.prompts.values(), learner.max_completion_tokens(config)
  policy = learner.with_memory(policy, config, student, longest)
  if others:
    others.tell('prepare', state, list(prompts), longest)
    state = barrier.place(state, layout)
  params = layout.whole(state.params)
  lanes = [*learner.prepared_lanes(config, student, policy, params, prompts, longest), *others.lanes]

  progress = progress_lib.TrainProgress(config.updates, first)
  stack.callback(progress.close)
  journal = journal_lib.Journal(run, progress, writer, family_of, optimizer.learning_rate)
  arrivals = rollouts.Arrivals(journal, config.rollout.stall_timeout_s)
  if replaying:
    replayer = replay_lib.Replayer(arrivals.put, config.rollout.replay_scale, arrivals.put)
    stack.callback(replayer.close)
    rollout = rollouts.Replayed(replayer, recorded)
  else:
    engines.wait_started()
    for scorers in (teachers, references):
      scorers.wait_started()
    # A batch that was being sampled is finished at the parameters that it was begun with.
    served, version = (params, first) if sampling is None else (layout.whole(sampling), first - 1)
    engines.publisher.publish(layout.single(served), student.config, version)
    del served
    engines_lib.check_identity(config, student, engines, teachers, references)
    agents = wiring.agent_pool(config, student, box, engines.serving, arrivals.put,
                               {'teacher': teachers.serving, 'reference': references.serving})
    stack.enter_context(agents)
    rollout = rollouts.Sampled(config, student.config, tasks, engines.publisher, agents, run, arrivals.put)

  # ---- Training -------------------------------------------------------------------------------------------------------
  def tick() -> None:
    arrivals.gather()  # what is being trained with goes on
    progress.set()

  def evaluate(update: int) -> None:
    if agents is None or not (config.evaluation.dev_tasks or config.evaluation.held_out_tasks):
      return
    chosen = {'dev': tasks.dev[:config.evaluation.dev_tasks], 'held_out': tasks.held_out[:config.evaluation.held_out_tasks]}
    groups = wiring.plan_attempts(tasks, [t for part in chosen.values() for t in part], config.evaluation.attempts)
    progress.set(update=min(update, config.updates - 1), phase='evaluate', total=0)
    trajectories = attempts.evaluate(agents, update, update, groups, tick)
    for split, part in chosen.items():
      ids = {t.task_id for t in part}
      mine = [t for t in trajectories if t.task_id in ids]
      if mine:
        journal.evaluated(update, split, mine)

  trainer = stack.enter_context(trainer_lib.Trainer(
      config, optimizer, state, lanes, policy, rollout, arrivals, journal, first=first, limits=limits, layout=layout,
      params=params, others=others, evaluate=evaluate, save=checkpoints.save, sampling=sampling))
  del state, params, sampling
  if first == 0:
    evaluate(0)
  schedules.run(config, trainer, [group for groups in run.read_batches().values() for group in groups])

  # ---- The end --------------------------------------------------------------------------------------------------------
  if first < config.updates:
    trainer.publish()
    evaluate(config.updates)
  trainer.save()
  if config.checkpoint.export:
    weights.export_hf(workdir / 'final', layout.single(trainer.params), student.config, student.folder)
  page = report.build_report(run)
  outcome = metrics.outcome(run.read_metrics())
  print(_closing(outcome, page))
  return dataclasses.asdict(outcome)


def _closing(outcome, page) -> str:
  show = lambda value: '--' if value is None else f'{value:.3f}'
  return '\n'.join([
      f'mean training reward: first quarter {show(outcome.first_quarter)}, last quarter {show(outcome.last_quarter)}',
      f'dev reward:           before {show(outcome.dev_before)}, after {show(outcome.dev_after)}',
      f'held-out family:      before {show(outcome.held_out_before)}, after {show(outcome.held_out_after)}',
      f'report:               {page}'])


if __name__ == '__main__':
  cli.run(main)
