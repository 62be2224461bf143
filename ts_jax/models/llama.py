"""The Llama family in Flax: one block, used scanned by the learner and unrolled by the embedded engine.

The learner's view is the *segment*: `forward` reads the boundary state its parent left (keys and values of everything
before it) and `extend` appends the segment's own.  What a boundary state holds is this family's business; everything
above treats it as an opaque pytree with a `length`.
"""

from __future__ import annotations

from typing import Any, Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from ts_jax.kernels import attention, products
from ts_jax.models.config import ModelConfig

Array = jax.Array
Params = dict[str, Any]
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
State = tuple[Array, Array]  # keys and values, or adjoints of them


@flax.struct.dataclass
class Boundary:
  """What a segment leaves to its children.

  Above `models/` only `state` (a pytree that gradients are taken of, and whose adjoints have its structure), `room` and `length`
  are known of it.

  Attributes:
    keys, values: [layers, P, kv_heads, head_dim], rotated; only the first `length` positions are real.
    length: scalar int32, tokens of the path from the root.
  """

  keys: Array
  values: Array
  length: Array

  @property
  def state(self) -> State:
    """The arrays that children read."""
    return self.keys, self.values

  def with_state(self, state: State) -> 'Boundary':
    """The same with other arrays."""
    return self.replace(keys=state[0], values=state[1])

  @property
  def room(self) -> int:
    """P, positions there is room for: what compiled shapes depend on."""
    return self.keys.shape[1]

  @property
  def dtype(self):
    """Of the state."""
    return self.keys.dtype


class RMSNorm(nn.Module):
  """Root-mean-square norm, computed in at least float32."""

  eps: float

  @nn.compact
  def __call__(self, x: Array) -> Array:
    scale = self.param('scale', nn.initializers.ones, (x.shape[-1],))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def _dense(name: str, features: int, x: Array) -> Array:
  dot = lambda x, kernel, *_, **__: products.dense(x, kernel)
  return nn.Dense(features, use_bias=False, dtype=x.dtype, name=name, dot_general=dot)(x)


class AttentionInput(nn.Module):
  """First part of a layer: normalised input to rotated queries and keys, and values."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    c, y = self.config, RMSNorm(self.config.rms_eps, name='attn_norm')(x)
    heads = lambda name, count: _dense(name, count * c.head_dim, y).reshape(*y.shape[:-1], count, c.head_dim)
    return rotate(heads('q', c.heads), rope), rotate(heads('k', c.kv_heads), rope), heads('v', c.kv_heads)


class AttentionOutput(nn.Module):
  """Second part: attention's context [B, T, heads, head_dim] into the residual stream."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: Array, context: Array) -> Array:
    return x + _dense('o', self.config.width, context.reshape(*x.shape[:-1], self.config.heads * self.config.head_dim))


class MlpInput(nn.Module):
  """Third part: (gate, up), before their nonlinearity."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: Array) -> tuple[Array, Array]:
    y = RMSNorm(self.config.rms_eps, name='mlp_norm')(x)
    return _dense('gate', self.config.ffn_width, y), _dense('up', self.config.ffn_width, y)


class MlpOutput(nn.Module):
  """Last part: the gated product into the residual stream."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: Array, gate: Array, up: Array) -> Array:
    return x + _dense('down', self.config.width, nn.silu(gate) * up)


