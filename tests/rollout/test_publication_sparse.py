"""Differences of weights: bit-exact, small, and refused where they do not fit."""

import doctest

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

from ts_jax.models import safetensors_file
from ts_jax.rollout.publication import sparse

DTYPES = st.sampled_from([np.uint16, np.uint32])


@st.composite
def old_and_new(draw):
  """Bits of any kind, which change in a fraction of the places, in runs and far apart."""
  dtype, size = draw(DTYPES), draw(st.integers(0, 3000))
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  old = rng.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
  new = np.where(rng.random(size) < draw(st.sampled_from([0, 0.001, 0.02, 0.5, 1])), rng.integers(0, np.iinfo(dtype).max, size, dtype), old)
  return old, new


@hypothesis.given(old_and_new())
def test_a_patch_turns_the_old_bits_into_the_new_ones(pair):
  old, new = pair
  patch = sparse.diff(old, new)
  if patch is None:
    assert np.array_equal(old, new)
    return
  assert patch.values.size == (old != new).sum()
  result = old.copy()
  sparse.apply(result, patch)
  assert np.array_equal(result, new)


@hypothesis.given(hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32)), st.data())
def test_signs_of_zero_and_nan_payloads_arrive(old, data):
  new = old.copy()
  special = np.array([0x7fc00001, 0xffc12345, 0x80000000, 0x00000000, 0x7f800000, 0x00000001], np.uint32).view(np.float32)
  for i in data.draw(st.lists(st.integers(0, len(old) - 1), max_size=10)):
    new[i] = special[i % len(special)]
  patch, result = sparse.diff(sparse.bits(old), sparse.bits(new)), old.copy()
  if patch is not None:
    sparse.apply(sparse.bits(result), patch)
  assert result.tobytes() == new.tobytes()


@pytest.mark.parametrize('places', [[0], [254], [255], [256], [510], [65535], [65536, 140000], [0, 1, 2], [199999], [254, 509, 765]])
def test_gaps_around_the_escapes(places):
  old = np.zeros(200000, np.uint16)
  new = old.copy()
  new[places] = 7
  patch, result = sparse.diff(old, new), old.copy()
  sparse.apply(result, patch)
  assert np.array_equal(result, new)


def test_each_change_costs_a_byte_for_its_place_where_they_are_dense_and_two_where_they_are_rare():
  rng = np.random.default_rng(0)
  for fraction, kind, per_change in ((0.03, np.uint8, 3.01), (0.0005, np.uint16, 4.01)):
    old = np.zeros(1_000_000, np.uint16)
    new = (rng.random(old.size) < fraction).astype(np.uint16)
    patch = sparse.diff(old, new)
    assert patch.gaps.dtype == kind and patch.size_bytes <= per_change * new.sum()


def test_a_patch_of_another_tensor_is_refused_and_nothing_changes():
  patch = sparse.diff(np.zeros(100, np.uint16), np.arange(100, dtype=np.uint16))
  for target in (np.zeros(50, np.uint16), np.zeros(100, np.uint32)):
    with pytest.raises(ValueError, match='does not fit'):
      sparse.apply(target, patch)
    assert not target.any()
  with pytest.raises(ValueError, match='does not fit'):
    sparse.apply(np.zeros(100, np.uint16), sparse.Patch(patch.gaps, patch.values[:-1]))
  with pytest.raises(ValueError, match='a patch keeps both'):
    sparse.diff(np.zeros(3, np.uint16), np.zeros(4, np.uint16))


def test_patches_survive_their_file(tmp_path):
  patches = {'a.weight': sparse.diff(np.zeros(9, np.uint16), np.arange(9, dtype=np.uint16)),
             'b': sparse.diff(np.zeros(70000, np.uint16), np.eye(1, 70000, 69999, dtype=np.uint16)[0])}
  arrays = sparse.pack(patches)
  specs = {n: safetensors_file.TensorSpec(a.shape, a.dtype) for n, a in arrays.items()}
  safetensors_file.write(tmp_path / 'p', specs, arrays.__getitem__)
  read = sparse.unpack(safetensors_file.read(tmp_path / 'p', integers=True))
  assert set(read) == set(patches)
  for name, patch in patches.items():
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(read[name], patch))


def test_documented_example():
  assert not doctest.testmod(sparse).failed
