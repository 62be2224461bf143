"""Keeps freed host memory in the process: a gradient is made and freed for every source, and on the CPU backend each new
one would otherwise fault in half a gigabyte of zeroed pages."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = -1


def keep_freed_memory() -> bool:
  """Tells the C allocator to reuse large blocks instead of returning them; call before the first large allocation.

  Returns:
    True where the allocator has these settings (glibc); elsewhere nothing changes.
  """
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  if mallopt is None:
    return False
  return all(mallopt(setting, value) == 1 for setting, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1)))
