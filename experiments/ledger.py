"""Learner FLOPs of a recorded update, from its trace and the shapes its segments were padded to."""

from __future__ import annotations

from typing import Sequence

from ts_jax import types
from ts_jax.models import flops
from ts_jax.models.config import ModelConfig
from ts_jax.streaming.buckets import Buckets


def update_flops(spans: Sequence[types.Span], trajectories: Sequence[types.Trajectory], model: ModelConfig, buckets: Buckets,
                 remat_tokens: int) -> flops.Flops:
  """What the learner's spans of one update count.

  Each trajectory that was computed counts one full pass, forward and backward, in the bucket (and pack) it ran in; so do prompts.
  Turns of running trajectories are part of their trajectory's pass: that a granularity runs some of it twice is no credit.  A second
  pass for terms without an advantage is not counted.

  Args:
    spans: of one update.
    trajectories: of the same.
    model: the student.
    buckets: padded lengths, the run's.
    remat_tokens: longer segments recompute their layers (`config.learner.remat_tokens`).
  """
  of = {(t.group, t.index): t for t in trajectories}
  prompts = {t.group: len(t.prompt_ids) - 1 for t in trajectories}
  shared = max((s.tokens for s in spans if s.kind == 'prompt' and s.group < 0), default=0)
  total = flops.Flops()
  for s in spans:
    if s.kind == 'source':
      members = [of[s.group, i] for i in s.members]
      tokens = buckets.pad(max(1, *(len(t.completion_ids) for t in members)))
      scored = max(buckets.pad_scored(t.scored_tokens, tokens) for t in members)
      total += flops.source_gradient(model, len(members), tokens, buckets.pad(prompts[s.group]), scored, tokens > remat_tokens)
    elif s.kind == 'prompt':
      tokens = buckets.pad(s.tokens)
      # A prompt that has all its tokens to itself does not stand behind the shared ones.
      past = buckets.pad(shared) if s.group >= 0 and s.tokens < prompts[s.group] else 0
      if s.work == 'forward':
        total += flops.segment_forward(model, 1, tokens, past)
      else:
        total += flops.segment_gradient(model, 1, tokens, past, tokens > remat_tokens)
  return total

