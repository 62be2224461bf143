"""The two difference measures of Equation 29."""

import pytest

from ts_jax.theory import discrepancy


def test_measures_are_relative_to_the_prediction_they_test():
  assert discrepancy.model_difference([2.0, 1.6], [1.9, 1.68]).tolist() == pytest.approx([5, 5])
  assert discrepancy.runtime_difference([2.0, 1.6], [1.9, 1.68]).tolist() == pytest.approx([5, -5])


def test_a_summary_does_not_let_signs_cancel_unseen():
  assert discrepancy.summarize([4.0, -6.0]) == discrepancy.Summary(mean=-1, mean_absolute=5, largest_absolute=6)


@pytest.mark.parametrize('call, told', [
    (lambda: discrepancy.summarize([]), 'no cells'),
    (lambda: discrepancy.model_difference([1.0, 2.0], [1.0]), 'cell by cell'),
    (lambda: discrepancy.runtime_difference([1.0], [float('nan')]), 'measured has a speedup of nan'),
    (lambda: discrepancy.model_difference([0.0], [1.0]), 'analytical has a speedup of 0'),
])
def test_bad_values_are_named(call, told):
  with pytest.raises(ValueError, match=told):
    call()
