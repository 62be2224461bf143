"""The batch composers by name, and the one procedure that runs them all (DivOPD Algorithm 1, Tables 11, 13, 14, 17, 18).

Methods differ in what they read, whether they gate, and how they order candidates; the learner's loss is the same.  All of
them are deterministic: the same pool, update and settings give the same batch, whatever the order within the pool's arrays.
"""

from __future__ import annotations

import dataclasses
import types as _types
from typing import Mapping

import numpy as np

from ts_jax.composer import coverage, focus, gate
from ts_jax.composer import pool as pool_lib
from ts_jax.composer.pool import Candidates, Pool

ORDERS = ('arrival', 'score', 'rollout', 'task')
WITHIN = ('uniform', 'score')


@dataclasses.dataclass(frozen=True)
class Settings:
  """Numbers of the composer; the defaults are those of Table 3.

  Attributes:
    batch_size: B, turns per update.
    multiplier: c; pending and fresh turns together are at most c * B.
    cap: k, turns per rollout in the first sweep.
    max_staleness: delta, versions between a turn's policy and the learner's.
    max_pending_age: W, updates an unselected turn is kept after it was first seen.
    seed: of uniform sampling and of the order of tasks.
    task_cap: turns per task in the first pass of `divopd_focus`.
    task_token_share: share of a batch's tokens one task may take in that pass.
  """

  batch_size: int = 64
  multiplier: int = 4
  cap: int = 4
  max_staleness: int = 2
  max_pending_age: int = 8
  seed: int = 0
  task_cap: int = 3
  task_token_share: float = 0.25

  def __post_init__(self):
    for name in ('batch_size', 'multiplier', 'cap', 'task_cap'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} {getattr(self, name)} must be at least 1')
    for name in ('max_staleness', 'max_pending_age'):
      if getattr(self, name) < 0:
        raise ValueError(f'{name} {getattr(self, name)} must not be negative')
    if not 0 < self.task_token_share <= 1:
      raise ValueError(f'task_token_share {self.task_token_share} must be in (0, 1]')


@dataclasses.dataclass(frozen=True)
class Method:
  """A composer.

  Attributes:
    gated: invalid turns are discarded; otherwise they may take slots.
    pooled: it composes from c * B pending and fresh turns and keeps what it does not select; otherwise it reads B turns
      (that pass the gate, if it has one) and keeps none.
    order: 'arrival'; 'score', descending over all turns; 'rollout', coverage; 'task', the older composer.
    within: with order 'rollout', turns of a rollout by 'score' (focus) or 'uniform' at random.
    capped: with order 'rollout', the first sweep is capped.
    balanced: rows are weighted so that every rollout of the batch has the same weight.
  """

  gated: bool = True
  pooled: bool = True
  order: str = 'rollout'
  within: str = 'score'
  capped: bool = True
  balanced: bool = False

  def __post_init__(self):
    if self.order not in ORDERS:
      raise ValueError(f'order {self.order!r} is unknown: use one of {ORDERS}')
    if self.within not in WITHIN:
      raise ValueError(f'within {self.within!r} is unknown: use one of {WITHIN}')


METHODS: Mapping[str, Method] = _types.MappingProxyType({
    'vanilla': Method(gated=False, pooled=False, order='arrival'),
    'gate_only': Method(pooled=False, order='arrival'),
    'top_b': Method(order='score'),
    'divopd_base': Method(within='uniform'),
    'divopd': Method(),
    'uncapped': Method(within='uniform', capped=False),  # k = infinity, the control of Table 18
    'divopd_uncapped': Method(capped=False),  # k = infinity with focus, the last line of Table 11
    'divopd_focus': Method(gated=False, order='task', balanced=True),  # Appendix A.1: see `_task_order`
    'vanilla_matched': Method(gated=False, order='arrival'),  # arrival order with the pool of the others, Table 17
})


def method(name: str) -> Method:
  """The method called `name`.

  Raises:
    ValueError: there is none.
  """
  if name not in METHODS:
    raise ValueError(f'composer {name!r} is unknown: use one of {sorted(METHODS)}')
  return METHODS[name]


