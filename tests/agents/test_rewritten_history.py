"""The loop behind a template that drops earlier reasoning: branches in requests, records, scores and limits, and their gradient."""

import dataclasses

import jax
import pytest

from experiments import offline, reference
from tests.agents import scripted
from tests.agents.scripted import block
from tests.agents.test_teacher import FakeTeacher, log_probs
from tests.models.test_chat import DROPS_REASONING
from tests.streaming import cases
from ts_jax import types
from ts_jax.agents import prompt
from ts_jax.models.config import ModelConfig
from ts_jax.objectives import distillation
from ts_jax.streaming import scheduler
from ts_jax.streaming.buckets import Buckets

THOUGHT = '<think>\nhm, what is there?\n</think>\n\n'
REPLIES = [THOUGHT + block('cat note.txt'), block('true'), '<think>\nnever closed', THOUGHT + block('touch made; submit')]


@pytest.fixture(scope='module')
def dropping(with_template):
  return with_template(DROPS_REASONING)


@pytest.fixture
def make(dropping, sandbox, task_folder):
  return lambda replies, **kwargs: scripted.Run(dropping, sandbox, task_folder, replies, **kwargs)


def test_turns_are_sampled_behind_the_conversation_the_template_renders(make, dropping):
  run = make(REPLIES)
  t = run.go()
  messages = prompt.initial_messages('do it')
  assert t.branches and [x.keeps for x in t.turns] == [None, len(t.prompt_ids), None, None]
  for turn, before, request in zip(t.turns, t.paths(), run.engine.requests, strict=True):
    assert request.token_ids == before + turn.context_ids == dropping.render(messages, add_generation_prompt=True)
    messages += [{'role': 'assistant', 'content': REPLIES[turn.index]}, {'role': 'user', 'content': turn.observation}]
  fixed = [e.turn.keeps for e in run.events if isinstance(e, types.TurnFixed)]
  assert fixed == [x.keeps for x in t.turns]
  assert types.Trajectory.from_json(t.to_json()) == t


def test_every_scorer_is_asked_behind_the_path_of_the_turn(make):
  teacher = FakeTeacher()
  run = make(REPLIES, teacher=teacher)
  t = run.go()
  for turn, before, (token_ids, start, _) in zip(t.turns, t.paths(), teacher.calls, strict=True):
    assert (token_ids, start) == (before + turn.context_ids + turn.sampled.token_ids, len(before) + len(turn.context_ids))
    assert turn.teacher_log_probs == log_probs(start, len(token_ids))


def test_context_limits_count_what_the_next_turn_is_sampled_behind(make):
  replies = ['<think>' + 'so ' * 50 + '</think>' + block('true')] * 4 + [block('submit')]
  whole = make(replies).go()
  longest = max(len(b) + len(x.context_ids) + len(x.sampled.token_ids) for b, x in zip(whole.paths(), whole.turns))
  assert longest < len(whole.prompt_ids) + len(whole.completion_ids) - 400
  assert make(replies, max_context_tokens=longest).go().terminal_reason is types.TerminalReason.DONE
  short = make(replies, max_context_tokens=longest - 100).go()
  assert all(len(b) + len(x.context_ids) + len(x.sampled.token_ids) <= longest - 100 for b, x in zip(short.paths(), short.turns))
  # The observation that would leave no room is not appended.
  assert make(replies[:4], max_context_tokens=len(whole.prompt_ids) + 200).go().terminal_reason is types.TerminalReason.CONTEXT_OVERFLOW


def test_a_loop_without_the_prompts_messages_says_what_is_missing(make):
  run = make(REPLIES)
  run.setup = dataclasses.replace(run.setup, messages=None)
  with pytest.raises(types.ConfigError, match='rewrites history.*messages of the prompt'):
    run.go()


@pytest.mark.parametrize('name', ['grpo', 'opd'])
def test_the_gradient_of_sampled_branches_is_that_of_full_sequences(make, name):
  members, thought, short = [], '<think>hm</think>\n', [{'role': 'user', 'content': 'q'}]  # few and short shapes: each is compiled
  for index, replies in enumerate([[thought + block('ls'), block('true'), thought + block('ls'), block('submit')], [block('submit')]]):
    t = make(replies, teacher=FakeTeacher(), messages=short).go()
    members.append(dataclasses.replace(t, update=0, group=0, index=index, reward=float(index == 0)))
  assert [x.keeps is not None for t in members for x in t.turns] == [False, True, False, True, False]
  batch = types.LogicalBatch(0, 0, (types.Group(0, 'task', members[0].prompt_ids, tuple(members)),))
  config = ModelConfig(vocab_size=259, width=24, ffn_width=40, layers=1, heads=4, kv_heads=2, head_dim=6)
  policy = scheduler.Policy(**({'objective': distillation.Distillation()} if name == 'opd' else {}))
  with jax.enable_x64(True):
    params = cases.tiny_params('float64', config=config)
    wanted = {'grpo': reference.grpo_direction, 'opd': reference.opd_direction}[name](config, params, batch)
    got, _ = cases.direction(batch, params, policy, dtype='float64', config=config, buckets=Buckets((256,)))
  assert offline.relative_error(got, wanted) <= 1e-10
