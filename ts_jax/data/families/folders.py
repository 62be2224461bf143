"""Look, then act: what to act on has to be found in a folder."""

from __future__ import annotations

from ts_jax.data.families import base


def _draw_found_file(rng):
  word, old, new = base.draw_words(rng, 3)
  return {'folder': base.folder_name(rng), 'word': word, 'old': f'{old}.txt', 'new': f'{new}.txt'}


FOUND_FILE = base.Family(
    name='found_file',
    level=2,
    phrasings=(
        'There is one file in the directory {folder}. Rename it to {new} and leave it in {folder}.',
        'List the directory {folder} to find its only file. Then rename that file to {new}, inside {folder}.',
        'The only file in {folder} has a wrong name. Its name should be {new}. Rename it.',
    ),
    draw=_draw_found_file,
    files=lambda v: {f'{v["folder"]}/{v["old"]}': v['word'] + '\n'},
    checks=lambda v: (
        base.Check('content_has_a_copy_of_that_name', 'assert ' + ' or '.join(
            f'os.path.lexists({p!r}) and read({p!r}) == {v["word"]!r}' for p in (v['new'], f'{v["folder"]}/{v["new"]}'))),
        base.Check('new_name_in_folder', f'assert read({v["folder"] + "/" + v["new"]!r}) == {v["word"]!r}'),
        base.Check('old_name_is_gone',
                   f'assert holds({v["folder"]!r}, [{v["new"]!r}]) and read({v["folder"] + "/" + v["new"]!r}) == {v["word"]!r}'),
    ),
    solution=lambda v: f'mv {v["folder"]}/*.txt {v["folder"]}/{v["new"]}',
)


def _draw_count_files(rng):
  count = rng.randint(2, 9)
  return {'folder': base.folder_name(rng), 'count': str(count), 'names': ' '.join(base.draw_words(rng, count)),
          'answer': rng.choice(base.ANSWERS)}


COUNT_FILES = base.Family(
    name='count_files',
    level=3,
    phrasings=(
        'Count the files in the directory {folder}. Write the number to {answer}.',
        'How many files are in the directory {folder}? Write the number to {answer}.',
        'Look in the directory {folder}, count its files and put the number in {answer}.',
    ),
    draw=_draw_count_files,
    files=lambda v: {f'{v["folder"]}/{n}': n + '\n' for n in v['names'].split()},
    checks=lambda v: (
        base.Check('nearly_right', f'assert abs(int(read({v["answer"]!r})) - {v["count"]}) <= 1'),
        base.Check('right', f'assert read({v["answer"]!r}) == {v["count"]!r}'),
    ),
    solution=lambda v: f'ls {v["folder"]} | wc -l > {v["answer"]}',
)


def _draw_find_word(rng):
  word, *rest = base.draw_words(rng, 7)
  names, others = rest[:3], rest[3:5]
  return {'folder': base.folder_name(rng), 'word': word, 'names': ' '.join(f'{n}.txt' for n in names),
          'others': ' '.join(others), 'target': f'{rng.choice(names)}.txt'}


def _find_word_files(v):
  others = iter(v['others'].split())
  return {f'{v["folder"]}/{n}': (v['word'] if n == v['target'] else next(others)) + '\n' for n in v['names'].split()}


def _kept(v):
  return [n for n in v['names'].split() if n != v['target']]


FIND_DELETE = base.Family(
    name='find_delete',
    level=3,
    phrasings=(
        'One of the three files in {folder} contains the word {word}. Delete that file and keep the other two.',
        'Find the file in the directory {folder} that has the word {word} in it and delete only that file.',
        'Look in the files of {folder}. Delete the one that contains the word {word}, not the others.',
    ),
    draw=_draw_find_word,
    files=_find_word_files,
    checks=lambda v: (
        # Deleting everything, or a guess, earns at most what the guess is worth.
        base.Check('file_is_gone_and_one_is_kept',
                   f'kept = os.listdir({v["folder"]!r})\n'
                   f'assert is_folder({v["folder"]!r}) and {v["target"]!r} not in kept and set(kept) & set({_kept(v)!r})'),
        base.Check('only_that_file_is_gone', f'assert holds({v["folder"]!r}, {_kept(v)!r})'),
    ),
    solution=lambda v: f'rm $(grep -l {v["word"]} {v["folder"]}/*)',
)
