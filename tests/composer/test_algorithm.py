"""Algorithm 1 against the brute-force implementation, and what it guarantees."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.composer import brute_force, cases
from ts_jax import types
from ts_jax.composer import gate, methods
from ts_jax.composer import pool as pool_lib

DETERMINED = [n for n in methods.METHODS if n not in ('divopd_base', 'uncapped')]  # the others sample: compared by allocation


def run(stream, name, numbers):
  pool = pool_lib.empty()
  for update, rows, *_ in stream:
    pool = pool_lib.arrive(pool, rows)
    composition, pool = methods.compose(pool, update, methods.METHODS[name], numbers)
    yield composition, pool


@pytest.mark.parametrize('name', DETERMINED)
@settings(max_examples=60, deadline=None)
@given(stream=cases.streams(), numbers=cases.settings_of())
def test_every_batch_and_every_remainder_equals_brute_force(name, stream, numbers):
  expected = brute_force.run(stream, numbers, name)
  for (composition, pool), (batch, pending, queue, dropped) in zip(run(stream, name, numbers), expected, strict=True):
    assert composition.batch.keys == batch
    assert pool.pending.keys == pending and pool.queue.keys == queue
    counted = dict(pool.dropped)
    assert counted.pop('stale', 0) == dropped['stale'] and counted.pop('expired', 0) == dropped['expired']
    assert sum(counted.values()) == dropped['invalid'] and set(counted) <= {r.name.lower() for r in gate.Reason}


@pytest.mark.parametrize('name', sorted(methods.METHODS))
@settings(max_examples=25, deadline=None)
@given(stream=cases.streams(), numbers=cases.settings_of())
def test_rows_are_conserved_and_never_trained_twice(name, stream, numbers):
  arrived, trained = [], []
  for (composition, pool), (_, rows, *_) in zip(run(stream, name, numbers), stream):
    arrived += [r.key for r in rows]
    trained += composition.batch.keys
    assert pool.balance == 0 and pool.arrived == len(arrived) and pool.selected == len(trained)
    present = trained + pool.pending.keys + pool.queue.keys
    assert len(set(present)) == len(present) and set(present) <= set(arrived)
    assert len(present) + sum(pool.dropped.values()) == len(arrived)


@pytest.mark.parametrize('name', ['divopd', 'divopd_base'])
@settings(max_examples=80, deadline=None)
@given(stream=cases.streams(), numbers=cases.settings_of())
def test_coverage_is_guaranteed_and_a_batch_is_full_when_the_pool_allows(name, stream, numbers):
  for composition, pool in run(stream, name, numbers):
    left = composition.batch.keys + pool.pending.keys
    valid = len(left) + composition.dropped.get('expired', 0)
    assert composition.candidates <= numbers.batch_size * numbers.multiplier
    assert len(composition.batch) == min(numbers.batch_size, valid)
    groups = {r for r, _ in left}  # expired rows may hide a group: a lower bound
    assert len(set(composition.batch.rollout)) >= min(math.ceil(len(composition.batch) / numbers.cap), len(groups))


@settings(max_examples=60, deadline=None)
@given(stream=cases.streams(), numbers=cases.settings_of())
def test_base_and_divopd_give_every_rollout_the_same_slots_from_one_pool(stream, numbers):
  for (_, rows, _), update in zip(stream, range(9)):
    pool = pool_lib.arrive(pool_lib.empty(), [dataclasses.replace(r, version=update) for r in rows])
    focused, _ = methods.compose(pool, update, methods.METHODS['divopd'], numbers)
    sampled, _ = methods.compose(pool, update, methods.METHODS['divopd_base'], numbers)
    assert focused.batch.rollout.tolist() == sampled.batch.rollout.tolist()


@pytest.mark.parametrize('name', sorted(methods.METHODS))
@settings(max_examples=25, deadline=None)
@given(stream=cases.streams(defects=False), numbers=cases.settings_of(), seed=st.integers(0, 99))
def test_selection_does_not_depend_on_the_order_of_the_arrays(name, stream, numbers, seed):
  pool = pool_lib.arrive(pool_lib.empty(), [r for _, rows, _ in stream for r in rows])
  mixed = pool.queue.take(np.random.default_rng(seed).permutation(len(pool.queue)))
  straight = methods.select(pool.queue, 3, methods.METHODS[name], numbers)
  assert pool.queue.take(straight).keys == mixed.take(methods.select(mixed, 3, methods.METHODS[name], numbers)).keys


@pytest.mark.parametrize('name', ['divopd', 'divopd_base', 'divopd_focus'])
def test_a_pool_saved_and_loaded_composes_the_same(name):
  numbers = methods.Settings(batch_size=16)
  straight = [c.batch.keys for c, _ in run(cases.fixed_stream(8), name, numbers)]
  pool, resumed = pool_lib.empty(), []
  for update, rows in cases.fixed_stream(8):
    pool = pool_lib.Pool.from_json(json.loads(json.dumps(pool_lib.arrive(pool, rows).to_json())))
    composition, pool = methods.compose(pool, update, methods.METHODS[name], numbers)
    resumed.append(composition.batch.keys)
  assert resumed == straight


def test_uniform_sampling_is_uniform_seeded_and_renewed_every_update():
  pool = pool_lib.arrive(pool_lib.empty(), [cases.make_row(0, t, quarters=t) for t in range(10)])
  base = methods.METHODS['divopd_base']
  numbers = lambda seed: methods.Settings(batch_size=4, seed=seed, max_staleness=99)
  draw = lambda seed, update: tuple(methods.compose(pool, update, base, numbers(seed))[0].batch.turn)
  hits = np.bincount(np.concatenate([draw(seed, 0) for seed in range(600)]), minlength=10)
  assert abs(hits - 240).max() < 5 * math.sqrt(600 * 0.4 * 0.6)
  assert draw(1, 1) == draw(1, 1) and len({draw(1, u) for u in range(20)}) > 15 and len({draw(s, 1) for s in range(20)}) > 15
  pairs = {frozenset(draw(seed, 0)[:2]) for seed in range(600)}
  assert len(pairs) == 45  # every pair occurs: choices of two turns are not tied to each other


def test_no_cap_takes_the_oldest_rollout_whole_and_the_cap_spreads():
  rows = [cases.make_row(r, t) for r in (7, 2, 5) for t in range(6)]
  pool = pool_lib.arrive(pool_lib.empty(), rows)
  numbers = methods.Settings(batch_size=8, cap=2, multiplier=4)
  spread, _ = methods.compose(pool, 0, methods.METHODS['divopd_base'], numbers)
  whole, _ = methods.compose(pool, 0, methods.METHODS['uncapped'], numbers)
  assert np.unique(spread.batch.rollout, return_counts=True)[1].tolist() == [3, 3, 2]
  assert whole.batch.rollout.tolist() == [2] * 6 + [5] * 2


def test_the_older_composer_weighs_every_rollout_of_a_batch_alike():
  rows = [cases.make_row(r, t) for r, n in ((0, 5), (1, 2), (2, 1)) for t in range(n)]
  pool, numbers = pool_lib.arrive(pool_lib.empty(), rows), methods.Settings(8)
  composition, _ = methods.compose(pool, 0, methods.METHODS['divopd_focus'], numbers)
  totals = [composition.row_weights[composition.batch.rollout == r].sum() for r in range(3)]
  np.testing.assert_allclose(totals, 8 / 3)
  assert methods.compose(pool, 0, methods.METHODS['divopd'], numbers)[0].row_weights.tolist() == [1] * 8


def test_bad_input_is_named():
  pool = pool_lib.arrive(pool_lib.empty(), [cases.make_row(3, 1, version=5)])
  divopd, numbers = methods.METHODS['divopd'], methods.Settings(4)
  with pytest.raises(types.PolicyVersionError, match=r'turn \(3, 1\) was generated by version 5, after update 4'):
    methods.compose(pool, 4, divopd, numbers)
  with pytest.raises(ValueError, match=r'turn \(3, 1\) arrived twice'):
    methods.compose(pool_lib.arrive(pool, [cases.make_row(3, 1)]), 5, divopd, dataclasses.replace(numbers, max_staleness=9))
  _, later = methods.compose(pool_lib.arrive(pool_lib.empty(), [cases.make_row(0, t) for t in range(9)]), 6, divopd,
                             dataclasses.replace(numbers, max_staleness=9))
  with pytest.raises(ValueError, match='updates may not run backwards'):
    methods.compose(later, 5, divopd, dataclasses.replace(numbers, max_staleness=9))
  with pytest.raises(ValueError, match="composer 'divop' is unknown"):
    methods.method('divop')
  with pytest.raises(ValueError, match='cap 0 must be at least 1'):
    methods.Settings(cap=0)
  with pytest.raises(ValueError, match='rollout -1 of a row'):
    cases.make_row(-1, 0)
  with pytest.raises(types.ConfigError, match='lost 1 of 2 rows'):
    pool_lib.Pool.from_json({**pool.to_json(), 'arrived': 2})
  with pytest.raises(types.ConfigError, match='malformed'):
    pool_lib.Pool.from_json({'pending': {}})