@dataclasses.dataclass(frozen=True, eq=False)
class Composition:
  """One composed batch.

  Attributes:
    update: q.
    batch: rows for the learner, in order of selection; short only when the pool was.
    row_weights: weights of the rows in the loss [n], mean 1.
    candidates: rows that were read, pending ones included and stale ones not.
    dropped: rows dropped in this update by reason.
  """

  update: int
  batch: Candidates
  row_weights: np.ndarray
  candidates: int
  dropped: Mapping[str, int]


def compose(pool: Pool, update: int, how: Method, settings: Settings) -> tuple[Composition, Pool]:
  """Composes the batch of one update (Algorithm 1).

  Args:
    pool: pending turns and the queue.
    update: q, the version the learner holds before the update.
    how: the method.
    settings: its numbers.

  Returns:
    (the batch, the pool for the next update).

  Raises:
    PolicyVersionError, ValueError: see `pool.read`.
  """
  limit = settings.batch_size * (settings.multiplier if how.pooled else 1)
  counted = pool.queue.valid if how.gated and not how.pooled else None
  got = pool_lib.read(pool, update, limit, settings.max_staleness, counted)
  candidates = got.candidates.take(got.candidates.valid) if how.gated else got.candidates
  rejected = gate.counts(got.candidates.reason) if how.gated else {}
  chosen = select(candidates, update, how, settings)
  left = np.ones(len(candidates), bool)
  left[chosen] = False
  pending, expired = pool_lib.retain(candidates.take(left), update, settings.max_pending_age)
  batch = candidates.take(chosen)
  dropped = pool_lib.add_counts({pool_lib.STALE: got.stale, pool_lib.EXPIRED: expired}, rejected)
  composition = Composition(update, batch, _row_weights(batch, how.balanced), len(got.candidates), dropped)
  return composition, dataclasses.replace(pool, pending=pending, queue=got.queue, selected=pool.selected + len(batch),
                                          dropped=pool_lib.add_counts(pool.dropped, dropped))


def select(candidates: Candidates, update: int, how: Method, settings: Settings) -> np.ndarray:
  """Indices of at most B candidates, in order of selection; gating is done before."""
  match how.order:
    case 'arrival':
      order = np.argsort(candidates.arrival, kind='stable')
    case 'score':
      order = np.lexsort((candidates.turn, candidates.rollout, -candidates.score))
    case 'rollout':
      keys = candidates.score if how.within == 'score' else focus.uniform_keys(candidates.rollout, candidates.turn, settings.seed, update)
      rank = focus.rank(candidates.rollout, keys, candidates.turn)
      order = coverage.sweep(candidates.rollout, candidates.first_seen, rank, settings.batch_size, settings.cap if how.capped else None)
    case _:
      order = _task_order(candidates, update, settings)
  return order[:settings.batch_size]


def _task_order(candidates: Candidates, update: int, settings: Settings) -> np.ndarray:
  """Order of selection of DivOPD-focus, from the few facts Appendix A.1 gives.

  Tasks in seeded random order, turns of a task by score; at most `task_cap` turns and `task_token_share` of the tokens per
  task at first, then without either.  Not stated there, and chosen here: a group is a task's turns over all its rollouts;
  the share is of B times the candidates' mean token count; it ends a task's turn at the first turn that exceeds it.
  """
  _, group = np.unique(np.array([r.task for r in candidates.rows], str), return_inverse=True)
  place = np.random.default_rng([settings.seed % 2**32, update]).permutation(group.max(initial=-1) + 1)[group]
  rank = focus.rank(place, candidates.score, candidates.rollout, candidates.turn)
  order = np.lexsort((rank, place))
  tokens = candidates.valid_tokens[order]
  before = np.cumsum(tokens) - tokens
  starts = np.flatnonzero(rank[order] == 0)
  within = before - np.repeat(before[starts], np.diff(starts, append=len(order))) + tokens
  limit = settings.task_token_share * settings.batch_size * (tokens.mean() if len(tokens) else 0)
  relaxed = (rank[order] >= settings.task_cap) | (within > limit)
  return order[np.argsort(relaxed, kind='stable')]


def _row_weights(batch: Candidates, balanced: bool) -> np.ndarray:
  if not balanced or not len(batch):
    return np.ones(len(batch))
  _, group, sizes = np.unique(batch.rollout, return_inverse=True, return_counts=True)
  return len(batch) / (len(sizes) * sizes[group])
