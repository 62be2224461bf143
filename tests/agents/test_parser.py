"""What counts as an action."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_jax.agents import parser

COMMANDS = st.text(st.characters(blacklist_characters='`\r', blacklist_categories=('Cs',)), min_size=1).filter(lambda t: t.strip())


@given(before=st.text(st.characters(blacklist_characters='`\r')), command=COMMANDS, after=st.text(), finished=st.booleans())
def test_block_is_found_whatever_surrounds_it(before, command, after, finished):
  before = before + '\n' if before else ''
  assert parser.parse_action(f'{before}```bash\n{command}\n```\n{after}', finished) == command.strip('\n')


@given(st.text(), st.booleans())
def test_any_text_gives_a_command_or_an_error(text, finished):
  parsed = parser.parse_action(text, finished)
  assert isinstance(parsed, parser.ParseError) or parsed.strip()


@given(st.text(st.characters(blacklist_characters='`')))
def test_text_without_a_fence_is_an_error(text):
  assert isinstance(parser.parse_action(text), parser.ParseError)


@pytest.mark.parametrize('text', ['ls', '`ls`', '```\nls\n```', '```python\nprint()\n```', '```bash ls```', '```bash\n```', '```bash\n  \n\n```',
                                  'say ```bash\nls\n```', '```bashful\nls\n```', ''])
def test_unreadable_replies(text):
  assert isinstance(parser.parse_action(text), parser.ParseError)


def test_first_of_two_blocks_is_the_action():
  assert parser.parse_action('```bash\nls\n```\nthen\n```bash\nrm -r x\n```') == 'ls'


def test_closing_fence_may_be_absent_only_when_the_reply_ended_by_itself():
  assert parser.parse_action('```bash\nls -l', finished=True) == 'ls -l'
  assert isinstance(parser.parse_action('```bash\nrm -r /testbed/ol', finished=False), parser.ParseError)
  assert parser.parse_action('```bash\nls -l```', finished=False) == 'ls -l'


def test_shell_names_indentation_and_windows_line_ends_are_accepted():
  assert parser.parse_action('  ```SH  \r\nls\r\ncat a\r\n  ```') == 'ls\ncat a'


def test_multi_line_commands_keep_their_inner_lines():
  assert parser.parse_action('```bash\n\ncat > a <<EOF\n\n  x\nEOF\nsubmit\n\n```') == 'cat > a <<EOF\n\n  x\nEOF\nsubmit'


def test_hostile_text_takes_linear_time():
  start = time.time()
  parser.parse_action('```bash' * 20000 + '\n' + ' \t`' * 100000 + '\n' * 100000)
  assert time.time() - start < 2
