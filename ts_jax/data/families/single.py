"""First rungs: one command, and the instruction says everything."""

from __future__ import annotations

from ts_jax.data.families import base


def _draw_make_folder(rng):
  return {'name': base.draw_words(rng, 1)[0]}


MAKE_FOLDER = base.Family(
    name='make_folder',
    level=1,
    phrasings=(
        'Make a directory named {name}.',
        'Create a directory named {name}.',
        'Make a new directory. Its name is {name}.',
    ),
    draw=_draw_make_folder,
    files=lambda v: {},
    checks=lambda v: (
        base.Check('name_exists', f'assert os.path.lexists({v["name"]!r})'),
        base.Check('is_a_directory', f'assert is_folder({v["name"]!r})'),
    ),
    solution=lambda v: f'mkdir {v["name"]}',
)


def _draw_write_word(rng):
  word, name = base.draw_words(rng, 2)
  return {'word': word, 'file': f'{name}.txt'}


WRITE_WORD = base.Family(
    name='write_word',
    level=1,
    phrasings=(
        'Write the word {word} to {file}.',
        'Write {word} to the file {file}.',
        'Put the word {word} in a new file named {file}.',
    ),
    draw=_draw_write_word,
    files=lambda v: {},
    checks=lambda v: (
        base.Check('file_exists', f'read({v["file"]!r})'),
        *base.word_checks(v['file'], v['word']),
    ),
    solution=lambda v: f'echo {v["word"]} > {v["file"]}',
)


def _draw_rename_file(rng):
  word, old, new = base.draw_words(rng, 3)
  return {'word': word, 'old': f'{old}.txt', 'new': f'{new}.txt'}


RENAME_FILE = base.Family(
    name='rename_file',
    level=1,
    phrasings=(
        'Rename the file {old} to {new}.',
        'Rename {old} to {new}.',
        'Change the name of the file {old} to {new}.',
    ),
    draw=_draw_rename_file,
    files=lambda v: {v['old']: v['word']},
    checks=lambda v: (
        base.Check('new_name_has_content', f'assert read({v["new"]!r}) == {v["word"]!r}'),
        # Tied to the content: deleting the file must earn nothing.
        base.Check('old_name_is_gone', f'assert read({v["new"]!r}) == {v["word"]!r} and not os.path.lexists({v["old"]!r})'),
    ),
    solution=lambda v: f'mv {v["old"]} {v["new"]}',
)
