"""Peak learner memory of each granularity beside Sync's, over one whole update: gradients, barrier, optimizer step.

    python -m experiments.bench_memory --config=configs/smoke.py
    python -m experiments.bench_memory --config=configs/smoke.py --config.objective.name=opd

Every trajectory of the batch runs at once and their turns arrive in a random order, so that as many are open together as
the schedule and `learner.kept_mb` permit.  Each granularity has a process of its own; the peak is that of its second update.
"""

from __future__ import annotations

import json
import subprocess
import sys

from absl import flags
from ml_collections import config_flags

from experiments import cli

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Model and learner settings; see configs/.', lock_config=True)
_GRANULARITY = flags.DEFINE_string('granularity', '', 'Measure this one in this process; empty: each in a process of its own.')
_GROUPS = flags.DEFINE_integer('groups', 2, 'Groups of the batch.')
_SIZE = flags.DEFINE_integer('size', 4, 'Trajectories of a group.')
_TURNS = flags.DEFINE_integer('turns', 8, 'Turns of a trajectory.')
_TURN_TOKENS = flags.DEFINE_integer('turn_tokens', 64, 'Tokens of a turn.')
_PROMPT_TOKENS = flags.DEFINE_integer('prompt_tokens', 256, 'Tokens of a prompt.')
flags.mark_flags_as_required(['config'])


def measure(config, granularity: str) -> dict[str, float]:
  """Runs two updates; returns memory in MB: 'peak' of the second, and 'parameters'."""
  import jax
  from experiments import learner, memory, offline, synthetic, wiring
  from ts_jax.streaming import barrier, lane as lane_lib
  wiring.compile_cache()
  config = config.copy_and_resolve_references()
  if granularity == 'batch':
    config.schedule.name = 'sync'
  else:
    config.schedule.update(name='thundersync', granularity=granularity)
  student = wiring.load_student(config)
  optimizer, accumulator = learner.optimizer(config), config.schedule.accumulator
  state = barrier.init(optimizer, student.params())
  batch = synthetic.batch(student.config.vocab_size, groups=_GROUPS.value, size=_SIZE.value, turns=_TURNS.value,
                          turn_tokens=_TURN_TOKENS.value, prompt_tokens=_PROMPT_TOKENS.value)
  longest = max(t.longest_completion for t in batch.trajectories)
  policy = learner.with_memory(learner.policy(config), config, student, longest)
  trajectories = learner.open_trajectories(config, student, longest) if policy.by_turns else None
  lane = learner.lane(config, student, trajectories, lane_lib.shared_prefix([g.prompt_ids for g in batch.groups]))
  for _ in range(2):
    memory.reset_peak()
    direction, _ = offline.batch_direction(batch, state.params, [lane], policy, accumulator)
    state, _ = barrier.apply(optimizer, state, direction)
    del direction
  jax.block_until_ready(state.params)
  return {'peak': memory.peak_bytes() / 1e6, 'parameters': sum(x.nbytes for x in jax.tree.leaves(state.params)) / 1e6}


def main() -> None:
  if _GRANULARITY.value:
    print(json.dumps(measure(_CONFIG.value, _GRANULARITY.value)))
    return
  from ts_jax.streaming import scheduler
  found = {}
  for granularity in scheduler.GRANULARITIES:
    command = [sys.executable, '-m', 'experiments.bench_memory', *sys.argv[1:], f'--granularity={granularity}']
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
      sys.exit(done.returncode)
    found[granularity] = json.loads(done.stdout.splitlines()[-1])
    sync = found['batch']['peak']
    print(f'{granularity:10s} peak {found[granularity]["peak"]:6.0f} MB, {found[granularity]["peak"] / sync:.2f} of Sync\'s', flush=True)
  sync = found['batch']['peak']
  print(json.dumps({'parameters_mb': round(found['batch']['parameters']), 'sync_mb': round(sync),
                    **{f'{g}_over_sync': round(found[g]['peak'] / sync, 4) for g in found if g != 'batch'}}))


if __name__ == '__main__':
  cli.run(main)