class Block(nn.Module):
  """One pre-norm decoder layer.  `attend` owns the key/value memory, so learner and engine share this definition.

  Its parts own no scope of their own: each reads the layer's parameters where the block has them, so a backward pass can
  run them one by one from kept values.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x: Array, rope: tuple[Array, Array], attend: Attend) -> tuple[Array, Any]:
    """x: [B, T, D]; rope: (cos, sin), each [B or 1, T, head_dim / 2].  Returns (x, whatever `attend` returned beside)."""
    def part(kind, *args):
      module = kind(self.config)
      nn.share_scope(self, module)
      return module(*args)

    context, memory = attend(*part(AttentionInput, x, rope))
    x = part(AttentionOutput, x, context)
    return part(MlpOutput, x, *part(MlpInput, x)), memory


def rope_table(config: ModelConfig, positions: Array, dtype=jnp.float32) -> tuple[Array, Array]:
  """Rotary cosines and sines of `positions` [..., T], each [..., T, head_dim / 2], in `dtype`."""
  exponent = jnp.arange(0, config.head_dim, 2, dtype=dtype) / config.head_dim
  angles = positions[..., None].astype(dtype) / config.rope_base**exponent
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, rope: tuple[Array, Array]) -> Array:
  """Rotates the half-split pairs of x [B, T, heads, head_dim] (Hugging Face layout)."""
  cos, sin = (t[..., None, :].astype(x.dtype) for t in rope)
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def embed(params: Params, tokens: Array, dtype=None) -> Array:
  """Token embeddings [..., D]."""
  table = params['embed']['embedding']
  return table[tokens].astype(dtype or table.dtype)


def final_norm(config: ModelConfig, params: Params, x: Array) -> Array:
  """The norm before the output head."""
  return RMSNorm(config.rms_eps).apply({'params': params['final_norm']}, x)


def head_matrix(params: Params) -> Array:
  """Output head as [vocab, D], the embedding itself when tied."""
  return params['head']['kernel'].T if 'head' in params else params['embed']['embedding']


def empty_boundary(config: ModelConfig, dtype=jnp.float32) -> Boundary:
  """The boundary state before the first token."""
  shape = (config.layers, 0, config.kv_heads, config.head_dim)
  return Boundary(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))


def forward(config: ModelConfig, params: Params, tokens: Array, boundary: Boundary, *, dtype=jnp.float32,
            remat: bool = False) -> tuple[Array, tuple[Array, Array]]:
  """Runs sibling segments that share one parent.

  Args:
    config: sizes.
    params: parameters, layers stacked.
    tokens: [B, T] int32; trailing padding is harmless.
    boundary: the parent's boundary state.
    dtype: activation dtype.
    remat: recompute each layer in the backward pass instead of keeping its intermediates.

  Returns:
    (normalised hidden states [B, T, D], (keys, values) of these tokens, each [layers, B, T, kv_heads, head_dim]).
  """
  positions = boundary.length + jnp.arange(tokens.shape[1])[None]
  rope = rope_table(config, positions, jnp.promote_types(dtype, jnp.float32))
  block = Block(config)

  def layer(x, scanned):
    layer_params, past_key, past_value = scanned

    def attend(query, key, value):
      context = attention.prefix_attention(query, key, value, past_key, past_value, boundary.length)
      return context, (key, value)

    return block.apply({'params': layer_params}, x, rope, attend)

  if remat:
    layer = jax.checkpoint(layer, prevent_cse=False)
  x, own = jax.lax.scan(layer, embed(params, tokens, dtype),
                        (params['layers'], boundary.keys.astype(dtype), boundary.values.astype(dtype)))
  return final_norm(config, params, x), own


def extend(boundary: Boundary, own: tuple[Array, Array], length: Array, capacity: int) -> Boundary:
  """Appends one segment's keys and values to its parent's boundary state.

  Args:
    boundary: the parent's state.
    own: (keys, values), each [layers, 1, T, kv_heads, head_dim].
    length: scalar, real tokens among the T.
    capacity: positions of the result; at least the parent's length and `length` together.
  """
  def append(past, new):
    padded = jnp.pad(past, ((0, 0), (0, capacity + new.shape[2]), (0, 0), (0, 0)))  # where a write may start, it may end
    return jax.lax.dynamic_update_slice_in_dim(padded, new[:, 0].astype(past.dtype), boundary.length, axis=1)[:, :capacity]

  return Boundary(append(boundary.keys, own[0]), append(boundary.values, own[1]), boundary.length + length)


def resize(state: State, room: int) -> State:
  """A state, or an adjoint of one, cut or padded to `room` positions."""
  def fit(x):
    return jnp.pad(x[:, :room], ((0, 0), (0, max(0, room - x.shape[1])), (0, 0), (0, 0)))

  return jax.tree.map(fit, state)


def own_adjoint(adjoint: State, boundary: Boundary, own: State) -> State:
  """What children want of the tokens of a segment.

  Args:
    adjoint: of the segment's boundary state, each [layers, C, kv_heads, head_dim].
    boundary: its parent's.
    own: (keys, values) of its tokens, each [layers, 1, T, kv_heads, head_dim].

  Returns:
    The rows behind the parent's, as far as they go, shaped like `own`.
  """
  def mine(a, p):
    width = p.shape[2]
    behind = jnp.pad(a, ((0, 0), (0, width), (0, 0), (0, 0)))
    return jax.lax.dynamic_slice_in_dim(behind, boundary.length, width, axis=1)[:, None].astype(p.dtype)

  return jax.tree.map(mine, adjoint, own)


def parent_adjoint(parent: State, adjoint: State, boundary: Boundary) -> State:
  """The adjoint of a parent's boundary state: a segment's own (`parent`), and what the segment's children want of it (`adjoint`)."""
  past = boundary.room
  above = (jnp.arange(past) < boundary.length)[:, None, None]

  def theirs(a, more):
    reach = min(past, a.shape[1])
    return more.astype(a.dtype).at[:, :reach].add(jnp.where(above[:reach], a[:, :reach], 0))

  return jax.tree.map(theirs, adjoint, parent)


def init_params(config: ModelConfig, key: Array, dtype=jnp.float32, scale: float = 0.02) -> Params:
  """Random parameters (tests, benchmarks); real runs load a checkpoint."""
  keys = jax.random.split(key, config.layers + 2)
  x, rope = jnp.zeros((1, 1, config.width)), rope_table(config, jnp.zeros((1, 1), jnp.int32))
  shapes = jax.eval_shape(lambda k: Block(config).init(k, x, rope, lambda q, k, v: (q, None))['params'], keys[0])
  flat, tree = jax.tree_util.tree_flatten_with_path(shapes)
  leaves = []
  for i, (path, leaf) in enumerate(flat):
    stacked = (config.layers, *leaf.shape)
    noise = scale * jax.random.normal(jax.random.fold_in(keys[0], i), stacked, dtype)
    leaves.append(1 + noise if path[-1].key == 'scale' else noise)
  params = {
      'embed': {'embedding': scale * jax.random.normal(keys[-1], (config.vocab_size, config.width), dtype)},
      'layers': jax.tree.unflatten(tree, leaves),
      'final_norm': {'scale': jnp.ones((config.width,), dtype)},
  }
  if not config.tied:
    params['head'] = {'kernel': scale * jax.random.normal(keys[-2], (config.width, config.vocab_size), dtype)}
  return params
