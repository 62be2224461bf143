"""The update barrier: reduce over lanes, clip by the global norm, one AdamW step on float32 masters.

With several lanes each device reduces and steps its own shard of the state (see `layout`).  Only the norm needs everything: its sums
run over whole leaves, one after the other, as they do with one lane.  All else is elementwise, so an update has the same bits for
every number of lanes where the lanes' sums are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ts_jax import types
from ts_jax.kernels import fold
from ts_jax.streaming import layout as layout_lib
from ts_jax.streaming.layout import Layout


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW as in Table 5 of ThunderSyncRL; `moment_dtype` is that of the first moment."""

  learning_rate: float = 1e-6
  b1: float = 0.9
  b2: float = 0.999
  epsilon: float = 1e-8
  weight_decay: float = 0.0
  max_norm: float = 1.0
  moment_dtype: str = 'float32'

  def build(self) -> optax.GradientTransformationExtraArgs:
    """Clipping and AdamW, as one optax chain over *descent* gradients; `update` wants their global `norm`."""
    return optax.chain(
        _clip(self.max_norm),
        optax.adamw(self.learning_rate, self.b1, self.b2, self.epsilon, weight_decay=self.weight_decay,
                    mu_dtype=self.moment_dtype))


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
  """`optax.clip_by_global_norm` with a norm that is known."""
  def update(updates, state, params=None, *, norm):
    del params
    clip = lambda x: jax.lax.select(norm < max_norm, x, (x / norm.astype(x.dtype)) * max_norm)
    return jax.tree.map(clip, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class LearnerState(NamedTuple):
  """What an update changes: parameters (float32 masters), optimizer state, and the version they publish as."""

  params: Any
  opt_state: Any
  policy_version: int


def init(config: OptimizerConfig, params, layout: Layout = Layout()) -> LearnerState:
  """Version 0 at the given parameters, cut as the layout says."""
  return place(LearnerState(params, config.build().init(params), 0), layout)


def place(state: LearnerState, layout: Layout) -> LearnerState:
  """A whole state, the same in every process, cut as the layout says."""
  return LearnerState(layout.place(state.params), layout.place(state.opt_state), state.policy_version)


def on_host(state: LearnerState, layout: Layout = Layout()) -> LearnerState:
  """The whole state in host memory; all processes take part."""
  bring = lambda x: np.asarray(layout_lib.local(layout.whole(x)))
  return LearnerState(jax.tree.map(bring, state.params), jax.tree.map(bring, state.opt_state), state.policy_version)


def reduce_lanes(kind: str, batches: Sequence[fold.Sum], normaliser: float = 1.0, layout: Layout = Layout()):
  """Sum of the lanes' batch directions, in lane order, times `normaliser` (a late scalar of the batch), as a float pytree.

  Args:
    kind: of accumulator.
    batches: of the lanes of this process.
    normaliser: a late scalar of the batch.
    layout: of the result; without devices it is whole, where the first lane's sum is.

  Raises:
    OverflowError: an exact sum may have left its range.
  """
  if layout.devices:
    with fold.precision(kind):
      total = jax.tree.map(lambda *own: _meet(layout, _beside(layout, *own)), *batches)  # one leaf at a time: each needs two more copies
  else:
    total = batches[0]
    for batch in batches[1:]:
      total = fold.add(kind, total, batch)
  fold.check(kind, total, 'batch direction')
  floating = [x.dtype for x in jax.tree.leaves(total.leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
  direction = fold.value(kind, total, floating[0] if floating else jnp.float32)
  return direction if normaliser == 1 else _scale(direction, np.float64(normaliser))


def _beside(layout: Layout, *own: jax.Array) -> jax.Array:
  """[lanes, ...]: an array of every lane, each where it is; `own`: those of this process."""
  shape = layout.lanes, *own[0].shape
  return jax.make_array_from_single_device_arrays(shape, layout.by_lane, [x[None] for x in own])


@functools.partial(jax.jit, static_argnums=0)
def _meet(layout: Layout, x):
  """Sum of [lanes, ...] over lanes, in their order: each shard on its device, once that has every lane's part of it."""
  parts = jax.lax.with_sharding_constraint(x, layout.behind_lanes(x.shape[1:]))
  return layout.constrain(functools.reduce(jnp.add, (parts[i] for i in range(layout.lanes))))


@jax.jit
def _scale(direction, factor):
  return jax.tree.map(lambda x: x * factor.astype(x.dtype), direction)


@jax.jit
def _squares(x):
  return jnp.sum(jnp.square(x))


def global_norm(direction, layout: Layout = Layout()) -> np.floating:
  """Euclidean norm over all leaves; its bits do not depend on the layout.  One leaf at a time is whole on every device."""
  squares = [np.asarray(_squares(layout_lib.local(layout.whole(x)))) for x in jax.tree.leaves(direction)]
  return np.sqrt(functools.reduce(np.add, squares))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _step(config: OptimizerConfig, layout: Layout, params, opt_state, direction, norm):
  descent = jax.tree.map(jnp.negative, direction)
  updates, opt_state = config.build().update(descent, opt_state, params, norm=norm)
  return layout.constrain((optax.apply_updates(params, updates), opt_state))


def apply(config: OptimizerConfig, state: LearnerState, direction, layout: Layout = Layout()) -> tuple[LearnerState, float]:
  """One ascent step along `direction` (Equation 3); consumes `state`.

  Args:
    config: of the optimizer.
    state: cut as the layout says.
    direction: likewise.
    layout: of the lanes.

  Returns:
    (next state with the next policy version, global norm before clipping).

  Raises:
    TsJaxError: the direction is not finite; no step is taken.
  """
  norm = global_norm(direction, layout)
  if not math.isfinite(norm):
    raise types.TsJaxError(f'the batch direction of policy version {state.policy_version} has norm {norm}: a log-prob or '
                           'weight is not finite; nothing was published')
  params, opt_state = _step(config, layout, state.params, state.opt_state, direction, norm)
  return LearnerState(params, opt_state, state.policy_version + 1), float(norm)
