"""What work takes, learned while it is done: seconds per padded token by kind of work and size."""

from __future__ import annotations

import dataclasses
from typing import Mapping

# Kinds: a source in one pass; what is left at completion of a trajectory whose turns ran forward; turns run forward.  Before
# anything is measured, in forward passes of a token: one pass is forward, recomputation and twice as much backward.
_PRIOR = {'whole': 4.0, 'late': 3.0, 'early': 1.0}
KINDS = tuple(_PRIOR)
_MEMORY = 0.9  # weight of what was known before, at each measurement of its kind and size
_SHRINKAGE = 1024  # tokens of a size that count as much as all that is known of its kind


@dataclasses.dataclass(frozen=True)
class Costs:
  """Measurements so far, older ones fading.

  Attributes:
    spent: (seconds, padded tokens) by (kind, size), where size is the binary logarithm of the tokens, rounded up.
  """

  spent: Mapping[tuple[str, int], tuple[float, float]] = dataclasses.field(default_factory=dict)

  def observe(self, kind: str, tokens: int, seconds: float) -> 'Costs':
    """Takes one measurement.

    Args:
      kind: one of `KINDS`.
      tokens: that were worked on, padded, at least 1.
      seconds: it took.
    """
    at = kind, _size(tokens)
    before_s, before = self.spent.get(at, (0.0, 0.0))
    return Costs({**self.spent, at: (_MEMORY * before_s + seconds, _MEMORY * before + tokens)})

  def predict(self, kind: str, tokens: int) -> float:
    """Seconds (before any measurement, forward passes of a token) that work on `tokens` padded tokens will take."""
    known = [spent for (k, _), spent in self.spent.items() if k == kind]
    if not known:
      other = next((k for k in KINDS if any(k == measured for measured, _ in self.spent)), None)
      return _PRIOR[kind] * (tokens if other is None else self.predict(other, tokens) / _PRIOR[other])
    rate = sum(s for s, _ in known) / sum(n for _, n in known)
    seconds, count = self.spent.get((kind, _size(tokens)), (0.0, 0.0))
    return tokens * (seconds + _SHRINKAGE * rate) / (count + _SHRINKAGE)

  def saved(self, tokens: int, of: int) -> float:
    """What is saved at completion, seconds, where `tokens` of a trajectory of `of` tokens so far have run forward before it."""
    return (self.predict('whole', of) - self.predict('late', of)) * tokens / of


def _size(tokens: int) -> int:
  return max(tokens, 1).bit_length()
