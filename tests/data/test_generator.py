"""Generated tasks: deterministic, idempotent, varied, solvable by their reference and by nothing less."""

import asyncio
import collections
import time

import pytest

from ts_jax import types
from ts_jax.data import demonstrations, families, generator, validate
from ts_jax.data import tasks as tasks_lib


def test_every_family_validates_and_doing_nothing_earns_nothing(generated, sandbox, tmp_path):
  lines = []
  result = asyncio.run(validate.validate_tasks(generated, sandbox, progress=lines.append, manifest=tmp_path / 'm.json'))
  assert not result.excluded
  assert {o.no_op_fraction for o in result.outcomes} == {0.0} and {o.reference_fraction for o in result.outcomes} == {1.0}
  assert f'{len(generated)}/{len(generated)}' in lines[-1] and 'ETA 0 s' in lines[-1]


# What a policy that never looks, or looks and copies everything, may earn: less than the tests passed by the solution.
@pytest.mark.parametrize('family, script, earned', [
    ('make_folder', 'touch {name}', 1 / 2),
    ('write_word', 'touch {file}', 1 / 3),
    ('rename_file', 'cp {old} {new}', 1 / 2),
    ('rename_file', 'rm {old}', 0),
    ('rename_file', 'rm {old}; touch {new}', 0),
    ('rename_file', 'ln -s {old} {new}', 0),
    ('note_folders', 'mkdir {first}', 1 / 2),
    ('note_folders', 'touch {first} {second}', 0),
    ('secret_word', 'cp {note} {file}', 1 / 2),
    ('trail', 'cp {note} {answer}', 0),
    ('trail', 'cat *.txt > {answer}', 1 / 2),
    ('found_file', 'mv {folder}/* {new}', 1 / 3),
    ('found_file', 'rm -r {folder}', 0),
    ('found_file', 'cp {folder}/* {folder}/{new}', 2 / 3),
    ('count_files', 'echo $(({count} + 1)) > {answer}', 1 / 2),
    ('count_files', 'echo many > {answer}', 0),
    ('find_delete', 'rm -r {folder}/*', 0),
    ('find_delete', 'rm -r {folder}', 0),
    ('two_words', 'cat {a} > {out}', 1 / 3),
    ('two_words', 'cat {b} {a} > {out}', 1),
])
def test_partial_credit(tmp_path, attempt, family, script, earned):
  task = tasks_lib.load_tasks(generator.generate(tmp_path / 'tasks', [family], 1))[0]
  values = generator._draw(families.BY_NAME[family], 0, 0, set())
  assert attempt(task, script.format(**values)).fraction == pytest.approx(earned)


def test_deleting_a_wrong_file_beside_the_right_one_is_worth_half(tmp_path, attempt):
  task = tasks_lib.load_tasks(generator.generate(tmp_path / 'tasks', ['find_delete'], 1))[0]
  values = generator._draw(families.BY_NAME['find_delete'], 0, 0, set())
  other = next(n for n in values['names'].split() if n != values['target'])
  folder = values['folder']
  assert attempt(task, f'rm {folder}/{other}').fraction == 0
  assert attempt(task, f'rm {folder}/{other} {folder}/{values["target"]}').fraction == 0.5


@pytest.mark.parametrize('family', [f for f in families.ALL if f.level > 1], ids=lambda f: f.name)
def test_what_must_be_found_is_not_in_the_instruction(tmp_path, family):
  hidden = {'note_folders': ('first', 'second'), 'follow_note': ('name',), 'secret_word': ('word',), 'trail': ('word', 'middle'),
            'found_file': ('old', 'word'), 'count_files': ('count',), 'find_delete': ('target',), 'two_words': ('first', 'second')}
  generator.generate(tmp_path / 'tasks', [family.name], 12, variants=3)
  tasks = tasks_lib.load_tasks(tmp_path / 'tasks')
  assert len({t.source for t in tasks}) == 4 and len({t.instruction for t in tasks}) > 3
  for task in tasks:
    values = generator._draw(family, 0, int(task.source.rsplit('-', 1)[1]), set())
    assert not any(values[key] in task.instruction.split() for key in hidden[family.name])


def test_instructions_are_short_and_differ(tmp_path):
  tasks = tasks_lib.load_tasks(generator.generate(tmp_path / 'tasks', instances=30))
  assert all(4 <= len(t.instruction.split()) <= 35 for t in tasks)
  by_family = collections.Counter(t.family for t in tasks if t.level > 1)
  assert sum(by_family.values()) > len(tasks) / 2
  shown = {m['content'] for d in demonstrations.DEMONSTRATIONS for m in d}
  assert not shown & {t.instruction for t in tasks}


def test_generation_is_idempotent_and_follows_its_inputs(tmp_path):
  root = tmp_path / 'tasks'
  first = tasks_lib.load_tasks(generator.generate(root, ['trail', 'make_folder'], 4))
  marker = root / 'trail-0000-a' / 'instruction.md'
  written_ns = marker.stat().st_mtime_ns
  generator.generate(root, ['trail', 'make_folder'], 4)
  assert marker.stat().st_mtime_ns == written_ns
  other = tasks_lib.load_tasks(generator.generate(root, ['trail', 'make_folder'], 4, seed=1))
  assert [t.task_id for t in other] == [t.task_id for t in first] and all(a.digest != b.digest for a, b in zip(first, other))
  again = tasks_lib.load_tasks(generator.generate(root, ['trail'], 6))
  assert [t.digest for t in again[:4]] == [t.digest for t in first if t.family == 'trail']


def test_sixty_instances_of_every_family_take_seconds(tmp_path):
  start_s = time.monotonic()
  generator.generate(tmp_path / 'tasks', instances={n: 60 for n in (*generator.FAMILIES, generator.HELD_OUT_FAMILY)})
  assert time.monotonic() - start_s < 5


def test_refusals(tmp_path):
  with pytest.raises(types.ConfigError, match='chess'):
    generator.generate(tmp_path / 'tasks', ['chess'])
  with pytest.raises(types.ConfigError, match='at least 1'):
    generator.generate(tmp_path / 'tasks', ['trail'], 0)
  with pytest.raises(types.ConfigError, match='too few different instances'):
    generator.generate(tmp_path / 'tasks', ['make_folder'], 1000, variants=1)
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'thesis.txt').write_text('precious')
  with pytest.raises(types.ConfigError, match='not a folder of generated tasks'):
    generator.generate(tmp_path / 'mine', ['trail'], 1)
  assert (tmp_path / 'mine' / 'thesis.txt').read_text() == 'precious' and not (tmp_path / 'tasks').exists()
  assert not [p for p in tmp_path.iterdir() if p.name.startswith('.')]
