"""Table 6, the opening prompt, and observations cut to tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_jax import types
from ts_jax.agents import limits as limits_lib
from ts_jax.agents import observation
from ts_jax.agents import prompt


def test_defaults_are_those_of_the_paper():
  assert limits_lib.Limits() == limits_lib.Limits(
      max_turns=300, max_turn_tokens=1024, max_trajectory_tokens=16384, max_prompt_tokens=16384, max_context_tokens=131072,
      max_observation_tokens=4096, tool_timeout_s=120.0, temperature=1.0)


@pytest.mark.parametrize('bad', [dict(max_turns=0), dict(max_turn_tokens=-1), dict(tool_timeout_s=0.0), dict(temperature=-0.5),
                                 dict(temperature=float('nan')), dict(max_turns=2.5), dict(max_observation_tokens=1),
                                 dict(tool_timeout_s=float('inf'))])
def test_bad_limit_is_named(bad):
  with pytest.raises(types.ConfigError, match=next(iter(bad))):
    limits_lib.Limits(**bad)


def test_reply_is_bounded_by_turn_trajectory_and_context():
  limits = limits_lib.Limits(max_turn_tokens=10, max_trajectory_tokens=25, max_context_tokens=100)
  assert limits.reply_tokens(generated=0, context=10) == 10
  assert limits.reply_tokens(generated=20, context=10) == 5
  assert limits.reply_tokens(generated=0, context=97) == 3
  assert limits.reply_tokens(generated=30, context=200) == 0


def test_too_long_prompt_is_refused_before_rollout(template):
  with pytest.raises(types.ConfigError, match='task-7.*max_prompt_tokens=50'):
    prompt.prompt_ids(template, 'x' * 100, (), limits_lib.Limits(max_prompt_tokens=50), 'task-7')
  with pytest.raises(types.ConfigError, match='no room'):
    prompt.prompt_ids(template, 'x', (), limits_lib.Limits(max_context_tokens=50), 'task-7')


def test_prompt_holds_system_demonstrations_and_instruction_in_order():
  demonstration = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]
  messages = prompt.initial_messages(' do it\n', [demonstration, demonstration])
  assert [m['role'] for m in messages] == ['system', 'user', 'assistant', 'user', 'assistant', 'user']
  assert messages[-1]['content'] == 'do it' and 'submit' in messages[0]['content']
  assert len(prompt.SYSTEM_PROMPT) < 250


@pytest.mark.parametrize('demonstration', [[], [{'role': 'user', 'content': 'q'}], [{'role': 'assistant', 'content': 'a'}] * 2])
def test_misshapen_demonstration_is_refused(demonstration):
  with pytest.raises(types.ConfigError, match='demonstration 0'):
    prompt.initial_messages('do it', [demonstration])
  with pytest.raises(types.ConfigError, match='empty instruction'):
    prompt.initial_messages(' \n')


@given(st.text(), st.integers(2, 40))
def test_truncation_keeps_whole_characters_of_head_and_tail(text, limit):
  encode = lambda t: t.encode('utf-8')  # one token per byte: every multi-byte character spans tokens
  kept = observation.truncate(text, limit, encode)
  if len(encode(text)) <= limit:
    assert kept == text
    return
  head, rest = kept.rsplit('\n[... ', 1)
  count, tail = rest.split(' tokens left out ...]\n', 1)
  assert text.startswith(head) and text.endswith(tail)
  assert len(encode(head)) + int(count) + len(encode(tail)) == len(encode(text))
  half = limit // 2
  assert half - 3 <= len(encode(head)) <= half and half - 3 <= len(encode(tail)) <= half


def test_truncation_halves_are_equal_and_visible():
  kept = observation.truncate('a' * 500 + 'b' * 500, 10, lambda t: t)
  assert kept == 'aaaaa\n[... 990 tokens left out ...]\nbbbbb'


def test_truncating_a_long_text_encodes_little_more_than_it_once():
  encoded = []
  observation.truncate('é' * 100000, 64, lambda t: encoded.append(len(t)) or t.encode())
  assert sum(encoded) < 101000 + 64 * 40


def test_result_text():
  assert observation.format_result('a\nb\n', 0) == 'a\nb'
  assert observation.format_result('', 0) == '[no output]'
  assert observation.format_result('oops\n', 2) == 'oops\n[exit code 2]'
  assert observation.format_result('', 1) == '[exit code 1]'
  assert observation.format_result('part', None) == 'part\n[timed out]'
