"""The learner of a run from its config: objective, schedule, memory, lane, optimizer."""

from __future__ import annotations

from concurrent import futures
import dataclasses
import math
import threading
from typing import Iterable, Sequence

import jax
import jax.numpy as jnp

from experiments import schedules, wiring
from ts_jax import types
from ts_jax.kernels import fold, products
from ts_jax.models import staged
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.objectives.objective import Objective
from ts_jax.objectives.terms import Terms
from ts_jax.streaming import barrier, forward_trajectories, lane as lane_lib, mismatch, open_trajectories as open_trajectories_lib, scheduler
from ts_jax.streaming import layout as layout_lib, sources, turn_trajectories, warmup
from ts_jax.streaming.buckets import Buckets
from ts_jax.streaming.layout import Layout
from ts_jax.telemetry import progress as progress_lib


# What must be added to a deviation that may be zero beside a difference that is not.
_LEAST_DEVIATION = 0.01


def buckets(config) -> Buckets:
  """The compiled shapes."""
  return Buckets(tuple(config.learner.buckets))


def functions(config, student: wiring.Student) -> sources.SourceFunctions:
  """The student's jitted learner functions."""
  return sources.SourceFunctions(student.config, config.agent.temperature, config.model.dtype, config.learner.remat_tokens,
                                 objective(config).terms, config.learner.matmul_precision)


def objective(config) -> Objective:
  """From late scalars to coefficients, by the objective's name; `estimator` and `aggregation` override those that go with it.

  Raises:
    ConfigError: a value is unknown, or does not go with the others.
  """
  settings = config.objective
  if settings.name not in (*policy_gradient.NAMES, 'opd'):
    raise types.ConfigError(f'objective {settings.name!r} is unknown: use one of {(*policy_gradient.NAMES, "opd")}')
  try:
    terms = _terms(config)
    return distillation.Distillation(terms) if settings.name == 'opd' else _policy_gradient(config, terms)
  except ValueError as e:
    raise types.ConfigError(f'config.objective: {e}') from None


def _terms(config) -> Terms:
  settings = config.objective
  if settings.kl > 0 and config.agent.temperature != 1:
    raise ValueError(f'kl={settings.kl} compares with log-probs of the reference at temperature 1: set config.agent.temperature=1 (it is '
                     f'{config.agent.temperature}), or kl=0')
  if settings.name == 'opd':
    for name, unset in (('aggregation', ('', 'token')), ('estimator', ('',)), ('baseline', ('group',)), ('advantage_clip', (0.0,))):
      if settings[name] not in unset:
        raise ValueError("objective 'opd' is a mean over all scored tokens, without rewards: unset "
                         f'config.objective.{name}={settings[name]!r}')
  return Terms(settings.importance_cap or None, settings.kl, settings.kl_estimator, settings.entropy)


def _policy_gradient(config, terms: Terms) -> policy_gradient.PolicyGradient:
  settings = config.objective
  estimator, aggregation = policy_gradient.NAMES[settings.name]
  made = policy_gradient.PolicyGradient(
      settings.estimator or estimator, settings.aggregation or aggregation, settings.epsilon, config.agent.max_trajectory_tokens,
      settings.baseline, settings.advantage_clip or None, terms)
  least = {'leave_one_out': 2, 'leave_one_out_std': 3}.get(made.estimator, 1)
  size = config.batch.group_size * (config.batch.prompts if made.needs_batch else 1)
  if size < least:
    raise ValueError(f'estimator {made.estimator!r} needs at least {least} rewards, a {made.baseline} has {size}: raise '
                     'config.batch.group_size')
  if made.estimator == 'leave_one_out_std' and made.advantage_clip is None and made.epsilon < _LEAST_DEVIATION:
    raise ValueError(f"with epsilon={made.epsilon} estimator 'leave_one_out_std' gives a trajectory whose others are all equal an "
                     f'advantage of {1 / made.epsilon:.0e} times the difference: set config.objective.advantage_clip, or epsilon to at '
                     f'least {_LEAST_DEVIATION}')
  return made


def open_trajectories(config, student: wiring.Student, max_tokens: int) -> open_trajectories_lib.OpenTrajectories | None:
  """What works on turns of unfinished trajectories of up to `max_tokens` completion tokens; None where nothing does."""
  settings = functions(config, student), buckets(config), max_tokens, objective(config).needs_teacher
  match policy(config).granularity:
    case 'forward' | scheduler.ELASTIC as granularity:
      on_device = forward_room(config, student, max_tokens)[0] if config.learner.kept_host_mb > 0 else None
      return forward_trajectories.ForwardTrajectories(*settings, config.learner.keep, on_device,
                                                       granularity == scheduler.ELASTIC)
    case 'turn':
      return turn_trajectories.TurnTrajectories(*settings)
  return None


