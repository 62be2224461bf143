"""A command's result as the text the agent reads."""

from __future__ import annotations

from typing import Callable, Sequence

Encode = Callable[[str], Sequence[int]]


def format_result(output: str, exit_code: int | None) -> str:
  """Returns the observation of a command: its output, and its exit code when that says something.

  Args:
    output: stdout and stderr.
    exit_code: None after a timeout.
  """
  text = output.rstrip('\n')
  if exit_code is None:
    return (text + '\n' if text else '') + '[timed out]'
  if exit_code:
    return (text + '\n' if text else '') + f'[exit code {exit_code}]'
  return text or '[no output]'


def elision_marker(left_out: int) -> str:
  """The line that stands where tokens were left out."""
  return f'\n[... {left_out} tokens left out ...]\n'


def truncate(text: str, max_tokens: int, encode: Encode) -> str:
  """Keeps the first and the last `max_tokens // 2` tokens of a long text, around a visible marker.

  Cuts fall between characters: a character made of several tokens is kept or left out whole.  The marker is not counted.

  Args:
    text: any text.
    max_tokens: at least 2.
    encode: text -> token ids, adding nothing.

  Returns:
    `text` itself when it has at most `max_tokens` tokens.
  """
  # A token holds at least one byte, so a short text needs no encoding.
  if len(text.encode('utf-8', errors='replace')) <= max_tokens:
    return text
  total = len(encode(text))
  if total <= max_tokens:
    return text
  half = max_tokens // 2
  head_chars = _longest(len(text), half, lambda n: len(encode(text[:n])))
  tail_chars = _longest(len(text) - head_chars, half, lambda n: len(encode(text[len(text) - n:])) if n else 0)
  head, tail = text[:head_chars], text[len(text) - tail_chars:]
  return head + elision_marker(total - len(encode(head)) - len(encode(tail))) + tail


def _longest(available: int, tokens: int, count: Callable[[int], int]) -> int:
  """Largest number of characters, at most `available`, that takes at most `tokens` tokens.

  Galloping keeps what is encoded near the size of what is kept, however long the text.
  """
  low, high = 0, min(available, tokens)
  while high < available and count(high) <= tokens:
    low, high = high, min(available, 2 * high)
  if count(high) <= tokens:
    return high
  while high - low > 1:
    middle = (low + high) // 2
    if count(middle) <= tokens:
      low = middle
    else:
      high = middle
  return low
