"""Made-up multi-turn trajectories of a given shape, for benchmarks whose figures depend on shapes only."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from ts_jax import types


def trajectory(rng: np.random.Generator, vocab: int, prompt_ids: Sequence[int], turns: int, turn_tokens: int, *, group: int = 0,
               index: int = 0, reward: float | None = None) -> types.Trajectory:
  """Turns of `turn_tokens` ids each, the second half of each sampled and scored by student and teacher."""
  half = turn_tokens // 2

  def turn(number: int) -> types.Turn:
    sampled = types.SampledTokens(ids(rng, vocab, half), (-1.0,) * half, 0, 0, types.FinishReason.STOP)
    scores = tuple(float(x) for x in rng.normal(-2, 1, half).clip(max=0))
    return types.Turn(number, ids(rng, vocab, turn_tokens - half), sampled, (True,) * half, teacher_log_probs=scores)

  return types.Trajectory(0, group, index, f'task {group}', 0, tuple(prompt_ids), tuple(turn(i) for i in range(turns)),
                          types.TerminalReason.DONE, reward)


def batch(vocab: int, *, groups: int, size: int, turns: int, turn_tokens: int, prompt_tokens: int, seed: int = 0) -> types.LogicalBatch:
  """Groups whose members have different rewards; half of every prompt is the same ids."""
  rng = np.random.default_rng(seed)
  common = ids(rng, vocab, prompt_tokens // 2)
  made = []
  for g in range(groups):
    prompt = common + ids(rng, vocab, prompt_tokens - len(common))
    members = (trajectory(rng, vocab, prompt, turns, turn_tokens, group=g, index=i, reward=i / size) for i in range(size))
    made.append(types.Group(g, f'task {g}', prompt, tuple(members)))
  return types.LogicalBatch(0, 0, tuple(made))


def ids(rng: np.random.Generator, vocab: int, count: int) -> tuple[int, ...]:
  """Random ids, special ones left out."""
  return tuple(int(i) for i in rng.integers(3, vocab, count))
