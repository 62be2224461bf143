"""Streamed updates against whole sequences: a tiny model in float64, the real student in float32, exact sums in any order.

Groups whose rewards are all equal have no direction; among the recorded ones, groups with a reward difference are compared.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments import learner, offline, recording, reference, wiring
from ts_jax import types
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.objectives import policy_gradient
from ts_jax.streaming import barrier, forward_trajectories, lane as lane_lib, scheduler, sources
from ts_jax.streaming.buckets import Buckets
from ts_jax.telemetry import progress as progress_lib

_MAX_RECORDED = 12
_KEPT_CAP = 4
_EXACT_CAP = 2  # exact statistics take 16 bytes a parameter and group
_TINY = ModelConfig(vocab_size=67, width=24, ffn_width=40, layers=3, heads=4, kv_heads=2, head_dim=6)


def float64_error() -> float:
  """Largest relative error of sync and thundersync over random batches of a tiny model in float64."""
  worst = 0.0
  with jax.enable_x64(True):
    params = jax.tree.map(lambda x: x.astype(jnp.float64), llama.init_params(_TINY, jax.random.PRNGKey(0), scale=0.3))
    for seed in range(4):
      batch = offline.random_batch(np.random.default_rng(seed))
      expected = reference.grpo_direction(_TINY, params, batch)
      for policy in (scheduler.Policy(granularity='batch', pack_rows=(2, 1)), scheduler.Policy(admission_cap=2)):
        lane = lane_lib.Lane(0, sources.SourceFunctions(_TINY, dtype='float64'), Buckets((24,)), accumulator='float32',
                             reward_centre=0.75)
        got, _ = offline.batch_direction(batch, params, [lane], policy, 'float32', order_seed=seed)
        worst = max(worst, offline.relative_error(got, expected))
  return worst


def recorded_batch(config, folder: pathlib.Path, groups: int) -> types.LogicalBatch:
  """A batch of `groups` recorded groups with a reward difference (their indices renumbered).

  Raises:
    TsJaxError: too few of them within the number of batches worth recording.
  """
  found = []
  for updates in range(1, _MAX_RECORDED + 1):
    run = recording.record(config, folder, updates)
    found += [g for g in recording.batch(run, updates - 1).groups if not policy_gradient.is_uniform([t.reward for t in g.trajectories])]
    if len(found) >= groups:
      break
  else:
    raise types.TsJaxError(f'{_MAX_RECORDED} recorded batches hold {len(found)} groups with a reward difference, fewer than '
                           f'--groups={groups}: use easier tasks or larger groups')

  def renumbered(index: int, group: types.Group) -> types.Group:
    members = tuple(types.Trajectory.from_json({**t.to_json(), 'update': 0, 'group': index}) for t in group.trajectories)
    return types.Group(index, group.task_id, group.prompt_ids, members)

  return types.LogicalBatch(0, 0, tuple(renumbered(i, g) for i, g in enumerate(found[:groups])))


def whole_sequence_direction(functions: sources.SourceFunctions, params, batch: types.LogicalBatch, objective):
  """Ascent direction by the student's own layers over whole sequences, one by one: nothing shared, split, streamed or scheduled."""
  total = jax.tree.map(lambda x: np.zeros(x.shape), params)
  for group in batch.groups:
    coefficients = objective.source_coefficients([t.reward for t in group.trajectories])
    pieces = ((t, s, c) for t, c in zip(group.trajectories, coefficients) for s in reference.sequences(t))
    for trajectory, sequence, coefficient in pieces:
      tokens = np.asarray(sequence.prompt_ids + sequence.completion_ids, np.int32)
      at = np.flatnonzero((False,) * len(sequence.prompt_ids) + sequence.completion_mask)
      if not len(at):
        continue
      inputs = np.pad(tokens[:-1], (0, -(len(tokens) - 1) % reference.BLOCK))
      weights = np.full((1, len(at)), objective.token_weight(len(batch.groups), len(group.trajectories), trajectory.scored_tokens))
      whole = sources.SourceBatch(inputs[None], (at - 1)[None], tokens[at][None], weights)
      result = functions.source_gradient(params, llama.empty_boundary(functions.config), whole)
      reference.add_to(total, result.gradient, coefficient)
  return total


