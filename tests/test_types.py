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


def test_teacher_log_probs_line_up_with_ids_and_are_all_there_or_none(batch):
  for t in batch.trajectories:
    assert t.completion_teacher_log_probs is None  # nobody scored them
    turns = tuple(changed(u, teacher_log_probs=tuple(2 * p for p in u.sampled.log_probs)) for u in t.turns)
    whole = changed(t, turns=turns)
    assert whole.completion_teacher_log_probs == tuple(2 * p for p in t.completion_log_probs)
    assert types.Trajectory.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    silent = changed(turns[-1], sampled=types.SampledTokens((), (), 0, 0, types.FinishReason.LENGTH), scored_mask=(), teacher_log_probs=None)
    partly = changed(t, turns=(*turns[:-1], silent))
    assert partly.completion_teacher_log_probs == tuple(2 * p for p in partly.completion_log_probs)  # nothing to score there
    lacking = changed(t, turns=(*turns[:-1], changed(turns[-1], teacher_log_probs=None)))
    assert lacking.completion_teacher_log_probs is None


def test_recordings_without_teacher_scores_still_load(batch):
  values = batch.trajectories[0].to_json()
  for turn in values['turns']:
    del turn['teacher_log_probs']
  assert types.Trajectory.from_json(values) == batch.trajectories[0]


def test_records_cannot_be_changed(batch):
  with pytest.raises(dataclasses.FrozenInstanceError):
    batch.trajectories[0].reward = 1.0


def changed(record, **values):
  return dataclasses.replace(record, **values)


def scored(batch, position, value):
  turn = batch.trajectories[0].turns[0]
  log_probs = [-1.0] * len(turn.sampled.token_ids)
  log_probs[position] = value
  return changed(turn, teacher_log_probs=tuple(log_probs))


@pytest.mark.parametrize('make, told', [
    (lambda b: changed(b.trajectories[0], reward=float('nan')), 'not finite'),
    (lambda b: changed(b.trajectories[0], prompt_ids=()), 'empty prompt'),
    (lambda b: changed(b.trajectories[0], terminal_reason=types.TerminalReason.INFRASTRUCTURE), 'never scored'),
    (lambda b: changed(b.trajectories[0], turns=b.trajectories[0].turns + b.trajectories[0].turns), 'out of order'),
    (lambda b: changed(b.trajectories[0].turns[0], scored_mask=(True,) * 99), 'mask of 99'),
    (lambda b: changed(b.trajectories[0].turns[0], teacher_log_probs=(-1.0,) * 99), r'turn 0: 99 teacher log-probs for \d+ sampled ids'),
    (lambda b: scored(b, 1, float('nan')), 'turn 0: teacher log-prob nan of sampled id 1 is not finite'),
    (lambda b: scored(b, 0, 0.5), 'turn 0: teacher log-prob 0.5 of sampled id 0 .* positive'),
    (lambda b: types.TurnScored(0, 0, 0, 3, (-1.0, float('-inf'))), 'turn 3: teacher log-prob -inf of sampled id 1'),
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
