"""What the agent reads before its first turn."""

from __future__ import annotations

from typing import Mapping, Sequence

from ts_jax import types
from ts_jax.agents import limits as limits_lib

Message = Mapping[str, str]

SYSTEM_PROMPT = ('You work in a Linux shell, in /testbed. Each reply is one command in a block:\n```bash\ncommand\n```\n'
                 'Its output comes back. Run submit when the task is done.')


def initial_messages(instruction: str, demonstrations: Sequence[Sequence[Message]] = ()) -> list[dict[str, str]]:
  """Returns the opening conversation: system prompt, demonstrations, instruction.

  Args:
    instruction: the task's text.
    demonstrations: worked conversations, each a list of {'role': 'user'|'assistant', 'content': text} that begins with
      a user's instruction and ends with an assistant's reply.

  Raises:
    ConfigError: an empty instruction, or a demonstration of another shape.
  """
  if not instruction.strip():
    raise types.ConfigError('the task has an empty instruction')
  messages = [{'role': 'system', 'content': SYSTEM_PROMPT}]
  for number, demonstration in enumerate(demonstrations):
    roles = [m.get('role') for m in demonstration]
    if not roles or len(roles) % 2 or roles != ['user', 'assistant'] * (len(roles) // 2):
      raise types.ConfigError(f'demonstration {number} has roles {roles}: it must alternate user, assistant and end with assistant')
    messages.extend({'role': m['role'], 'content': m['content']} for m in demonstration)
  return messages + [{'role': 'user', 'content': instruction.strip()}]


def prompt_ids(template, instruction: str, demonstrations: Sequence[Sequence[Message]], limits: limits_lib.Limits,
               task_id: str) -> tuple[int, ...]:
  """Renders the prompt of a group once, for all of its trajectories.

  Raises:
    ConfigError: the prompt is longer than the limits allow; known before rollout starts.
  """
  ids = tuple(template.initial(initial_messages(instruction, demonstrations)))
  limits.check_prompt(len(ids), task_id)
  return ids
