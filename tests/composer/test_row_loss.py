"""The row loss against the formula and automatic differentiation; the identities of Appendix E.1 on composed batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.composer import cases
from ts_jax.composer import methods, row_loss
from ts_jax.composer import pool as pool_lib

WIDTH = 7  # length of the vectors that stand for grad log pi


def random_rows(seed: int, rollouts: int = 6, dead: bool = True):
  """Rollouts of 1 to 8 turns of 1 to 6 tokens with random scores; some rows dead."""
  rng, rows = np.random.default_rng(seed), []
  for rollout in range(rollouts):
    for turn in range(int(rng.integers(1, 9))):
      size = int(rng.integers(1, 7))
      logs = lambda: tuple(rng.normal(-2, 1, size).tolist())
      mask = tuple(bool(b) for b in rng.random(size) < (0.6 if dead else 2))
      rows.append(cases.make_row(rollout, turn, token_ids=(1,) * size, student_log_probs=logs(), teacher_log_probs=logs(), scored_mask=mask,
                                 teacher_valid_mask=tuple(bool(b) for b in rng.random(size) < 0.7) if dead and turn % 2 else None))
  return rows


def valid_of(row):
  return [m and (row.teacher_valid_mask is None or row.teacher_valid_mask[i]) for i, m in enumerate(row.scored_mask)]


@pytest.mark.parametrize('seed', range(5))
def test_value_and_weights_are_equation_3_with_dead_rows_counted(seed):
  rows, beta = random_rows(seed), 0.7
  learner = [np.random.default_rng(9).normal(-2, 1, len(r.token_ids)) for r in rows]
  value, total = 0.0, 0
  for row, own, weights in zip(rows, learner, row_loss.token_weights(rows)):
    valid = [i for i, v in enumerate(valid_of(row)) if v]
    total += bool(valid)
    for i in range(len(own)):
      assert weights[i] == pytest.approx(1 / (len(rows) * len(valid)) if i in valid else 0.0, rel=1e-15)
    if valid:
      value -= sum(beta * (row.teacher_log_probs[i] - own[i]) for i in valid) / len(valid) / len(rows)
  assert 0 < total < len(rows)
  assert row_loss.loss_value(rows, learner, beta) == pytest.approx(value, rel=1e-12)


def test_the_direction_is_the_gradient_of_the_clipped_surrogate():
  rows, beta = random_rows(3, rollouts=2), 0.7
  rng = np.random.default_rng(4)
  features = [rng.normal(size=(len(r.token_ids), WIDTH)) for r in rows]
  table, theta = rng.normal(size=(WIDTH, 5)), rng.normal(size=WIDTH)
  with jax.enable_x64(True):
    log_probs = lambda p, x, r: jax.nn.log_softmax((x * p) @ table)[jnp.arange(len(x)), jnp.array(r.token_ids) % 5]

    def loss(p):
      rows_of_loss = []
      for x, row in zip(features, rows):
        now, valid = log_probs(p, x, row), jnp.array(valid_of(row))
        old = jax.lax.stop_gradient(now)
        advantage = beta * (jnp.array(row.teacher_log_probs) - old)
        ratio = jnp.exp(now - old)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        rows_of_loss.append(-(surrogate * valid).sum() / valid.sum() if valid.any() else 0.0)
      return sum(rows_of_loss) / len(rows)

    expected = np.asarray(jax.grad(loss)(theta))
    learner = [np.asarray(log_probs(theta, x, r)) for x, r in zip(features, rows)]
    coefficients = row_loss.score_coefficients(rows, learner, beta)
    direction = sum(np.asarray(jax.jacobian(log_probs)(theta, x, r)).T @ c for x, r, c in zip(features, rows, coefficients))
  np.testing.assert_allclose(-direction, expected, rtol=1e-11, atol=1e-14)


def test_equal_scores_are_exactly_zero_and_masked_values_change_nothing():
  rows = random_rows(1)
  same = row_loss.score_coefficients(rows, [np.where(valid_of(r), r.teacher_log_probs, 3.0) for r in rows])
  assert not any(c.any() for c in same)
  spoil = lambda r, values: tuple(x if v else cases.NAN for x, v in zip(values, valid_of(r)))
  spoiled = [dataclasses.replace(r, student_log_probs=spoil(r, r.student_log_probs), teacher_log_probs=spoil(r, r.teacher_log_probs))
             for r in rows]
  learner = [r.student_log_probs for r in rows]
  for a, b in zip(row_loss.score_coefficients(rows, learner), row_loss.score_coefficients(spoiled, [r.student_log_probs for r in spoiled])):
    assert a.tolist() == b.tolist()
  assert pool_lib.Candidates.of(rows).score.tolist() == pool_lib.Candidates.of(spoiled).score.tolist()


def test_bad_log_probs_are_named():
  row = cases.make_row(2, 5)
  with pytest.raises(ValueError, match=r'turn \(2, 5\): 1 learner log-probs for 3 ids'):
    row_loss.advantages(row, [-1.0])
  with pytest.raises(ValueError, match=r'turn \(2, 5\): a learner log-prob of a valid token is not finite'):
    row_loss.advantages(row, [-1.0, cases.NAN, -1.0])
  with pytest.raises(ValueError, match='2 row weights for 1 rows'):
    row_loss.token_weights([row], [1.0, 1.0])


class Gradients:
  """g_t of every row, and batch gradients as the row loss weighs them, with random vectors for grad log pi."""

  def __init__(self, rows, seed: int = 0):
    rng = np.random.default_rng(seed)
    self.vectors = {r.key: rng.normal(size=(len(r.token_ids), WIDTH)) for r in rows}
    self.own = {r.key: self.batch([r]) for r in rows}

  def batch(self, rows) -> np.ndarray:
    coefficients = row_loss.score_coefficients(rows, [r.student_log_probs for r in rows])
    return -sum(c @ self.vectors[r.key] for r, c in zip(rows, coefficients))


@pytest.mark.parametrize('name, dead', [('divopd_base', False), ('uncapped', False), ('vanilla_matched', True), ('divopd_focus', True)])
def test_lemma_1_the_shift_is_a_covariance_of_inclusion_and_gradient(name, dead):
  """Expectations over 40 seeds taken as equally likely, for which the identity is exact."""
  rows = random_rows(7, dead=dead)
  gradients, size = Gradients(rows), 10
  pool = pool_lib.arrive(pool_lib.empty(), rows)
  inclusion, mean = dict.fromkeys(gradients.own, 0.0), np.zeros(WIDTH)
  for seed in range(40):
    batch = methods.compose(pool, 0, methods.METHODS[name], methods.Settings(batch_size=size, cap=2, multiplier=9, seed=seed))[0].batch
    mean += gradients.batch(list(batch.rows)) / 40
    for key in batch.keys:
      inclusion[key] += 1 / 40
  pi, own = np.array([inclusion[r.key] for r in rows]), np.array([gradients.own[r.key] for r in rows])
  assert pi.sum() == pytest.approx(size)
  covariance = (pi[:, None] * own).mean(0) - pi.mean() * own.mean(0)
  np.testing.assert_allclose(mean - gradients.batch(rows), len(rows) / size * covariance, rtol=0, atol=1e-13)
  assert np.abs(covariance).max() > 1e-3


@pytest.mark.parametrize('seed', range(4))
def test_corollary_2_focus_reweights_kept_against_dropped_turns(seed):
  rows = random_rows(seed, rollouts=8, dead=False)
  gradients = Gradients(rows, seed)
  numbers = methods.Settings(batch_size=12, cap=2, multiplier=9)
  batch = methods.compose(pool_lib.arrive(pool_lib.empty(), rows), 0, methods.METHODS['divopd'], numbers)[0].batch
  kept = set(batch.keys)
  base, shift = np.zeros(WIDTH), np.zeros(WIDTH)
  for rollout in sorted(set(batch.rollout.tolist())):
    turns = [r for r in rows if r.rollout == rollout]
    top = [gradients.own[r.key] for r in turns if r.key in kept]
    rest = [gradients.own[r.key] for r in turns if r.key not in kept]
    base += len(top) / 12 * np.mean(top + rest, axis=0)
    if rest:
      shift += len(top) * len(rest) / len(turns) * (np.mean(top, axis=0) - np.mean(rest, axis=0)) / 12
      score = lambda r: sum(s - t for s, t in zip(r.student_log_probs, r.teacher_log_probs))
      assert min(score(r) for r in turns if r.key in kept) >= max(score(r) for r in turns if r.key not in kept)
  np.testing.assert_allclose(gradients.batch(list(batch.rows)) - base, shift, rtol=0, atol=1e-13)
  assert np.abs(shift).max() > 1e-3


def test_the_expectation_of_base_is_equation_7():
  rows = random_rows(2, rollouts=4, dead=False)
  pool, draws = pool_lib.arrive(pool_lib.empty(), rows), 1500
  hits, slots = dict.fromkeys((r.key for r in rows), 0), None
  for seed in range(draws):
    batch = methods.compose(pool, 0, methods.METHODS['divopd_base'], methods.Settings(batch_size=8, cap=2, seed=seed))[0].batch
    slots = np.bincount(batch.rollout, minlength=4)
    for key in batch.keys:
      hits[key] += 1
  for row in rows:
    expected = slots[row.rollout] / sum(r.rollout == row.rollout for r in rows)
    assert hits[row.key] / draws == pytest.approx(expected, abs=5 * (0.25 / draws)**0.5)


def test_proposition_1_gating_undoes_the_dilution_by_dead_rows():
  rows = random_rows(5)
  live = [r for r in rows if any(valid_of(r))]
  gradients = Gradients(rows)
  assert len(live) < len(rows)
  np.testing.assert_allclose(gradients.batch(live), len(rows) / len(live) * gradients.batch(rows), rtol=1e-12)
