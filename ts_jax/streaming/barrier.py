"""The update barrier: reduce over lanes, clip by the global norm, one AdamW step on float32 masters."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import optax

from ts_jax import types
from ts_jax.kernels import fold


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

  def build(self) -> optax.GradientTransformation:
    """Clipping and AdamW, as one optax chain over *descent* gradients."""
    return optax.chain(
        optax.clip_by_global_norm(self.max_norm),
        optax.adamw(self.learning_rate, self.b1, self.b2, self.epsilon, weight_decay=self.weight_decay,
                    mu_dtype=self.moment_dtype))


class LearnerState(NamedTuple):
  """What an update changes: parameters (float32 masters), optimizer state, and the version they publish as."""

  params: Any
  opt_state: Any
  policy_version: int


def init(config: OptimizerConfig, params) -> LearnerState:
  """Version 0 at the given parameters."""
  return LearnerState(params, config.build().init(params), 0)


def reduce_lanes(kind: str, batches: Sequence[fold.Sum], normaliser: float = 1.0):
  """Sum of the lanes' batch directions, in lane order, times `normaliser` (a late scalar of the batch), as a float pytree.

  Raises:
    OverflowError: an exact sum may have left its range.
  """
  total = batches[0]
  for batch in batches[1:]:
    total = fold.add(kind, total, batch)
  fold.check(kind, total, 'batch direction')
  floating = [x.dtype for x in jax.tree.leaves(total.leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
  direction = fold.value(kind, total, floating[0] if floating else jnp.float32)
  return direction if normaliser == 1 else jax.tree.map(lambda x: x * jnp.asarray(normaliser, x.dtype), direction)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(config: OptimizerConfig, params, opt_state, direction):
  norm = optax.global_norm(direction)
  descent = jax.tree.map(jnp.negative, direction)
  updates, opt_state = config.build().update(descent, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, norm


def apply(config: OptimizerConfig, state: LearnerState, direction) -> tuple[LearnerState, float]:
  """One ascent step along `direction` (Equation 3); consumes `state`.

  Returns:
    (next state with the next policy version, global norm before clipping).

  Raises:
    TsJaxError: the direction is not finite.  The parameters are lost; resume from the run directory.
  """
  params, opt_state, norm = _step(config, state.params, state.opt_state, direction)
  norm = float(norm)
  if not math.isfinite(norm):
    raise types.TsJaxError(f'the batch direction of policy version {state.policy_version} has norm {norm}: a log-prob or '
                           'weight is not finite; nothing was published')
  return LearnerState(params, opt_state, state.policy_version + 1), norm
