"""What a family of generated tasks is: values drawn once, phrased several ways, checked by tests over the work folder."""

from __future__ import annotations

import dataclasses
import random
from typing import Callable, Mapping

from ts_jax.data.families import words

Values = Mapping[str, str]

ANSWERS = ('answer.txt', 'result.txt', 'output.txt', 'reply.txt', 'final.txt')


@dataclasses.dataclass(frozen=True)
class Check:
  """One test function: its name without `test_`, and its body (lines of Python over the helpers of `HELPERS`)."""

  name: str
  body: str


@dataclasses.dataclass(frozen=True)
class Family:
  """One kind of task.

  Attributes:
    name: identifier, part of the task ids.
    level: 1: one command, all of it said in the instruction; 2: look once, then act; 3: look, and work out what to do.
    phrasings: format strings over the drawn values; each is one variant of a source instance.  They may name only
      what the agent is meant to know before it looks.
    draw: values of one instance.
    files: initial files of the work folder, path -> content.
    checks: the tests; none passes on the initial files.
    solution: body of the reference script.
  """

  name: str
  level: int
  phrasings: tuple[str, ...]
  draw: Callable[[random.Random], Values]
  files: Callable[[Values], Mapping[str, str]]
  checks: Callable[[Values], tuple[Check, ...]]
  solution: Callable[[Values], str]


# Links are refused: a link to the tests themselves would hold every expected word.
HELPERS = '''import os
import stat


def read(path):
  """Content of a regular file; fails on anything else, links on the way included."""
  assert os.path.realpath(path) == os.path.abspath(path), path + ' is or lies behind a link'
  assert stat.S_ISREG(os.lstat(path).st_mode), path + ' is not a regular file'
  with open(path, encoding='utf-8', errors='replace') as file:
    return file.read(4096).strip()


def is_folder(path):
  """Whether a real folder is there."""
  return os.path.realpath(path) == os.path.abspath(path) and os.path.isdir(path)


def holds(folder, names):
  """Whether a real folder holds exactly these names."""
  return is_folder(folder) and sorted(os.listdir(folder)) == sorted(names)
'''


def draw_words(rng: random.Random, count: int) -> list[str]:
  """Returns `count` different words."""
  return rng.sample(words.WORDS, count)


def folder_name(rng: random.Random) -> str:
  """Returns a name that no word or file has."""
  return rng.choice(words.FOLDERS)


def word_checks(path: str, word: str) -> tuple[Check, ...]:
  """Tests of 'write this word to that file': a word among others is worth half."""
  return (Check('word_is_written', f'assert {word!r} in read({path!r}).split()[:8]'),
          Check('nothing_else_is_written', f'assert read({path!r}) == {word!r}'))