def lane(config, student: wiring.Student, trajectories: open_trajectories_lib.OpenTrajectories | None = None,
         shared: Sequence[int] = (), index: int = 0, device: jax.Device | None = None) -> lane_lib.Lane:
  """A learner lane; `shared`: what all prompts begin with; `device`: where it computes, None for where the parameters are."""
  return lane_lib.Lane(index, functions(config, student), buckets(config),
                       accumulator=config.schedule.accumulator, reward_centre=config.objective.reward_centre,
                       objective=objective(config), trajectories=trajectories, shared_prefix=shared, device=device)


def devices(config) -> tuple[jax.Device | None, ...]:
  """Where the lanes of this process compute; (None,) for one lane in all, which computes where its parameters are.

  Raises:
    ConfigError: there are fewer devices than lanes.
  """
  number, found = config.schedule.lanes, jax.local_devices()
  if number < 1:
    raise types.ConfigError(f'config.schedule.lanes={number} must be at least 1')
  if number > len(found):
    raise types.ConfigError(f'config.schedule.lanes={number} needs as many devices, JAX has {len(found)} of platform {found[0].platform!r}: '
                            f'lower it, or for virtual devices on a CPU set JAX_NUM_CPU_DEVICES={number} in the environment')
  return (None,) if number == jax.process_count() == 1 else tuple(found[:number])


def layout(config) -> Layout:
  """Where the learner's state is.

  Raises:
    ConfigError: as `devices`.
  """
  if devices(config) == (None,):
    return Layout()
  return Layout(tuple(d for p in range(jax.process_count()) for d in jax.local_devices(p)[:config.schedule.lanes]))


def lanes(config, student: wiring.Student, policy: scheduler.Policy, max_tokens: int, shared: Sequence[int] = ()) -> list[lane_lib.Lane]:
  """The learner lanes of this process.

  Args:
    config: the run's.
    student: the model.
    policy: the schedule that they will run under.
    max_tokens: longest completion.
    shared: what all prompts begin with.

  Raises:
    ConfigError: as `devices`.
  """
  first = jax.process_index() * config.schedule.lanes
  return [lane(config, student, open_trajectories(config, student, max_tokens) if policy.by_turns else None, shared, first + i, device)
          for i, device in enumerate(devices(config))]


def policy(config) -> scheduler.Policy:
  """How lanes work under the config's schedule; `with_memory` adds what the memory budget permits."""
  settings = config.schedule
  schedules.max_staleness(config)
  if settings.accumulator not in fold.KINDS:
    raise types.ConfigError(f'accumulator {settings.accumulator!r} is unknown: use one of {fold.KINDS}')
  streaming = (*(g for g in scheduler.GRANULARITIES if g != 'batch'), scheduler.ELASTIC)
  if settings.granularity not in streaming:
    raise types.ConfigError(f'granularity {settings.granularity!r} is unknown: use one of {streaming}')
  by_turns = settings.granularity in ('turn', 'forward', scheduler.ELASTIC)
  whole = settings.name != 'thundersync'  # batches: as cheaply as possible, once they are complete
  if by_turns and whole:
    raise types.ConfigError(f'granularity {settings.granularity!r} streams, which schedule {settings.name!r} does not: set '
                            'schedule.granularity=trajectory')
  if config.learner.keep not in staged.KEEP:
    raise types.ConfigError(f'config.learner.keep={config.learner.keep!r} is unknown: use one of {staged.KEEP}')
  if config.learner.matmul_precision not in products.PRECISIONS:
    raise types.ConfigError(f'config.learner.matmul_precision={config.learner.matmul_precision!r} is unknown: use one of {products.PRECISIONS}')
  if config.objective.max_distinct_rewards < 1:
    raise types.ConfigError(f'config.objective.max_distinct_rewards={config.objective.max_distinct_rewards} must be at least 1')
  direct = settings.accumulator == 'float32'
  if settings.granularity == scheduler.ELASTIC and not direct:
    raise types.ConfigError(f'granularity {scheduler.ELASTIC!r} decides by time what is done early, so its rounding is never that of another '
                            "run: set schedule.accumulator=float32, or schedule.granularity=forward")
  return scheduler.Policy(
      granularity='batch' if whole else settings.granularity, direct=direct, admission_cap=settings.admission_cap,
      pack_rows=tuple(settings.pack_rows) if direct and settings.granularity not in ('turn', 'forward') else (1,),
      objective=objective(config), piece_lengths=forward_trajectories.piece_lengths(buckets(config)),
      reward_sums=config.objective.max_distinct_rewards)


