"""The replay of Equation 14: its invariants, a step-by-step second implementation, and the closed forms as its limit."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ts_jax.theory import jobs, release, replay, sampling, speedup, waves

TIMES = st.one_of(st.floats(0, 100), st.sampled_from([0.5, 1.0]))  # some jobs are ready together
JOBS = st.lists(st.tuples(TIMES, st.one_of(st.floats(0, 20), st.sampled_from([0.1, 0.2, 0.3])), st.integers(0, 3)), min_size=1, max_size=40)


def replayed(rows, **options):
  ready, service, lane = (np.array(c) for c in zip(*rows))
  return replay.replay(ready, service, lane, lanes=4, rollout_s=max(ready.max(), 1e-3), **options)


def event_by_event(rows, dispatch_s=0.0):
  """Completion of each lane: a clock that takes whichever ready job is first, and waits when none is."""
  ends = np.zeros(4)
  for k in range(4):
    waiting, clock = sorted((r, s) for r, s, lane in rows if lane == k), 0.0
    for ready, service in waiting:
      clock = (clock if ready <= clock else ready) + service + dispatch_s
    ends[k] = clock
  return ends


@settings(deadline=None)
@given(JOBS, st.floats(0, 1), st.floats(0, 5))
def test_replay_equals_an_event_by_event_simulation(rows, dispatch_s, suffix_s):
  result = replayed(rows, dispatch_s=dispatch_s, suffix_s=suffix_s)
  ends = event_by_event(rows, dispatch_s)
  np.testing.assert_allclose(result.lane_end_s, ends, rtol=1e-12, atol=1e-12)
  assert result.step_s == pytest.approx(max(result.rollout_s, ends.max()) + suffix_s, rel=1e-12)
  assert result.tail_s == pytest.approx(max(ends.max() - result.rollout_s, 0), abs=1e-9)


@settings(deadline=None)
@given(JOBS, st.randoms(use_true_random=False))
def test_order_of_the_arrays_changes_no_bit(rows, random):
  shuffled = list(rows)
  random.shuffle(shuffled)
  one, other = replayed(rows), replayed(shuffled)
  assert (one.step_s, one.tail_s, one.sync_step_s) == (other.step_s, other.tail_s, other.sync_step_s)
  assert np.array_equal(one.lane_busy_s, other.lane_busy_s) and np.array_equal(one.lane_end_s, other.lane_end_s)


@settings(deadline=None)
@given(JOBS)
def test_work_is_conserved_and_jobs_of_a_lane_never_overlap_or_start_early(rows):
  result = replayed(rows)
  ready, service, lane = (np.array(c) for c in zip(*rows))
  np.testing.assert_allclose(result.lane_busy_s, np.bincount(lane, service, minlength=4), rtol=1e-12)
  np.testing.assert_allclose(result.end_s - result.start_s, service, atol=1e-9)
  assert np.all(result.start_s >= ready - 1e-9)
  for k in range(4):
    mine = np.flatnonzero(lane == k)
    mine = mine[np.lexsort((result.start_s[mine], result.end_s[mine]))]
    idle = result.start_s[mine[1:]] - result.end_s[mine[:-1]]
    assert np.all(idle >= -1e-9)
    # A lane that idles had nothing ready: the next job starts the moment it is.
    assert np.all((idle < 1e-9) | (np.abs(result.start_s[mine[1:]] - ready[mine[1:]]) < 1e-9))


@settings(deadline=None)
@given(JOBS, st.floats(0, 5))
def test_step_lies_between_the_longer_stage_and_sync(rows, suffix_s):
  result = replayed(rows, suffix_s=suffix_s)
  longest = max(result.rollout_s, result.lane_busy_s.max())
  assert longest + suffix_s <= result.step_s * (1 + 1e-12) and result.step_s <= result.sync_step_s * (1 + 1e-12)
  assert 1 - 1e-12 <= result.speedup <= result.bound * (1 + 1e-12) <= 2 + 1e-9
  assert result.tail == result.tail_s / result.rollout_s


@settings(deadline=None)
@given(JOBS, st.integers(0, 39), st.floats(0, 1))
def test_releasing_a_job_earlier_never_ends_later(rows, index, fraction):
  ready, service, lane = rows[index % len(rows)]
  earlier = list(rows)
  earlier[index % len(rows)] = (ready * fraction, service, lane)
  assert np.all(replayed(earlier).lane_end_s <= replayed(rows).lane_end_s + 1e-9)


@settings(deadline=None)
@given(JOBS.map(lambda rows: [(r, s, 0) for r, s, _ in rows]))
def test_tail_of_a_trace_is_the_supremum_over_its_release_fraction(rows):
  """Equations 18 and 19: one plus the tail, from the service released strictly before each u."""
  result = replayed(rows)
  ready, service = (np.array(c) for c in list(zip(*rows))[:2])
  u = ready / result.rollout_s
  outstanding = np.array([service[ready >= r].sum() for r in ready]) / result.rollout_s
  assert 1 + result.tail == pytest.approx(max(1.0, float(np.max(u + outstanding))), rel=1e-9)


def test_known_schedule():
  result = replay.replay([0.0, 1.0, 10.0, 4.0], [2.0, 3.0, 1.0, 1.0], [0, 0, 0, 1], suffix_s=0.5)
  assert result.end_s.tolist() == [2, 5, 11, 5] and result.start_s.tolist() == [0, 2, 10, 4]
  assert (result.step_s, result.tail_s, result.sync_step_s, result.tail) == (11.5, 1, 16.5, 0.1)
  assert result.lane_busy_s.tolist() == [6, 1] and result.lane_end_s.tolist() == [11, 5]
  assert result.bound == 16.5 / 10.5


def test_sync_may_do_cheaper_work_than_the_replayed_jobs():
  result = replay.replay([1.0, 2.0], [2.0, 2.0], rollout_s=4.0, sync_service_s=2.0)
  assert result.sync_step_s == 6 and result.step_s == 5 and result.bound == 1.5


def law(granularity, turns=10):
  return release.ReleaseLaw(granularity, turns, group_size=8, service_exponent=0.49)


GRANULARITIES = {'grpo': release.grpo(0.02), 'group': release.group(), 'opd': release.opd(0.45), 'forward': release.forward(0.35, 0.02, 1.1)}


@pytest.mark.parametrize('name', GRANULARITIES)
@pytest.mark.parametrize('ratio', [0.6, 1.0, 1.5])
def test_closed_form_is_the_limit_of_a_large_drawn_batch(name, ratio):
  release_law = law(GRANULARITIES[name])
  batch = 80_000
  workload = sampling.sample(np.random.default_rng(3), release_law, batch, batch, ratio)
  trace = replay.replay(*jobs.release(GRANULARITIES[name], workload), rollout_s=1.0)
  # Five standard deviations of a mean over groups.
  assert trace.tail == pytest.approx(float(speedup.tail(release_law, 1 / ratio)), abs=5 * np.sqrt(8 / batch) / ratio)


@pytest.mark.parametrize('name', GRANULARITIES)
@pytest.mark.parametrize('ratio', [0.5, 1.0, 2.0])
def test_waves_of_drawn_batches_follow_equation_26(name, ratio):
  release_law, capacity, suffix = law(GRANULARITIES[name]), 8000, 0.05
  workload = sampling.sample(np.random.default_rng(5), release_law, 4 * capacity, capacity, ratio)
  trace = replay.replay(*jobs.release(GRANULARITIES[name], workload), suffix_s=suffix, sync_service_s=workload.lane_service_s(1))
  predicted = waves.speedup(release_law, waves.of_batch(4 * capacity, capacity, ratio, suffix))
  assert trace.speedup == pytest.approx(float(predicted), rel=0.015)


def test_midpoint_quantiles_stay_within_equation_27():
  n, rho = 50, 1.2
  release_law = release.ReleaseLaw(release.grpo(0.0), service_exponent=0.49)
  ready = ((np.arange(n) + 0.5) / n)**(1 / 1.49)
  trace = replay.replay(ready, np.full(n, rho / n), rollout_s=1.0)
  error = abs(trace.tail - float(speedup.tail(release_law, rho)))
  assert error <= speedup.tail_change_bound(1 / (2 * n), rho)


def test_small_drawn_batches_take_longer_than_their_mean_release_in_the_mean():
  """The endpoint is convex in the release distribution."""
  release_law = law(release.grpo(0.02))
  tails = []
  for seed in range(200):
    workload = sampling.sample(np.random.default_rng(seed), release_law, 64, 64, 1.0)
    share = jobs.release(release.grpo(0.02), workload)
    tails.append(replay.replay(share.ready_s, share.service_s / share.service_s.sum(), rollout_s=1.0).tail)
  assert np.mean(tails) > float(speedup.tail(release_law, 1.0)) + 0.01


def refilled(durations, slots):
  """Start times when a slot takes the next trajectory the moment it is free."""
  free, start = np.zeros(slots), np.zeros(len(durations))
  for i, d in enumerate(durations):
    k = int(free.argmin())
    start[i], free[k] = free[k], free[k] + d
  return start


def test_forward_beats_the_other_granularities_at_near_equal_durations():
  """Rollout = service of one full pass, 20 turns, 256 trajectories on 128 slots, durations 5 % apart, suffix 3 %."""
  turns, batch, speedups = 20, 256, {}
  granularities = {'trajectory': release.grpo(0.0), 'group': release.group(), 'forward': release.forward(0.35), 'turn': release.opd(3 / 7, 7 / 4)}
  for seed in range(8):
    duration = np.maximum(np.random.default_rng(seed).normal(1, 0.05, batch), 0.5)
    start = refilled(duration, 128)
    rollout = float((start + duration).max())
    service = duration * rollout / duration.sum()
    fraction = np.arange(1, turns + 1) / turns
    drawn = jobs.Workload((start[:, None] + duration[:, None] * fraction).ravel(), np.repeat(service / turns, turns),
                          np.repeat(np.arange(batch), turns), start + duration, np.arange(batch) // 8, np.zeros(batch, int))
    for name, g in granularities.items():
      trace = replay.replay(*jobs.release(g, drawn), suffix_s=0.03 * rollout, sync_service_s=drawn.lane_service_s(1))
      speedups.setdefault(name, []).append(trace.speedup)
  mean = {name: float(np.mean(v)) for name, v in speedups.items()}
  assert mean == pytest.approx({'trajectory': 1.41, 'forward': 1.58, 'turn': 1.13, 'group': mean['group']}, abs=0.02)
  assert mean['group'] < mean['trajectory']


def workload():
  return jobs.Workload([1.0, 2.0, 4.0], [0.5, 0.5, 2.0], [0, 0, 1], [3.0, 4.0], [0, 0], [0, 1])


def test_jobs_at_each_granularity():
  by_ready = lambda g: sorted(zip(*(c.tolist() for c in jobs.release(g, workload()))))
  assert by_ready(release.grpo(0.0)) == [(3, 1, 0), (4, 2, 1)]
  assert by_ready(release.group()) == [(4, 1, 0), (4, 2, 1)]
  assert by_ready(release.opd(0.5, work=2.0)) == [(1, 0.5, 0), (2, 0.5, 0), (3, 1, 0), (4, 2, 1), (4, 2, 1)]
  assert by_ready(release.forward(0.25, 0.25)) == [(1, 0.125, 0), (2, 0.125, 0), (3, 0.5, 0), (4, 0.25, 0),
                                                     (4, 0.5, 1), (4, 0.5, 1), (4, 1, 1)]
  assert workload().lane_service_s(2).tolist() == [1, 2]


@settings(deadline=None, max_examples=40)
@given(st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0.5, 2))
def test_a_granularity_moves_work_but_loses_none(turn, closure, work):
  drawn = sampling.sample(np.random.default_rng(1), law(release.forward(0.5)), 20, 10, 1.0)
  assert jobs.release(release.forward(turn, closure, work), drawn).service_s.sum() == pytest.approx(work * drawn.service_s.sum())


@pytest.mark.parametrize('call, told', [
    (lambda: replay.replay([], []), 'at least one job'),
    (lambda: replay.replay([1.0], [1.0, 2.0]), '1 ready times, 2 services'),
    (lambda: replay.replay([1.0, np.nan], [1.0, 2.0]), 'ready_s has nan'),
    (lambda: replay.replay([1.0], [-1.0]), 'service_s has -1.0'),
    (lambda: replay.replay([5.0], [1.0], rollout_s=4.0), 'rollout_s=4.0'),
    (lambda: replay.replay([5.0], [1.0], [2], lanes=2), 'lanes=2'),
    (lambda: replay.replay([5.0], [1.0], [0.5]), 'integers'),
    (lambda: replay.replay([0.0], [1.0]), 'greater than 0'),
    (lambda: replay.replay([1.0], [1.0], suffix_s=-0.1), 'suffix_s has -0.1'),
    (lambda: replay.replay([1.0], [1.0], sync_service_s=[1.0, 2.0]), '2 entries for 1 lanes'),
    (lambda: jobs.Workload([1.0], [1.0], [0], [0.5], [0], [0]), 'after its trajectory 0 completed at 0.5'),
    (lambda: jobs.Workload([1.0], [1.0], [1], [2.0], [0], [0]), 'do not fit 1 trajectories'),
    (lambda: jobs.Workload([1.0], [np.inf], [0], [2.0], [0], [0]), 'turn_service_s has inf'),
    (lambda: jobs.Workload([1.0], [1.0], [0], [2.0], [-1], [0]), 'group has -1'),
    (lambda: jobs.Workload([1.0], [1.0, 1.0], [0], [2.0], [0], [0]), 'one entry a turn'),
    (lambda: sampling.sample(np.random.default_rng(0), law(release.group()), 0, 1, 1.0), 'batch=0'),
])
def test_bad_values_are_named(call, told):
  with pytest.raises(ValueError, match=told):
    call()
