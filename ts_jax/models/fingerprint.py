"""A 32-bit fingerprint of a tensor's bytes that costs less than a CRC.  NumPy alone: it also runs inside vLLM's workers.

Every 4 KiB become one sum of 32-bit words times odd 64-bit weights, modulo 2^64 (multilinear hashing), and the CRC-32 is of these
sums.  It guards against accidents, not against intent.
"""

from __future__ import annotations

import zlib

import numpy as np

_ROW_WORDS = 1024
_WEIGHTS = (np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def fingerprint(array: np.ndarray) -> int:
  """The fingerprint of a C-contiguous array's bytes, whatever its shape and dtype.

  >>> fingerprint(np.arange(5000)) == fingerprint(np.arange(5000).view(np.uint8))
  True
  """
  data = array.reshape(-1).view(np.uint8)
  rows = data.size // (4 * _ROW_WORDS)
  words = data[:rows * 4 * _ROW_WORDS].view('<u4').reshape(rows, _ROW_WORDS)
  return zlib.crc32(data[words.nbytes:], zlib.crc32(np.einsum('ij,j->i', words, _WEIGHTS, dtype=np.uint64)))
