"""The fixed list of compiled shapes.  A source's shape depends on its own length only, never on what else is in flight."""

from __future__ import annotations

import bisect
import dataclasses

from ts_jax import types

DEFAULT_LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


@dataclasses.dataclass(frozen=True)
class Buckets:
  """Allowed padded lengths, ascending.

  Attributes:
    lengths: padded segment lengths in tokens.
  """

  lengths: tuple[int, ...] = DEFAULT_LENGTHS

  def __post_init__(self):
    if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 2:
      raise types.ConfigError(f'bucket lengths {self.lengths} must be ascending, distinct and at least 2')

  def pad(self, tokens: int) -> int:
    """Smallest bucket that holds `tokens`.

    Raises:
      ConfigError: longer than the longest bucket.
    """
    at = bisect.bisect_left(self.lengths, tokens)
    if at == len(self.lengths):
      raise types.ConfigError(
          f'a segment of {tokens} tokens is longer than the longest bucket, {self.lengths[-1]}: add a longer one to '
          'config.learner.buckets or lower the limits in config.agent')
    return self.lengths[at]

  def pad_scored(self, scored: int, padded: int) -> int:
    """Positions the output head runs on: half of the padded segment where that holds all scored tokens, else all."""
    return padded // 2 if scored <= padded // 2 else padded

  def up_to(self, tokens: int) -> tuple[int, ...]:
    """The buckets needed for segments of at most `tokens`."""
    return self.lengths[:self.lengths.index(self.pad(tokens)) + 1]
