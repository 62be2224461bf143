"""The vocabulary: valid by construction, JSON both ways."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import offline
from ts_jax import types


@pytest.fixture
def batch():
  return offline.random_batch(np.random.default_rng(0))


def test_records_survive_json(batch):
  for record in (batch, types.Span('engine', 0.0, 1.0, 3), types.ContentFixed(batch.trajectories[0])):
    assert type(record).from_json(json.loads(json.dumps(record.to_json()))) == record


def test_masks_and_log_probs_line_up_with_ids(batch):
  for t in batch.trajectories:
    assert len(t.completion_ids) == len(t.completion_mask) == len(t.completion_log_probs)
    assert t.scored_tokens == sum(t.completion_mask)
    sampled = [i for turn in t.turns for i in turn.sampled.token_ids]
    assert [i for i, p in zip(t.completion_ids, t.completion_log_probs) if p != 0.0] == sampled


def test_records_cannot_be_changed(batch):
  with pytest.raises(dataclasses.FrozenInstanceError):
    batch.trajectories[0].reward = 1.0


def changed(record, **values):
  return dataclasses.replace(record, **values)


@pytest.mark.parametrize('make, told', [
    (lambda b: changed(b.trajectories[0], reward=float('nan')), 'not finite'),
    (lambda b: changed(b.trajectories[0], prompt_ids=()), 'empty prompt'),
    (lambda b: changed(b.trajectories[0], terminal_reason=types.TerminalReason.INFRASTRUCTURE), 'never scored'),
    (lambda b: changed(b.trajectories[0], turns=b.trajectories[0].turns + b.trajectories[0].turns), 'out of order'),
    (lambda b: changed(b.trajectories[0].turns[0], scored_mask=(True,) * 99), 'mask of 99'),
    (lambda b: changed(b.groups[0], prompt_ids=(1, 2, 3)), 'does not belong'),
    (lambda b: changed(b, update=5), 'not of update 5'),
    (lambda b: changed(b, groups=b.groups[::-1]), 'out of order'),
    (lambda b: types.GroupPlan(0, 'a', (1,), 0), 'size 0'),
    (lambda b: types.SampledTokens((1,), (0.5,), 0, 0, types.FinishReason.STOP), 'positive'),
    (lambda b: types.SampledTokens((1,), (), 0, 0, types.FinishReason.STOP), '0 log-probs'),
    (lambda b: types.SampledTokens((1,), (-1.0,), 3, 2, types.FinishReason.STOP), 'runs backwards'),
])
def test_contradictions_are_refused(batch, make, told):
  with pytest.raises(ValueError, match=told):
    make(batch)


def test_records_of_another_version_are_named():
  with pytest.raises(types.ConfigError, match="unknown fields.*'colour'"):
    types.Span.from_json({**types.Span('tool', 0.0, 1.0, 0).to_json(), 'colour': 1})
  with pytest.raises(types.ConfigError, match='incomplete'):
    types.Span.from_json({'kind': 'tool'})


def test_every_terminal_reason_has_one_outcome_and_only_infrastructure_is_retried():
  assert set(types.TERMINAL_OUTCOMES) == set(types.TerminalReason)
  assert [r for r, o in types.TERMINAL_OUTCOMES.items() if o.retried] == [types.TerminalReason.INFRASTRUCTURE]
  assert all(o.verified == o.scored != o.retried for o in types.TERMINAL_OUTCOMES.values())
