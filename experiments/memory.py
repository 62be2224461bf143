"""Memory of the learner: the peak of its process or device, and what its accumulators hold."""

from __future__ import annotations

import ctypes
import pathlib
import re
from typing import Mapping, Sequence

import jax

from ts_jax.kernels import fold
from ts_jax.streaming import lane as lane_lib


def reset_peak() -> None:
  """Gives freed host memory back and begins a new peak of this process (Linux); the peak of a device cannot begin anew."""
  trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
  if trim is not None:
    trim(0)
  pathlib.Path('/proc/self/clear_refs').write_text('5')


def peak_bytes() -> int:
  """Largest device memory in use so far; on a CPU, where device memory is the process's, its largest resident size since `reset_peak`."""
  statistics = jax.local_devices()[0].memory_stats()
  if statistics:
    return statistics['peak_bytes_in_use']
  return 1024 * int(re.search(r'VmHWM:\s+(\d+) kB', pathlib.Path('/proc/self/status').read_text())[1])


def accumulator_bytes(lanes: Sequence[lane_lib.Lane]) -> int:
  """Bytes of every `fold.Sum` that the lanes hold now: statistics of open groups, direction of the batch, adjoints."""
  total, seen, waiting = 0, set(), list(lanes)
  while waiting:
    found = waiting.pop()
    if id(found) in seen:
      continue
    seen.add(id(found))
    if isinstance(found, fold.Sum):
      total += sum(x.nbytes for x in jax.tree.leaves(found))
    elif isinstance(found, Mapping):
      waiting += list(found.values())
    elif isinstance(found, (list, tuple)):
      waiting += found
    elif type(found).__module__.startswith('ts_jax.streaming.'):
      waiting += list(vars(found).values())
  return total
