"""Step time of thundersync against sync on the same recorded batches, replayed so that rollout takes about as long as learning.

    python -m experiments.speedup --config=configs/smoke.py

The two schedules alternate within one run.  R is rollout time, L the learner's service in Sync (its cheapest pass), P the
optimizer step; the bound is (R + L + P) / (max(R, L) + P).
"""

from __future__ import annotations

import json
import os
import pathlib

from absl import flags
from ml_collections import config_flags
import numpy as np

from experiments import cli, learner, recording, replayed_schedule, wiring
from ts_jax.streaming import barrier, host_memory
from ts_jax.telemetry import progress as progress_lib

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Model, tasks and batch sizes; see configs/.', lock_config=True)
_RECORDING = flags.DEFINE_string('recording', 'runs/recording', 'Folder of the recorded batches.')
_BATCHES = flags.DEFINE_integer('batches', 2, 'Recorded batches to replay.')
_ROUNDS = flags.DEFINE_integer('rounds', 2, 'Times each batch runs under each schedule.')
flags.mark_flags_as_required(['config'])


def step(config, lanes, state, policy, trajectories, scale: float):
  """One update; returns (next state, R, learner service, P, step time), seconds."""
  state, (done,) = replayed_schedule.run(config, lanes, policy, state, [trajectories], scale)
  service = sum(s.end_s - s.start_s for s in done.result.spans)
  return state, done.result.rollout_end_s - done.begin_s, service, done.end_s - done.barrier_s, done.end_s - done.begin_s


def measure(config, folder: pathlib.Path) -> dict[str, float]:
  """Runs the comparison and returns the figures."""
  student = wiring.load_student(config)
  run = recording.record(config, folder, _BATCHES.value)
  batches = [run.read_trajectories(k) for k in range(_BATCHES.value)]
  layout = learner.layout(config)
  state = barrier.init(learner.optimizer(config), student.params(), layout)
  flat = [t for b in batches for t in b]
  prompts, longest = {t.prompt_ids for t in flat}, max(t.longest_completion for t in flat)
  # Sync does its cheapest pass, whatever granularity is configured.
  streamed = learner.with_memory(learner.policy(config), config, student, longest)
  configs = {'sync': _cheapest_sync(config), 'thundersync': config}
  policies = {'sync': learner.policy(configs['sync']), 'thundersync': streamed}
  lanes = {name: learner.prepared_lanes(config, student, policy, layout.whole(state.params), prompts, longest, f'compile {name}')
           for name, policy in policies.items()}

  # Balance: one Sync update per batch with all rewards at once measures L; recorded times are scaled to it.
  scales = []
  for trajectories in batches:
    state, *_ = step(configs['sync'], lanes['sync'], state, policies['sync'], trajectories, 0.0)  # settles caches and buffers
    state, _, service, _, _ = step(configs['sync'], lanes['sync'], state, policies['sync'], trajectories, 0.0)
    recorded = max(t.reward_s for t in trajectories) - min(t.start_s for t in trajectories)
    scales.append(service / recorded)

  rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in policies}
  with progress_lib.Progress(2 * _ROUNDS.value * len(batches), 'alternate schedules', 'updates') as progress:
    for _ in range(_ROUNDS.value):
      for trajectories, scale in zip(batches, scales):
        for name, policy in policies.items():
          state, *row = step(configs[name], lanes[name], state, policy, trajectories, scale)
          rows[name].append(tuple(row))
          progress.advance()

  rollout, service, suffix, sync_step = np.mean(rows['sync'], axis=0)
  _, stream_service, _, stream_step = np.mean(rows['thundersync'], axis=0)
  bound = (rollout + service + suffix) / (max(rollout, service) + suffix)
  speedup = sync_step / stream_step
  print(f'R {rollout:.2f} s, L {service:.2f} s (thundersync {stream_service:.2f} s), P {suffix:.2f} s; {len(flat)} trajectories')
  print(f'step: sync {sync_step:.2f} s, thundersync {stream_step:.2f} s; speedup {speedup:.2f} of a bound of {bound:.2f}')
  return {'speedup': speedup, 'bound': bound, 'fraction_of_bound': speedup / bound, 'rollout_over_learner': rollout / service}


def _cheapest_sync(config):
  """The config with Sync, which packs where it may."""
  sync = config.copy_and_resolve_references()
  sync.schedule.update(name='sync', granularity='trajectory', max_staleness=0)
  return sync


def main() -> None:
  config, folder = _CONFIG.value, pathlib.Path(_RECORDING.value).resolve()
  learner_cores, engine_cores = wiring.split_cores(config)
  os.sched_setaffinity(0, learner_cores)  # before JAX starts its threads
  host_memory.keep_freed_memory()
  wiring.compile_cache()
  recording.record(config, folder, _BATCHES.value, engine_cores)
  figures = measure(config, folder)
  print(json.dumps({k: round(float(v), 4) for k, v in figures.items()}))


if __name__ == '__main__':
  cli.run(main)
