"""Every cell of the notebook runs, and shows what the notebook says."""

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def names():
  notebook = json.loads((ROOT / 'notebooks' / 'equivalence.ipynb').read_text())
  namespace = {}
  for cell in notebook['cells']:
    if cell['cell_type'] == 'code':
      exec(compile(''.join(cell['source']), cell['id'], 'exec'), namespace)  # as Jupyter would, in one namespace
  return namespace


def test_streamed_directions_equal_whole_sequences(names):
  assert len(names['errors']) == 9 and max(names['errors'].values()) <= 1e-10
  assert set(names['objective_errors']) == {'grpo', 'dr_grpo', 'rloo', 'reinforce'} and max(names['objective_errors'].values()) <= 1e-10


def test_exact_sums_have_one_result(names):
  assert len(names['seen']) == 1
