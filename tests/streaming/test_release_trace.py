"""Every learner span of an update says what it was for, at which version, and when its inputs were fixed."""

import dataclasses

import numpy as np
import pytest

from experiments import offline
from tests.streaming import cases
from ts_jax import types
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.streaming import release_trace, scheduler
from ts_jax.telemetry import trace

OBJECTIVES = {'grpo': policy_gradient.PolicyGradient(), 'opd': distillation.Distillation()}


def timed(batch):
  """The batch with a time of its own for every moment: turn, content, reward."""
  made = []
  for g in batch.groups:
    members = []
    for t in g.trajectories:
      begin = 100.0 * (1 + t.group * len(g.trajectories) + t.index)
      turns = tuple(dataclasses.replace(turn, request_end_s=begin + 10 * turn.index) for turn in t.turns)
      members.append(dataclasses.replace(t, turns=turns, start_s=begin - 1, content_s=begin + 50, reward_s=begin + 60))
    made.append(dataclasses.replace(g, trajectories=tuple(members)))
  return dataclasses.replace(batch, groups=tuple(made))


@pytest.mark.parametrize('name, granularity', [('grpo', 'trajectory'), ('opd', 'turn')])
def test_spans_name_task_version_members_scored_tokens_and_readiness(name, granularity):
  batch = timed(offline.random_batch(np.random.default_rng(3), groups=2, teacher=name == 'opd', shared=7))
  policy = scheduler.Policy(granularity, pack_rows=(2, 1) if granularity == 'trajectory' else (1,), objective=OBJECTIVES[name], kept_cap=2)
  student = dataclasses.replace(cases.TINY, layers=1)
  _, result = cases.direction(batch, cases.tiny_params('float32', config=student), policy, config=student, share=name == 'grpo')
  spans = result.spans
  of = {t.key[1:]: t for t in batch.trajectories}
  assert {s.version for s in spans} == {batch.policy_version}
  assert all(s.task == (f'task{s.group}' if s.group >= 0 else '') for s in spans)
  sources = [s for s in spans if s.kind == 'source']
  computed = [(s.group, i) for s in sources for i in s.members]
  assert sources and len(computed) == len(set(computed))
  for s in sources:
    mine = [of[s.group, i] for i in s.members]
    assert s.scored == sum(t.scored_tokens for t in mine) and s.ready_s == max(t.content_s for t in mine)
    assert s.work in ('final', 'known', 'content') and (s.index in s.members or len(s.members) > 1)
  folds = [s for s in spans if s.kind == 'fold' and s.work == '']
  assert [s.members for s in folds] == [s.members for s in sources]
  assert all(s.ready_s == of[s.group, s.index].reward_s for s in spans if s.kind == 'fold' and s.work == 'held')
  last = lambda group: max(t.reward_s if name == 'grpo' else t.content_s for t in batch.trajectories if group in (t.group, -1))
  closing = [s for s in spans if s.kind == 'reduce' or (s.kind == 'prompt' and s.work == 'backward')]
  assert closing and all(s.ready_s == last(s.group) for s in closing)
  assert {s.work for s in spans if s.kind == 'prompt'} == {'forward', 'backward'}
  for s in spans:
    if s.kind in ('turn', 'forward'):
      assert s.kind == granularity and s.ready_s == of[s.group, s.index].turns[s.turn].request_end_s  # scores without a span of their own
  if granularity in ('turn', 'forward'):  # no turn counts twice
    early = {at: sum(s.scored for s in spans if s.kind == granularity and (s.group, s.index) == at) for at in computed}
    assert all(n <= of[at].scored_tokens for at, n in early.items()) and any(early.values())
  records = trace.sources(spans)
  assert [r.members for r in records if r.kind == 'source'] == [s.members for s in sorted(sources, key=lambda s: s.start_s)]
  ends = {g: max(s.end_s for s in closing if s.group == g) for g in {s.group for s in closing}}
  assert all(r.deferred_s >= max(r.end_s, ends.get(r.group, 0), ends.get(-1, 0)) for r in records)


def test_readiness_of_a_scored_turn_is_the_end_of_its_score():
  plan = types.GroupPlan(0, 'copy', (1, 2), 1)
  known = release_trace.ReleaseTrace(0, 4, [plan], OBJECTIVES['opd'], 1.0)
  sampled = types.SampledTokens((5, 6), (-1.0, -1.0), 4, 4, types.FinishReason.STOP)
  known.take(types.TurnFixed(0, 0, 0, types.Turn(0, (), sampled, (True, False), request_end_s=2.0)))
  turn = types.Span('turn', 9.0, 10.0, 0, 0, 0, turn=0, lane=0)
  known.take(types.Span('teacher', 2.0, 3.5, 0, 0, 0, 0))
  known.take(types.Span('teacher', 2.0, 8.5, 1, 0, 0, 0))  # of the next update's
  known.take(types.TurnScored(0, 0, 0, 0, (-1.0, -2.0)))
  assert known.describe(turn) == dataclasses.replace(turn, task='copy', version=4, ready_s=3.5, scored=1)
  assert known.describe(types.Span('prompt', 1.0, 2.0, 0, 0, lane=0, work='forward')).ready_s == 1.0
