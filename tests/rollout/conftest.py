"""Real engines serving a tiny random model."""

import dataclasses
import pathlib

import pytest

from tests.rollout import tiny_engine
from ts_jax.rollout import process
from ts_jax.rollout.engine import core as core_lib


@dataclasses.dataclass
class Model:
  folder: pathlib.Path
  compile_cache: pathlib.Path
  params: dict


@pytest.fixture(scope='session')
def model(tmp_path_factory) -> Model:
  root, params = tmp_path_factory.mktemp('engine'), tiny_engine.random_params(0)
  return Model(tiny_engine.write_folder(root / 'model', params), root / 'xla', params)


@pytest.fixture
def make_core(model):
  """Makes in-process engines; ended with the test."""
  cores = []

  def make(**kwargs) -> core_lib.EngineCore:
    kwargs = dict(slots=4, max_context=600) | kwargs
    cores.append(core_lib.EngineCore(tiny_engine.CONFIG, tiny_engine.handed_over(model.params), **kwargs))
    return cores[-1]

  yield make
  for core in cores:
    core.stop()


@pytest.fixture(scope='session')
def start_engine(model, tmp_path_factory):
  """Starts engine processes; all are ended with the session."""
  running = []

  def start(wait: bool = True, **kwargs) -> process.EngineProcess:
    kwargs = dict(slots=4, max_context=256, compile_cache=model.compile_cache,
                  log_path=tmp_path_factory.mktemp('log') / 'engine.log') | kwargs
    engine = process.EngineProcess(kwargs.pop('model_folder', model.folder), **kwargs)
    running.append(engine)
    engine.start(wait)
    return engine

  yield start
  for engine in running:
    engine.stop()


@pytest.fixture(scope='session')
def engine(start_engine) -> process.EngineProcess:
  """One engine that tests share and leave as they found it."""
  return start_engine()
