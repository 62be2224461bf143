"""Step time of the four schedules on equal workloads, engine and tools on some cores and the learner on others, and the bound.

    python -m experiments.speedup --config=configs/speedup.py --objectives=grpo,opd --seeds=42,43,44

Schedules alternate.  Each one's run begins with the same parameters, tasks and seeds, on engines of its own; of its updates the
first is left out.  Then the batches that Sync sampled are replayed under every schedule, with times at which their rollout takes as
long as their learning.  With --config.rollout.replay=FOLDER only the batches of that run are replayed, and nothing is sampled.

R is rollout time, L the learner's service in Sync (its cheapest pass), P what follows the barrier: optimizer step and
publication; the bound is (R + L + P) / (max(R, L) + P).  What stages cost each other on shared memory: `learner_slowdown` is
thundersync's service per token while the engine samples over that in the replay, `rollout_slowdown` its rollout time per token over
Sync's.  Ends with one JSON object, by objective.
"""

from __future__ import annotations

import json
import math
import os
import pathlib

from absl import flags
from ml_collections import config_flags

from experiments import cli, contenders as contenders_lib, engines as engines_lib, learner, schedules, step_figures, wiring
from ts_jax import types
from ts_jax.streaming import host_memory
from ts_jax.telemetry import rundir

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Model, tasks and batch sizes; see configs/.', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/speedup', 'Folder of tasks, logs, and the batches that Sync sampled.')
_OBJECTIVES = flags.DEFINE_list('objectives', None, "Objectives to compare under; default: the config's.")
_SCHEDULES = flags.DEFINE_list('schedules', list(schedules.NAMES), 'Schedules to compare; sync and thundersync among them.')
_SEEDS = flags.DEFINE_list('seeds', None, "Seeds of tasks and sampling; default: the config's.")
_ROUNDS = flags.DEFINE_integer('rounds', 1, 'Times each schedule runs for each seed.', lower_bound=1)
_UPDATES = flags.DEFINE_integer('updates', 3, 'Consecutive updates of a run; the first is left out.', lower_bound=2)
_BALANCE = flags.DEFINE_bool('balance', True, 'Find the agent.concurrency at which rollout takes about as long as learning.')
_REPLAY_RATIO = flags.DEFINE_float('replay_ratio', 1.0, 'Rollout over learner time of the replays.', lower_bound=0.01)
_MAX_STALENESS = flags.DEFINE_integer('max_staleness', 0, 'Of fully_async; 0: its default.', lower_bound=0)
flags.mark_flags_as_required(['config'])

_NEAR = 1.15  # rollout and learner time are balanced within this factor
_CLOSE = 1.07  # good enough to stop the search
_WAVES = 2
_MAY_CHANGE = ('updates', 'agent.concurrency')  # from one comparison in a folder to the next


def with_objective(config, name: str):
  """The config of a comparison under one objective."""
  config = config.copy_and_resolve_references()
  config.objective.name, config.updates = name, _UPDATES.value
  return config


def with_seed(config, seed: int):
  """The config with another seed of tasks and sampling."""
  config = config.copy_and_resolve_references()
  config.seed = seed
  return config


def seeds(config) -> list[int]:
  """`--seeds` as numbers.

  Raises:
    ConfigError: one is not a number.
  """
  try:
    return [int(s) for s in _SEEDS.value or [config.seed]]
  except ValueError:
    raise types.ConfigError(f'--seeds={",".join(_SEEDS.value)} must be whole numbers, for instance --seeds=42,43') from None


