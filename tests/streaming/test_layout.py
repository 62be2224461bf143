"""State cut over the lanes' devices: where it is, and that an update has the bits of one lane."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import offline
from ts_jax.kernels import fold
from ts_jax.streaming import barrier, layout as layout_lib
from ts_jax.streaming.layout import Layout
from ts_jax.telemetry import checkpoints

SHAPES = {'embedding': (67, 24), 'kernel': (3, 24, 40), 'scale': (3, 24), 'odd': (7,)}
CONFIG = barrier.OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, max_norm=0.5)


def lanes(number: int) -> Layout:
  return Layout(tuple(jax.devices()[:number])) if number > 1 else Layout()


def tree(seed: int):
  rng = np.random.default_rng(seed)
  return {name: jnp.asarray(rng.normal(0, 0.1, shape), jnp.float32) for name, shape in SHAPES.items()}


def split_sums(number: int, kind: str):
  """Gradients folded on one lane each, in turn."""
  devices, sums = jax.devices(), {}
  for i in range(9):
    lane, gradient = i % number, tree(100 + i)
    here = jax.device_put(gradient, devices[lane])
    sums[lane] = fold.fold(kind, sums[lane] if lane in sums else fold.zeros(kind, here), here)
  return [sums[lane] for lane in range(number)]


def updates(number: int, kind: str = 'exact', steps: int = 2):
  layout = lanes(number)
  state, norms = barrier.init(CONFIG, tree(0), layout), []
  for _ in range(steps):
    state, norm = barrier.apply(CONFIG, state, barrier.reduce_lanes(kind, split_sums(number, kind), 0.3, layout), layout)
    norms.append(norm)
  return state, norms


def test_leaves_are_cut_along_their_largest_divisible_axis_and_replicated_without_one():
  layout = lanes(4)
  assert {name: layout.axis(shape) for name, shape in SHAPES.items()} == {'embedding': 1, 'kernel': 2, 'scale': 1, 'odd': None}
  state, _ = updates(4)
  for part in (state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
    for name, x in part.items():
      axis = layout.axis(x.shape)
      local = tuple(n // 4 if i == axis else n for i, n in enumerate(x.shape))
      assert [s.data.shape for s in x.addressable_shards] == [local] * 4, name


def test_an_update_has_the_bits_of_one_lane_for_every_number_of_lanes():
  one, norms = updates(1)
  assert norms[0] > CONFIG.max_norm  # it is clipped
  for number in (2, 3, 8):
    state, found = updates(number)
    assert found == norms and offline.bits(state) == offline.bits(one)


def test_float_sums_meet_in_the_order_of_the_lanes():
  layout, sums = lanes(4), split_sums(4, 'float32')
  got = barrier.reduce_lanes('float32', sums, 1.0, layout)
  assert offline.bits(got) == offline.bits(barrier.reduce_lanes('float32', sums))


def test_one_step_is_that_of_optax():
  direction, params = tree(5), tree(0)
  chain = optax.chain(optax.clip_by_global_norm(CONFIG.max_norm), optax.adamw(CONFIG.learning_rate, weight_decay=CONFIG.weight_decay))
  wanted, _ = jax.jit(chain.update)(jax.tree.map(jnp.negative, direction), chain.init(params), params)
  wanted = optax.apply_updates(params, wanted)
  state, norm = barrier.apply(CONFIG, barrier.init(CONFIG, params), direction)
  assert norm == pytest.approx(offline.relative_error(direction, tree(6)) * np.linalg.norm(offline.flat(tree(6))), rel=1) and norm > 0.5
  assert offline.relative_error(state.params, wanted) < 1e-7


def test_a_direction_that_is_not_finite_leaves_the_state_as_it_was():
  layout = lanes(2)
  state = barrier.init(CONFIG, tree(0), layout)
  direction = layout.place({**tree(1), 'odd': jnp.full(7, jnp.nan)})
  with pytest.raises(Exception, match='norm nan'):
    barrier.apply(CONFIG, state, direction, layout)
  assert offline.bits(state.params) == offline.bits(tree(0))


def test_exact_sums_that_left_their_range_are_refused():
  sums = split_sums(2, 'exact')
  sums[1] = fold.fold('exact', sums[1], jax.device_put(tree(1), jax.devices()[1]), 1e6)
  with pytest.raises(OverflowError, match='batch direction'):
    barrier.reduce_lanes('exact', sums, 1.0, lanes(2))


def test_whole_parameters_are_on_every_device_once():
  layout = lanes(4)
  params = tree(0)
  whole = layout.whole(layout.place(params))
  for device in layout.devices:
    mine = layout_lib.on(whole, device)
    assert all(x.devices() == {device} for x in jax.tree.leaves(mine)) and offline.bits(mine) == offline.bits(params)
    assert all(x.unsafe_buffer_pointer() == y.unsafe_buffer_pointer()
               for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(layout_lib.on(mine, device))))


def test_checkpoints_restore_across_numbers_of_lanes(tmp_path):
  state, _ = updates(4)
  for number in (1, 3):
    saved = checkpoints.Checkpoints(tmp_path / str(number))
    saved.save(2, state)
    like = barrier.init(CONFIG, tree(0), lanes(number))
    _, found = saved.restore(like)
    saved.close()
    assert offline.bits(found) == offline.bits(state) and found.policy_version == state.policy_version
    kernel = found.params['kernel']
    assert [s.data.shape for s in kernel.addressable_shards] == [s.data.shape for s in like.params['kernel'].addressable_shards]
