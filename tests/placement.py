"""Where a test's server processes compute: each pytest worker has a core of its own for them."""

import os


def engine_cores() -> list[int]:
  """One core: by the worker's number, and without workers the last one."""
  cores, worker = sorted(os.sched_getaffinity(0)), os.environ.get('PYTEST_XDIST_WORKER', '')
  return [cores[int(worker.removeprefix('gw')) % len(cores) if worker else -1]]
