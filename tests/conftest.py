"""Quick compilation, eight virtual devices for the tests of several lanes, and an end to what each module compiled."""

import gc
import os

import jax
import pytest

# Three quarters of the suite's time would be compilation of programs that run for milliseconds.  Processes that tests start, and
# tests under an XLA_FLAGS of one's own (it may be empty), compile as users do.
QUICK = '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false'

jax.config.update('jax_num_cpu_devices', 8)
if 'XLA_FLAGS' not in os.environ:
  os.environ['XLA_FLAGS'] = QUICK
  jax.devices()  # reads them
  del os.environ['XLA_FLAGS']


@pytest.fixture(scope='module', autouse=True)
def forget_compiled_functions():
  """An executable holds memory mappings, of which Linux allows a process 65,530: thousands of executables end it with a segmentation fault."""
  yield
  jax.clear_caches()
  gc.collect()
