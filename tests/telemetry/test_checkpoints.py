"""Checkpoints: what is written comes back, and an interruption does not leave half of one."""

import signal
from typing import NamedTuple

import jax
import numpy as np
import pytest

from ts_jax.telemetry import checkpoints, interruption


class State(NamedTuple):
  params: dict
  version: int


@pytest.fixture(autouse=True)
def heard():
  """A shell's background job starts with interruptions ignored."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def state(value: float) -> State:
  return State({'w': jax.numpy.full((3,), value)}, 4)


def test_the_newest_checkpoint_comes_back(tmp_path):
  kept = checkpoints.Checkpoints(tmp_path, keep=2)
  for step in range(3):
    kept.save(step, state(step))
  step, restored = kept.restore(state(9))
  kept.close()
  assert step == 2 and restored.version == 4
  np.testing.assert_array_equal(restored.params['w'], np.full(3, 2.0, np.float32))


def test_a_second_interruption_does_not_wait():
  with pytest.raises(KeyboardInterrupt):
    with interruption.delayed():
      with interruption.delayed():
        signal.raise_signal(signal.SIGINT)
      signal.raise_signal(signal.SIGINT)
      pytest.fail('the second signal was delayed')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_waits_until_the_checkpoint_is_whole(tmp_path, monkeypatch, number):
  kept = checkpoints.Checkpoints(tmp_path)
  write = kept._manager.save

  def interrupted(*args, **kwargs):
    signal.raise_signal(number)
    return write(*args, **kwargs)

  monkeypatch.setattr(kept._manager, 'save', interrupted)
  before = signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    with pytest.raises(KeyboardInterrupt):
      kept.save(1, state(1))
  finally:
    signal.signal(signal.SIGTERM, before)
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  kept.save(1, state(7))  # already there
  assert kept.restore(state(9))[1].params['w'][0] == 1
  kept.close()
