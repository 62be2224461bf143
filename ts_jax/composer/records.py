"""What the composer composes: one row per student turn, scored by the teacher, as a plain frozen record.

A row is what its producer knew.  When it arrived and when a learner first saw it are stamps of the pool that holds it.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

from ts_jax import types


@dataclasses.dataclass(frozen=True)
class Row(types.Record):
  """One student turn with the scores of the policy that generated it and of the frozen teacher.

  Whether the fields fit each other is for the gate to say and to count, not a condition of building the record: a turn
  whose scoring failed is still a turn that arrived.

  Attributes:
    rollout: number of the rollout, unique within a run.
    turn: 0-based position in the rollout.
    version: student policy version that generated it.
    token_ids: sampled ids [T]; empty when they were lost.
    student_log_probs: log-probs under that version [T], nats.
    teacher_log_probs: log-probs of the same ids under the teacher [T], nats; None when scoring failed.
    scored_mask: ids that are response and carry loss [T].
    teacher_valid_mask: ids whose teacher score is usable [T]; None means all.
    prompt_truncated: the student saw a shortened prompt.
    task: the task the rollout attempted.
    succeeded: outcome of the rollout; None when it is not known.
  """

  rollout: int
  turn: int
  version: int
  token_ids: tuple[int, ...]
  student_log_probs: tuple[float, ...]
  teacher_log_probs: tuple[float, ...] | None
  scored_mask: tuple[bool, ...]
  teacher_valid_mask: tuple[bool, ...] | None = None
  prompt_truncated: bool = False
  task: str = ''
  succeeded: bool | None = None

  def __post_init__(self):
    for name in ('rollout', 'turn', 'version'):
      value = getattr(self, name)
      if value < 0 or value != int(value):
        raise ValueError(f'{name} {value} of a row must be a whole number from 0 on')

  @property
  def key(self) -> tuple[int, int]:
    """(rollout, turn): unique within a run."""
    return (self.rollout, self.turn)


def from_turn(turn: types.Turn, rollout: int, teacher_log_probs: Sequence[float] | None, *, task: str = '',
              teacher_valid_mask: Sequence[bool] | None = None, prompt_truncated: bool = False,
              succeeded: bool | None = None) -> Row:
  """The row of a recorded turn; a turn that spans versions counts as its oldest."""
  return Row(rollout=rollout, turn=turn.index, version=turn.sampled.version_start, token_ids=turn.sampled.token_ids,
             student_log_probs=turn.sampled.log_probs,
             teacher_log_probs=None if teacher_log_probs is None else tuple(teacher_log_probs), scored_mask=turn.scored_mask,
             teacher_valid_mask=None if teacher_valid_mask is None else tuple(teacher_valid_mask),
             prompt_truncated=prompt_truncated, task=task, succeeded=succeeded)
