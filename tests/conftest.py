"""Eight virtual devices for the tests of several lanes; everything else runs on the first."""

import jax

jax.config.update('jax_num_cpu_devices', 8)
