"""From an agent's reply to the one command it asks for."""

from __future__ import annotations

import dataclasses
import re

_OPEN = re.compile(r'[ \t]*```[ \t]*(bash|sh|shell)[ \t]*', re.IGNORECASE)
_CLOSE = re.compile(r'[ \t]*```')

PARSE_ERROR_OBSERVATION = ('Your reply held no command. Reply with one command in a block:\n```bash\ncommand\n```')


@dataclasses.dataclass(frozen=True)
class ParseError:
  """Why a reply is not an action.  The turn is consumed; the agent sees `PARSE_ERROR_OBSERVATION` whatever the reason."""

  reason: str


def parse_action(text: str, finished: bool = True) -> str | ParseError:
  """Finds the command of a reply: the first fenced block marked bash (or sh, shell).  Later blocks are ignored.

  The opening fence stands on a line of its own and the closing one begins a line; it may also end the block's last line
  of text, and may be absent when the reply ended by itself.

  Args:
    text: the decoded reply without its stop token.
    finished: the engine sampled a stop token.  A reply cut by a length limit needs its closing fence: what is
      missing could be half a command.

  Returns:
    The command, without surrounding blank lines, or the error.
  """
  lines = text.replace('\r\n', '\n').split('\n')
  start = next((i for i, line in enumerate(lines) if _OPEN.fullmatch(line)), None)
  if start is None:
    return ParseError('no ```bash block')
  body = lines[start + 1:]
  end = next((i for i, line in enumerate(body) if _CLOSE.match(line)), None)
  if end is not None:
    command = '\n'.join(body[:end])
  else:
    command = '\n'.join(body).rstrip()
    if command.endswith('```'):
      command = command[:-3]
    elif not finished:
      return ParseError('the reply was cut inside the block')
  command = command.strip('\n')
  if not command.strip():
    return ParseError('the block is empty')
  return command