def student_errors(config, student: wiring.Student, batch: types.LogicalBatch) -> dict[str, float]:
  """Float32 streamed direction against float32 full sequences; the larger figure of sync and thundersync.

  Returns:
    'whole': relative error against the student's layers on whole sequences; 'independent': against code that shares
    nothing with the student's, whose other order of operations has float32 rounding of its own; 'cosine': 1 - cosine
    against 'independent'; 'forward': as 'whole', for thundersync with turns run forward on arrival, whose backward pass from
    kept values is compiled differently.
  """
  params, objective, functions = student.params(), learner.objective(config), learner.functions(config, student)
  longest = max(t.longest_completion for t in batch.trajectories)
  policy = scheduler.Policy(admission_cap=config.schedule.admission_cap, objective=objective, kept_cap=_KEPT_CAP)
  policies = [dataclasses.replace(policy, granularity='batch'), policy, dataclasses.replace(policy, granularity='forward')]
  buckets, shared = learner.buckets(config), lane_lib.shared_prefix([g.prompt_ids for g in batch.groups])
  whole = offline.flat(whole_sequence_direction(functions, params, batch, objective))
  independent = offline.flat(reference.grpo_direction(student.config, params, batch, objective.epsilon))
  worst = {'whole': 0.0, 'independent': 0.0, 'cosine': 0.0, 'forward': 0.0}
  for policy in policies:
    trajectories = forward_trajectories.ForwardTrajectories(functions, buckets, longest) if policy.by_turns else None
    lane = learner.lane(config, student, trajectories, shared)
    got = offline.flat(offline.batch_direction(batch, params, [lane], policy, 'float32')[0])
    # 1 - cos from the difference of unit vectors: 1 - dot would cancel to the rounding of the dot product.
    cosine = 0.5 * float(np.sum((got / np.linalg.norm(got) - independent / np.linalg.norm(independent))**2))
    error = float(np.linalg.norm(got - whole) / np.linalg.norm(whole))
    if policy.by_turns:
      figures = {'forward': error}
    else:
      figures = {'whole': error, 'cosine': cosine, 'independent': float(np.linalg.norm(got - independent) / np.linalg.norm(independent))}
    worst |= {k: max(worst[k], v) for k, v in figures.items()}
  return worst


def equal_bits(config, student: wiring.Student, batch: types.LogicalBatch, orders: int) -> tuple[bool, int]:
  """With the exact accumulator: (sync and thundersync give the same parameter bits, number of orders that do too)."""
  optimizer = learner.optimizer(config)
  lane = lane_lib.Lane(0, learner.functions(config, student), learner.buckets(config), accumulator='exact',
                       reward_centre=config.objective.reward_centre, objective=learner.objective(config),
                       shared_prefix=lane_lib.shared_prefix([g.prompt_ids for g in batch.groups]))

  def new_parameters(streaming: bool, order: int) -> bytes:
    state = barrier.init(optimizer, student.params())
    policy = scheduler.Policy(granularity='trajectory' if streaming else 'batch', direct=False, admission_cap=_EXACT_CAP,
                              objective=learner.objective(config))
    direction, _ = offline.batch_direction(batch, state.params, [lane], policy, 'exact', order_seed=order)
    state, _ = barrier.apply(optimizer, state, direction)
    return offline.bits(state.params)

  with progress_lib.Progress(orders + 1, 'exact updates', 'updates') as progress:
    sync = new_parameters(False, 0)
    progress.advance()
    equal = []
    for order in range(orders):
      equal.append(new_parameters(True, order) == sync)
      progress.advance()
  return equal[0], sum(equal)


def report(config, folder: pathlib.Path, groups: int, orders: int) -> None:
  """Runs the comparison and prints it; the last line is one JSON object.

  Args:
    config: model, tasks and batch sizes.
    folder: of the recording.
    groups: recorded groups to compare.
    orders: random arrival orders with exact sums.
  """
  tiny = float64_error()
  student = wiring.load_student(config)
  batch = recorded_batch(config, folder, groups)
  errors = student_errors(config, student, batch)
  schedules, equal = equal_bits(config, student, batch, orders)
  print(f'tiny model, float64, independent code: relative error {tiny:.1e}')
  print(f'student, float32, {len(batch.trajectories)} recorded trajectories: relative error {errors["whole"]:.1e} against whole '
        f'sequences through the same layers ({errors["forward"]:.1e} with turns run forward on arrival), {errors["independent"]:.1e} against '
        f'independent code; 1 - cosine {errors["cosine"]:.1e}')
  print(f'student, exact accumulator: equal bits for sync and thundersync: {schedules}; for {equal} of {orders} arrival orders')
  print(json.dumps({'float64_relative_error': tiny, 'float32_relative_error': errors['independent'],
                    'float32_whole_sequence_error': errors['whole'], 'float32_forward_error': errors['forward'],
                    'one_minus_cosine': errors['cosine'], 'bit_equal_schedules': schedules, 'bit_equal_orders': equal}))
