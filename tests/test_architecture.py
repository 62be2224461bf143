"""Imports point one way."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
BELOW = {
    'types': set(),
    'models': {'types', 'kernels'},
    'kernels': {'types'},
    'objectives': {'types'},
    'streaming': {'types', 'models', 'kernels', 'objectives'},
    'rollout': {'types', 'models', 'kernels'},
    'data': {'types'},
    'agents': {'types', 'models', 'rollout', 'data'},
    'evaluation': {'types'},
    'telemetry': {'types', 'models'},
    'composer': {'types', 'models'},
    'theory': {'types'},
}


def imported(path: pathlib.Path) -> set[str]:
  """Layers of ts_jax that a file imports."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {a.name for a in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      names |= {f'{node.module}.{a.name}' for a in node.names}
  return {n.split('.')[1] for n in names if n.startswith('ts_jax.')}


@pytest.mark.parametrize('path', sorted((ROOT / 'ts_jax').rglob('*.py')), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_layer_imports_only_what_lies_below_it(path):
  layer = path.relative_to(ROOT / 'ts_jax').parts[0].removesuffix('.py')
  if layer != '__init__':
    assert imported(path) <= BELOW[layer] | {layer}


# The engine server is a program, the extension a part of vLLM's, and the sender a program beside it.
LIBRARY = [p for p in sorted((ROOT / 'ts_jax').rglob('*.py')) if p.name not in ('server.py', 'extension.py', 'sender.py')]


@pytest.mark.parametrize('path', LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_library_code_reads_no_flags_and_knows_no_experiment(path):
  text = path.read_text()
  assert 'flags.FLAGS' not in text and 'from experiments' not in text and 'import torch' not in text


def test_what_runs_inside_vllm_needs_nothing_of_ours():
  for path in ('rollout/vllm/extension.py', 'rollout/vllm/guardian.py', 'rollout/vllm/sender.py', 'rollout/publication/sparse.py',
               'models/fingerprint.py'):
    assert not imported(ROOT / 'ts_jax' / path)
