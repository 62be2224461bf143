"""Train, development and held-out tasks (Appendix C.2 of ThunderSyncRL), and the order in which training draws them."""

from __future__ import annotations

import collections
import dataclasses
import fractions
import functools
import hashlib
import math
import random
import unicodedata
from typing import Sequence

from ts_jax import types
from ts_jax.data import tasks as tasks_lib


@dataclasses.dataclass(frozen=True)
class Split:
  """Tasks by use.  Each part alternates between its families, in the order of identifier digests: any prefix is mixed.

  Attributes:
    train: drawn for updates.
    dev: other sources of the same families; contribute no gradients.
    held_out: the family that training never sees.
  """

  train: tuple[tasks_lib.Task, ...]
  dev: tuple[tasks_lib.Task, ...]
  held_out: tuple[tasks_lib.Task, ...]

  def digests(self) -> dict[str, str]:
    """Part -> SHA-256 (hex) of its task list: identifiers and the digests of the task folders."""
    return {part: list_digest(getattr(self, part)) for part in ('train', 'dev', 'held_out')}


def normalise_identifier(identifier: str) -> str:
  """Returns the form in which identifiers are compared and hashed: NFKC, lower case, runs of white space as one '-'."""
  return '-'.join(unicodedata.normalize('NFKC', identifier).lower().split())


def identifier_digest(identifier: str) -> str:
  """Returns the SHA-256 (hex) of the normalised identifier."""
  return hashlib.sha256(normalise_identifier(identifier).encode()).hexdigest()


def list_digest(tasks: Sequence[tasks_lib.Task]) -> str:
  """Returns the SHA-256 (hex) of a task list, independent of its order."""
  lines = sorted(f'{normalise_identifier(t.task_id)} {t.digest}\n' for t in tasks)
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def split(tasks: Sequence[tasks_lib.Task], *, dev_fraction: float = 0.05, held_out_family: str | None = None,
          per_family: bool = False) -> Split:
  """Splits by source: source groups in the order of their digests, the first `dev_fraction` of them for development.

  Membership depends on identifiers and `dev_fraction` alone, not on the order of `tasks`.

  Args:
    tasks: identifiers must be unique.
    dev_fraction: of the source groups, rounded up; in [0, 1).
    held_out_family: kept out of both; None: nothing is.
    per_family: take the fraction (rounded up) of each family instead of all groups together.

  Raises:
    ConfigError: repeated identifiers, an unknown family, a fraction out of range, or nothing left to train on.
  """
  if not 0 <= dev_fraction < 1:
    raise types.ConfigError(f'dev_fraction={dev_fraction} must be in [0, 1)')
  identifiers = [normalise_identifier(t.task_id) for t in tasks]
  repeated = sorted({i for i in identifiers if identifiers.count(i) > 1}) if len(set(identifiers)) < len(identifiers) else []
  if repeated:
    raise types.ConfigError(f'task identifiers {repeated[:5]} occur more than once (case and spacing aside): rename or remove')
  families = {t.family for t in tasks}
  if held_out_family is not None and held_out_family not in families:
    raise types.ConfigError(f'held_out_family {held_out_family!r} has no tasks: there are {sorted(families)}')
  held_out_sources = {normalise_identifier(t.source) for t in tasks if t.family == held_out_family}
  # A source shared with the held-out family leaves training with it.
  held_out = [t for t in tasks if normalise_identifier(t.source) in held_out_sources]
  rest = [t for t in tasks if normalise_identifier(t.source) not in held_out_sources]
  pools = [[t for t in rest if t.family == f] for f in sorted({t.family for t in rest})] if per_family else [rest]
  dev_sources = set().union(*(_dev_sources(pool, dev_fraction) for pool in pools))
  train = [t for t in rest if normalise_identifier(t.source) not in dev_sources]
  if not train:
    raise types.ConfigError(f'no training task is left of {len(tasks)} (dev_fraction={dev_fraction}, held_out_family='
                            f'{held_out_family!r}): add tasks or lower the fraction')
  dev = [t for t in rest if normalise_identifier(t.source) in dev_sources]
  return Split(*(_alternate(part) for part in (train, dev, held_out)))


def _alternate(tasks: Sequence[tasks_lib.Task]) -> tuple[tasks_lib.Task, ...]:
  ranked, seen = [], collections.Counter()
  for task in sorted(tasks, key=lambda t: identifier_digest(t.task_id)):
    ranked.append((seen[task.family], len(ranked), task))
    seen[task.family] += 1
  return tuple(task for _, _, task in sorted(ranked, key=lambda r: r[:2]))


def _dev_sources(tasks: Sequence[tasks_lib.Task], dev_fraction: float) -> set[str]:
  groups = sorted({normalise_identifier(t.source) for t in tasks}, key=identifier_digest)
  # Exact decimal arithmetic: 0.05 * 60 in floating point is above 3.
  return set(groups[:math.ceil(fractions.Fraction(str(dev_fraction)) * len(groups))])


def task_at(tasks: Sequence[tasks_lib.Task], seed: int, position: int) -> tasks_lib.Task:
  """Returns the task drawn at `position`: shuffled without replacement, shuffled anew whenever the list is exhausted.

  A pure function of the task identifiers, the seed and the position, so a run resumes from its position alone.

  Args:
    tasks: the training list, in any order.
    seed: of the run.
    position: 0-based count of draws before this one.

  Raises:
    ConfigError: no tasks.
  """
  if not tasks:
    raise types.ConfigError('there are no tasks to draw from')
  if position < 0:
    raise ValueError(f'position {position} is negative')
  epoch, offset = divmod(position, len(tasks))
  by_id = {t.task_id: t for t in tasks}
  return by_id[_shuffled(tuple(sorted(by_id)), seed, epoch)[offset]]


def task_order(tasks: Sequence[tasks_lib.Task], seed: int, start: int, count: int) -> tuple[tasks_lib.Task, ...]:
  """Returns the `count` tasks drawn from position `start` on; see `task_at`."""
  return tuple(task_at(tasks, seed, start + i) for i in range(count))


@functools.lru_cache(maxsize=8)
def _shuffled(identifiers: tuple[str, ...], seed: int, epoch: int) -> tuple[str, ...]:
  order = list(identifiers)
  random.Random(f'{seed}/{epoch}').shuffle(order)
  return tuple(order)
