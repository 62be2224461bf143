"""The folder format: what is read, and what each broken folder is told."""

import json
import shutil

import pytest

from ts_jax import types
from ts_jax.data import tasks as tasks_lib


def test_generated_folder_is_read_back(generated):
  task = next(t for t in generated if t.task_id == 'write_word-0000-a')
  assert (task.family, task.source, task.level, task.uses_pytest) == ('write_word', 'write_word-0000', 1, False)
  assert [n for n, _ in task.test_weights] == ['test_file_exists', 'test_word_is_written', 'test_nothing_else_is_written']
  assert sum(w for _, w in task.test_weights) == pytest.approx(1, abs=1e-12)
  assert task.instruction and task.files_folder.is_dir() and task.setup_script is None and task.verifier_timeout_s == 60


@pytest.mark.parametrize('name', tasks_lib.REQUIRED_FILES)
def test_missing_file_is_named_with_its_folder(generated, tmp_path, name):
  folder = tmp_path / 'broken'
  shutil.copytree(generated[0].path, folder)
  (folder / name).unlink()
  with pytest.raises(types.ConfigError) as e:
    tasks_lib.load_tasks(tmp_path)
  assert name in str(e.value) and str(folder) in str(e.value)


@pytest.mark.parametrize('name, text, told', [
    ('task.toml', '[verifier', 'not valid TOML'),
    ('task.toml', '[verifier]\ntimeout_sec = -1', 'timeout_sec=-1'),
    ('task.toml', '[metadata]\nlevel = "hard"', "level='hard'"),
    ('instruction.md', ' \n', 'empty'),
    ('tests/test_outputs.py', 'def test_a(:', 'not valid Python'),
    ('tests/test_outputs.py', 'x = 1', 'no test_'),
    ('tests/weights.json', '{', 'not valid JSON'),
    ('tests/weights.json', '[1]', 'map test names'),
    ('tests/weights.json', '{"test_other": 1.0}', 'test_other'),
])
def test_malformed_file_is_named_with_the_fault(generated, tmp_path, name, text, told):
  folder = tmp_path / 'broken'
  shutil.copytree(generated[0].path, folder)
  (folder / name).write_text(text)
  with pytest.raises(types.ConfigError) as e:
    tasks_lib.load_task(folder)
  assert str(folder / name) in str(e.value) and told in str(e.value)


def test_weights_must_sum_to_one(make_task):
  with pytest.raises(types.ConfigError, match='sum to 0.7'):
    make_task('def test_a(): pass\ndef test_b(): pass\n', weights={'test_a': 0.5, 'test_b': 0.2})


def test_missing_root_empty_root_and_unknown_family(generated, tmp_path):
  with pytest.raises(types.ConfigError, match='does not exist'):
    tasks_lib.load_tasks(tmp_path / 'nowhere')
  with pytest.raises(types.ConfigError, match='no task folders'):
    tasks_lib.load_tasks(tmp_path)
  with pytest.raises(types.ConfigError, match="no tasks of family \\['chess'\\]"):
    tasks_lib.load_tasks(generated[0].path.parent, families=('trail', 'chess'))


def test_digest_sees_content_and_names(generated, tmp_path):
  folder = tmp_path / 'copy'
  shutil.copytree(generated[0].path, folder)
  assert tasks_lib.folder_digest(folder) == generated[0].digest
  (folder / 'tests' / 'test.sh').rename(folder / 'tests' / 'test2.sh')
  renamed = tasks_lib.folder_digest(folder)
  (folder / 'instruction.md').write_text('Else.\n')
  assert len({generated[0].digest, renamed, tasks_lib.folder_digest(folder)}) == 3


def test_evolved_task_shares_its_originals_source(make_task):
  one = make_task('def test_a(): pass\n', name='disk_usage')
  two = make_task('def test_a(): pass\n', name='disk_usage-evol2')
  assert one.source == two.source == 'disk_usage' and one.family == 'terminal'


def test_pytest_is_used_for_what_needs_it(make_task):
  plain = make_task('def test_a(): pass\n', name='a')
  kinds = ['def test_a(tmp_path): pass\n', 'import pytest\ndef test_a(): pass\n', 'class TestA:\n  def test_a(self): pass\n']
  assert not plain.uses_pytest and all(make_task(k, name=f'k{i}').uses_pytest for i, k in enumerate(kinds))


def test_published_weights_may_name_methods_without_their_class(make_task):
  tests = 'class TestA:\n  def test_a(self): pass\n  def test_b(self): pass\n'
  task = make_task(tests, weights={'test_a': 0.25, 'test_b': 0.75})
  assert task.test_weights == (('TestA::test_a', 0.25), ('TestA::test_b', 0.75))
  assert json.loads((task.tests_folder / 'weights.json').read_text())['test_b'] == 0.75
