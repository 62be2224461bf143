"""Trajectories whose history was rewritten: a tree of segments, each processed once forward and once backward.

A chat template may drop what was said before, reasoning above all: a turn is then sampled behind a path that leaves the
earlier one somewhere.  Segments are cut where paths part, so that a boundary state is only ever needed at a segment's end,
which a recurrent layer could give as well as one with keys and values.

Such a trajectory is worked on at completion: forward from the prompt, parents first, then backward, children first.  What
children want of a segment's boundary state is summed in at least float32 before the segment itself runs backward.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from ts_jax import types
from ts_jax.models import llama
from ts_jax.streaming import open_trajectories, sources as sources_lib
from ts_jax.streaming.buckets import Buckets


@dataclasses.dataclass(frozen=True)
class Segment:
  """A piece of a path without branches.

  Attributes:
    parent: index of the segment before it, which stands earlier; -1 for the prompt.
    before: the id before the first.
    behind: ids between the prompt and the first.
    data: ids, mask and teacher scores, as of a trajectory.
    rank: [number scored] place of each scored id among the trajectory's.
  """

  parent: int
  before: int
  behind: int
  data: sources_lib.SourceData
  rank: np.ndarray


def segments(trajectory: types.Trajectory) -> tuple[Segment, ...]:
  """The tree of a trajectory, parents first; segments that no scored id depends on are left out."""
  flat = sources_lib.SourceData.of(trajectory)
  # Each id is known by its place in `flat`; a path is a row of places, and a place's parent never changes.
  parent, path, start = np.full(flat.tokens, -1), [], 0
  for turn in trajectory.turns:
    if turn.keeps is not None:
      path = path[:turn.keeps - len(trajectory.prompt_ids)]
    for place in range(start, start + len(turn.context_ids) + len(turn.sampled.token_ids)):
      parent[place] = path[-1] if path else -1
      path.append(place)
      start = place + 1
  needed = flat.mask.copy()
  for place in reversed(range(flat.tokens)):
    if needed[place] and parent[place] >= 0:
      needed[parent[place]] = True
  children = np.bincount(parent[needed & (parent >= 0)], minlength=flat.tokens)
  rank, depth = np.cumsum(flat.mask) - 1, np.zeros(flat.tokens, int)
  pieces: list[list[int]] = []
  piece_of = {-1: -1}
  for place in np.flatnonzero(needed):
    above = int(parent[place])
    depth[place] = depth[above] + 1 if above >= 0 else 0
    if above < 0 or children[above] > 1:
      pieces.append([])
      piece_of[place] = len(pieces) - 1
    else:
      piece_of[place] = piece_of[above]
    pieces[piece_of[place]].append(place)
  made = []
  for places in map(np.asarray, pieces):
    above = int(parent[places[0]])
    columns = ('completion', 'mask', 'sampler_log_probs', 'teacher_log_probs', 'reference_log_probs')
    data = dataclasses.replace(flat, **{c: getattr(flat, c)[places] for c in columns if getattr(flat, c) is not None})
    made.append(Segment(piece_of[above], int(flat.completion[above]) if above >= 0 else trajectory.prompt_ids[-1],
                        int(depth[places[0]]), data, rank[places][data.mask]))
  return tuple(made)


def gradient(functions: sources_lib.SourceFunctions, params, tree: tuple[Segment, ...], prompt: llama.Boundary, weight: float,
             count: float, buckets: Buckets, teacher: bool) -> sources_lib.SourceResult:
  """Gradient of a trajectory from its tree.

  Args:
    functions: the student's.
    params: parameters.
    tree: see `segments`; something is scored.
    prompt: boundary state of the prompt without its last id.
    weight, count: w_t and u_t of every scored token.
    buckets: allowed shapes.
    teacher: the objective needs the teacher's scores.
  """
  inner, memory = {s.parent for s in tree}, {-1: prompt}
  batches = [sources_lib.pack(s.before, [s.data], [weight], buckets, teacher, functions.terms, [count]) for s in tree]
  for index, (segment, batch) in enumerate(zip(tree, batches)):
    if index in inner:
      behind, size = memory[segment.parent], segment.data.tokens
      capacity = buckets.pad(int(prompt.length) + segment.behind + size)
      memory[index] = functions.segment_forward(params, behind, batch.tokens, np.int32(size), capacity)
  total, log_probs = None, np.zeros((1, sum(s.data.scored for s in tree)))
  adjoints: dict[int, tuple] = {}
  for index in reversed(range(len(tree))):
    segment, behind, batch = tree[index], memory[tree[index].parent], batches[index]
    if index in inner:
      result = functions.inner_gradient(params, behind, batch, adjoints.pop(index))
    else:
      result = functions.source_gradient(params, behind, batch)
    total = open_trajectories.accumulate(total, result.gradient)
    adjoints[segment.parent] = open_trajectories.accumulate(adjoints.get(segment.parent), result.adjoint)
    log_probs[0, segment.rank] = np.asarray(result.log_probs)[0, :segment.data.scored]
  return sources_lib.SourceResult(total, jax.block_until_ready(adjoints[-1]), log_probs)