def check(config, student: wiring.Student, usable: list[int]) -> None:
  """Finds what could be wrong before anything is measured.

  Raises:
    ConfigError: what is.
  """
  unknown = sorted(set(_SCHEDULES.value) - set(schedules.NAMES))
  if unknown or not {'sync', 'thundersync'} <= set(_SCHEDULES.value):
    raise types.ConfigError(f'--schedules={",".join(_SCHEDULES.value)} must be some of {schedules.NAMES}, sync and thundersync among them')
  seeds(config)
  for name in _SCHEDULES.value:
    learner.policy(contenders_lib.with_schedule(config, name, _MAX_STALENESS.value))
  if config.rollout.replay:
    if learner.objective(config).needs_teacher and any(t.completion_teacher_log_probs is None for batch in recorded(config) for t in batch):
      raise types.ConfigError(f'{config.rollout.replay} was recorded without a teacher, which objective {config.objective.name!r} needs: replay '
                              'a run of opd, or leave it out of --objectives')
    return
  for scorer in types.SCORERS:
    engines_lib.load_teacher(config, student, usable, usable, scorer)


def recorded(config) -> contenders_lib.Batches:
  """The first batches of the run that `config.rollout.replay` names.

  Raises:
    ConfigError: it has fewer.
  """
  run = rundir.RunDirectory(config.rollout.replay)
  there = run.updates_with_trajectories()
  if len(there) < config.updates:
    raise types.ConfigError(f'{run.path} has {len(there)} recorded updates and --updates={config.updates} are wanted: lower it, or replay '
                            'another run')
  return [run.read_trajectories(k) for k in there[:config.updates]]


def measure(config, folder: pathlib.Path, engine_cores: tuple[int, ...]) -> dict:
  """Compares the schedules under one objective; returns its JSON values."""
  student, name = wiring.load_student(config), config.objective.name
  if config.rollout.replay:
    batches = recorded(config)
    flat = [t for b in batches for t in b]
    contenders = _contenders(config, student, {t.prompt_ids for t in flat}, max(t.longest_completion for t in flat))
    rounds = replays(contenders, config, batches, engine_cores)
    return outcome(name, rounds, rounds)
  tasks = wiring.load_tasks(config, folder, student)
  runs = {seed: rundir.RunDirectory(folder / f'{name}-{seed}') for seed in seeds(config)}
  for seed, run in runs.items():
    with run:  # that it may be written
      run.open(with_seed(config, seed), may_change=_MAY_CHANGE)
  contenders = _contenders(config, student, tasks.prompts.values(), learner.max_completion_tokens(config))
  place = tasks, folder / f'{name}-engines', engine_cores
  if _BALANCE.value:
    config.agent.concurrency = balanced_concurrency(config, contenders, place)
  sampled, replayed = [], []
  for seed, run in runs.items():
    mine, batches = with_seed(config, seed), []
    for _ in range(_ROUNDS.value):
      figures = {}
      for schedule in contenders.names:
        figures[schedule], done = contenders.sampled(mine, schedule, *place)
        if schedule == 'sync' and not batches:
          batches = [list(d.result.batch.trajectories) for d in done]
      sampled.append(figures)
    _keep(run, mine, batches)
    replayed += replays(contenders, mine, batches, engine_cores)
  return outcome(name, sampled, replayed) | {'concurrency': config.agent.concurrency}


def _contenders(config, student, prompts, max_tokens: int) -> contenders_lib.Contenders:
  return contenders_lib.Contenders(config, student, _SCHEDULES.value, prompts, max_tokens, _MAX_STALENESS.value)


def _keep(run: rundir.RunDirectory, config, batches: contenders_lib.Batches) -> None:
  """Writes what was sampled, to be replayed again."""
  with run:
    run.open(config, may_change=_MAY_CHANGE)
    run.resume_at(0)
    for batch in batches:
      for trajectory in batch:
        run.append_trajectory(trajectory)


def replays(contenders: contenders_lib.Contenders, config, batches: contenders_lib.Batches, cores: tuple[int, ...]) -> list[dict]:
  """Figures by schedule of each round of replays."""
  balanced = contenders.balanced(config, batches, _REPLAY_RATIO.value, cores)
  return [{name: contenders.replayed(config, name, balanced, 1.0, cores)[0] for name in contenders.names} for _ in range(_ROUNDS.value)]


