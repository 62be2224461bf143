"""Splits by source digest, and the order of draws."""

import collections
import math
import pathlib
import random

import hypothesis
from hypothesis import strategies as st
import pytest

from ts_jax import types
from ts_jax.data import splits
from ts_jax.data import tasks as tasks_lib


def _task(task_id, source=None, family='trail'):
  return tasks_lib.Task(task_id, family, source or task_id, 1, 'Do it.', pathlib.Path('/nowhere'), f'digest of {task_id}',
                        (('test_a', 1.0),))


def _tasks(sizes, family='trail'):
  return [_task(f'{family}-{s}-{v}', f'{family}-{s}', family) for s, size in enumerate(sizes) for v in range(size)]


_SIZES = st.lists(st.integers(1, 3), min_size=2, max_size=40)


@hypothesis.given(_SIZES, st.integers(0, 99), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=60, deadline=None)
def test_sources_stay_together_and_order_does_not_matter(sizes, percent, seed):
  tasks = _tasks(sizes)
  fraction = percent / 100
  hypothesis.assume(math.ceil(percent * len(sizes) / 100) < len(sizes))
  parts = splits.split(tasks, dev_fraction=fraction)
  assert sorted(t.task_id for t in parts.train + parts.dev) == sorted(t.task_id for t in tasks)
  dev_sources = {t.source for t in parts.dev}
  assert not dev_sources & {t.source for t in parts.train}
  assert len(dev_sources) == -(-percent * len(sizes) // 100)
  shuffled = random.Random(seed).sample(tasks, len(tasks))
  assert splits.split(shuffled, dev_fraction=fraction) == parts
  assert splits.split(shuffled, dev_fraction=fraction).digests() == parts.digests()


def test_dev_holds_the_smallest_digests_of_five_percent_rounded_up():
  tasks = _tasks([1] * 61)
  parts = splits.split(tasks)
  expected = sorted((t.source for t in tasks), key=splits.identifier_digest)[:4]
  assert {t.source for t in parts.dev} == set(expected)
  assert len(splits.split(_tasks([1] * 60)).dev) == 3  # exactly 3: no floating-point excess rounded up
  assert len(splits.split(_tasks([1] * 3474)).dev) == 174  # Table 4


def test_held_out_family_is_apart_and_takes_its_sources_along():
  tasks = _tasks([2] * 20) + _tasks([2] * 5, 'count') + [_task('trail-x', 'count-1', 'trail')]
  parts = splits.split(tasks, held_out_family='count')
  assert {t.task_id for t in parts.held_out} == {t.task_id for t in tasks if t.family == 'count'} | {'trail-x'}
  assert {t.family for t in parts.train + parts.dev} == {'trail'}


def test_per_family_takes_a_share_of_each_and_prefixes_are_mixed():
  tasks = _tasks([2] * 10) + _tasks([2] * 30, 'count')
  parts = splits.split(tasks, dev_fraction=0.1, per_family=True)
  assert collections.Counter(t.family for t in parts.dev) == {'trail': 2, 'count': 6}
  assert collections.Counter(t.family for t in parts.train[:10]) == {'trail': 5, 'count': 5}


def test_refusals():
  with pytest.raises(types.ConfigError, match='more than once'):
    splits.split([_task('Trail 1'), _task('trail-1')])
  with pytest.raises(types.ConfigError, match="'chess' has no tasks"):
    splits.split(_tasks([1] * 4), held_out_family='chess')
  with pytest.raises(types.ConfigError, match='dev_fraction=1'):
    splits.split(_tasks([1] * 4), dev_fraction=1)
  with pytest.raises(types.ConfigError, match='no training task'):
    splits.split(_tasks([3]), dev_fraction=0.05)
  with pytest.raises(types.ConfigError, match='no tasks to draw'):
    splits.task_at([], 0, 0)


def test_digest_changes_with_a_tasks_content():
  tasks = _tasks([1] * 4)
  changed = [*tasks[:3], tasks_lib.Task(**{**vars(tasks[3]), 'digest': 'other'})]
  assert splits.list_digest(tasks) != splits.list_digest(changed)
  assert splits.list_digest(tasks) == splits.list_digest(tasks[::-1])


@hypothesis.given(st.integers(1, 12), st.integers(0, 100), st.integers(0, 60))
@hypothesis.settings(max_examples=60, deadline=None)
def test_draws_resume_anywhere_and_use_every_task_once_a_pass(count, seed, start):
  tasks = _tasks([1] * count)
  whole = splits.task_order(tasks, seed, 0, 5 * count)
  for epoch in range(5):
    assert {t.task_id for t in whole[epoch * count:(epoch + 1) * count]} == {t.task_id for t in tasks}
  start %= 4 * count
  assert splits.task_order(tasks[::-1], seed, start, count) == whole[start:start + count]


def test_passes_and_seeds_are_shuffled_differently():
  tasks = _tasks([1] * 20)
  orders = [splits.task_order(tasks, seed, epoch * 20, 20) for seed in (0, 1) for epoch in (0, 1)]
  assert len({tuple(t.task_id for t in o) for o in orders}) == 4
