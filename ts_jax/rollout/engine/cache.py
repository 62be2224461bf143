"""Key/value memory of the engine: slots that decode, and a bounded store of prefixes that lost their slot.

Every slot remembers the token ids whose keys and values it holds, also after its request has ended, so that the next
turn of a trajectory, or another trajectory of its group, starts from them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ts_jax.models.config import ModelConfig

Array = jax.Array
_WORTH_KEEPING = 32  # tokens; shorter prefixes are recomputed
_WORTH_COPYING = 8  # tokens
_MIN_CAPACITY = 256


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
  """Length of the longest common prefix of two id arrays."""
  n = min(len(a), len(b))
  different = a[:n] != b[:n]
  return int(different.argmax()) if different.any() else n


def capacities(max_context: int) -> tuple[int, ...]:
  """Cache lengths that are compiled for: about 1.5x apart, the last one holds `max_context` and one padded chunk."""
  sizes, size = [], _MIN_CAPACITY
  last = -(-max_context // 64) * 64 + 64
  while size < last:
    sizes.append(size)
    size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
  return (*sizes, last)


@functools.partial(jax.jit, static_argnums=1)
def _resize(cache, capacity: int):
  keys, values = cache
  change = capacity - keys.shape[-1]
  if change < 0:
    return keys[..., :capacity], values[:, :, :capacity]
  return jnp.pad(keys, ((0, 0),) * 3 + ((0, change),)), jnp.pad(values, ((0, 0), (0, 0), (0, change), (0, 0)))


@functools.partial(jax.jit, donate_argnums=0)
def _copy(cache, source, target):
  def move(x):
    return jax.lax.dynamic_update_index_in_dim(x, jax.lax.dynamic_index_in_dim(x, source, 0, keepdims=False), target, 0)
  return jax.tree.map(move, cache)


@functools.partial(jax.jit, static_argnums=2)
def _extract(cache, slot, length: int):
  keys, values = cache
  row = lambda x: jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False)
  return row(keys)[..., :length], row(values)[:, :length]


@functools.partial(jax.jit, donate_argnums=0)
def _insert(cache, slot, kept):
  return jax.tree.map(lambda x, k: jax.lax.dynamic_update_slice(x, k[None], (slot, 0, 0, 0)), cache, kept)


@dataclasses.dataclass
class _Kept:
  tokens: np.ndarray
  layers: list[tuple[Array, Array]]
  size_bytes: int


class PrefixStore:
  """Least-recently-used store of prefixes, bounded in bytes."""

  def __init__(self, limit_bytes: int):
    """Args: limit_bytes: bound on the keys and values held."""
    self.limit_bytes = limit_bytes
    self.size_bytes = 0
    self._entries: collections.OrderedDict[tuple[str, bytes], _Kept] = collections.OrderedDict()

  def __len__(self) -> int:
    return len(self._entries)

  def clear(self) -> None:
    """Drops everything."""
    self._entries.clear()
    self.size_bytes = 0

  def find(self, tokens: np.ndarray, salt: str) -> tuple[int, _Kept | None]:
    """Longest common prefix of `tokens` with an entry, and that entry."""
    best, found = 0, None
    for key, kept in self._entries.items():
      if key[0] == salt and (n := common_prefix(kept.tokens, tokens)) > best:
        best, found = n, key
    if found is None:
      return 0, None
    self._entries.move_to_end(found)
    return best, self._entries[found]

  def add(self, tokens: np.ndarray, salt: str, layers: list[tuple[Array, Array]]) -> None:
    """Keeps a prefix, dropping entries that it extends and then the oldest ones."""
    size = sum(k.nbytes + v.nbytes for k, v in layers)
    if size > self.limit_bytes:
      return
    for key, kept in list(self._entries.items()):
      if key[0] == salt and common_prefix(kept.tokens, tokens) == len(kept.tokens):
        self.size_bytes -= self._entries.pop(key).size_bytes
    while self._entries and self.size_bytes + size > self.limit_bytes:
      self.size_bytes -= self._entries.popitem(last=False)[1].size_bytes
    self._entries[salt, tokens.tobytes()] = _Kept(tokens, layers, size)
    self.size_bytes += size


class SlotCache:
  """The decoding cache: per layer keys [S, Hkv, hd, C] and values [S, Hkv, C, hd] in float32.

  The capacity C follows the longest context in use (every row of a decode step pays for it).  Invariant: C is larger
  than what any slot holds, so that a row that takes no part in a step has a position to write to that nobody reads.

  Attributes:
    layers: the caches; `Forward` replaces the entries.
    capacity: C.
    tokens: per slot, the ids whose keys and values it holds.
    salts: per slot, the salt they were computed under (prefixes are shared within one salt only).
  """

  def __init__(self, config: ModelConfig, slots: int, max_context: int, store_bytes: int):
    """Args: config: sizes; slots: rows; max_context: longest sequence, tokens; store_bytes: bound of the store."""
    self._config, self._slots = config, slots
    self._sizes = capacities(max_context)
    self.store = PrefixStore(store_bytes)
    self._allocate(self._sizes[0])
    self.tokens = [np.zeros(0, np.int32) for _ in range(slots)]
    self.salts = [''] * slots
    self._used = [0] * slots
    self._clock = 0

  def _allocate(self, capacity: int) -> None:
    c = self._config
    self.capacity = capacity
    self.layers = [(jnp.zeros((self._slots, c.kv_heads, c.head_dim, capacity), jnp.float32),
                    jnp.zeros((self._slots, c.kv_heads, capacity, c.head_dim), jnp.float32)) for _ in range(c.layers)]

  def clear(self) -> None:
    """Drops what every slot and the store hold."""
    self.store.clear()
    self.tokens = [np.zeros(0, np.int32) for _ in range(self._slots)]

  def touch(self, slot: int) -> None:
    """Marks the slot as the most recently used."""
    self._clock += 1
    self._used[slot] = self._clock

  def reserve(self, length: int) -> None:
    """Grows the capacity to hold `length` positions and one more."""
    if length + 1 > self.capacity:
      self._resize(next(s for s in self._sizes if s >= length + 1))

  def shrink(self, length: int) -> None:
    """Cuts the capacity when active rows, of at most `length` tokens, need far less; idle slots' longer prefixes are stored."""
    size = next(s for s in self._sizes if s >= length + 1)
    if size >= self.capacity // 2:
      return
    for slot in range(self._slots):
      if len(self.tokens[slot]) >= size:
        self._save(slot)
        self.tokens[slot] = self.tokens[slot][:size - 1]
    self._resize(size)

  def _resize(self, capacity: int) -> None:
    for i, layer in enumerate(self.layers):
      self.layers[i] = _resize(layer, capacity)
    self.capacity = capacity

  def available(self, tokens: np.ndarray, salt: str) -> int:
    """Longest prefix of `tokens` that some slot or the store holds."""
    return max([self.store.find(tokens, salt)[0], *(self._shared(s, tokens, salt) for s in range(self._slots))])

  def _shared(self, slot: int, tokens: np.ndarray, salt: str) -> int:
    return common_prefix(self.tokens[slot], tokens) if self.salts[slot] == salt else 0

  def claim(self, tokens: np.ndarray, salt: str, free: list[int], reuse: bool = True) -> tuple[int, int]:
    """Chooses a slot for `tokens` and fills it with the longest known prefix.

    Args:
      tokens: ids the request needs keys and values of.
      salt: prefix-sharing scope.
      free: slots without a running request.
      reuse: whether known prefixes may be read.

    Returns:
      (slot, number of leading tokens whose keys and values it now holds).
    """
    shared = [self._shared(s, tokens, salt) if reuse else 0 for s in range(self._slots)]
    kept_length, kept = self.store.find(tokens, salt) if reuse else (0, None)
    source = max(range(self._slots), key=lambda s: shared[s])
    best = max(shared[source], kept_length)
    # A slot whose whole content is a prefix of the request is continued in place: nothing is lost.
    in_place = [s for s in free if shared[s] + _WORTH_KEEPING > best and len(self.tokens[s]) - shared[s] < _WORTH_KEEPING
                and len(self.tokens[s])]
    if in_place:
      slot = max(in_place, key=lambda s: shared[s])
      best = shared[slot]
    else:
      slot = min(free, key=lambda s: self._used[s] if len(self.tokens[s]) else -1)
      self._save(slot)
      if best - shared[slot] < _WORTH_COPYING:
        best = shared[slot]
      else:
        if best == shared[source]:
          for i, layer in enumerate(self.layers):
            self.layers[i] = _copy(layer, np.int32(source), np.int32(slot))
        else:
          self.reserve(kept.layers[0][1].shape[1])
          for i, layer in enumerate(self.layers):
            self.layers[i] = _insert(layer, np.int32(slot), kept.layers[i])
    self.tokens[slot], self.salts[slot] = tokens[:best].copy(), salt
    self.touch(slot)
    return slot, best

  def _save(self, slot: int) -> None:
    """Moves a slot's content to the store unless another holder covers it."""
    tokens, salt = self.tokens[slot], self.salts[slot]
    others = [self._shared(s, tokens, salt) for s in range(self._slots) if s != slot]
    covered = max([self.store.find(tokens, salt)[0], *others])
    if len(tokens) - covered < _WORTH_KEEPING or not self.store.limit_bytes:
      return
    length = -(-len(tokens) // 64) * 64
    self.store.add(tokens, salt, [_extract(layer, np.int32(slot), length) for layer in self.layers])
