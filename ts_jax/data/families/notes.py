"""Look, then act: what to do stands in a file."""

from __future__ import annotations

from ts_jax.data.families import base

_NOTES = ('note.txt', 'memo.txt', 'info.txt', 'page.txt', 'letter.txt', 'hint.txt')
_JOBS = ('todo.txt', 'task.txt', 'job.txt', 'plan.txt', 'order.txt', 'guide.txt', 'next.txt', 'help.txt')
_STARTS = ('start.txt', 'first.txt', 'begin.txt', 'map.txt', 'index.txt')


def _draw_note_folders(rng):
  first, second = base.draw_words(rng, 2)
  return {'note': rng.choice(_NOTES), 'first': first, 'second': second}


NOTE_FOLDERS = base.Family(
    name='note_folders',
    level=2,
    phrasings=(
        'First cat {note}, then make the two directories named in it.',
        'The file {note} names two directories. First cat it, then make both.',
        'Read {note} and make a directory for each of the two names in it.',
    ),
    draw=_draw_note_folders,
    files=lambda v: {v['note']: f'{v["first"]} {v["second"]}\n'},
    checks=lambda v: (
        base.Check('first_directory', f'assert is_folder({v["first"]!r})'),
        base.Check('second_directory', f'assert is_folder({v["second"]!r})'),
    ),
    solution=lambda v: f'mkdir $(cat {v["note"]})',
)


def _draw_follow_note(rng):
  name, word, other = base.draw_words(rng, 3)
  return {'note': rng.choice(_JOBS), 'job': rng.choice(('folder', 'write', 'rename')),
          'name': name, 'word': word, 'other': other}


def _follow_note_files(v):
  text = {'folder': f'Make a directory named {v["name"]}.',
          'write': f'Write the word {v["word"]} to {v["name"]}.txt.',
          'rename': f'Rename the file {v["other"]}.txt to {v["name"]}.txt.'}[v['job']]
  files = {v['note']: text + '\n'}
  if v['job'] == 'rename':
    files[f'{v["other"]}.txt'] = v['word'] + '\n'
  return files


def _follow_note_checks(v):
  name, file, other = v['name'], f'{v["name"]}.txt', f'{v["other"]}.txt'
  if v['job'] == 'folder':
    return (base.Check('name_exists', f'assert os.path.lexists({name!r})'),
            base.Check('is_a_directory', f'assert is_folder({name!r})'))
  if v['job'] == 'write':
    return base.word_checks(file, v['word'])
  return (base.Check('new_name_has_content', f'assert read({file!r}) == {v["word"]!r}'),
          base.Check('old_name_is_gone', f'assert read({file!r}) == {v["word"]!r} and not os.path.lexists({other!r})'))


FOLLOW_NOTE = base.Family(
    name='follow_note',
    level=2,
    phrasings=(
        'First cat {note}, then do what it says.',
        'Run cat {note} and do what it says.',
        'Read the file {note} and do what it says.',
    ),
    draw=_draw_follow_note,
    files=_follow_note_files,
    checks=_follow_note_checks,
    solution=lambda v: {'folder': f'mkdir {v["name"]}', 'write': f'echo {v["word"]} > {v["name"]}.txt',
                        'rename': f'mv {v["other"]}.txt {v["name"]}.txt'}[v['job']],
)


def _draw_secret_word(rng):
  word, name = base.draw_words(rng, 2)
  return {'note': rng.choice(_NOTES), 'word': word, 'file': f'{name}.txt'}


SECRET_WORD = base.Family(
    name='secret_word',
    level=2,
    phrasings=(
        'First cat {note}, then write the secret word to {file}.',
        'The secret word is in {note}. First cat it, then write the word to {file}.',
        'Read {note} to learn the secret word. Then write only that word to {file}.',
    ),
    draw=_draw_secret_word,
    files=lambda v: {v['note']: f'The secret word is {v["word"]}\n'},
    checks=lambda v: base.word_checks(v['file'], v['word']),
    solution=lambda v: f"sed 's/.* //' {v['note']} > {v['file']}",
)


def _draw_trail(rng):
  word, middle = base.draw_words(rng, 2)
  return {'note': rng.choice(_STARTS), 'word': word, 'middle': f'{middle}.txt', 'answer': rng.choice(base.ANSWERS)}


TRAIL = base.Family(
    name='trail',
    level=3,
    phrasings=(
        'The file {note} names another file. Write the word that is in that other file to {answer}.',
        'Read {note}. It gives the name of a file. Write the word from that file to {answer}.',
        'Start with {note}: it tells you which file to read. Put the word you find there in {answer}.',
    ),
    draw=_draw_trail,
    files=lambda v: {v['note']: v['middle'] + '\n', v['middle']: v['word'] + '\n'},
    checks=lambda v: base.word_checks(v['answer'], v['word']),
    solution=lambda v: f'cat "$(cat {v["note"]})" > {v["answer"]}',
)


def _draw_two_words(rng):
  first, second, name_a, name_b, out = base.draw_words(rng, 5)
  return {'first': first, 'second': second, 'a': f'{name_a}.txt', 'b': f'{name_b}.txt', 'out': f'{out}.txt'}


TWO_WORDS = base.Family(
    name='two_words',
    level=2,
    phrasings=(
        'The files {a} and {b} hold one word each. Write both words to {out}.',
        'Read {a} and {b}. Then write the two words you found to the file {out}.',
        'Put the word from {a} and the word from {b} together in a new file named {out}.',
    ),
    draw=_draw_two_words,
    files=lambda v: {v['a']: v['first'] + '\n', v['b']: v['second'] + '\n'},
    checks=lambda v: (
        base.Check('first_word', f'assert {v["first"]!r} in read({v["out"]!r}).split()[:8]'),
        base.Check('second_word', f'assert {v["second"]!r} in read({v["out"]!r}).split()[:8]'),
        base.Check('both_and_nothing_else', f'assert sorted(read({v["out"]!r}).split()) == {sorted((v["first"], v["second"]))!r}'),
    ),
    solution=lambda v: f'cat {v["a"]} {v["b"]} > {v["out"]}',
)
