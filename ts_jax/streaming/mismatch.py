"""How far the sampler's log-probs are from the learner's, of the same tokens: what is measured, and when it is too much.

Tokens are sampled from pi_s, the engine's distribution, and differentiated under pi_l, the learner's.  With d = log pi_l - log pi_s
of each scored token, all means over these samples from pi_s estimate KL(pi_s || pi_l) = E_s[log pi_s - log pi_l]:

    k1  mean of -d                 unbiased, either sign
    k3  mean of exp(d) - 1 - d     unbiased, never negative, d^2 / 2 where d is small

(Schulman, "Approximating KL divergence").  The effective sample size of the importance weights w = exp(d) is (sum w)^2 / (n sum w^2):
1 where the distributions agree, 1 / n where one token outweighs all others.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ts_jax import types


@dataclasses.dataclass(frozen=True)
class Mismatch:
  """Sums over scored tokens, in float64; those of two disjoint sets of tokens add up with `+`.

  Attributes:
    tokens: n.
    absolute: sum of |d|.
    largest: largest |d|.
    difference: sum of d.
    excess: sum of exp(d) - 1 - d.
    weights, squares: sums of w and of w^2.
  """

  tokens: int = 0
  absolute: float = 0.0
  largest: float = 0.0
  difference: float = 0.0
  excess: float = 0.0
  weights: float = 0.0
  squares: float = 0.0

  @classmethod
  def of(cls, learner, sampler) -> 'Mismatch':
    """Measures log-probs [n] of scored tokens: the learner's against the sampler's."""
    d = np.asarray(learner, np.float64) - np.asarray(sampler, np.float64)
    if not d.size:
      return cls()
    with np.errstate(over='ignore'):  # what overflows is far above any limit
      w = np.exp(d)
      return cls(d.size, *(float(x) for x in (np.abs(d).sum(), np.abs(d).max(), d.sum(), (np.expm1(d) - d).sum(), w.sum(), (w * w).sum())))

  def __add__(self, other: 'Mismatch') -> 'Mismatch':
    sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)}
    return Mismatch(**{**sums, 'largest': float(np.maximum(self.largest, other.largest))})  # NaN stays, unlike with max()

  def summary(self) -> dict[str, float | None]:
    """The fields of `telemetry.metrics.UpdateRecord`; None where no token was measured."""
    n = self.tokens or math.nan
    effective = self.weights / n * (self.weights / self.squares) if self.squares else 0.0
    values = dict(sampler_gap_mean=self.absolute / n, sampler_gap_max=self.largest, sampler_kl_k1=-self.difference / n,
                  sampler_kl_k3=self.excess / n, sampler_ess=min(effective, 1.0))
    return values if self.tokens else dict.fromkeys(values)


# By the coarser precision of sampler and learner: (warn, stop).  k3 is half the mean square of d where d is small.  float32 against
# float32 has |d| of 6e-6 on average and 1e-4 at most, k3 about 5e-11: 1e-8 is d = 1.4e-4 everywhere, 1e-5 is 4.5e-3, less than one
# optimizer step of training does.  bfloat16 has 0.037 and 0.23, k3 about 1e-3: 0.01 is 0.14 everywhere, 0.1 is 0.45.
DEFAULTS = {'float32': (1e-8, 1e-5), 'bfloat16': (0.01, 0.1)}


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of k3: it sees both a small difference everywhere (in its square) and a large one at a few tokens.

  Attributes:
    warn: above it an update warns.
    stop: above it an update is not taken.
  """

  warn: float
  stop: float

  def __post_init__(self):
    if not 0 < self.warn <= self.stop:
      raise types.ConfigError(f'config.mismatch: warn={self.warn} must be positive and at most stop={self.stop} (inf for no limit)')

  def check(self, mismatch: Mismatch, update: int) -> str:
    """Judges an update before its step is taken.

    Returns:
      A warning, or ''.

    Raises:
      TsJaxError: above `stop`, or not a number.
    """
    if not mismatch.tokens:
      return ''
    found = mismatch.summary()
    k3 = found['sampler_kl_k3']
    if k3 <= self.warn:
      return ''
    what = (f"update {update}: the learner's log-probs differ from the sampler's by k3 = {k3:.2g} over {mismatch.tokens} tokens (|d| mean "
            f'{found["sampler_gap_mean"]:.2g}, largest {found["sampler_gap_max"]:.2g}, effective sample size {found["sampler_ess"]:.3f})')
    causes = 'Do the engines serve the published weights, in the precision of config.vllm.dtype, at config.agent.temperature?'
    if k3 <= self.stop:
      return f'{what}, above config.mismatch.warn={self.warn:g}.  {causes}  If they do, config.objective.importance_cap corrects for it'
    raise types.TsJaxError(f'{what}, above config.mismatch.stop={self.stop:g}: the step was not taken and nothing before it is lost.  {causes}  '
                           "Correct that, delete this update's file under trajectories/, and resume; or raise the limit")
