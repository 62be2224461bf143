"""A segment's forward pass now, its backward pass later: the layers of the Llama family with kept values.

A trajectory grows turn by turn.  `extend` runs the layers over a turn's tokens when they arrive and keeps what a backward
pass needs; `backward` runs once, over all turns together, when the cotangent of the last layer's output is known.  With
`keep='all'` nothing but attention scores, norms and the gated product is computed again; with `keep='inputs'` each layer
is, from its kept input, for a sixth of the memory (SmolLM2).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from ts_jax.kernels import attention
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig

Array = jax.Array
KEEP = ('inputs', 'all')


@flax.struct.dataclass
class Kept:
  """An open trajectory.

  Attributes:
    values: kept values by name, each [layers, 1, C, features].
    memory: keys and values of the prompt and of the trajectory so far, room for P + C positions.
    hidden: [1, C, D] output of the last layer, before the final norm.
    start: scalar int32, prompt tokens.
  """

  values: dict[str, Array]
  memory: llama.Boundary
  hidden: Array
  start: Array

  @property
  def capacity(self) -> int:
    """C, tokens there is room for."""
    return self.hidden.shape[1]


def token_bytes(config: ModelConfig, keep: str, itemsize: int = 4) -> int:
  """Memory that one kept token takes, its keys and values included."""
  return value_bytes(config, keep, itemsize) + itemsize * (2 * config.layers * config.kv_heads * config.head_dim + config.width)


def value_bytes(config: ModelConfig, keep: str, itemsize: int = 4) -> int:
  """Memory of what is kept of a token for the backward pass only."""
  return itemsize * config.layers * sum(_features(config, keep).values())


def _features(config: ModelConfig, keep: str) -> dict[str, int]:
  if keep not in KEEP:
    raise ValueError(f'keep={keep!r} is unknown: use one of {KEEP}')
  if keep == 'inputs':
    return {'input': config.width}
  heads = config.heads * config.head_dim
  return {'input': config.width, 'query': heads, 'context': heads, 'middle': config.width, 'gate': config.ffn_width,
          'up': config.ffn_width}


def begin(config: ModelConfig, prompt: llama.Boundary, capacity: int, keep: str | None = 'all') -> Kept:
  """An empty trajectory behind a prompt of boundary state `prompt`, with room for `capacity` tokens; `keep` None: values elsewhere."""
  dtype = prompt.keys.dtype
  room = ((0, 0), (0, capacity), (0, 0), (0, 0))
  memory = prompt.replace(keys=jnp.pad(prompt.keys, room), values=jnp.pad(prompt.values, room))
  values = {} if keep is None else {n: jnp.zeros(shape, dtype) for n, shape in value_shapes(config, capacity, keep).items()}
  return Kept(values, memory, jnp.zeros((1, capacity, config.width), dtype), prompt.length)


def value_shapes(config: ModelConfig, capacity: int, keep: str) -> dict[str, tuple[int, ...]]:
  """Shapes of `Kept.values`."""
  return {name: (config.layers, 1, capacity, features) for name, features in _features(config, keep).items()}


def extend(config: ModelConfig, params: llama.Params, kept: Kept, tokens: Array, count: Array, past: int,
           keep: str) -> tuple[Kept, dict[str, Array]]:
  """Runs the layers over the next tokens.

  Args:
    config: sizes.
    params: parameters, layers stacked.
    kept: the trajectory so far; room for T more tokens.
    tokens: [1, T] int32, trailing padding is harmless.
    count: scalar, real tokens among the T.
    past: positions of the memory to attend to, at least its length.
    keep: what the backward pass will read.

  Returns:
    (the trajectory with `count` more tokens in memory and hidden states, their values [layers, 1, T, features] by name, which
    `with_values` puts where they belong).
  """
  memory, dtype = kept.memory, kept.hidden.dtype
  rope = _rope(config, memory.length, tokens.shape[1], dtype)
  every_layer = 'query' in _features(config, keep)

  def layer(x, scanned):
    p, keys, values = scanned
    part = lambda kind, *args: kind(config).apply({'params': p}, *args)
    query, key, value = part(llama.AttentionInput, x, rope)
    context = attention.prefix_attention(query, key, value, keys, values, memory.length)
    middle = part(llama.AttentionOutput, x, context)
    gate, up = part(llama.MlpInput, middle)
    new = {'input': x}
    if every_layer:
      flat = lambda y: y.reshape(*y.shape[:2], -1)
      new |= {'query': flat(query), 'context': flat(context), 'middle': middle, 'gate': gate, 'up': up}
    return part(llama.MlpOutput, middle, gate, up), (new, (key, value))

  x, (new, own) = jax.lax.scan(layer, llama.embed(params, tokens, dtype),
                               (params['layers'], memory.keys[:, :past], memory.values[:, :past]))
  append = lambda old, value: jax.lax.dynamic_update_slice_in_dim(old, value[:, 0], memory.length, axis=1)
  hidden = jax.lax.dynamic_update_slice_in_dim(kept.hidden, x, memory.length - kept.start, axis=1)
  memory = llama.Boundary(append(memory.keys, own[0]), append(memory.values, own[1]), memory.length + count)
  return Kept(kept.values, memory, hidden, kept.start), new


def with_values(kept: Kept, new: dict[str, Array], count: Array) -> Kept:
  """The trajectory with the values of its last `count` tokens, from `extend`."""
  at = kept.memory.length - count - kept.start
  return kept.replace(values=jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, at, axis=2), kept.values, new))


def backward(config: ModelConfig, params: llama.Params, kept: Kept, tokens: Array, prompt: tuple[Array, Array],
             cotangent: Array, embedding: Array) -> tuple[llama.Params, tuple[Array, Array]]:
  """Gradient of the layers and embeddings of a whole trajectory, from the cotangent of its last layer's output.

  Args:
    config: sizes.
    params: parameters, layers stacked.
    kept: the trajectory; may have more room than needed.
    tokens: [1, T] int32 of all turns, T at most the room.
    prompt: (keys, values) of the prompt's boundary state, each [layers, P, kv_heads, head_dim].
    cotangent: [1, T, D] of `kept.hidden`; zero where nothing is scored.
    embedding: [V, D], what the embedding's gradient is added to: that of a tied head, or zeros.

  Returns:
    ({'embed', 'layers'}, adjoint of `prompt`).
  """
  dtype, length = kept.hidden.dtype, tokens.shape[1]
  rope = _rope(config, kept.start, length, dtype)
  own = tuple(jax.lax.dynamic_slice_in_dim(x, kept.start, length, axis=1)[:, None]
              for x in (kept.memory.keys, kept.memory.values))
  attend = lambda q, k, v, pk, pv: attention.prefix_attention(q, k, v, pk, pv, kept.start)

  def pull(kind, p, cotangent, *args):
    """Cotangents of the parameters that a part of the layer reads, and of its arguments.  Products of the part's own
    forward pass are not needed for them, and are not computed."""
    return jax.vjp(lambda p, *args: kind(config).apply({'params': p}, *args), p, *args)[1](cotangent)

  # Cut layer by layer: of all layers at once it would be a copy of everything that is kept.
  filled = lambda value: jax.tree.map(lambda x: x[:, :length], value)

  def parts(dx, scanned):
    p, value, (key, val), (past_key, past_value) = scanned
    value = filled(value)
    take = lambda *names: {n: p[n] for n in names}
    heads = lambda y: y.reshape(*y.shape[:2], config.heads, config.head_dim)
    dp, dmiddle, dgate, dup = pull(llama.MlpOutput, take('down'), dx, value['middle'], value['gate'], value['up'])
    more, dnorm = pull(llama.MlpInput, take('mlp_norm', 'gate', 'up'), (dgate, dup), value['middle'])
    dp, dmiddle = dp | more, dmiddle + dnorm
    more, dx, dcontext = pull(llama.AttentionOutput, take('o'), dmiddle, value['input'], heads(value['context']))
    dq, dk, dv, *adjoint = jax.vjp(attend, heads(value['query']), key, val, past_key, past_value)[1](dcontext)
    dp |= more
    more, dnorm, _ = pull(llama.AttentionInput, take('attn_norm', 'q', 'k', 'v'), (dq, dk, dv), value['input'], rope)
    return dx + dnorm, (dp | more, tuple(adjoint))

  def whole(dx, scanned):
    p, value, _, past = scanned
    value = filled(value)
    block = llama.Block(config)

    def run(p, x, pk, pv):
      return block.apply({'params': p}, x, rope, lambda q, k, v: (attend(q, k, v, pk, pv), None))[0]

    dp, dx, *adjoint = jax.vjp(run, p, value['input'], *past)[1](dx)
    return dx, (dp, tuple(adjoint))

  past = tuple(x.astype(dtype) for x in prompt)
  dx, (layers, adjoint) = jax.lax.scan(parts if 'query' in kept.values else whole, cotangent,
                                       (params['layers'], kept.values, own, past), reverse=True)
  return {'embed': {'embedding': embedding.at[tokens[0]].add(dx[0].astype(embedding.dtype))}, 'layers': layers}, adjoint


def _rope(config: ModelConfig, first: Array, length: int, dtype) -> tuple[Array, Array]:
  positions = first + jnp.arange(length)[None]
  return llama.rope_table(config, positions, jnp.promote_types(dtype, jnp.float32))