def balanced_concurrency(config, contenders: contenders_lib.Contenders, place: tuple) -> int:
  """Trajectories that sample at once, at which rollout takes about as long as learning; at least two waves of them make a batch."""
  size = config.batch.prompts * config.batch.group_size
  # One slot stays free: publications in flight ask the engine for a probe.
  most = min(size // _WAVES, config.rollout.slots * config.rollout.replicas - 1)
  if most < 1:
    raise types.ConfigError(f'{size} trajectories on {config.rollout.slots} slots make no {_WAVES} waves: raise config.batch or config.rollout.slots')
  trial, tried = config.copy_and_resolve_references(), {}
  trial.updates, chosen = 2, min(config.agent.concurrency, most)
  while chosen not in tried and len(tried) < 4:
    trial.agent.concurrency = chosen
    figures, _ = contenders.sampled(trial, 'sync', *place)
    tried[chosen] = figures.rollout_s / figures.service_s
    print(f'balance: {chosen} trajectories at once, rollout / learner {tried[chosen]:.2f}', flush=True)
    if 1 / _CLOSE <= tried[chosen] <= _CLOSE:
      break
    chosen = min(max(round(chosen * tried[chosen]**1.5), 1), most)  # rollout time falls with less than its inverse
  best = min(tried, key=lambda c: abs(math.log(tried[c])))
  if not 1 / _NEAR <= tried[best] <= _NEAR:
    print(f'balance: not reached with {best} of at most {most} at once; rollout is {"longer" if tried[best] > 1 else "shorter"} than learning: '
          'change config.rollout.slots, config.agent or config.batch', flush=True)
  return best


def outcome(name: str, sampled: list[dict], replayed: list[dict]) -> dict:
  """Prints both tables; returns the JSON values."""
  real, replay = step_figures.Comparison(sampled), step_figures.Comparison(replayed)
  if sampled is not replayed:
    real.print(f'{name}, sampled')
  replay.print(f'{name}, replayed')
  mean, stream = lambda values: float(values.mean()), 'thundersync'
  per_token = [mean(c.each(lambda mine, sync: mine.source_s_per_token, stream)) for c in (real, replay)]
  found = {
      'speedup': mean(real.speedup(stream)), 'speedup_std': float(real.speedup(stream).std()), 'bound': mean(real.bound()),
      'fraction_of_bound': mean(real.fraction_of_bound(stream)), 'rollout_over_learner': mean(real.balance()),
      'replay_speedup': mean(replay.speedup(stream)), 'replay_bound': mean(replay.bound()),
      'replay_fraction_of_bound': mean(replay.fraction_of_bound(stream)), 'learner_slowdown': per_token[0] / per_token[1],
      'rollout_slowdown': mean(real.each(lambda mine, sync: mine.rollout_s_per_token / sync.rollout_s_per_token, stream)),
      'trajectories': mean(real.each(lambda mine, sync: sync.trajectories, 'sync'))}
  print(f'{name}: speedup {found["speedup"]:.3f}, {found["fraction_of_bound"]:.3f} of the bound {found["bound"]:.3f}; replayed '
        f'{found["replay_fraction_of_bound"]:.3f} of {found["replay_bound"]:.3f}; learner slowed down by {found["learner_slowdown"]:.3f}, rollout by '
        f'{found["rollout_slowdown"]:.3f}\n', flush=True)
  return found | {'schedules': real.rows(), 'replayed': replay.rows()}


def main() -> None:
  config, folder = _CONFIG.value, pathlib.Path(_WORKDIR.value).resolve()
  usable = sorted(os.sched_getaffinity(0))
  learner_cores, engine_cores = wiring.split_cores(config)
  os.sched_setaffinity(0, learner_cores)  # before JAX starts its threads
  host_memory.keep_freed_memory()
  wiring.compile_cache()
  configs = [with_objective(config, name) for name in _OBJECTIVES.value or [config.objective.name]]
  student = wiring.load_student(config)
  for mine in configs:
    check(mine, student, usable)
  print(json.dumps(cli.rounded({mine.objective.name: measure(mine, folder, engine_cores) for mine in configs}, 5)))


if __name__ == '__main__':
  cli.run(main)