def with_memory(policy: scheduler.Policy, config, student: wiring.Student, max_tokens: int) -> scheduler.Policy:
  """The schedule with as many open trajectories of `max_tokens` completion tokens as `learner.kept_mb` has room for.

  Raises:
    ConfigError: not even one.
  """
  if not policy.by_turns:
    return policy
  if policy.granularity == 'turn':
    passes = turn_trajectories.unit_passes(policy.objective.terms, policy.objective.needs_teacher)
    size, remedy = turn_trajectories.held_bytes(student.config, len(passes)), 'or use schedule.granularity=forward'
    cap = int(config.learner.kept_mb * 1e6 // size)
  else:
    size, remedy = _forward_bytes(config, student, max_tokens)[0], "set learner.keep='inputs', or learner.kept_host_mb"
    cap = sum(forward_room(config, student, max_tokens))
  if not cap:
    raise types.ConfigError(f'config.learner.kept_mb={config.learner.kept_mb} is less than one trajectory of {max_tokens} tokens '
                            f'holds ({size / 1e6:.0f} MB): raise it, {remedy}')
  return dataclasses.replace(policy, kept_cap=cap)


def _forward_bytes(config, student: wiring.Student, max_tokens: int) -> tuple[int, int]:
  """(what a trajectory run forward turn by turn holds, the part of it that can be in host memory)."""
  tokens = forward_trajectories.room(buckets(config), max_tokens)
  settings = student.config, config.learner.keep, jnp.dtype(config.model.dtype).itemsize
  return tokens * staged.token_bytes(*settings), tokens * staged.value_bytes(*settings)


def forward_room(config, student: wiring.Student, max_tokens: int) -> tuple[int, int]:
  """Trajectories of `max_tokens` completion tokens that may be open at once, with kept values (on the device, in host memory)."""
  whole, values = _forward_bytes(config, student, max_tokens)
  device = int(config.learner.kept_mb * 1e6)
  host = min(int(config.learner.kept_host_mb * 1e6) // values, device // (whole - values))
  return (device - host * (whole - values)) // whole, host


def optimizer(config) -> barrier.OptimizerConfig:
  """AdamW of the config."""
  return barrier.OptimizerConfig(**config.optimizer.to_dict())


def mismatch_limits(config) -> mismatch.Limits:
  """How far learner and sampler may be apart: as the config says, or (0) what the coarser of their precisions explains.

  Replayed log-probs may be of other parameters: nothing limits them.  Where the schedule trains old tokens, training explains more than
  precision does: only what the config says.
  """
  if config.rollout.replay:
    return mismatch.Limits(math.inf, math.inf)
  if config.schedule.name in schedules.STALE:
    stop = config.mismatch.stop or math.inf
    return mismatch.Limits(config.mismatch.warn or stop, stop)
  coarse = config.model.dtype == 'bfloat16' or wiring.sampler_dtype(config) != 'float32'
  warn, stop = mismatch.DEFAULTS['bfloat16' if coarse else 'float32']
  stop = config.mismatch.stop or stop
  return mismatch.Limits(config.mismatch.warn or min(warn, stop), stop)


def max_completion_tokens(config) -> int:
  """Longest completion a trajectory can have: what it samples, and the observations between."""
  bounds = wiring.limits(config)
  template_tokens = 64  # an observation's roles and separators
  between = (bounds.max_turns - 1) * (bounds.max_observation_tokens + template_tokens)
  return min(bounds.max_context_tokens, bounds.max_trajectory_tokens + between)


def prepared_lanes(config, student: wiring.Student, policy: scheduler.Policy, params, prompts: Iterable[Sequence[int]],
                   max_tokens: int, title: str = 'compile learner') -> list[lane_lib.Lane]:
  """The lanes of a run, with every shape compiled that its updates may need, on every lane's device.

  Args:
    config: the run's.
    student: the model.
    policy: the schedule that the lanes will run under.
    params: any parameters of the right shapes, whole on every lane's device.
    prompts: all prompts of the run, ids.  What they begin with in common is processed once per update; it must not depend on
      where a run is resumed, or a resumed run would not have the bits of an uninterrupted one.
    max_tokens: longest completion.
    title: of the progress bar.
  """
  prompts = set(map(tuple, prompts))
  shared, lengths = lane_lib.shared_prefix(prompts), {len(p) for p in prompts}
  made = lanes(config, student, policy, max_tokens, shared)
  shapes = len(made) * warmup.count(buckets(config), lengths, max_tokens, policy.pack_rows, made[0].trajectories)

  lock, ended = threading.Lock(), threading.Event()

  def advance(count: int) -> None:
    with lock:
      if ended.is_set():
        raise types.TsJaxError('warm-up on another device failed, or was interrupted')
      compiling.advance(count)

  def warm_up(one: lane_lib.Lane) -> None:
    warmup.warm_up(functions(config, student), layout_lib.on(params, one.device), buckets(config), prompt_tokens=lengths,
                   max_tokens=max_tokens, rows=policy.pack_rows, accumulator=config.schedule.accumulator, shared_tokens=len(shared),
                   objective=policy.objective, trajectories=one.trajectories, several=len(made) > 1, advance=advance)

  with progress_lib.Progress(shapes, title, 'shapes') as compiling, futures.ThreadPoolExecutor(len(made)) as pool:
    others = [pool.submit(warm_up, one) for one in made[1:]]
    try:
      warm_up(made[0])
      for other in others:
        other.result()
    except BaseException:
      ended.set()  # at the next shape
      raise
  return made
