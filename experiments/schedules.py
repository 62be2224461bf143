"""The schedules: when trajectories are submitted, which batch is trained, and when its result is published.  One loop each.

    sync          batch k is sampled from theta_k, and trained once it is complete                             lag 0
    thundersync   the same; what can be computed is, while it is being sampled                                 lag 0
    async         batch k is sampled from theta_(k-1), while batch k-1 is trained                              lag 1, of the first batch 0
    fully_async   sampling goes on all the time, publications in flight; the learner takes n complete groups   lag 0 to max_staleness

The surrogate is the same, at theta_k, without an importance weight unless the config asks for one (Appendix D.4 of ThunderSyncRL).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Collection, Sequence

from experiments import rollouts
from experiments.trainer import Trainer
from ts_jax import types
from ts_jax.streaming import pacing, staleness

NAMES = ('sync', 'thundersync', 'async', 'fully_async')
STALE = ('async', 'fully_async')  # they train tokens of older versions
_DEFAULT_STALENESS = 2

Planned = tuple[int, int]  # (update it was planned for, group)


def max_staleness(config) -> int:
  """Largest lag of a token under the config's schedule.

  Raises:
    ConfigError: the schedule's lag is not a setting, or it is out of range.
  """
  name, chosen = config.schedule.name, config.schedule.max_staleness
  if name not in NAMES:
    raise types.ConfigError(f'schedule {name!r} is unknown: use one of {NAMES}')
  if name != 'fully_async':
    if chosen:
      raise types.ConfigError(f"config.schedule.max_staleness={chosen} is a setting of schedule 'fully_async'; with {name!r} every lag is "
                              f'{int(name == "async")}: unset it')
    return int(name == 'async')
  if chosen < 0:
    raise types.ConfigError(f'config.schedule.max_staleness={chosen} must be positive, or 0 for {_DEFAULT_STALENESS}')
  return chosen or _DEFAULT_STALENESS


def run(config, trainer: Trainer, trained: Collection[Planned] = ()) -> None:
  """Trains until the run's last update.

  Args:
    config: the run's.
    trainer: at its first update; engines serve the version before it in `async`, else the learner's.
    trained: in `fully_async`, the groups that updates before the first one took.
  """
  match config.schedule.name:
    case 'async':
      one_behind(trainer)
    case 'fully_async':
      independent(trainer, max_staleness(config), trained)
    case _:
      on_policy(trainer)


def on_policy(trainer: Trainer) -> None:
  """`sync` and `thundersync`: the learner's policy decides what is released when."""
  for update in range(trainer.first, trainer.updates):
    plans = trainer.rollout.plans(update)
    trainer.begin(update, plans)
    trainer.rollout.submit(update, update)
    trainer.train(update, plans, trainer.arrivals)
    trainer.evaluate_due()
    trainer.save_due()


def one_behind(trainer: Trainer) -> None:
  """`async`: nothing is in flight when weights are published, so a batch has one version."""
  rollout, arrivals, first = trainer.rollout, trainer.arrivals, trainer.first
  if first < trainer.updates:
    rollout.submit(first, max(0, first - 1))
  for update in range(first, trainer.updates):
    plans = rollout.plans(update)
    trainer.begin(update, plans)
    while not all(arrivals.complete(update, plan) for plan in plans):
      arrivals.gather(wait=True)
    batch = [t for plan in plans for t in arrivals.take(update, plan)]
    trainer.publish()
    trainer.evaluate_due()
    if update + 1 < trainer.updates:
      rollout.submit(update + 1, update)
    lag = min(update, 1)
    trainer.train(update, plans, rollouts.Complete(batch, arrivals), ahead=True, lags=staleness.Lags(lag, lag), publish=False)
    trainer.save_due()


def independent(trainer: Trainer, bound: int, trained: Collection[Planned]) -> None:
  """`fully_async`: `pacing` decides which groups start, and which of the complete ones are trained."""
  arrivals, first = trainer.arrivals, trainer.first
  if first >= trainer.updates:
    return
  groups = _Groups(trainer, bound, trained)
  for update in range(first, trainer.updates):
    trainer.begin(update, trainer.rollout.plans(update))
    arrivals.gather()
    while (batch := groups.take()) is None:
      arrivals.gather(wait=True)
    plans = [dataclasses.replace(plan, index=i) for i, (_, plan) in enumerate(batch)]
    members = [dataclasses.replace(t, update=update, group=i) for i, at in enumerate(batch) for t in arrivals.take(*at)]
    trainer.train(update, plans, rollouts.Complete(members, arrivals), ahead=True, lags=staleness.Lags(0, bound),
                  planned=tuple((planned, plan.index) for planned, plan in batch))
    trainer.evaluate_due()
    groups.published(update + 1)
    trainer.save_due()


class _Groups:
  """`pacing` of the groups of a run: its numbers are those of (planned update, plan)."""

  def __init__(self, trainer: Trainer, bound: int, trained: Collection[Planned]):
    """Starts, or goes on with, what may be under way at the trainer's first update."""
    self._rollout, self._arrivals, version = trainer.rollout, trainer.arrivals, trainer.first
    self._size = len(self._rollout.plans(version))
    self._running: dict[int, tuple[int, types.GroupPlan]] = {}
    self._complete: dict[int, tuple[int, types.GroupPlan]] = {}
    done = {update * self._size + group for update, group in trained}
    going_on = [n for n in range(min(version + bound + 1, trainer.updates) * self._size) if n not in done]
    kept: dict[int, int] = {}  # oldest version of what is finished of a group
    for update in sorted({number // self._size for number in going_on}):
      for t in self._rollout.kept(update, 0, version):
        number = update * self._size + t.group
        kept[number] = min([kept.get(number, version), t.policy_version, *t.versions])
    self._pace, starts = pacing.resumed(self._size, trainer.updates, bound, version, done, kept)
    self._start(starts, version)

  def published(self, version: int) -> None:
    """The engines serve `version` from now on: starts what may start with it."""
    self._pace, starts = pacing.publish(self._pace, version)
    self._start(starts, version)

  def take(self) -> list[tuple[int, types.GroupPlan]] | None:
    """The next batch, or None while there is none."""
    for number, at in list(self._running.items()):
      if self._arrivals.complete(*at):
        oldest = min(v for t in self._arrivals.look(*at) for v in (t.policy_version, *t.versions))
        self._pace = pacing.complete(self._pace, number, oldest)
        self._complete[number] = self._running.pop(number)
    self._pace, chosen = pacing.take(self._pace)
    return None if chosen is None else [self._complete.pop(number) for number in chosen]

  def _start(self, numbers: Sequence[int], version: int) -> None:
    for update, members in itertools.groupby(numbers, lambda number: number // self._size):
      members, plans = list(members), self._rollout.plans(update)
      self._running.update({number: (update, plans[number % self._size]) for number in members})
      self._rollout.submit(update, version, groups=[number % self._size for number in members], newer_too=True)
