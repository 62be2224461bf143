"""What a fingerprint must tell apart."""

import hypothesis
from hypothesis import strategies as st
import numpy as np

from ts_jax.models import fingerprint

EXPECTED = 2265134967


@hypothesis.given(st.integers(0, 2**32), st.sampled_from([0, 1, 4095, 4096, 4097, 20000]), st.data())
def test_a_changed_byte_and_two_words_that_change_places_are_seen(seed, size, data):
  before = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
  value = fingerprint.fingerprint(before)
  assert value == fingerprint.fingerprint(before.copy()) and 0 <= value < 2**32
  if size:
    after = before.copy()
    after[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    assert fingerprint.fingerprint(after) != value
    flipped = before.copy()
    flipped[[data.draw(st.integers(0, size - 1), label='one'), data.draw(st.integers(0, size - 1), label='other')]] ^= 0x80  # two signs
    assert np.array_equal(flipped, before) or fingerprint.fingerprint(flipped) != value
  if size >= 32:
    words = before[:size // 8 * 8].view(np.uint64)
    i, j = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    swapped = words.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert np.array_equal(swapped, words) or fingerprint.fingerprint(swapped) != fingerprint.fingerprint(words)


def test_shape_and_place_in_memory_do_not_matter_and_the_value_stays():
  array = np.arange(6000, dtype=np.float32)
  shifted = np.concatenate([np.zeros(1, np.uint8), array.view(np.uint8)])[1:]
  assert len({fingerprint.fingerprint(a) for a in (array, array.reshape(60, 100), shifted)}) == 1
  assert fingerprint.fingerprint(array) == EXPECTED  # learner and server have NumPy of their own
