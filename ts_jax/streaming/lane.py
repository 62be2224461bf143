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
from ts_jax.streaming import scheduler, sources as sources_lib
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
  """

  def __init__(self, index: int, functions: sources_lib.SourceFunctions, buckets: Buckets, *, accumulator: str,
               reward_centre: float, objective: policy_gradient.Objective = policy_gradient.Objective(),
               trajectories: OpenTrajectories | None = None):
    """Makes an idle lane.

    Args:
      index: lane number.
      functions: the student's jitted functions.
      buckets: allowed shapes.
      accumulator: 'float32' or 'exact'.
      reward_centre: c, subtracted from rewards before they weight a gradient; the middle of the reward range.
      objective: from rewards and lengths to weights.
      trajectories: at granularity `forward`, the trajectories whose turns run forward as they arrive.
    """
    self.index = index
    self._functions = functions
    self._buckets = buckets
    self._kind = accumulator
    self._centre = reward_centre
    self._objective = objective
    self._trajectories = trajectories
    self.update = -1
    self.gap = SamplerGap()

  def begin(self, update: int, params, plans: Sequence[types.GroupPlan], policy_version: int) -> None:
    """Starts an update at `params`; the lane reads them and never changes them."""
    for plan in plans:
      if len(plan.prompt_ids) < 2:
        raise types.ConfigError(f'task {plan.task_id}: a prompt needs at least two tokens, got {len(plan.prompt_ids)}')
    self.update = update
    self._params = params
    self._plans = {p.index: p for p in plans}
    self._version = policy_version
    self._groups: dict[int, _Group] = {}
    self._data: dict[tuple[int, int], sources_lib.SourceData] = {}
    self._batch: fold.Sum | None = None
    if self._trajectories is not None:
      self._trajectories.clear()
    self.gap = SamplerGap()

  def register_turn(self, group: int, index: int, turn: types.Turn) -> None:
    """Hands over one more turn of a running trajectory (granularity `forward`)."""
    self._trajectories.register((group, index), turn)

  def register(self, group: int, index: int, data: sources_lib.SourceData) -> None:
    """Hands over a finished trajectory's tokens.

    Raises:
      PolicyVersionError: it was sampled from another policy version than this update's.
    """
    if data.policy_version != self._version:
      raise types.PolicyVersionError(
          f'trajectory {index} of group {group} was sampled at policy version {data.policy_version}, the update runs at '
          f'{self._version}')
    self._data[group, index] = data

  def cost(self, data: sources_lib.SourceData) -> int:
    """Padded tokens of a source."""
    return self._buckets.pad(max(data.tokens, 1))

  def run(self, work: scheduler.Work) -> list[types.Span]:
    """Runs one work item to completion and returns its spans (without readiness)."""
    spans: list[types.Span] = []
    match work:
      case scheduler.PromptForward():
        self._prompt(work.group, spans)
      case scheduler.TurnForward():
        self._turns(work, spans)
      case scheduler.SourceWork():
        self._source(work, spans)
      case scheduler.FoldHeld():
        with _Timed(self, spans, 'fold', work.group, work.index):
          self._fold_statistics(work.group, self._groups[work.group].held.pop(work.index), work.reward)
      case scheduler.CloseGroup():
        self._close(work, spans)
    return spans

  def finish(self) -> fold.Sum:
    """The lane's share of the batch direction; leaves the lane empty.

    Raises:
      RuntimeError: a group is still open.
    """
    if self._groups:
      raise RuntimeError(f'lane {self.index}: groups {sorted(self._groups)} are still open at the barrier')
    batch = self._batch if self._batch is not None else fold.zeros(self._kind, self._params)
    self._params, self._batch = None, None
    fold.check(self._kind, batch, f'lane {self.index}')
    return batch

  def _prompt_tokens(self, group: int) -> tuple[np.ndarray, np.int32]:
    ids = self._plans[group].prompt_ids[:-1]
    tokens = np.zeros((1, self._buckets.pad(len(ids))), np.int32)
    tokens[0, :len(ids)] = ids
    return tokens, np.int32(len(ids))

  def _prompt(self, group: int, spans: list[types.Span]) -> llama.Boundary:
    state = self._groups.setdefault(group, _Group())
    if state.boundary is None:
      tokens, length = self._prompt_tokens(group)
      with _Timed(self, spans, 'prompt', group, tokens=int(length)):
        state.boundary = jax.block_until_ready(self._functions.prompt_forward(self._params, tokens, length))
    return state.boundary

  def _turns(self, work: scheduler.TurnForward, spans: list[types.Span]) -> None:
    boundary = self._prompt(work.group, spans)
    at, prompt_ids = (work.group, work.index), self._plans[work.group].prompt_ids
    with _Timed(self, spans, 'forward', *at) as timed:
      timed.tokens(self._trajectories.forward(self._params, prompt_ids, boundary, at, work.turns))

  def _source(self, work: scheduler.SourceWork, spans: list[types.Span]) -> None:
    boundary = self._prompt(work.group, spans)
    data = [self._data[work.group, i] for i in work.indices]
    size = self._plans[work.group].size
    weights = [self._objective.token_weight(len(self._plans), size, d.scored) for d in data]
    packed = len(work.indices) > 1
    if packed:  # rows of one sum: each carries its coefficient; otherwise the fold applies it
      weights = [w * c for w, c in zip(weights, work.coefficients)]
    batch = sources_lib.pack(self._plans[work.group].prompt_ids, data, weights, self._buckets)
    index = work.indices[0] if len(work.indices) == 1 else -1
    with _Timed(self, spans, 'source', work.group, index, tokens=sum(d.tokens for d in data)):
      if self._trajectories is None:
        result = self._functions.source_gradient(self._params, boundary, batch)
      else:
        result = self._trajectories.source_gradient(self._params, boundary, (work.group, index), batch, data[0].tokens)
      jax.block_until_ready(result)
    self._measure_gap(data, np.asarray(result.log_probs))
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
    if policy_gradient.is_uniform(work.rewards) or (state.statistics is None and state.direct_adjoint is None):
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
    tokens, length = self._prompt_tokens(work.group)
    with _Timed(self, spans, 'prompt', work.group, tokens=int(length)):
      self._fold_batch(self._functions.prompt_gradient(self._params, tokens, length, adjoint))

  def _measure_gap(self, data: Sequence[sources_lib.SourceData], log_probs: np.ndarray) -> None:
    for row, source in enumerate(data):
      gap = np.abs(log_probs[row, :source.scored] - source.sampler_log_probs[source.mask])
      self.gap += SamplerGap(float(gap.sum()), float(gap.max()), source.scored)


def _begin_or_fold(kind: str, total: fold.Sum | None, tree, scale: float = 1.0) -> fold.Sum:
  return fold.fold(kind, fold.zeros(kind, tree) if total is None else total, tree, scale)


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
