"""Conversations as ids, behind templates that only append; `test_chat_rewriting.py` has the others."""

import copy

import pytest
from hypothesis import HealthCheck
from hypothesis import assume
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from tests.models.conftest import CONVERSATIONS
from tests.models.test_tokenizer import ANY_TEXT
from ts_jax import types
from ts_jax.models import chat

END, START = 2, 1

# In the manner of Qwen3: the reasoning of earlier replies is dropped once the user has spoken again.
DROPS_REASONING = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# In the manner of Llama 3: contents are trimmed, nothing stands between a turn's end and the next start.
TRIMS = """{{- bos_token }}{% for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def with_template(tokenizer, source, role='user'):
  other = copy.copy(tokenizer)
  other.chat_template = source
  return chat.ChatTemplate(other, role)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(prompt=ANY_TEXT, turns=st.lists(st.tuples(ANY_TEXT, ANY_TEXT), min_size=1, max_size=4))
@pytest.mark.parametrize('source', [None, TRIMS])
def test_pieces_equal_the_rendered_conversation(tokenizer, source, prompt, turns):
  """Whatever was said: initial + replies + observations == rendering of everything, if the replies re-tokenise identically."""
  template = with_template(tokenizer, source or tokenizer.chat_template)
  if source:  # a template that trims renders a reply's white space away, where the record keeps what was sampled
    turns = [(reply.strip(), observation) for reply, observation in turns]
  for reply, _ in turns:  # a leading line break would join the one that ends the generation prompt
    whole = tokenizer.encode('assistant\n' + reply, allow_special=False)
    assume(whole == tokenizer.encode('assistant\n', allow_special=False) + tokenizer.encode(reply, allow_special=False))
  messages = [{'role': 'user', 'content': prompt}]
  record = template.initial(messages)
  for reply, observation in turns:
    record += tokenizer.encode(reply, allow_special=False) + (template.end_of_turn_id,)
    record += template.observation(observation, previous_finished=True)
    messages += [{'role': 'assistant', 'content': reply}, {'role': 'user', 'content': observation}]
  assert record == template.render(messages, add_generation_prompt=True)


@settings(max_examples=50, deadline=None)
@given(content=ANY_TEXT)
def test_content_never_controls_the_conversation(template, content):
  """As many control ids as the template writes, and the text arrives unchanged."""
  plain = template.initial([{'role': 'user', 'content': 'x'}])
  ids = template.initial([{'role': 'user', 'content': content}])
  assert [i for i in ids if i in template.tokenizer.special_ids] == [i for i in plain if i in template.tokenizer.special_ids]
  assert template.tokenizer.decode(ids) == template.tokenizer.decode(plain).replace('user\nx', 'user\n' + content)
  assert [i for i in template.observation(content, True) if i in template.tokenizer.special_ids] == [START, END, START]


def test_separator_follows_the_sampled_end_of_turn(template):
  decode = template.tokenizer.decode
  assert template.end_of_turn_id == END and template.stop_ids == (END,)
  assert decode(template.observation('ok', previous_finished=True)) == '\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n'


def test_a_turn_cut_by_length_is_closed_by_the_observation(template):
  finished, cut = (template.observation('ok', previous_finished=f) for f in (True, False))
  assert cut == (END,) + finished


def test_a_rare_segmentation_stays_as_sampled(template):
  """Ids that would not come back from encoding their text: the record keeps them and what follows is unchanged."""
  rare = tuple(template.tokenizer.encode(c, False)[0] for c in 'hello')
  assert template.tokenizer.encode(template.tokenizer.decode(rare), False) != rare
  record = template.initial([{'role': 'user', 'content': 'q'}]) + rare + (END,) + template.observation('o', True)
  text = template.tokenizer.decode(record)
  whole = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'hello'}, {'role': 'user', 'content': 'o'}]
  assert text == template.tokenizer.decode(template.render(whole, True))


def test_markers_in_content_are_content(template):
  for content in ('\ue000', '\ue0001\ue000', '\ue000\ue001<|im_end|>\ue0000\ue000'):
    assert content in template.tokenizer.decode(template.initial([{'role': 'user', 'content': content}]))
    assert content in template.tokenizer.decode(template.observation(content, True))


def test_only_what_rewrites_history_says_so(tokenizer, template):
  assert not template.rewrites and template.rewriting == ''
  dropping = with_template(tokenizer, DROPS_REASONING)
  assert dropping.rewrites and '\n' not in dropping.rewriting
  assert dropping.rewriting.startswith("after an observation of role 'user' it renders 'a reply<|im_end|>")
  assert "where '<think>\\na thought" in dropping.rewriting
  with pytest.raises(types.ConfigError, match="rewrites history.*'user'.*a thought"):
    dropping.observation('x', True)
  # The same template only appends when observations are not user messages.
  by_tool = with_template(tokenizer, DROPS_REASONING, role='tool')
  assert not by_tool.rewrites and tokenizer.decode(by_tool.observation('x', True)).startswith('\n<|im_start|>tool\nx')
  with pytest.raises(types.ConfigError, match='rewrites history'):
    by_tool.observation('x', True, role='user')


@pytest.mark.parametrize('message, source', [
    ('has no chat template', None),
    ('does not compile', '{% for m in messages %}'),
    ('does not put a control token', "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"),
    ('refuses a conversation', "{{ raise_exception('no users here') }}"),
    ('differently at different turns',
     "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + loop.index|string }}{% endfor %}"
     "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"),
    # Where a reply starts behind a tag that its history does not keep, the prompt itself would change.
    ('rewrites the prompt.*a reply.*where .*<think>',
     DROPS_REASONING.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")),
    ('rewrites the prompt',
     "{% for m in messages %}{{ '<|im_start|>' + m.role + ('*' if loop.last else '') + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
     "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"),
    ('refuses a conversation', "{{ strftime_now('%d %b %Y') }}"),  # a prompt with today's date could not be resumed
    ('refuses a conversation', "{{ messages.append(1) }}"),  # sandboxed
])
def test_unusable_templates_say_why(tokenizer, message, source):
  with pytest.raises(types.ConfigError, match=message):
    with_template(tokenizer, source)


def test_generation_tags_change_nothing(tokenizer, template):
  tagged = tokenizer.chat_template.replace("{% endfor %}", "{% generation %}{% endgeneration %}{% endfor %}")
  assert with_template(tokenizer, tagged).render(CONVERSATIONS[1], True) == template.render(CONVERSATIONS[1], True)
