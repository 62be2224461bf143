"""Algorithm 1 and the readers beside it, a second time: lists, loops and fractions, nothing shared with the library.

Validity is taken from the defect a test put into a row, not computed.
"""

from __future__ import annotations

import dataclasses
import fractions

import numpy as np


@dataclasses.dataclass
class Item:
  row: object
  valid: bool
  seen: int = -1

  @property
  def id(self):
    return (self.row.rollout, self.row.turn)

  @property
  def tokens(self):
    dead = self.row.token_ids == () or self.row.teacher_log_probs is None or not any(self.row.scored_mask) or \
        len(self.row.scored_mask) != 3 or self.row.teacher_valid_mask or float('-inf') in self.row.teacher_log_probs
    return 0 if dead else 2

  @property
  def score(self):
    if not self.tokens:
      return fractions.Fraction(0)
    return sum(fractions.Fraction(self.row.student_log_probs[i]) - fractions.Fraction(self.row.teacher_log_probs[i]) for i in (0, 1))


def run(stream, settings, name):
  """Yields (batch ids in order, pending ids, queued ids, dropped so far by 'stale', 'expired', 'invalid') per update."""
  pending, queue = [], []
  dropped = {'stale': 0, 'expired': 0, 'invalid': 0}
  pooled = name not in ('vanilla', 'gate_only')
  gated = name not in ('vanilla', 'vanilla_matched', 'divopd_focus')
  for update, rows, defects in stream:
    queue += [Item(row, not defect) for row, defect in zip(rows, defects)]
    oldest = max(update - settings.max_staleness, 0)
    fresh_pending = []
    for item in pending:
      if item.row.version < oldest:
        dropped['stale'] += 1
      else:
        fresh_pending.append(item)
    pool = fresh_pending
    room = settings.batch_size * settings.multiplier if pooled else settings.batch_size
    filled = len(pool)
    while queue and filled < room:
      item = queue.pop(0)
      if item.row.version < oldest:
        dropped['stale'] += 1
        continue
      item.seen = update
      pool.append(item)
      filled += 1 if pooled or not gated or item.valid else 0
    if gated:
      dropped['invalid'] += sum(not i.valid for i in pool)
      pool = [i for i in pool if i.valid]
    batch = choose(pool, settings, name, update)
    pending = []
    for item in pool:
      if item not in batch:
        if update - item.seen <= settings.max_pending_age:
          pending.append(item)
        else:
          dropped['expired'] += 1
    yield [i.id for i in batch], [i.id for i in pending], [i.id for i in queue], dict(dropped)


def choose(pool, settings, name, update):
  size = settings.batch_size
  if name in ('vanilla', 'gate_only', 'vanilla_matched'):
    return pool[:size]
  best_first = sorted(pool, key=lambda i: (-i.score, i.row.rollout, i.row.turn))
  if name == 'top_b':
    return best_first[:size]
  if name == 'divopd_focus':
    return by_task(best_first, settings, update)
  groups = {}
  for item in best_first:
    groups.setdefault(item.row.rollout, []).append(item)
  order = sorted(groups, key=lambda r: (min(i.seen for i in groups[r]), r))
  batch, taken = [], {r: 0 for r in order}
  cap = settings.cap if name == 'divopd' else len(pool) + 1
  while len(batch) < size and any(taken[r] < len(groups[r]) for r in order):
    for r in order:
      while taken[r] < min(cap, len(groups[r])) and len(batch) < size:
        batch.append(groups[r][taken[r]])
        taken[r] += 1
    cap += 1
  return batch


def by_task(best_first, settings, update):
  tasks = sorted({i.row.task for i in best_first})
  places = np.random.default_rng([settings.seed, update]).permutation(len(tasks))
  order = [t for _, t in sorted(zip(places, tasks))]
  limit = settings.task_token_share * settings.batch_size * sum(i.tokens for i in best_first) / max(len(best_first), 1)
  batch = []
  for relaxed in (False, True):
    for task in order:
      used, open_ = 0, True
      for number, item in enumerate(i for i in best_first if i.row.task == task):
        used += item.tokens
        open_ = open_ and number < settings.task_cap and used <= limit + 1e-9
        if open_ != relaxed and len(batch) < settings.batch_size:
          batch.append(item)
  return batch
