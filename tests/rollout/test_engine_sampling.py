"""The two-level draw has the distribution it claims."""

import jax
import numpy as np
import pytest
import scipy.stats

from ts_jax.rollout.engine import sampling


@pytest.mark.parametrize('vocab', [40, 256, 700])  # one padded block, one full one, several
@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_sampled_frequencies_match_softmax(vocab, temperature):
  count = 40_000
  logits = 1.5 * np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32)
  rows = np.repeat(logits[:, None], count, axis=1)
  draw = sampling.Draw(np.full(count, 7, np.uint32), np.zeros(count, np.uint32), np.arange(count, dtype=np.int32),
                       np.full(count, temperature, np.float32))
  tokens, log_probs = jax.jit(sampling.sample)(rows, draw)
  expected = scipy.special.log_softmax(logits.astype(np.float64) / temperature)
  np.testing.assert_allclose(log_probs, expected[tokens], atol=2e-6)
  counts, probs = np.bincount(tokens, minlength=vocab), np.exp(expected)
  common = probs * count > 8  # the chi-square approximation wants expected counts; the rest is one cell
  observed = np.append(counts[common], counts[~common].sum())
  wanted = np.append(probs[common], probs[~common].sum()) * count
  keep = wanted > 0
  assert scipy.stats.chisquare(observed[keep], wanted[keep] * observed.sum() / wanted[keep].sum()).pvalue > 1e-3


def test_noise_depends_on_seed_words_and_position_only():
  logits = np.zeros((500, 6), np.float32)
  draw = sampling.Draw(np.array([1, 1, 1, 2, 1, 1], np.uint32), np.array([0, 0, 0, 0, 1, 0], np.uint32),
                       np.array([3, 3, 4, 3, 3, 3], np.int32), np.ones(6, np.float32))
  tokens = np.asarray(sampling.sample(logits, draw)[0])
  assert tokens[0] == tokens[1] == tokens[5]
  assert len({tokens[0], tokens[2], tokens[3], tokens[4]}) == 4
