"""A learner lane: runs what the scheduler assigns, at the parameters of one policy version."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ts_jax import types
from ts_jax.kernels import fold
from ts_jax.models import llama
from ts_jax.objectives import policy_gradient
from ts_jax.objectives.objective import Objective
from ts_jax.streaming import branches, open_trajectories, scheduler, sources as sources_lib
from ts_jax.streaming.buckets import Buckets
from ts_jax.streaming.open_trajectories import OpenTrajectories


@dataclasses.dataclass(frozen=True)
class SamplerGap:
  """Learner against sampler log-probs of the same tokens: sum and largest of the absolute differences."""

  total: float = 0.0
  largest: float = 0.0
  tokens: int = 0

  def __add__(self, other: 'SamplerGap') -> 'SamplerGap':
    return SamplerGap(self.total + other.total, max(self.largest, other.largest), self.tokens + other.tokens)


@dataclasses.dataclass
class _Group:
  """What the lane holds of an open group."""

  boundary: llama.Boundary | None = None
  statistics: tuple[fold.Sum, fold.Sum] | None = None
  direct_adjoint: fold.Sum | None = None
  held: dict[int, Any] = dataclasses.field(default_factory=dict)


class Lane:
  """Executes work items of one update and accumulates the batch direction.

  A lane owns its groups' boundary states and statistics; nothing is shared between lanes until the barrier adds their
  batch sums.  Work on one lane is strictly sequential.

  Its prefix tree: what all prompts of the run begin with, the rest of each group's prompt, trajectories, and at granularity
  `turn` their turns.  A segment's backward pass runs once, after its last child; that of the shared prefix at the barrier,
  for all lanes together.
  """

  def __init__(self, index: int, functions: sources_lib.SourceFunctions, buckets: Buckets, *, accumulator: str,
               reward_centre: float, objective: Objective = policy_gradient.PolicyGradient(),
               trajectories: OpenTrajectories | None = None, shared_prefix: Sequence[int] = (), device: jax.Device | None = None):
    """Makes an idle lane.

    Args:
      index: lane number.
      functions: the student's jitted functions.
      buckets: allowed shapes.
      accumulator: 'float32' or 'exact'.
      reward_centre: c, subtracted from rewards before they weight a gradient; the middle of the reward range.
      objective: from rewards and lengths to weights.
      trajectories: at granularities `turn` and `forward`, what works on turns as they arrive.
      shared_prefix: ids that prompts of an update begin with, processed once for all of them; a prompt that does not begin with
        it stands alone.  See `shared_prefix`.
      device: where to compute; None: where the parameters are.
    """
    self.index = index
    self._functions = functions
    self._buckets = buckets
    self._kind = accumulator
    self._centre = reward_centre
    self._objective = objective
    self._trajectories = trajectories
    self._shared = tuple(shared_prefix)
    self._device = device
    self.update = -1
    self.gap = SamplerGap()

  def begin(self, update: int, params, plans: Sequence[types.GroupPlan], policy_version: int) -> None:
    """Starts an update at `params`; the lane reads them and never changes them."""
    for plan in plans:
      if len(plan.prompt_ids) < 2:
        raise types.ConfigError(f'task {plan.task_id}: a prompt needs at least two tokens, got {len(plan.prompt_ids)}')
    self.update = update
    self._params = params if self._device is None else jax.device_put(params, self._device)
    self._plans = {p.index: p for p in plans}
    self._version = policy_version
    self._groups: dict[int, _Group] = {}
    self._data: dict[tuple[int, int], sources_lib.SourceData] = {}
    self._trees: dict[tuple[int, int], tuple[branches.Segment, ...]] = {}
    self._batch: fold.Sum | None = None
    self._root: llama.Boundary | None = None
    self._root_adjoint: fold.Sum | None = None
    if self._trajectories is not None:
      self._trajectories.clear()
    self.gap = SamplerGap()

  def fix_turn(self, group: int, index: int, turn: types.Turn) -> int:
    """Hands over one more turn of a running trajectory; returns the steps that can be worked on."""
    self._trajectories.fix((group, index), turn)
    return self._trajectories.steps((group, index))

  def score_turn(self, group: int, index: int, turn: int, log_probs: Sequence[float]) -> int:
    """Hands over the teacher's scores of a turn; returns the steps that can be worked on."""
    self._trajectories.score((group, index), turn, log_probs)
    return self._trajectories.steps((group, index))

  def register(self, trajectory: types.Trajectory) -> sources_lib.SourceData:
    """Hands over a finished trajectory.

    Raises:
      PolicyVersionError: it was sampled from another policy version than this update's.
    """
    if trajectory.policy_version != self._version:
      raise types.PolicyVersionError(
          f'trajectory {trajectory.index} of group {trajectory.group} was sampled at policy version {trajectory.policy_version}, '
          f'the update runs at {self._version}')
    at = (trajectory.group, trajectory.index)
    self._data[at] = sources_lib.SourceData.of(trajectory)
    if trajectory.branches:
      self._trees[at] = branches.segments(trajectory)
    if self._trajectories is not None:
      self._trajectories.complete(at, trajectory.turns)
    return self._data[at]

  def cost(self, data: sources_lib.SourceData) -> int:
    """Padded tokens of a source."""
    return self._buckets.pad(max(data.tokens, 1))

  def run(self, work: scheduler.Work) -> list[types.Span]:
    """Runs one work item to completion and returns its spans (without readiness)."""
    spans: list[types.Span] = []
    match work:
      case scheduler.PromptForward():
        self._prompt(work.group, spans)
      case scheduler.TurnWork():
        self._turns(work, spans)
      case scheduler.SourceWork():
        self._source(work, spans)
      case scheduler.FoldHeld():
        with _Timed(self, spans, 'fold', work.group, work.index):
          self._fold_statistics(work.group, self._groups[work.group].held.pop(work.index), work.reward)
      case scheduler.CloseGroup():
        self._close(work, spans)
    return spans

  def finish_shared_prefix(self, others: Sequence['Lane']) -> list[types.Span]:
    """Runs the shared prefix backward for this lane and `others`, once every group is closed."""
    adjoints = [lane._root_adjoint for lane in (self, *others) if lane._root_adjoint is not None]
    spans: list[types.Span] = []
    if not adjoints:
      return spans
    total = fold.place(self._kind, adjoints[0], jax.tree.leaves(self._params)[0])
    for adjoint in adjoints[1:]:
      total = fold.add(self._kind, total, adjoint)
    fold.check(self._kind, total, 'adjoint of the shared prefix')
    tokens, length = self._padded(self._shared)
    dtype = jnp.dtype(self._functions.dtype)
    with _Timed(self, spans, 'prompt', -1, tokens=int(length)):
      value = fold.value(self._kind, total, jnp.promote_types(dtype, jnp.float32))
      gradient, _ = self._functions.segment_gradient(self._params, self._functions.root(), tokens, value)
      self._fold_batch(gradient)
    return spans

  def finish(self) -> fold.Sum:
    """The lane's share of the batch direction; leaves the lane empty.

    Raises:
      RuntimeError: a group is still open.
    """
    if self._groups:
      raise RuntimeError(f'lane {self.index}: groups {sorted(self._groups)} are still open at the barrier')
    batch = self._batch if self._batch is not None else fold.zeros(self._kind, self._params)
    self._params, self._batch, self._root, self._root_adjoint = None, None, None, None
    fold.check(self._kind, batch, f'lane {self.index}')
    return batch

  def _padded(self, ids: Sequence[int]) -> tuple[np.ndarray, np.int32]:
    return sources_lib.padded(ids, self._buckets), np.int32(len(ids))

  def _shares(self, group: int) -> bool:
    """The group's prompt begins with the shared prefix and has more."""
    prompt = self._plans[group].prompt_ids[:-1]
    return bool(self._shared) and len(prompt) > len(self._shared) and prompt[:len(self._shared)] == self._shared

  def _parent(self, group: int, spans: list[types.Span]) -> tuple[llama.Boundary, np.ndarray, np.int32]:
    """(boundary state a group's prompt stands behind, the prompt's own padded tokens, how many)."""
    prompt = self._plans[group].prompt_ids[:-1]
    if not self._shares(group):
      return self._functions.root(), *self._padded(prompt)
    if self._root is None:
      tokens, length = self._padded(self._shared)
      with _Timed(self, spans, 'prompt', -1, tokens=int(length)):
        self._root = jax.block_until_ready(
            self._functions.segment_forward(self._params, self._functions.root(), tokens, length, tokens.shape[1]))
    return self._root, *self._padded(prompt[len(self._shared):])

  def _prompt(self, group: int, spans: list[types.Span]) -> llama.Boundary:
    state = self._groups.setdefault(group, _Group())
    if state.boundary is None:
      parent, tokens, length = self._parent(group, spans)
      capacity = self._buckets.pad(len(self._plans[group].prompt_ids) - 1)
      with _Timed(self, spans, 'prompt', group, tokens=int(length)):
        state.boundary = jax.block_until_ready(self._functions.segment_forward(self._params, parent, tokens, length, capacity))
    return state.boundary

  def _turns(self, work: scheduler.TurnWork, spans: list[types.Span]) -> None:
    boundary = self._prompt(work.group, spans)
    at, before = (work.group, work.index), self._plans[work.group].prompt_ids[-1]
    with _Timed(self, spans, self._trajectories.span_kind, *at) as timed:
      timed.tokens(self._trajectories.advance(self._params, before, boundary, at))

  def _source(self, work: scheduler.SourceWork, spans: list[types.Span]) -> None:
    boundary = self._prompt(work.group, spans)
    data = [self._data[work.group, i] for i in work.indices]
    size, before = self._plans[work.group].size, self._plans[work.group].prompt_ids[-1]
    weights = [self._objective.token_weight(len(self._plans), size, d.scored) for d in data]
    packed = len(work.indices) > 1
    if packed:  # rows of one sum: each carries its coefficient; otherwise the fold applies it
      weights = [w * c for w, c in zip(weights, work.coefficients)]
    index = work.indices[0] if len(work.indices) == 1 else -1
    with _Timed(self, spans, 'source', work.group, index, tokens=sum(d.tokens for d in data)):
      if any((work.group, i) in self._trees for i in work.indices):
        result = self._with_branches(work, weights)
      elif self._trajectories is None:
        batch = sources_lib.pack(before, data, weights, self._buckets, self._objective.needs_teacher)
        result = self._functions.source_gradient(self._params, boundary, batch)
      else:
        result = self._trajectories.gradient(self._params, before, boundary, (work.group, index), weights[0])
      jax.block_until_ready(result)
    self._measure_gap(data, result.log_probs)
    with _Timed(self, spans, 'fold', work.group, index):
      if work.coefficients is not None:
        scale = 1.0 if packed else work.coefficients[0]
        self._fold_batch(result.gradient, scale)
        state = self._groups[work.group]
        state.direct_adjoint = _begin_or_fold(self._kind, state.direct_adjoint, result.adjoint, scale)
        jax.block_until_ready(state.direct_adjoint)
      elif work.reward is None:
        self._groups[work.group].held[work.indices[0]] = result
      else:
        self._fold_statistics(work.group, result, work.reward)

  def _with_branches(self, work: scheduler.SourceWork, weights: Sequence[float]) -> sources_lib.SourceResult:
    """Sources whose history was rewritten, and others packed with them, one by one."""
    sums, log_probs = None, []
    boundary, before = self._groups[work.group].boundary, self._plans[work.group].prompt_ids[-1]
    for index, weight in zip(work.indices, weights):
      at, teacher = (work.group, index), self._objective.needs_teacher
      if at in self._trees:
        if self._trajectories is not None:
          self._trajectories.discard(at)
        one = branches.gradient(self._functions, self._params, self._trees[at], boundary, weight, self._buckets, teacher)
      else:
        batch = sources_lib.pack(before, [self._data[at]], [weight], self._buckets, teacher)
        one = self._functions.source_gradient(self._params, boundary, batch)
      sums = open_trajectories.accumulate(sums, (one.gradient, one.adjoint))
      log_probs += list(np.asarray(one.log_probs))
    return sources_lib.SourceResult(*sums, log_probs)

  def _fold_statistics(self, group: int, result: sources_lib.SourceResult, reward: float) -> None:
    state = self._groups[group]
    tree = {'params': result.gradient, 'boundary': result.adjoint}
    state.statistics = jax.block_until_ready(fold.fold_pair(self._kind, state.statistics, tree, reward - self._centre))

  def _fold_batch(self, gradient, scale: float = 1.0) -> None:
    self._batch = jax.block_until_ready(_begin_or_fold(self._kind, self._batch, gradient, scale))

  def _close(self, work: scheduler.CloseGroup, spans: list[types.Span]) -> None:
    state = self._groups.pop(work.group, _Group())
    if self._trajectories is not None:
      self._trajectories.drop(work.group)
    if self._objective.is_zero(work.rewards) or (state.statistics is None and state.direct_adjoint is None):
      return
    adjoint = None
    if state.statistics is not None:
      reduction = self._objective.group_reduction(work.rewards, self._centre)
      with _Timed(self, spans, 'reduce', work.group):
        for statistic in state.statistics:
          fold.check(self._kind, statistic, f'group {work.group}')
        part = lambda name: tuple(s.replace(leaves=s.leaves[name]) for s in state.statistics)
        if self._batch is None:
          self._batch = fold.zeros(self._kind, self._params)
        self._batch = fold.fold_reduced(self._kind, self._batch, part('params'), reduction.shift, reduction.scale)
        adjoint = fold.value_reduced(self._kind, part('boundary'), reduction.shift, reduction.scale,
                                     state.boundary.keys.dtype)
        jax.block_until_ready((self._batch, adjoint))
    if state.direct_adjoint is not None:
      direct = fold.value(self._kind, state.direct_adjoint, state.boundary.keys.dtype)
      adjoint = direct if adjoint is None else jax.tree.map(jnp.add, adjoint, direct)
    state.statistics = None
    parent, tokens, length = self._parent(work.group, spans)
    with _Timed(self, spans, 'prompt', work.group, tokens=int(length)):
      gradient, above = self._functions.segment_gradient(self._params, parent, tokens, adjoint)
      self._fold_batch(gradient)
      if self._shares(work.group):
        self._root_adjoint = jax.block_until_ready(_begin_or_fold(self._kind, self._root_adjoint, above))

  def _measure_gap(self, data: Sequence[sources_lib.SourceData], log_probs: Sequence[np.ndarray]) -> None:
    for row, source in zip(log_probs, data):
      gap = np.abs(np.asarray(row)[:source.scored] - source.sampler_log_probs[source.mask])
      self.gap += SamplerGap(float(gap.sum()), float(gap.max()), source.scored)


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

  def __init__(self, lane: Lane, spans: list[types.Span], kind: str, group: int, index: int = -1, tokens: int = 0):
    self._spans = spans
    self._fields = dict(kind=kind, update=lane.update, group=group, index=index, lane=lane.index, tokens=tokens)

  def __enter__(self) -> '_Timed':
    self._start = time.time()
    return self

  def tokens(self, count: int) -> None:
    """States the tokens processed where they are known only afterwards."""
    self._fields['tokens'] = count

  def __exit__(self, kind, value, traceback):
    if kind is None:
      self._spans.append(types.Span(start_s=self._start, end_s=time.time(), **self._fields))
