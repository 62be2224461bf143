"""Where the learner's state is: float32 masters and optimizer state in shards over the lanes' devices, parameters whole on each.

The devices are a mesh of one axis, 'lane'.  A leaf is cut along its largest axis that the number of lanes divides, the first of
equal ones, and replicated where there is none.  With one lane nothing is cut or moved.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Tree = Any
AXIS = 'lane'


@dataclasses.dataclass(frozen=True)
class Layout:
  """Of the state of several lanes.

  Attributes:
    devices: of all lanes, in their order, also those of other processes; () for one lane, wherever its arrays are.
  """

  devices: tuple[jax.Device, ...] = ()

  def __post_init__(self):
    if len(self.devices) == 1 or len(set(self.devices)) < len(self.devices):
      raise ValueError(f'a layout needs two or more different devices, or none for one lane, not {self.devices}')

  @property
  def lanes(self) -> int:
    """How many."""
    return len(self.devices) or 1

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh:
    """The devices, along `AXIS`."""
    return jax.sharding.Mesh(np.asarray(self.devices), (AXIS,))

  @property
  def replicated(self) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(self.mesh, PartitionSpec())

  @property
  def by_lane(self) -> NamedSharding:
    """Of arrays whose first axis is that of the lanes: each has its own part."""
    return NamedSharding(self.mesh, PartitionSpec(AXIS))

  def axis(self, shape: tuple[int, ...]) -> int | None:
    """The axis along which arrays of a shape are cut; None where they are replicated."""
    divisible = [i for i, n in enumerate(shape) if n and n % self.lanes == 0]
    return max(divisible, key=lambda i: (shape[i], -i), default=None)

  def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
    """Of arrays of a shape."""
    axis = self.axis(shape)
    return NamedSharding(self.mesh, PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, AXIS))

  def behind_lanes(self, shape: tuple[int, ...]) -> NamedSharding:
    """Of [lanes, ...] with every lane's part of one shard together."""
    return NamedSharding(self.mesh, PartitionSpec(None, *self.sharding(shape).spec))

  def place(self, tree: Tree) -> Tree:
    """Cuts arrays that are whole, here or on the host, and the same in every process."""
    if not self.devices:
      return tree
    return jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), self.sharding(np.shape(x)), np.asarray(x).__getitem__), tree)

  def constrain(self, tree: Tree) -> Tree:
    """Within a jitted function: keeps arrays cut as `place` cuts them."""
    if not self.devices:
      return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, self.sharding(x.shape)), tree)

  def whole(self, tree: Tree) -> Tree:
    """The arrays whole on every lane's device; all processes take part."""
    return _copy(tree, self.replicated) if self.devices else tree

  def single(self, tree: Tree) -> Tree:
    """Arrays that are `whole`, on the first device of this process only: for what is computed apart from the lanes."""
    return jax.tree.map(local, tree) if self.devices else tree


@functools.partial(jax.jit, static_argnums=1)
def _copy(tree, sharding):
  return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), tree)


def on(tree: Tree, device: jax.Device | None) -> Tree:
  """Arrays that are whole, on one device: their copy there, or moved there; None: where they are."""
  def one(x):
    if device is None:
      return x
    here = [s.data for s in getattr(x, 'addressable_shards', ()) if s.device == device and s.data.shape == x.shape]
    return here[0] if here else jax.device_put(x, device)

  return jax.tree.map(one, tree)


def local(x: jax.Array) -> jax.Array:
  """A replicated array on the first device of this process that has it."""
  return x.addressable_data(0)
