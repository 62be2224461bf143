"""Routing decisions under any order of assignments, releases and failures."""

import collections

from hypothesis import given, settings, strategies as st
import pytest

from ts_jax import types
from ts_jax.rollout import routing

KINDS = ('assign',) * 6 + ('release',) * 2 + ('down', 'up')
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 7)), max_size=120)


def run(state, events):
  """Yields (state before, event, state after, answer) of each event; what `number` means depends on the kind."""
  for kind, group, number in events:
    before, answer = state, None
    if kind == 'assign':
      state, answer = routing.assign(state, group, number)
    elif kind == 'release':
      state = routing.release(state, group, number)
    else:
      state = (routing.mark_down if kind == 'down' else routing.mark_up)(state, number % state.replicas)
    yield before, (kind, group, number), state, answer


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 6), EVENTS)
def test_every_decision_keeps_its_promises(replicas, slack, events):
  for before, (kind, group, number), after, chosen in run(routing.Routing(replicas, slack), events):
    assert sum(after.active) == len(after.homes)
    if kind != 'assign':
      continue
    up = set(range(replicas)) - before.down
    home = before.homes.get((group, number))
    if not up:
      assert chosen is None and after == before
      continue
    assert chosen in up  # never a replica that is down when another is up
    assert after.homes == {**before.homes, (group, number): chosen}  # nothing else moves
    if home in up:
      assert chosen == home  # sticky
      continue
    least = min(before.active[r] for r in up)
    assert before.active[chosen] <= least + slack  # the balance bound
    within = [r for r in up if before.active[r] <= least + slack]
    members = collections.Counter(r for (g, _), r in before.homes.items() if g == group)
    assert members[chosen] == max(members[r] for r in within)  # together where the bound allows it
    if not members[chosen]:
      assert before.active[chosen] == least


@given(st.integers(1, 5), st.integers(0, 6), st.lists(st.integers(0, 5), max_size=80))
def test_without_releases_and_failures_loads_stay_within_the_bound(replicas, slack, groups):
  state = routing.Routing(replicas, slack)
  for member, group in enumerate(groups):
    state, _ = routing.assign(state, group, member)
    assert max(state.active) - min(state.active) <= slack + 1


def test_groups_stay_together_and_replicas_share_them():
  state = routing.Routing(4, slack=4)
  for group in range(8):
    for member in range(4):
      state, _ = routing.assign(state, group, member)
  assert state.active == (8, 8, 8, 8)
  assert all(len({state.homes[g, m] for m in range(4)}) == 1 for g in range(8))


def test_a_group_larger_than_the_bound_spreads():
  state = routing.Routing(2, slack=4)
  for member in range(24):
    state, _ = routing.assign(state, 'large', member)
  assert sorted(state.active) == [10, 14]


def test_sequences_of_a_dead_replica_move_and_do_not_move_back():
  state = routing.Routing(2, slack=0)
  for member in range(2):
    state, home = routing.assign(state, 'g', member)
    assert home == member
  state, moved = routing.assign(routing.mark_down(state, 0), 'g', 0)
  assert moved == 1 and state.active == (0, 2)
  assert routing.assign(routing.mark_up(state, 0), 'g', 0)[1] == 1
  assert routing.assign(routing.mark_up(state, 0), 'g', 2)[1] == 0


@pytest.mark.parametrize('replicas, slack, told', [(0, 4, 'replicas=0'), (2, -1, 'slack=-1')])
def test_nonsensical_sizes_are_refused(replicas, slack, told):
  with pytest.raises(types.ConfigError, match=told):
    routing.Routing(replicas, slack)
