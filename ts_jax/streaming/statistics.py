"""What a lane has summed of gradients whose coefficients are not known yet, and how it becomes a direction.

Sums of a population (`Pair`, `ByReward`) know when advantages are affine in the own reward and when not; whose sums they are
is the other question: with a population per group (`GroupStatistics`) they close with their group, with the batch as
population (`BatchStatistics`) parameter gradients go to one place for all groups of a lane and close at the barrier.
Adjoints of a group's prompt are the group's own in either case, and close with it.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Sequence

import jax

from ts_jax.kernels import fold
from ts_jax.objectives.objective import Objective


@dataclasses.dataclass(frozen=True)
class Pair:
  """G1c = sum_i (r_i - centre) H_i and G2 = sum_i H_i, for affine objectives (Equation 7).  Methods that add consume it.

  Attributes:
    kind: of accumulator.
    centre: c.
    sums: (G1c, G2); None while nothing was folded.
  """

  kind: str
  centre: float
  sums: tuple[fold.Sum, fold.Sum] | None = None

  def fold(self, tree: Any, reward: float) -> 'Pair':
    """Takes a gradient H_i."""
    return dataclasses.replace(self, sums=fold.fold_pair(self.kind, self.sums, tree, reward - self.centre))

  def add(self, other: 'Pair') -> 'Pair':
    """Takes what another lane has summed, which is moved to where this is."""
    if self.sums is None or other.sums is None:
      return other if self.sums is None else self
    return dataclasses.replace(self, sums=tuple(fold.add(self.kind, a, b) for a, b in zip(self.sums, other.sums)))

  def place(self, like: jax.Array) -> 'Pair':
    """The same, where `like` is."""
    return dataclasses.replace(self, sums=tuple(fold.place(self.kind, s, like) for s in self.sums))

  def part(self, name: str) -> 'Pair':
    """The same of one branch of the trees."""
    return dataclasses.replace(self, sums=tuple(s.replace(leaves=s.leaves[name]) for s in self.sums))

  def check(self, what: str) -> None:
    """Raises OverflowError where an exact sum may have left its range."""
    for s in self.sums:
      fold.check(self.kind, s, what)

  def reduce(self, total: fold.Sum, objective: Objective, population: Sequence[float]) -> fold.Sum:
    """total + the direction; consumes `total`."""
    return fold.fold_reduced(self.kind, total, self.sums, *objective.reduction(population, self.centre))

  def value(self, objective: Objective, population: Sequence[float], dtype) -> Any:
    """The direction as floats."""
    return fold.value_reduced(self.kind, self.sums, *objective.reduction(population, self.centre), dtype)


@dataclasses.dataclass(frozen=True)
class ByReward:
  """B_r = sum of H_i over the trajectories with reward r, for objectives that are not affine.  Nothing is ever subtracted.

  Attributes and methods as those of `Pair`; `sums` by reward.
  """

  kind: str
  sums: tuple[tuple[float, fold.Sum], ...] = ()

  def fold(self, tree: Any, reward: float) -> 'ByReward':
    sums = dict(self.sums)
    total = sums.pop(reward) if reward in sums else fold.zeros(self.kind, tree)
    return self._with({**sums, reward: fold.fold(self.kind, total, tree)})

  def add(self, other: 'ByReward') -> 'ByReward':
    sums = dict(self.sums)
    for reward, s in other.sums:
      sums[reward] = fold.add(self.kind, sums.pop(reward), s) if reward in sums else s
    return self._with(sums)

  def place(self, like: jax.Array) -> 'ByReward':
    return self._with({reward: fold.place(self.kind, s, like) for reward, s in self.sums})

  def part(self, name: str) -> 'ByReward':
    return self._with({reward: s.replace(leaves=s.leaves[name]) for reward, s in self.sums})

  def check(self, what: str) -> None:
    for reward, s in self.sums:
      fold.check(self.kind, s, f'{what}, reward {reward}')

  def reduce(self, total: fold.Sum, objective: Objective, population: Sequence[float]) -> fold.Sum:
    coefficients = objective.reward_coefficients(population)
    for reward, s in self.sums:
      total = fold.fold_sum(self.kind, total, s, coefficients[reward])
    return total

  def value(self, objective: Objective, population: Sequence[float], dtype) -> Any:
    return fold.value(self.kind, self.reduce(fold.zeros(self.kind, self.sums[0][1].leaves), objective, population), dtype)

  def _with(self, sums: dict[float, fold.Sum]) -> 'ByReward':
    return dataclasses.replace(self, sums=tuple(sorted(sums.items(), key=lambda item: item[0])))


class Statistics(abc.ABC):
  """Of one lane and update; see the module."""

  def __init__(self, objective: Objective, kind: str, centre: float):
    """Begins empty.

    Args:
      objective: decides what is summed.
      kind: of accumulator.
      centre: see `Pair`.
    """
    self._objective = objective
    self._empty = Pair(kind, centre) if objective.affine else ByReward(kind)
    self._groups: dict[int, Pair | ByReward] = {}

  def pop(self, group: int) -> Pair | ByReward | None:
    """What is the group's own, which closes; None if nothing is."""
    return self._groups.pop(group, None)

  def take(self, group: int, sums: Pair | ByReward) -> None:
    """Adds what another lane has summed of a group; consumes what is there."""
    self._groups[group] = self._groups.get(group, self._empty).add(sums)

  def _fold_group(self, group: int, tree: Any, reward: float) -> Pair | ByReward:
    self._groups[group] = self._groups.get(group, self._empty).fold(tree, reward)
    return self._groups[group]

  @abc.abstractmethod
  def fold(self, group: int, gradient: Any, adjoint: Any, reward: float) -> None:
    """Takes a source's parameter gradient and the adjoint of its prompt's boundary state."""

  @abc.abstractmethod
  def close(self, group: int, sums: Pair | ByReward, total: fold.Sum, population: Sequence[float], dtype) -> tuple[fold.Sum, Any]:
    """(total + what the group's own sums add to it, adjoint of the prompt's boundary state); consumes `total`."""

  @abc.abstractmethod
  def pop_batch(self) -> Pair | ByReward | None:
    """What the lane holds for the batch as population, which is gone then; None if nothing."""


