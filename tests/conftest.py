"""Eight virtual devices for the tests of several lanes, and an end to what each module compiled."""

import gc

import jax
import pytest

jax.config.update('jax_num_cpu_devices', 8)


@pytest.fixture(scope='module', autouse=True)
def forget_compiled_functions():
  """An executable holds memory mappings, of which Linux allows a process 65,530: thousands of executables end it with a segmentation fault."""
  yield
  jax.clear_caches()
  gc.collect()
