"""Shared-buffer replay: one recorded stream of arrivals and updates through every composer (DivOPD Table 11, Appendix E.2).

Every method sees the same experience, so differences are those of selection.  What training would have changed, and with
it the experience, is out of reach of a replay.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from ts_jax import types
from ts_jax.composer import diagnostics, methods
from ts_jax.composer import pool as pool_lib
from ts_jax.composer.pool import Candidates, Pool
from ts_jax.composer.records import Row


@dataclasses.dataclass(frozen=True)
class Drain(types.Record):
  """The learner composed a batch: the update's number is the version it held."""

  update: int


Event = Row | Drain  # in the order in which a queue received rows and a learner drained it


def event_from_json(values: Mapping[str, Any]) -> Event:
  """Inverse of either record's `to_json`."""
  return Drain.from_json(values) if 'update' in values else Row.from_json(values)


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
  """A buffer, inspected once: all its rows in order of arrival, and (update, rows that had arrived) of every drain."""

  rows: Candidates
  drains: tuple[tuple[int, int], ...]

  @classmethod
  def of(cls, events: Iterable[Event]) -> Recording:
    """Separates arrivals from drains; rows after the last drain had no chance and are left out.

    Raises:
      ValueError: there is no drain.
    """
    rows, drains = [], []
    for event in events:
      if isinstance(event, Drain):
        drains.append((event.update, len(rows)))
      else:
        rows.append(event)
    if not drains:
      raise ValueError(f'a buffer of {len(rows)} rows without a drain cannot be replayed: record the learner\'s updates too')
    return cls(Candidates.of(rows[:drains[-1][1]]), tuple(drains))


@dataclasses.dataclass(frozen=True, eq=False)
class Replayed:
  """What one method made of a recording: a composition per drain, and the pool after the last."""

  compositions: tuple[methods.Composition, ...]
  pool: Pool


def replay(recording: Recording, how: methods.Method, settings: methods.Settings) -> Replayed:
  """Runs a recording through a method."""
  pool, done, compositions = pool_lib.empty(), 0, []
  for update, arrived in recording.drains:
    pool = pool_lib.arrive(pool, recording.rows.take(slice(done, arrived)))
    composition, pool = methods.compose(pool, update, how, settings)
    compositions.append(composition)
    done = arrived
  return Replayed(tuple(compositions), pool)


def trained_turns(recording: Recording, replayed: Replayed) -> np.ndarray:
  """Trained turns of every valid rollout: rollouts with a turn that passes the gate; turns with a token that carries loss."""
  rollouts = np.unique(recording.rows.rollout[recording.rows.valid])
  trained = np.concatenate([c.batch.rollout[c.batch.valid_tokens > 0] for c in replayed.compositions])
  trained = trained[np.isin(trained, rollouts)]
  return np.bincount(np.searchsorted(rollouts, trained), minlength=len(rollouts))


def measures(recording: Recording, replayed: Replayed) -> dict[str, float]:
  """Table 11's columns (`never_selected_share`, `gini`), with what Tables 2, 9, 12 and 16 say of a reader.

  `age` is the mean of update minus version over selected rows, dead ones included; the measures of single batches are means
  over the batches that are not empty; the rest are sums over the replay.
  """
  counts = trained_turns(recording, replayed)
  batches = [c for c in replayed.compositions if len(c.batch)]
  ages = np.concatenate([c.update - c.batch.version for c in replayed.compositions])
  trained = sum(int(c.batch.valid_tokens.sum()) for c in replayed.compositions)
  return {
      'never_selected_share': diagnostics.never_selected_share(counts),
      'gini': diagnostics.gini(counts),
      **diagnostics.mean_measures([diagnostics.batch_measures(c.batch) for c in batches]),
      'age': float(ages.mean()) if len(ages) else 0.0,
      'scored_per_trained': diagnostics.scored_per_trained(int(recording.rows.valid_tokens.sum()), trained),
      'selected': replayed.pool.selected,
      'stale': replayed.pool.dropped.get(pool_lib.STALE, 0),
      'expired': replayed.pool.dropped.get(pool_lib.EXPIRED, 0),
  }


def compare(events: Iterable[Event], settings: methods.Settings = methods.Settings(),
            names: Sequence[str] = tuple(methods.METHODS)) -> dict[str, dict[str, float]]:
  """Measures of every named method on one buffer, side by side."""
  recording = Recording.of(events)
  return {name: measures(recording, replay(recording, methods.method(name), settings)) for name in names}
