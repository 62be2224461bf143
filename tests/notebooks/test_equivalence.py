"""The notebook runs from top to bottom in a kernel of its own, and shows what it says."""

import json
import pathlib

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / 'notebooks'
_SHOW = '''
import json
print(json.dumps({'late_scalars': max(late_scalar_errors.values()), 'prefix': prefix_error, 'turns': turn_errors,
                  'granularities': [[*k, v] for k, v in errors.items()], 'estimators': objective_errors, 'distinct': len(seen), 'spread': max(spread)}))
'''


@pytest.fixture(scope='module')
def notebook():
  read = nbformat.read(FOLDER / 'equivalence.ipynb', as_version=4)
  read.cells.append(nbformat.v4.new_code_cell(_SHOW))
  nbclient.NotebookClient(read, timeout=300, resources={'metadata': {'path': str(FOLDER)}}).execute()
  return read


@pytest.fixture(scope='module')
def figures(notebook):
  return json.loads(''.join(o.text for o in notebook.cells[-1].outputs if o.output_type == 'stream'))


def test_streamed_directions_equal_whole_sequences(figures):
  assert figures['late_scalars'] <= 1e-10 and figures['prefix'] <= 1e-10
  assert {(name, granularity) for name, granularity, _, _ in figures['granularities']} == {
      (n, g) for n in ('grpo', 'opd') for g in ('batch', 'group', 'trajectory', 'turn', 'forward')}
  assert max(error for *_, error in figures['granularities']) <= 1e-10
  assert set(figures['estimators']) == {'grpo', 'dr_grpo', 'rloo', 'reinforce'} and max(figures['estimators'].values()) <= 1e-10


def test_turns_need_their_deferred_adjoints(figures):
  alone, replayed = figures['turns']
  assert alone > 0.01 and replayed <= 1e-10


def test_exact_sums_have_one_result(figures):
  assert figures['distinct'] == 1 and 0 < figures['spread'] < 1e-5


def test_both_plots_are_drawn(notebook):
  pictures = [o for c in notebook.cells if c.cell_type == 'code' for o in c.outputs if 'image/png' in o.get('data', {})]
  assert len(pictures) == 2
