"""Pacing: whatever the order in which groups complete, no token is too old, no group is lost or trained twice, nobody waits for ever."""

import dataclasses

from hypothesis import given, settings, strategies as st
import pytest

from ts_jax.streaming import pacing

SIZES = dict(size=st.integers(1, 4), updates=st.integers(1, 6), bound=st.integers(0, 3))


class Run:
  """A rollout side that completes groups in a drawn order, and a learner that is done whenever it is drawn."""

  def __init__(self, data, pace, starts, version=0):
    self.data, self.pace, self.version = data, pace, version
    self.first = dict.fromkeys(starts, version)  # group -> version of its first token
    self.batches, self.training = [], False

  def complete(self):
    group = self.data.draw(st.sampled_from(sorted(self.pace.running)))
    if self.data.draw(st.booleans()):  # it had to wait for a slot: its first token is newer than its start
      self.first[group] = self.data.draw(st.integers(self.first[group], self.version))
    self.pace = pacing.complete(self.pace, group, self.first[group])

  def step(self):
    """One thing happens; False when nothing can."""
    if not self.training:
      self.pace, batch = pacing.take(self.pace)
      if batch is not None:
        self.batches.append(batch)
        self.training = True
        return True
    choices = ['complete'] * bool(self.pace.running) + ['publish'] * self.training
    if not choices:
      return False
    if self.data.draw(st.sampled_from(choices)) == 'complete':
      self.complete()
    else:
      self.training, self.version = False, self.version + 1
      self.pace, starts = pacing.publish(self.pace, self.version)
      self.first.update(dict.fromkeys(starts, self.version))
    return True

  def check(self, updates, first=0):
    assert len(self.batches) == updates - first  # nobody waited for ever
    trained = [g for batch in self.batches for g in batch]
    assert len(set(trained)) == len(trained) and not self.pace.running and not self.pace.complete
    for update, batch in enumerate(self.batches, first):
      assert len(batch) == self.pace.size
      assert all(0 <= update - self.first[g] <= self.pace.bound for g in batch)
    return set(trained)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), **SIZES)
def test_every_group_is_trained_once_within_the_bound(data, size, updates, bound):
  run = Run(data, *pacing.publish(pacing.Pace(size, updates, bound), 0))
  while run.step():
    assert len(run.pace.running) + len(run.pace.complete) <= (bound + 1) * size
  assert run.check(updates) == set(range(size * updates))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), **SIZES)
def test_a_run_that_was_killed_anywhere_goes_on(data, size, updates, bound):
  """What it had trained since the checkpoint is trained again; of groups under way some trajectories are kept, others begin anew."""
  run = Run(data, *pacing.publish(pacing.Pace(size, updates, bound), 0))
  for _ in range(data.draw(st.integers(0, 60))):
    if not run.step():
      break
  checkpoint = data.draw(st.integers(0, run.version))
  trained = {g for batch in run.batches[:checkpoint] for g in batch}
  finished = data.draw(st.sets(st.sampled_from(sorted(run.first))))
  oldest = {g: run.first[g] for g in finished - trained if run.first[g] <= checkpoint}
  again = Run(data, *pacing.resumed(size, updates, bound, checkpoint, trained, oldest), checkpoint)
  again.first.update({g: v for g, v in oldest.items() if g in again.first})
  while again.step():
    pass
  assert again.check(updates, checkpoint) | trained == set(range(size * updates))


def test_the_fastest_groups_go_first_as_long_as_no_other_becomes_too_old():
  pace, starts = pacing.publish(pacing.Pace(2, 4, 1), 0)
  assert list(starts) == [0, 1, 2, 3]
  pace = pacing.complete(pacing.complete(pace, 3, 0), 2, 0)
  pace, batch = pacing.take(pace)
  assert batch == (2, 3)
  pace, starts = pacing.publish(pace, 1)
  assert list(starts) == [4, 5]
  pace = pacing.complete(pacing.complete(pace, 4, 1), 5, 1)
  assert pacing.take(pace)[1] is None  # 0 and 1, of version 0, must be in update 1
  pace = pacing.complete(pacing.complete(pace, 1, 0), 0, 0)
  assert pacing.take(pace)[1] == (0, 1)


def test_without_a_lag_it_is_sync():
  pace, starts = pacing.publish(pacing.Pace(2, 3, 0), 0)
  assert list(starts) == [0, 1]


@pytest.mark.parametrize('wrong, told', [
    (lambda p: pacing.complete(p, 9, 0), 'which does not run'),
    (lambda p: pacing.complete(p, 1, -1), 'tokens of version -1'),
    (lambda p: pacing.publish(p, 1), 'before update 0 had a batch'),
    (lambda p: pacing.resumed(2, 4, 1, 1, [0], {}), '1 groups are recorded as trained, 1 updates take 2'),
    (lambda p: pacing.resumed(1, 4, 1, 2, [0, 1], {2: 1, 3: 1}), '2 groups must be trained by update 2'),
])
def test_what_cannot_happen_is_an_error(wrong, told):
  pace, _ = pacing.publish(pacing.Pace(2, 4, 1), 0)
  with pytest.raises(pacing.PacingError, match=told):
    wrong(pace)


def test_states_are_not_changed():
  pace, _ = pacing.publish(pacing.Pace(1, 2, 1), 0)
  before = dataclasses.replace(pace)
  pacing.take(pacing.complete(pace, 0, 0))
  assert pace == before
