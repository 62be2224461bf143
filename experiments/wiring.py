"""Builds the parts of a run from its config: student, tasks, agents.  The engines are in `engines`, the learner in `learner`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from ts_jax import types
from ts_jax.agents import environment, limits as limits_lib, loop, pool, prompt as prompt_lib, sandbox as sandbox_lib
from ts_jax.data import demonstrations, generator, splits, tasks as tasks_lib, validate, verifier as verifier_lib
from ts_jax.models import chat, source, tokenizer as tokenizer_lib, weights
from ts_jax.models.config import ModelConfig
from ts_jax.rollout import replicas
from ts_jax.rollout.vllm import environment as vllm_environment
from ts_jax.telemetry import progress as progress_lib


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


def load_model(name: str) -> tuple[ModelConfig, Any]:
  """Sizes and parameters of a folder, hub id or 'package:NAME', on the device."""
  folder = source.resolve_model(name)
  return weights.load_config(folder), jax.tree.map(jnp.asarray, weights.load_params(folder))


def compile_cache(least_s: float = 0.5) -> pathlib.Path:
  """Switches on the persistent cache of this process for compilations of at least `least_s` seconds; returns its folder."""
  folder = pathlib.Path(os.environ.get('TS_JAX_CACHE', pathlib.Path.home() / '.cache' / 'ts_jax')) / 'compiled'
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', least_s)
  return folder


def limits(config) -> limits_lib.Limits:
  """Table 6 from the config."""
  names = [f.name for f in dataclasses.fields(limits_lib.Limits)]
  return limits_lib.Limits(**{n: config.agent[n] for n in names})


def vllm_dtype(config) -> str:
  """Precision of vLLM servers that are started here."""
  return config.vllm.dtype if config.vllm.dtype != 'auto' else {'cpu': 'float32', 'cuda': 'bfloat16'}[vllm_environment.accelerator()]


def sampler_dtype(config) -> str:
  """Precision of the rollout engines; of those that somebody else started, what `config.vllm.dtype` says, or else the coarser."""
  if config.rollout.urls:
    return 'bfloat16' if config.vllm.dtype == 'auto' else config.vllm.dtype
  return vllm_dtype(config) if config.rollout.engine == 'vllm' else 'float32'


def split_cores(config) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """(learner cores, engine cores): 'auto' halves what this process may use; one core is shared."""
  usable = sorted(os.sched_getaffinity(0))
  half = max(1, len(usable) // 2)
  automatic = usable[:half], usable[-half:]
  return tuple(parse_cores(text, auto, usable) for text, auto in zip((config.learner.cores, config.rollout.cores), automatic))


@contextlib.contextmanager
def on_cores(cores: Sequence[int]):
  """Threads and processes that this thread starts within run on `cores`."""
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores)
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


def parse_cores(text: str, automatic: Sequence[int], usable: Sequence[int]) -> tuple[int, ...]:
  """Cores named by a list like '0,1' or '4-7', or `automatic`; refuses those not among `usable`."""
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
  shown, bounds = _demonstrations(config), limits(config)
  prompts = {
      t.task_id: prompt_lib.prompt_ids(student.template, t.instruction, shown, bounds, t.task_id)
      for t in (*split.train, *split.dev, *split.held_out)}
  return TaskSets(tuple(split.train), tuple(split.dev), tuple(split.held_out), prompts)


def _demonstrations(config):
  return demonstrations.DEMONSTRATIONS if config.agent.demonstrations else ()


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
             teacher: str = '', reference: str = '') -> str:
  """The few lines a run says about itself before it starts."""
  learner = sorted(os.sched_getaffinity(0))
  lines = [f'student   {config.model.source} ({student.folder})',
           f'schedule  {config.schedule.name}, {config.schedule.accumulator} accumulator, seed {config.seed}']
  if tasks is None:
    lines.append(f'rollout   replay of {config.rollout.replay}, times x {config.rollout.replay_scale:g}; learner on cores {learner}')
  else:
    engine = ', '.join(config.rollout.urls) or f'{config.rollout.engine} on cores {list(engine_cores)}'
    lines += [f'tasks     {len(tasks.train)} train, {len(tasks.dev)} dev, {len(tasks.held_out)} held out',
              f'rollout   engine {engine}; learner on cores {learner}', f'sandbox   {box.backend.description}']
    if student.template.rewrites:
      lines.append(f'history   the chat template rewrites it: {student.template.rewriting}; turns behind that are branches, worked on at '
                   'completion')
  lines[1:1] = [f'{name:<10}{where}' for name, where in (('teacher', teacher), ('reference', reference)) if where]
  return '\n'.join(lines)


def plan_update(config, tasks: TaskSets, update: int) -> list[tuple[types.GroupPlan, tasks_lib.Task]]:
  """Groups of one update: the next prompts of the shuffled training list (a pure function of seed and update)."""
  count = config.batch.prompts
  chosen = [splits.task_at(tasks.train, config.seed, update * count + i) for i in range(count)]
  return [(types.GroupPlan(i, t.task_id, tasks.prompts[t.task_id], config.batch.group_size), t) for i, t in enumerate(chosen)]


def plan_attempts(tasks: TaskSets, chosen: Sequence[tasks_lib.Task], attempts: int):
  """Groups of an evaluation."""
  return [(types.GroupPlan(i, t.task_id, tasks.prompts[t.task_id], attempts), t) for i, t in enumerate(chosen)]


def sandbox(config) -> sandbox_lib.Sandbox:
  """The sandbox backend; raises ConfigError with the remedy where there is none."""
  backend = sandbox_lib.Sandbox.probe(config.agent.sandbox, allow_unsandboxed=config.agent.allow_unsandboxed)
  return sandbox_lib.Sandbox(backend)


def agent_pool(config, student: Student, box: sandbox_lib.Sandbox, engines: replicas.ReplicaSet, emit: Callable[[Any], None],
               scorers: Mapping[str, replicas.ReplicaSet | None]) -> pool.AgentPool:
  """The agents; every event and span goes to `emit`; every turn is scored by each of the scorers there are."""
  setup = loop.AgentSetup(
      environment_factory=lambda task: environment.TerminalEnvironment(box, task.path), template=student.template,
      verifier=verifier_lib.Verifier(box), limits=limits(config), retries=config.agent.retries,
      messages=lambda task: prompt_lib.initial_messages(task.instruction, _demonstrations(config)))
  return pool.AgentPool(setup, engines, run_seed=config.seed, concurrency=config.agent.concurrency, emit_event=emit, emit_span=emit,
                        scorers={name: scorer for name, scorer in scorers.items() if scorer is not None})