class GroupStatistics(Statistics):
  """A population per group."""

  def fold(self, group, gradient, adjoint, reward):
    jax.block_until_ready(self._fold_group(group, {'params': gradient, 'boundary': adjoint}, reward).sums)

  def close(self, group, sums, total, population, dtype):
    sums.check(f'group {group}')
    total = sums.part('params').reduce(total, self._objective, population)
    return total, sums.part('boundary').value(self._objective, population, dtype)

  def pop_batch(self):
    return None


class BatchStatistics(Statistics):
  """The batch as population."""

  def __init__(self, objective, kind, centre):
    super().__init__(objective, kind, centre)
    self._batch = self._empty

  def fold(self, group, gradient, adjoint, reward):
    self._batch = self._batch.fold(gradient, reward)
    jax.block_until_ready((self._batch.sums, self._fold_group(group, adjoint, reward).sums))

  def close(self, group, sums, total, population, dtype):
    sums.check(f'adjoint of group {group}')
    return total, sums.value(self._objective, population, dtype)

  def pop_batch(self):
    everything, self._batch = self._batch, self._empty
    return everything if everything.sums else None


def warm_up(objective: Objective, kind: str, gradient: Any, adjoint: Any, total: fold.Sum, dtype, several: bool = False) -> tuple[fold.Sum, Any]:
  """Runs what statistics run, at these shapes, between `several` lanes too; consumes `total`."""
  made, population = of(objective, kind, 0.0), (0.0, 1.0)
  for reward in population:
    made.fold(0, gradient, adjoint, reward)
  if several:
    other = of(objective, kind, 0.0)
    other.fold(0, gradient, adjoint, population[0])
    made.take(0, other.pop(0))
  total, boundary = made.close(0, made.pop(0), total, population, dtype)
  late = made.pop_batch()
  return (late.reduce(total, objective, population) if late else total), boundary


def of(objective: Objective, kind: str, centre: float) -> Statistics:
  """Empty statistics of the kind that the objective needs."""
  return (BatchStatistics if objective.needs_batch else GroupStatistics)(objective, kind, centre)
