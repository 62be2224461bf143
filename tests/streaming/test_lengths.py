"""What groups are dealt out to lanes by."""

import dataclasses

import numpy as np
import pytest

from experiments import offline
from ts_jax.streaming import lengths


def test_later_groups_count_more_and_unseen_tasks_are_as_long_as_the_others():
  batch = offline.random_batch(np.random.default_rng(0), groups=2)
  plans = offline.plans(batch)
  assert lengths.Lengths().predict(plans) == [float(p.size) for p in plans]
  mean = [np.mean([len(t.completion_ids) for t in g.trajectories]) for g in batch.groups]
  known = lengths.Lengths().observe(batch)
  assert known.predict(plans) == pytest.approx([p.size * m for p, m in zip(plans, mean)])
  unseen = dataclasses.replace(plans[0], task_id='another')
  assert known.predict([unseen]) == pytest.approx([unseen.size * np.mean(mean)])
  assert known.observe(batch).by_task == pytest.approx(known.by_task)
