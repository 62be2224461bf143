"""A learner lane: runs what the scheduler assigns, at the parameters of one policy version."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ts_jax import types
from ts_jax.kernels import fold
from ts_jax.models import llama
from ts_jax.objectives import policy_gradient
from ts_jax.objectives.objective import Objective
from ts_jax.streaming import branches, layout, mismatch as mismatch_lib, open_trajectories, scheduler, sources as sources_lib
from ts_jax.streaming import statistics as statistics_lib
from ts_jax.streaming.buckets import Buckets
from ts_jax.streaming.inputs import Inputs
from ts_jax.streaming.open_trajectories import OpenTrajectories


class Parts(NamedTuple):
  """What a lane has summed for another to finish: of a group that the other owns, or at the barrier.

  Attributes:
    statistics: whose coefficients are not known yet; None if none.
    adjoint: of the group's prompt (at the barrier: of the shared prefix) with known coefficients; None if none.
  """

  statistics: statistics_lib.Pair | statistics_lib.ByReward | None = None
  adjoint: fold.Sum | None = None


class Result(NamedTuple):
  """Of a work item: its spans (without readiness), and what a `HandOver` gives away."""

  spans: list[types.Span]
  parts: Parts | None = None


@dataclasses.dataclass
class _Group:
  """What the lane holds of an open group."""

  boundary: llama.Boundary | None = None
  direct_adjoint: fold.Sum | None = None
  held: dict[int, Any] = dataclasses.field(default_factory=dict)


class Lane:
  """Executes work items of one update and accumulates the batch direction.

  A lane owns its groups' boundary states and statistics.  One that took sources of another's group gives what it summed of them
  to the owner before that closes the group; all else stays with the lane until the barrier adds batch sums.  Work on one lane is
  strictly sequential, in whatever thread; lanes share nothing but `Inputs`, which they only read.

  Its prefix tree: what all prompts of the run begin with, the rest of each group's prompt, trajectories, and at granularity
  `turn` their turns.  A segment's backward pass runs once, after its last child; that of the shared prefix at the barrier,
  for all lanes together.

  Attributes:
    index: lane number.
    device: where it computes; None: where the parameters are.
    host: process that it is in, as process 0 sees it.
    trajectories: what works on turns as they arrive, or None.
    mismatch: of the update's sources so far.
  """

  host = 0

  def __init__(self, index: int, functions: sources_lib.SourceFunctions, buckets: Buckets, *, accumulator: str,
               reward_centre: float, objective: Objective = policy_gradient.PolicyGradient(),
               trajectories: OpenTrajectories | None = None, shared_prefix: Sequence[int] = (), device: jax.Device | None = None):
    """Makes an idle lane.

    Args:
      index: lane number.
      functions: the student's jitted functions, with the objective's terms.
      buckets: allowed shapes.
      accumulator: 'float32' or 'exact'.
      reward_centre: c, subtracted from rewards before they weight a gradient; the middle of the reward range.
      objective: from rewards and lengths to weights.
      trajectories: at granularities by turns, what works on them as they arrive.
      shared_prefix: ids that prompts of an update begin with, processed once for all of them; a prompt that does not begin with
        it stands alone.  See `shared_prefix`.
      device: where to compute; None: where the parameters are.
    """
    if functions.terms != objective.terms:
      raise ValueError(f'the functions compute {functions.terms}, the objective has {objective.terms}')
    self.index, self.device, self.trajectories = index, device, trajectories
    self._functions = functions
    self._buckets = buckets
    self._kind = accumulator
    self._centre = reward_centre
    self._objective = objective
    self._shared = tuple(shared_prefix)
    self.update = -1
    self.mismatch = mismatch_lib.Mismatch()

  def begin(self, update: int, params, inputs: Inputs) -> None:
    """Starts an update at `params`, whole ones (see `layout`); the lane reads them and never changes them."""
    self.update = update
    self._params = layout.on(params, self.device)
    self._inputs = inputs
    self._groups: dict[int, _Group] = {}
    self._statistics = statistics_lib.of(self._objective, self._kind, self._centre)
    self._batch: fold.Sum | None = None
    self._root: llama.Boundary | None = None
    self._root_adjoint: fold.Sum | None = None
    if self.trajectories is not None:
      self.trajectories.clear()
    self.mismatch = mismatch_lib.Mismatch()

  def steps(self, group: int, index: int) -> int:
    """Steps of a trajectory that can be worked on before it is complete; asks the inputs only, whatever the lane does meanwhile."""
    return self.trajectories.steps(self._inputs.turns[group, index])

  def early_tokens(self, group: int, index: int) -> int:
    """Tokens of these steps; as `steps`."""
    return self.trajectories.tokens(self._inputs.turns[group, index])

  def cost(self, group: int, index: int) -> int:
    """Padded tokens of a source; as `steps`."""
    return self._inputs.cost((group, index), self._buckets)

  def prompt_cost(self, group: int) -> int:
    """Padded tokens that a lane computes of a group's prompt before anything behind it."""
    own = len(self._inputs.plans[group].prompt_ids) - 1 - len(self._shared) * self._shares(group)
    return self._buckets.pad(own)

  def run(self, work: scheduler.Work, parts: Sequence[Parts] = ()) -> Result:
    """Runs one work item to completion; `parts`: what other lanes have summed of a group that is closed."""
    spans: list[types.Span] = []
    match work:
      case scheduler.PromptForward():
        self._prompt(work.group, spans)
      case scheduler.TurnWork():
        self._turns(work, spans)
      case scheduler.SourceWork():
        self._source(work, spans)
      case scheduler.FoldHeld():
        with _Timed(self, spans, 'fold', work.group, work.index, members=(work.index,), work='held'):
          result = self._groups[work.group].held.pop(work.index)
          if work.coefficient is None:
            self._statistics.fold(work.group, result.gradient, result.adjoint, work.reward)
          else:
            self._fold_known(work.group, result, work.coefficient)
      case scheduler.HandOver():
        return Result(spans, self._hand_over(work.group))
      case scheduler.CloseGroup():
        self._close(work, parts, spans)
    return Result(spans)

  def rest(self) -> Parts:
    """What only the barrier can finish, for all lanes together; the lane keeps none of it."""
    adjoint, self._root_adjoint = self._root_adjoint, None
    return Parts(self._statistics.pop_batch(), adjoint)

  def finish_shared_prefix(self, adjoints: Sequence[fold.Sum]) -> list[types.Span]:
    """Runs the shared prefix backward, from the adjoints of all lanes, once every group is closed."""
    spans: list[types.Span] = []
    if not adjoints:
      return spans
    total = fold.place(self._kind, adjoints[0], jax.tree.leaves(self._params)[0])
    for adjoint in adjoints[1:]:
      total = fold.add(self._kind, total, adjoint)
    fold.check(self._kind, total, 'adjoint of the shared prefix')
    tokens, length = self._padded(self._shared)
    dtype = jnp.dtype(self._functions.dtype)
    with _Timed(self, spans, 'prompt', -1, tokens=int(length), work='backward'):
      value = fold.value(self._kind, total, jnp.promote_types(dtype, jnp.float32))
      gradient, _ = self._functions.segment_gradient(self._params, self._functions.root(), tokens, value)
      self._fold_batch(gradient)
    return spans

  def finish_statistics(self, sums: Sequence[statistics_lib.Pair | statistics_lib.ByReward], rewards: Sequence[float]) -> list[types.Span]:
    """Reduces what all lanes hold for the batch as population, given all its rewards."""
    spans: list[types.Span] = []
    if not sums or self._objective.is_zero(rewards):
      return spans
    with _Timed(self, spans, 'reduce', -1):
      like = jax.tree.leaves(self._params)[0]
      late = sums[0].place(like)
      for other in sums[1:]:
        late = late.add(other.place(like))
      late.check('batch statistics')
      self._batch = jax.block_until_ready(late.reduce(self._total(), self._objective, rewards))
    return spans

  def finish(self) -> fold.Sum:
    """The lane's share of the batch direction; leaves the lane empty.

    Raises:
      RuntimeError: a group is still open.
    """
    if self._groups:
      raise RuntimeError(f'lane {self.index}: groups {sorted(self._groups)} are still open at the barrier')
    batch = self._total()
    self._params, self._inputs, self._batch, self._root = None, None, None, None
    fold.check(self._kind, batch, f'lane {self.index}')
    return batch

  def _padded(self, ids: Sequence[int]) -> tuple[np.ndarray, np.int32]:
    return sources_lib.padded(ids, self._buckets), np.int32(len(ids))

  def _shares(self, group: int) -> bool:
    """The group's prompt begins with the shared prefix and has more."""
    prompt = self._inputs.plans[group].prompt_ids[:-1]
    return bool(self._shared) and len(prompt) > len(self._shared) and prompt[:len(self._shared)] == self._shared

  def _parent(self, group: int, spans: list[types.Span]) -> tuple[llama.Boundary, np.ndarray, np.int32]:
    """(boundary state a group's prompt stands behind, the prompt's own padded tokens, how many)."""
    prompt = self._inputs.plans[group].prompt_ids[:-1]
    if not self._shares(group):
      return self._functions.root(), *self._padded(prompt)
    if self._root is None:
      tokens, length = self._padded(self._shared)
      with _Timed(self, spans, 'prompt', -1, tokens=int(length), work='forward'):
        self._root = jax.block_until_ready(
            self._functions.segment_forward(self._params, self._functions.root(), tokens, length, tokens.shape[1]))
    return self._root, *self._padded(prompt[len(self._shared):])

  def _prompt(self, group: int, spans: list[types.Span]) -> llama.Boundary:
    state = self._groups.setdefault(group, _Group())
    if state.boundary is None:
      parent, tokens, length = self._parent(group, spans)
      capacity = self._buckets.pad(len(self._inputs.plans[group].prompt_ids) - 1)
      with _Timed(self, spans, 'prompt', group, tokens=int(length), work='forward'):
        state.boundary = jax.block_until_ready(self._functions.segment_forward(self._params, parent, tokens, length, capacity))
    return state.boundary

  def _turns(self, work: scheduler.TurnWork, spans: list[types.Span]) -> None:
    boundary = self._prompt(work.group, spans)
    at, before = (work.group, work.index), self._inputs.plans[work.group].prompt_ids[-1]
    known = self._inputs.turns[at]
    if not self.trajectories.steps(known):  # its history was rewritten meanwhile, or another attempt began
      return
    with _Timed(self, spans, self.trajectories.span_kind, *at, turn=self.trajectories.last_turn(known)) as timed:
      timed.tokens(self.trajectories.advance(self._params, before, boundary, at, known))

  def _source(self, work: scheduler.SourceWork, spans: list[types.Span]) -> None:
    boundary = self._prompt(work.group, spans)
    data = [self._inputs.data[work.group, i] for i in work.indices]
    before, terms = self._inputs.plans[work.group].prompt_ids[-1], self._objective.terms
    passes, scale = self._passes(work, data)
    index = work.indices[0] if len(work.indices) == 1 else -1
    with _Timed(self, spans, 'source', work.group, index, tokens=sum(d.tokens for d in data), scored=sum(d.scored for d in data),
                members=work.indices, work=work.service.name.lower()):
      if any((work.group, i) in self._inputs.trees for i in work.indices):
        results = [self._with_branches(work, w, u) for w, u in passes]
      elif work.whole:
        batches = [sources_lib.pack(before, data, w, self._buckets, self._objective.needs_teacher, terms, u) for w, u in passes]
        results = [self._functions.source_gradient(self._params, boundary, batch) for batch in batches]
      else:
        at = work.group, index
        results = self.trajectories.gradients(self._params, before, boundary, at, self._inputs.turns[at], [(w[0], u[0]) for w, u in passes])
      jax.block_until_ready(results)
    self._measure(data, results[0].log_probs)
    with _Timed(self, spans, 'fold', work.group, index, members=work.indices):
      for result in results[1:]:  # terms without an advantage
        self._fold_known(work.group, result, 1.0)
      if work.coefficients is not None:
        self._fold_known(work.group, results[0], scale)
      elif work.reward is None:
        self._groups[work.group].held[work.indices[0]] = results[0]
      else:
        self._statistics.fold(work.group, results[0].gradient, results[0].adjoint, work.reward)

  def _with_branches(self, work: scheduler.SourceWork, weights: Sequence[float], counts: Sequence[float]) -> sources_lib.SourceResult:
    """One pass of sources whose history was rewritten, and of others packed with them, one by one."""
    sums, log_probs = None, []
    boundary, before = self._groups[work.group].boundary, self._inputs.plans[work.group].prompt_ids[-1]
    settings = self._buckets, self._objective.needs_teacher
    for index, weight, count in zip(work.indices, weights, counts):
      at = (work.group, index)
      if at in self._inputs.trees:
        if self.trajectories is not None:
          self.trajectories.discard(at)
        one = branches.gradient(self._functions, self._params, self._inputs.trees[at], boundary, weight, count, *settings)
      else:
        batch = sources_lib.pack(before, [self._inputs.data[at]], [weight], *settings, self._objective.terms, [count])
        one = self._functions.source_gradient(self._params, boundary, batch)
      sums = open_trajectories.accumulate(sums, (one.gradient, one.adjoint))
      log_probs += list(np.asarray(one.log_probs))
    return sources_lib.SourceResult(*sums, log_probs)

  def _passes(self, work: scheduler.SourceWork, data: Sequence[sources_lib.SourceData]):
    """Backward passes of sources: ((w_t of each, u_t of each) per pass, coefficient that the fold applies to the first).

    Terms that do not carry the advantage go with the score where the coefficient is known, and need a second pass where it
    comes later.
    """
    size, objective = self._inputs.plans[work.group].size, self._objective
    weights = [objective.token_weight(len(self._inputs.plans), size, d.scored) for d in data]
    counts, none = [objective.count_coefficient(size) * w for w in weights], [0.0] * len(data)
    counted = objective.terms.needs_counts
    if counted and work.coefficients is None:
      return [(weights, none), (none, counts)], 1.0
    if work.coefficients is None:
      return [(weights, none)], 1.0
    if len(data) == 1 and not counted:
      return [(weights, none)], work.coefficients[0]
    # Several parts of one sum: each carries its coefficient; otherwise the fold applies it.
    return [([w * c for w, c in zip(weights, work.coefficients)], counts if counted else none)], 1.0

  def _fold_known(self, group: int, result: sources_lib.SourceResult, scale: float) -> None:
    self._fold_batch(result.gradient, scale)
    state = self._groups[group]
    state.direct_adjoint = jax.block_until_ready(_begin_or_fold(self._kind, state.direct_adjoint, result.adjoint, scale))

  def _total(self) -> fold.Sum:
    return fold.zeros(self._kind, self._params) if self._batch is None else self._batch

  def _fold_batch(self, gradient, scale: float = 1.0) -> None:
    self._batch = jax.block_until_ready(_begin_or_fold(self._kind, self._batch, gradient, scale))

  def _hand_over(self, group: int) -> Parts:
    state = self._groups.pop(group, _Group())
    if self.trajectories is not None:
      self.trajectories.drop(group)
    return Parts(self._statistics.pop(group), state.direct_adjoint)

  def _take(self, group: int, state: _Group, parts: Sequence[Parts]) -> None:
    """Adds what other lanes have summed of a group."""
    like = jax.tree.leaves(self._params)[0]
    for part in parts:
      if part.statistics is not None:
        self._statistics.take(group, part.statistics.place(like))
      if part.adjoint is not None:
        theirs, mine = fold.place(self._kind, part.adjoint, like), state.direct_adjoint
        state.direct_adjoint = theirs if mine is None else fold.add(self._kind, mine, theirs)

  def _close(self, work: scheduler.CloseGroup, parts: Sequence[Parts], spans: list[types.Span]) -> None:
    state = self._groups.pop(work.group, _Group())
    self._take(work.group, state, parts)
    if self.trajectories is not None:
      self.trajectories.drop(work.group)
    adjoint = self._reduce(work, spans)
    if state.direct_adjoint is not None:
      direct = fold.value(self._kind, state.direct_adjoint, jnp.dtype(self._functions.dtype))
      adjoint = direct if adjoint is None else jax.tree.map(jnp.add, adjoint, direct)
    if adjoint is None:
      return
    parent, tokens, length = self._parent(work.group, spans)
    with _Timed(self, spans, 'prompt', work.group, tokens=int(length), work='backward'):
      gradient, above = self._functions.segment_gradient(self._params, parent, tokens, adjoint)
      self._fold_batch(gradient)
      if self._shares(work.group):
        self._root_adjoint = jax.block_until_ready(_begin_or_fold(self._kind, self._root_adjoint, above))

  def _reduce(self, work: scheduler.CloseGroup, spans: list[types.Span]) -> llama.State | None:
    """Reduces a group's statistics, which are gone then; returns what they want of the prompt, or None."""
    late = self._statistics.pop(work.group)
    if late is None or self._objective.is_zero(work.rewards):
      return None
    with _Timed(self, spans, 'reduce', work.group):
      dtype = jnp.dtype(self._functions.dtype)
      self._batch, adjoint = jax.block_until_ready(self._statistics.close(work.group, late, self._total(), work.rewards, dtype))
    return adjoint

  def _measure(self, data: Sequence[sources_lib.SourceData], log_probs: Sequence[np.ndarray]) -> None:
    for row, source in zip(log_probs, data):
      self.mismatch += mismatch_lib.Mismatch.of(np.asarray(row)[:source.scored], source.sampler_log_probs[source.mask])


