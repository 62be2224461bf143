"""The scheduler as a state machine: random event orders, service order, caps, errors."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ts_jax import types
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.objectives.terms import Terms
from ts_jax.streaming import scheduler as s


def simulate(policy, sizes, seed, rewards=(0.0, 0.5, 1.5), lanes=1):
  """Random interleaving of content, rewards and finished work.  Returns (final state, work in order, peak statistics)."""
  rng = np.random.default_rng(seed)
  state, assigned = s.start(policy, sizes, lanes)
  running = list(assigned)
  done, peak = [], 0
  reward = {(g, i): float(rng.choice(rewards)) for g, m in enumerate(sizes) for i in range(m)}
  scored = {at: int(rng.integers(0, 4)) for at in reward}
  turns = {at: int(rng.integers(0, 4)) if policy.by_turns else 0 for at in reward}
  pending, arrived = [('turn', at) if turns[at] else ('content', at) for at in reward], {}
  while pending or running:
    if state.closed:
      break
    choices = [('event', e) for e in pending] + [('work', w) for w in running]
    kind, item = choices[rng.integers(len(choices))]
    if kind == 'event':
      pending.remove(item)
      what, at = item
      if what == 'turn':
        turns[at] -= 1
        pending.append(('turn', at) if turns[at] else ('content', at))
        arrived[at] = arrived.get(at, 0) + 1
        event = s.TurnReady(*at, steps=arrived[at], tokens=60 * arrived[at])
      elif what == 'content':
        pending += [('reward', at)] if policy.objective.needs_rewards else []
        event = s.ContentReady(*at, scored=scored[at], cost=int(rng.choice([64, 128])))
      else:
        event = s.RewardReady(*at, reward=reward[at])
    else:
      running.remove(item)
      done.append(item.work)
      event = s.WorkDone(item.lane, item.work, float(rng.random()))
    state, more = s.advance(state, event)
    running += more
    for lane in range(lanes):
      kept = sum(x.worked > 0 and x.status in (s.Status.RUNNING, s.Status.READY) for g in state.groups if g.lane == lane for x in g.sources)
      assert kept <= policy.kept_cap
      peak = max(peak, sum(lane in g.statistics for g in state.groups))
      scopes = [[g for g in state.groups if g.lane == lane]] if policy.objective.needs_batch else [[g] for g in state.groups]
      assert all(len({r for g in scope for r in g.summed}) <= policy.reward_sums for scope in scopes)
  return state, done, peak, reward, scored


OBJECTIVES = [policy_gradient.PolicyGradient(), distillation.Distillation(), policy_gradient.PolicyGradient('mean', baseline='batch'),
              policy_gradient.PolicyGradient(advantage_clip=0.9), policy_gradient.PolicyGradient('leave_one_out_std', baseline='batch'),
              policy_gradient.PolicyGradient(terms=Terms(kl=0.1))]
POLICIES = st.builds(
    lambda granularity, direct, cap, rows, objective: s.Policy(
        granularity, direct or granularity == 'elastic', cap, rows if direct and granularity not in ('turn', 'forward') else (1,),
        objective=objective, kept_cap=cap, reward_sums=cap if direct else 3),
    st.sampled_from(s.GRANULARITIES), st.booleans(), st.integers(1, 3), st.sampled_from([(1,), (2, 1), (4, 2, 1)]),
    st.sampled_from(OBJECTIVES))


@settings(max_examples=300, deadline=None)
@given(policy=POLICIES, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 10**9), lanes=st.integers(1, 3))
def test_every_order_closes_and_accounts_for_every_source(policy, sizes, seed, lanes):
  state, done, peak, reward, scored = simulate(policy, sizes, seed, lanes=lanes)
  assert state.closed and all(g.final(policy.objective) for g in state.groups)
  assert peak <= policy.admission_cap or policy.objective.needs_batch  # whose sums are the lane's
  computed = [(w.group, i) for w in done if isinstance(w, s.SourceWork) for i in w.indices]
  assert len(computed) == len(set(computed))
  population = lambda g: list(reward.values()) if policy.objective.needs_batch else [reward[g, i] for i in range(sizes[g])]
  closed = [w.group for w in done if isinstance(w, s.CloseGroup)]
  assert len(closed) == len(set(closed))
  for g, size in enumerate(sizes):
    rewards = [reward[g, i] for i in range(size)]
    coefficients = policy.objective.source_coefficients(rewards, population(g))
    for i in range(size):
      if not scored[g, i]:
        assert (g, i) not in computed
      elif coefficients[i] != 0 or policy.objective.terms.needs_counts:
        assert (g, i) in computed
  for g in set(closed):  # what other lanes summed of a group is there before it is closed
    at = next(n for n, w in enumerate(done) if w == s.CloseGroup(g, state.population(g)))
    assert all(n < at for n, w in enumerate(done) if w.group == g and n != at)
  held = [w for w in done if isinstance(w, s.SourceWork) and w.service is s.Service.CONTENT]
  folded = {(w.group, w.index) for w in done if isinstance(w, s.FoldHeld)}
  for w in held:
    assert (w.group, w.indices[0]) in folded or policy_gradient.is_uniform(population(w.group))


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), seed=st.integers(0, 10**9))
def test_sync_computes_nothing_before_the_last_reward_and_never_in_vain(sizes, seed):
  policy = s.Policy(granularity='batch')
  state, assigned = s.start(policy, sizes)
  assert not assigned
  state, done, *_ = simulate(policy, sizes, seed)
  assert state.wasted == 0 and all(w.service is s.Service.FINAL for w in done if isinstance(w, s.SourceWork))


def begin(policy, size=2, groups=2):
  """A state whose prompts have been computed, so that the lane is free."""
  state, work = s.start(policy, [size] * groups)
  while work:
    state, work = s.advance(state, s.WorkDone(0, work[0].work))
  return state


def feed(state, *events):
  issued = []
  for event in events:
    state, work = s.advance(state, event)
    issued += work
  return state, issued


def test_service_order_is_final_then_known_then_content():
  state = begin(s.Policy())
  state, issued = feed(state, s.ContentReady(0, 0, 3, 64))
  assert issued[0].work.service is s.Service.CONTENT  # nothing better: start before the verdict
  busy = issued[0].work
  state, issued = feed(state, s.ContentReady(0, 1, 3, 64), s.ContentReady(1, 0, 3, 64), s.ContentReady(1, 1, 3, 64),
                       s.RewardReady(0, 1, 1.0), s.RewardReady(1, 0, 0.0), s.RewardReady(1, 1, 1.0))
  assert not issued
  order = []
  work = busy
  while len(order) < 3:
    state, issued = feed(state, s.WorkDone(0, work))
    work = issued[0].work
    if isinstance(work, s.SourceWork):
      order.append((work.group, work.service))
  assert order == [(1, s.Service.FINAL), (1, s.Service.FINAL), (0, s.Service.KNOWN)]


def test_only_one_gradient_waits_for_its_verdict():
  state = begin(s.Policy())
  state, issued = feed(state, s.ContentReady(0, 0, 3, 64), s.ContentReady(0, 1, 3, 64))
  state, issued = feed(state, s.WorkDone(0, issued[0].work))
  assert not issued
  state, issued = feed(state, s.RewardReady(0, 0, 1.0))
  assert issued[0].work == s.FoldHeld(0, 0, 1.0)


def test_admission_cap_defers_the_next_group():
  state = begin(s.Policy(admission_cap=1))
  state, issued = feed(state, s.ContentReady(0, 0, 3, 64), s.RewardReady(0, 0, 1.0))
  state, fold_work = feed(state, s.WorkDone(0, issued[0].work))
  assert fold_work[0].work == s.FoldHeld(0, 0, 1.0)
  state, issued = feed(state, s.WorkDone(0, fold_work[0].work), s.ContentReady(1, 0, 3, 64), s.RewardReady(1, 0, 1.0))
  assert not issued
  state, issued = feed(state, s.ContentReady(0, 1, 3, 64), s.RewardReady(0, 1, 0.0))
  assert issued[0].work.group == 0


@pytest.mark.parametrize('events, message', [
    ((s.ContentReady(0, 0, 1, 64), s.ContentReady(0, 0, 1, 64)), 'fixed before'),
    ((s.RewardReady(0, 0, 1.0),), 'before its content'),
    ((s.ContentReady(0, 0, 1, 64), s.RewardReady(0, 0, 1.0), s.RewardReady(0, 0, 1.0)), 'rewarded before with 1.0'),
    ((s.ContentReady(5, 0, 1, 64),), 'never registered'),
    ((s.WorkDone(0, s.CloseGroup(0, (1.0, 0.0))),), 'not assigned'),
])
def test_impossible_events_are_errors(events, message):
  with pytest.raises(s.SchedulerError, match=message):
    feed(begin(s.Policy()), *events)


def test_nothing_may_follow_the_close():
  state = begin(s.Policy(granularity='batch'), size=1, groups=1)
  state, issued = feed(state, s.ContentReady(0, 0, 1, 64), s.RewardReady(0, 0, 1.0))  # a group of one is uniform
  assert state.closed and not issued and state.skipped == 1
  with pytest.raises(s.SchedulerError, match='after the batch was closed'):
    feed(state, s.ContentReady(0, 0, 1, 64))


def test_packs_stay_within_the_permitted_padding():
  policy = s.Policy(granularity='batch', pack_rows=(2, 1), pack_waste=1.2)
  state, _ = s.start(policy, [3])
  state, issued = feed(state, *(s.ContentReady(0, i, 1, c) for i, c in enumerate((64, 512, 64))),
                       *(s.RewardReady(0, i, r) for i, r in enumerate((0.0, 1.0, 1.0))))
  assert issued[0].work.indices == (0, 2)


@pytest.mark.parametrize('settings_', [dict(admission_cap=0), dict(direct=False, pack_rows=(2, 1)), dict(pack_rows=(2,)), dict(granularity='token')])
def test_contradictory_policies_are_refused(settings_):
  with pytest.raises(ValueError):
    s.Policy(**settings_)


def test_turns_run_forward_when_nothing_better_is_ready_the_longest_waiting_first():
  policy = s.Policy(granularity='forward', kept_cap=1)
  state, assigned = s.start(policy, [3])
  assert assigned == [s.Assignment(0, s.PromptForward(0))]
  for index, turns in ((0, 1), (1, 1), (1, 2)):
    state, more = s.advance(state, s.TurnReady(0, index, turns))
    assert not more  # the lane is busy
  state, (turn,) = s.advance(state, s.WorkDone(0, assigned[0].work))
  assert turn.work == s.TurnWork(0, 1, 2)
  state, more = s.advance(state, s.WorkDone(0, turn.work))
  assert not more  # trajectory 0 would need a second place among kept ones
  state, (source,) = s.advance(state, s.ContentReady(0, 1, scored=3, cost=64))
  assert isinstance(source.work, s.SourceWork) and source.work.indices == (1,)
  state, (turn,) = s.advance(state, s.WorkDone(0, source.work))
  assert turn.work == s.TurnWork(0, 0, 1)
  with pytest.raises(s.SchedulerError, match='fixed before'):
    s.advance(state, s.TurnReady(0, 1, 3))


@pytest.mark.parametrize('granularity', ['turn', 'forward'])
def test_granularities_by_turns_need_single_rows(granularity):
  with pytest.raises(ValueError, match=f"granularity '{granularity}' needs"):
    s.Policy(granularity=granularity, pack_rows=(2, 1))


def test_a_group_is_released_when_its_last_reward_is_known():
  state = begin(s.Policy(granularity='group'))
  state, issued = feed(state, s.ContentReady(0, 0, 3, 64), s.ContentReady(0, 1, 3, 64), s.RewardReady(0, 0, 1.0))
  assert not issued
  state, issued = feed(state, s.RewardReady(0, 1, 0.0))
  assert issued[0].work.service is s.Service.FINAL and not state.groups[0].statistics


def test_distillation_needs_no_reward():
  state = begin(s.Policy(direct=False, objective=distillation.Distillation()), groups=1)
  state, issued = feed(state, s.ContentReady(0, 0, 3, 64))
  assert issued[0].work == s.SourceWork(0, (0,), s.Service.FINAL, coefficients=(1.0,))
  state, issued = feed(state, s.WorkDone(0, issued[0].work), s.ContentReady(0, 1, 0, 64))
  assert issued[0].work == s.CloseGroup(0, (None, None))


CLIPPED = policy_gradient.PolicyGradient(advantage_clip=1.0)


def test_a_reward_without_a_sum_waits_for_its_advantage():
  state = begin(s.Policy(objective=CLIPPED, reward_sums=1), size=3, groups=1)
  state, issued = feed(state, s.ContentReady(0, 0, 3, 64), s.RewardReady(0, 0, 1.0), s.ContentReady(0, 1, 3, 64), s.RewardReady(0, 1, 0.0))
  state, folds = feed(state, s.WorkDone(0, issued[0].work))
  assert folds[0].work == s.FoldHeld(0, 0, 1.0)
  state, issued = feed(state, s.WorkDone(0, folds[0].work))
  assert not issued and state.groups[0].summed == [1.0]
  state, issued = feed(state, s.ContentReady(0, 2, 3, 64))
  assert issued[0].work.service is s.Service.CONTENT  # its reward may be one that has a sum
  state, issued = feed(state, s.WorkDone(0, issued[0].work), s.RewardReady(0, 2, 0.5))
  assert issued[0].work.coefficient == CLIPPED.source_coefficients((1.0, 0.0, 0.5))[2]
  state, issued = feed(state, s.WorkDone(0, issued[0].work))
  assert issued[0].work.service is s.Service.FINAL and issued[0].work.coefficients is not None
  state, issued = feed(state, s.WorkDone(0, issued[0].work))
  assert issued[0].work == s.CloseGroup(0, (1.0, 0.0, 0.5))


def test_a_batch_baseline_closes_groups_when_the_last_reward_of_the_batch_is_known():
  state = begin(s.Policy(admission_cap=1, objective=policy_gradient.PolicyGradient('mean', baseline='batch')), size=1, groups=3)
  known = (e for g in range(2) for e in (s.ContentReady(g, 0, 3, 64), s.RewardReady(g, 0, 1.0)))
  state, issued = feed(state, *known, s.ContentReady(2, 0, 3, 64))
  done = []
  while issued:
    done.append(issued[0].work)
    state, issued = feed(state, s.WorkDone(0, issued[0].work))
  assert [w.group for w in done if isinstance(w, s.SourceWork)] == [0, 1, 2]  # the cap is for sums of groups, and there are none
  assert not any(isinstance(w, s.CloseGroup) for w in done)
  state, issued = feed(state, s.RewardReady(2, 0, 0.0))
  while issued:
    done.append(issued[0].work)
    state, issued = feed(state, s.WorkDone(0, issued[0].work))
  assert state.closed and [w.rewards for w in done if isinstance(w, s.CloseGroup)] == [(1.0, 1.0, 0.0)] * 3


def test_terms_without_an_advantage_keep_uniform_groups():
  objective = policy_gradient.PolicyGradient(terms=Terms(entropy=0.1))
  state = begin(s.Policy('group', objective=objective), size=1, groups=1)
  state, issued = feed(state, s.ContentReady(0, 0, 3, 64), s.RewardReady(0, 0, 1.0))
  assert issued[0].work == s.SourceWork(0, (0,), s.Service.FINAL, coefficients=(0.0,)) and state.skipped == 0


def test_more_distinct_rewards_than_sums_stop_exact_statistics():
  policy = s.Policy(direct=False, objective=CLIPPED, reward_sums=1)
  with pytest.raises(types.TsJaxError, match='2 distinct rewards .0.0, 1.0., and there are sums for 1'):
    feed(begin(policy), s.ContentReady(0, 0, 3, 64), s.RewardReady(0, 0, 1.0), s.ContentReady(0, 1, 3, 64), s.RewardReady(0, 1, 0.0))


@settings(max_examples=50, deadline=None)
@given(predicted=st.lists(st.floats(0.1, 10), min_size=1, max_size=12), lanes=st.integers(1, 4))
def test_groups_are_dealt_out_evenly(predicted, lanes):
  owner = s.deal(predicted, lanes)
  load = [sum(p for p, o in zip(predicted, owner) if o == lane) for lane in range(lanes)]
  assert max(load) - min(load) <= max(predicted) + 1e-9 and s.deal(predicted, lanes) == owner
  assert lanes > 1 or owner == [0] * len(predicted)


@pytest.mark.parametrize('direct', [True, False])
def test_an_idle_lane_takes_trajectories_and_hands_over_what_it_summed_of_them(direct):
  state, assigned = s.start(s.Policy('group', direct=direct), [3, 1], lanes=2, prompt_costs=[64, 64])
  while assigned:
    state, assigned = feed(state, *(s.WorkDone(a.lane, a.work) for a in assigned))
  state, issued = feed(state, s.ContentReady(1, 0, 3, 64), s.RewardReady(1, 0, 1.0))  # a group of one: nothing to do
  state, issued = feed(state, *(s.WorkDone(a.lane, a.work) for a in issued))
  state, issued = feed(state, *(s.ContentReady(0, i, 3, 128) for i in range(3)), *(s.RewardReady(0, i, float(i % 2)) for i in range(3)))
  first, taken = issued
  assert (first.lane, first.work.indices) == (0, (0,)) and (taken.lane, taken.work.indices) == (1, (2,))  # the later of two
  state, issued = feed(state, s.WorkDone(1, taken.work))
  assert [(a.lane, a.work.indices) for a in issued] == [(1, (1,))]  # it has the group's prompt by now
  state, more = feed(state, s.WorkDone(0, first.work))
  assert not more
  state, issued = feed(state, s.WorkDone(1, issued[0].work))
  assert issued == [s.Assignment(1, s.HandOver(0))]
  state, issued = feed(state, s.WorkDone(1, s.HandOver(0)))
  assert issued == [s.Assignment(0, s.CloseGroup(0, (0.0, 1.0, 0.0)))] and not state.groups[0].helpers


def test_lanes_of_another_host_keep_their_trajectories():
  state, assigned = s.start(s.Policy('group'), [3, 1], lanes=2, hosts=[0, 1])
  while assigned:
    state, assigned = feed(state, *(s.WorkDone(a.lane, a.work) for a in assigned))
  state, issued = feed(state, *(s.ContentReady(0, i, 3, 128) for i in range(3)), *(s.RewardReady(0, i, float(i % 2)) for i in range(3)))
  assert [a.lane for a in issued] == [0]


def test_any_number_of_turns_that_do_not_pay_is_passed_over():
  size = 3000
  state, assigned = s.start(s.Policy('elastic', kept_cap=size), [size])
  for index in range(size):
    state, more = s.advance(state, s.TurnReady(0, index, 1, tokens=5))
    assert not more  # the lane is busy
  state, more = s.advance(state, s.WorkDone(0, assigned[0].work))
  assert not more  # five tokens, padded to 64, save less than they take
  state, (turn,) = s.advance(state, s.TurnReady(0, 7, 2, tokens=250))
  assert turn.work == s.TurnWork(0, 7, 2, 250)
