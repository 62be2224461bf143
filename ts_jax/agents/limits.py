"""Limits of a trajectory: Table 6 of ThunderSyncRL (arXiv 2610.05935)."""

from __future__ import annotations

import dataclasses
import math

from ts_jax import types


@dataclasses.dataclass(frozen=True)
class Limits:
  """Independent ceilings; the first one reached ends the turn or the trajectory (`ts_jax.agents.loop` has the table).

  Attributes:
    max_turns: agentic turns per trajectory.
    max_turn_tokens: generated tokens per turn, reasoning included.
    max_trajectory_tokens: generated tokens over all turns.
    max_prompt_tokens: tokens of the initial prompt.
    max_context_tokens: prompt, observations and generated tokens together.
    max_observation_tokens: kept of a tool's output, half from its start and half from its end.
    tool_timeout_s: seconds per command.
    temperature: sampling temperature (top-p 1, top-k off, no penalties).
  """

  max_turns: int = 300
  max_turn_tokens: int = 1024
  max_trajectory_tokens: int = 16384
  max_prompt_tokens: int = 16384
  max_context_tokens: int = 131072
  max_observation_tokens: int = 4096
  tool_timeout_s: float = 120.0
  temperature: float = 1.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name == 'temperature':
        valid = math.isfinite(value) and value >= 0
      elif field.name == 'tool_timeout_s':
        valid = math.isfinite(value) and value > 0
      else:
        valid = isinstance(value, int) and value > 0
      if not valid:
        raise types.ConfigError(f'limit {field.name}={value!r} must be a positive number (temperature may be 0)')
    if self.max_observation_tokens < 2:
      raise types.ConfigError('limit max_observation_tokens=1 leaves no room for head and tail: use at least 2')

  def check_prompt(self, prompt_tokens: int, task_id: str) -> None:
    """Raises ConfigError when a prompt does not fit, or leaves no room for a token of reply."""
    if prompt_tokens > self.max_prompt_tokens:
      raise types.ConfigError(f'task {task_id}: its prompt has {prompt_tokens} tokens, more than max_prompt_tokens='
                              f'{self.max_prompt_tokens}. Shorten the demonstrations, raise the limit, or leave the task out')
    if prompt_tokens >= self.max_context_tokens:
      raise types.ConfigError(f'task {task_id}: its prompt has {prompt_tokens} tokens and max_context_tokens='
                              f'{self.max_context_tokens} leaves no room for a reply. Raise the limit')

  def reply_tokens(self, generated: int, context: int) -> int:
    """Most tokens the next reply may have.

    Args:
      generated: tokens sampled so far in the trajectory.
      context: tokens before the reply, the pending observation included.
    """
    return max(0, min(self.max_turn_tokens, self.max_trajectory_tokens - generated, self.max_context_tokens - context))
