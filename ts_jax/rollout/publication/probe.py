"""Whether a replica serves what was published, seen from outside: a fixed prompt's log-probs, and nothing of it from a cache.

The checksum says that the right bits arrived; the probe says that the replica computes with them (packed and tied copies included)
and with no key or value of the version before.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Mapping, Sequence

import jax
import numpy as np

from ts_jax import types
from ts_jax.kernels import logprob
from ts_jax.models import llama
from ts_jax.models.config import ModelConfig
from ts_jax.rollout import control as control_lib

# Mean absolute difference of log-probs, nats, between a server that computes in this dtype and a float32 forward pass.
TOLERANCES = {'float32': 1e-4, 'float16': 0.03, 'bfloat16': 0.15}
_BUCKET = 64  # of the learner's shapes


@dataclasses.dataclass(frozen=True)
class Probe:
  """A prompt and what the learner makes of it.

  Attributes:
    token_ids: T >= 2 ids; more than two blocks of the server's cache (16 or 32 tokens), so that a stale block would be hit.
    log_probs: parameters -> [T - 1] log-probs of token_ids[1:].
    tolerance: mean absolute difference that passes, nats.
  """

  token_ids: tuple[int, ...]
  log_probs: Callable[[Mapping[str, Any]], np.ndarray]
  tolerance: float

  def warm(self, control: control_lib.EngineControl, timeout_s: float | None = None) -> None:
    """Leaves keys and values of the prompt, under the version before, where they would be found if nobody dropped them."""
    control.prompt_log_probs(self.token_ids, timeout_s)

  def check(self, control: control_lib.EngineControl, expected: np.ndarray, timeout_s: float | None = None) -> None:
    """Asks again.

    Args:
      control: the replica, not paused.
      expected: `log_probs` of the published parameters.
      timeout_s: of the answer, which waits for a slot where requests are in flight; None: the control's own.

    Raises:
      InfrastructureError: something came from a cache, or the log-probs are others.
    """
    values, cached = control.prompt_log_probs(self.token_ids, timeout_s)
    if cached:
      raise types.InfrastructureError(f'engine {control.url} kept keys and values of {cached} tokens across the publication: it '
                                      'would sample from two policies at once')
    difference = float(np.mean(np.abs(np.array(values[1:], np.float64) - expected)))
    if not difference <= self.tolerance:  # also when not a number
      raise types.InfrastructureError(f'engine {control.url} gives the probe prompt log-probs that differ from the learner\'s by '
                                      f'{difference:.3g} nats on average, more than {self.tolerance:g}: it does not compute with the '
                                      'weights whose checksum it acknowledged, or in another dtype than the tolerance is for')


def learner_probe(config: ModelConfig, token_ids: Sequence[int], served_dtype: str = 'float32', tolerance: float | None = None) -> Probe:
  """A probe that the learner's own layers answer, in float32.

  Args:
    config: the student's sizes.
    token_ids: the prompt.
    served_dtype: what the replicas compute in.
    tolerance: mean absolute difference that passes, nats; None: that of `served_dtype`.

  Raises:
    ConfigError: a dtype without a tolerance.
  """
  if served_dtype not in TOLERANCES:
    raise types.ConfigError(f'there is no tolerance for replicas that compute in {served_dtype!r}: use one of {list(TOLERANCES)}')
  count = len(token_ids) - 1
  inputs = np.zeros((1, -(-count // _BUCKET) * _BUCKET), np.int32)
  inputs[0, :count] = token_ids[:-1]
  targets = np.asarray(token_ids[1:], np.int32)

  @jax.jit
  def log_probs(params):
    hidden, _ = llama.forward(config, params, inputs, llama.empty_boundary(config))
    return logprob.token_log_probs(hidden[0, :count], llama.head_matrix(params), targets)

  return Probe(tuple(int(t) for t in token_ids), lambda params: np.asarray(log_probs(params), np.float64),
               tolerance or TOLERANCES[served_dtype])