def _begin_or_fold(kind: str, total: fold.Sum | None, tree, scale: float = 1.0) -> fold.Sum:
  return fold.fold(kind, fold.zeros(kind, tree) if total is None else total, tree, scale)


def shared_prefix(prompts: Sequence[Sequence[int]], at_least: int = 32) -> tuple[int, ...]:
  """The longest beginning that all of several different prompts share, each keeping some ids of its own; () if it is short.

  Args:
    prompts: of a run, ids.
    at_least: tokens that are worth a segment of their own.
  """
  distinct = {tuple(p) for p in prompts}
  first, last = min(distinct), max(distinct)
  length = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
  length = min(length, min(map(len, distinct)) - 2)  # the last id opens each trajectory's segment
  return first[:length] if len(distinct) > 1 and length >= at_least else ()


class _Timed:
  """Context manager that appends one span of lane work."""

  def __init__(self, lane: Lane, spans: list[types.Span], kind: str, group: int, index: int = -1, **fields):
    self._spans = spans
    self._fields = dict(kind=kind, update=lane.update, group=group, index=index, lane=lane.index, **fields)

  def __enter__(self) -> '_Timed':
    self._start = time.time()
    return self

  def tokens(self, count: int) -> None:
    """States the tokens processed where they are known only afterwards."""
    self._fields['tokens'] = count

  def __exit__(self, kind, value, traceback):
    if kind is None:
      self._spans.append(types.Span(start_s=self._start, end_s=time.time(), **self._fields))
