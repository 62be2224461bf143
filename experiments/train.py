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
import queue
import signal
import sys
import time

from absl import flags
from ml_collections import config_flags

from experiments import cli
from ts_jax import types

_CONFIG = config_flags.DEFINE_config_file('config', None, 'What to run; see configs/.', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Run directory; made if needed, resumed if it holds this run.')
flags.mark_flags_as_required(['config', 'workdir'])


class Observer:
  """Turns events and spans into progress and records."""

  def __init__(self, run, progress):
    self._run, self._progress = run, progress

  def begin(self, update: int, total: int) -> None:
    """A new update starts."""
    self._start_s = time.time()
    self._total, self._turns, self._content, self._tokens, self._busy_s = total, set(), 0, 0, 0.0
    self._rewards: list[float] = []
    self._progress.begin_update(update, total)

  def __call__(self, event) -> None:
    """Takes one event or span."""
    match event:
      case types.Span():
        if event.lane >= 0:
          self._busy_s += event.end_s - event.start_s
        self._run.append_span(event)
      case types.TurnFixed():
        self._turns.add((event.group, event.index))
        self._tokens += len(event.turn.sampled.token_ids)
      case types.RewardFixed():
        self._run.append_trajectory(event.trajectory)
        self._rewards.append(event.trajectory.reward)
    elapsed = max(time.time() - self._start_s, 1e-3)
    done = len(self._rewards)
    self._progress.set(done=done, running=max(0, len(self._turns) - done), tokens_per_s=self._tokens / elapsed,
                       reward_mean=sum(self._rewards) / done if done else None, learner_busy=min(1.0, self._busy_s / elapsed))


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
  try:
    with contextlib.ExitStack() as stack:
      return _train(config, workdir, wiring, engine_cores, everything, stack)
  finally:
    os.sched_setaffinity(0, everything)


def _train(config, workdir, wiring, engine_cores, everything, stack: contextlib.ExitStack) -> dict:
  import jax
  from experiments import engines as engines_lib, learner
  from ts_jax.evaluation import attempts
  from ts_jax.models import weights
  from ts_jax.rollout import replay as replay_lib
  from ts_jax.streaming import barrier, host_memory, update as update_lib
  from ts_jax.telemetry import checkpoints as checkpoints_lib, interruption, metrics, progress as progress_lib, report, rundir

  # ---- What could be wrong is checked first -------------------------------------------------------------------------
  policy, optimizer, limits = learner.policy(config), learner.optimizer(config), learner.mismatch_limits(config)
  student = wiring.load_student(config)
  replaying = bool(config.rollout.replay)
  teacher, reference = (None if replaying else engines_lib.load_teacher(config, student, engine_cores, sorted(everything), name)
                        for name in types.SCORERS)
  box = None if replaying else stack.enter_context(wiring.sandbox(config))
  run = stack.enter_context(rundir.RunDirectory(workdir))
  resumed = run.open(config, may_change=('mismatch.warn', 'mismatch.stop'))
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
  events: queue.Queue = queue.Queue()
  engines = agents = replayer = None
  if replaying:
    replayer = replay_lib.Replayer(events.put_nowait, config.rollout.replay_scale, events.put_nowait)
    stack.callback(replayer.close)
  else:
    exchange = stack.enter_context(engines_lib.exchange_folder(config, student, workdir))
    engines = stack.enter_context(engines_lib.rollout_engines(config, student, engine_cores, run.logs, exchange, cache))
    print(f'publish   {engines.publisher.description}', file=sys.stderr)
    teachers, references = (stack.enter_context(engines_lib.teachers(config, found, run.logs, cache)) for found in (teacher, reference))

  state = barrier.init(optimizer, student.params())
  checkpoints = checkpoints_lib.Checkpoints(run.checkpoints, config.checkpoint.keep)
  stack.callback(checkpoints.close)
  first = 0
  if resumed and checkpoints.latest is not None:
    first, state = checkpoints.restore(state)
    print(f'resuming  at update {first}', file=sys.stderr)
  if resumed:
    run.resume_at(first, keep_trajectories=True)
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
  lane = learner.prepared_lane(config, student, policy, state.params, prompts, longest)

  if engines is not None:
    engines.wait_started()
    for scorers in (teachers, references):
      scorers.wait_started()
    engines.publisher.publish(state.params, student.config, state.policy_version)
    engines_lib.check_identity(config, student, engines, teachers, references)
    agents = wiring.agent_pool(config, student, box, engines.serving, events.put_nowait,
                               {'teacher': teachers.serving, 'reference': references.serving})
    stack.enter_context(agents)

  # ---- Training -------------------------------------------------------------------------------------------------------
  progress = progress_lib.TrainProgress(config.updates, first)
  stack.callback(progress.close)
  observer = Observer(run, progress)

  def evaluate(update: int) -> None:
    if agents is None or not (config.evaluation.dev_tasks or config.evaluation.held_out_tasks):
      return
    chosen = {'dev': tasks.dev[:config.evaluation.dev_tasks], 'held_out': tasks.held_out[:config.evaluation.held_out_tasks]}
    groups = wiring.plan_attempts(tasks, [t for part in chosen.values() for t in part], config.evaluation.attempts)
    progress.set(update=min(update, config.updates - 1), phase='evaluate', total=0)
    trajectories = attempts.evaluate(agents, update, state.policy_version, groups, lambda: progress.set())
    while not events.empty():
      events.get_nowait()
    for split, part in chosen.items():
      ids = {t.task_id for t in part}
      mine = [t for t in trajectories if t.task_id in ids]
      if mine:
        progress.finish_evaluation(writer.write(metrics.eval_record(update, split, mine, family_of, time.time())))

  saveable = [state]  # empty while the barrier consumes the state

  def save_on_exit(kind, value, traceback) -> None:
    if kind is not None and saveable and step_update > first:
      checkpoints.save(step_update, saveable[0])

  step_update = first
  stack.push(save_on_exit)
  if first == 0:
    evaluate(0)
  for update in range(first, config.updates):
    step_update = update
    begin_s = time.time()
    if replaying:
      trajectories = recorded(update)
      plans = replay_lib.plans(trajectories)
    else:
      groups = wiring.plan_update(config, tasks, update)
      plans = [plan for plan, _ in groups]
    observer.begin(update, sum(p.size for p in plans))
    if replaying:
      replayer.submit_update(update, state.policy_version, trajectories)
    else:
      kept = [t for t in run.read_trajectories(update) if t.policy_version == state.policy_version]
      for trajectory in kept:  # an interrupted update goes on where it was
        events.put(types.ContentFixed(dataclasses.replace(trajectory, reward=None, tests_passed=())))
        events.put(types.RewardFixed(trajectory))
      agents.submit_update(update, state.policy_version, groups, skip={(t.group, t.index) for t in kept})

    result = update_lib.run_update(update, state.policy_version, state.params, plans, events, [lane], policy,
                                   stall_timeout_s=config.rollout.stall_timeout_s, observe=observer)
    warning = limits.check(result.mismatch, update)
    if warning:
      progress.line.lasting(f'WARNING   {warning}')

    with interruption.delayed():  # a step that was taken is recorded
      progress.set(phase='optimizer')
      barrier_s = time.time()
      direction = barrier.reduce_lanes(config.schedule.accumulator, result.sums, result.normaliser)
      result = dataclasses.replace(result, sums=())  # two copies of the parameters' size
      saveable.clear()
      state, norm = barrier.apply(optimizer, state, direction)
      jax.block_until_ready(state.params)
      saveable.append(state)
      step_update = update + 1
      publish_s = time.time()
      observer(types.Span('optimizer', barrier_s, publish_s, update))
      if engines is not None:
        progress.set(phase='publish')
        engines.publisher.publish(state.params, student.config, state.policy_version)
      end_s = time.time()
      observer(types.Span('publish', publish_s, end_s, update))

      busy_s = sum(s.end_s - s.start_s for s in result.spans)
      summary = metrics.summarise(result.batch.trajectories, family_of)
      rollout_end_s = max(result.rollout_end_s, begin_s + 1e-3)  # a resumed update may have nothing left to sample
      rollout_s = rollout_end_s - begin_s
      progress.finish_update(writer.write(metrics.UpdateRecord(
          **summary, **result.mismatch.summary(), update=update, policy_version=result.batch.policy_version, time_s=end_s,
          grad_norm=norm, learning_rate=optimizer.learning_rate, step_s=end_s - begin_s, rollout_s=rollout_s,
          learner_busy_s=busy_s, learner_idle_s=max(0.0, end_s - begin_s - busy_s - (publish_s - barrier_s)),
          tail_s=result.learner_end_s - rollout_end_s, optimizer_s=publish_s - barrier_s, publish_s=end_s - publish_s,
          tokens_per_s=summary['generated_tokens'] / rollout_s, skipped_sources=result.skipped, wasted_sources=result.wasted)))
    done = update + 1
    if config.evaluation.every and done % config.evaluation.every == 0 and done < config.updates:
      evaluate(done)
    if config.checkpoint.every and done % config.checkpoint.every == 0 and done < config.updates:
      checkpoints.save(done, state)

  # ---- The end --------------------------------------------------------------------------------------------------------
  if first < config.updates:
    evaluate(config.updates)
  checkpoints.save(config.updates, state)
  if config.checkpoint.export:
    weights.export_hf(workdir / 'final', state.params, student.config, student.folder)
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
