"""Append-only files of one JSON object a line, that survive a kill at any byte."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

from ts_jax import types
from ts_jax.models import safetensors_file

_FULL = (errno.ENOSPC, errno.EDQUOT)


class JsonLines:
  """One file of JSON lines, safe to append to from several threads of one process.

  A line is handed to the system before `append` returns.  What a kill left of an unfinished last line is ignored when reading and cut
  off before the next append.  The file is created by the first append.
  """

  def __init__(self, path: Path):
    self.path = path
    self._file: Any = None
    self._mutex = threading.Lock()

  def append(self, values: Mapping[str, Any]) -> None:
    """Appends one object.

    Raises:
      ValueError: a value is not JSON, or a float is not finite.
      DiskFullError: no space left.
      TsJaxError: the file cannot be written.
    """
    line = json.dumps(values, separators=(',', ':'), allow_nan=False, ensure_ascii=False)
    # A lone surrogate (undecodable bytes in a tool's output) has no UTF-8 form; its JSON escape reads back the same.
    data = (line.encode('utf-8') if _encodable(line) else json.dumps(values, separators=(',', ':')).encode('ascii')) + b'\n'
    with self._mutex, explained(self.path):
      if self._file is None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_unfinished_line(self.path)
        # Unbuffered: a buffer that could not be written would be written again when the file closes.
        self._file = open(self.path, 'ab', buffering=0)
      try:
        rest = memoryview(data)
        while rest:
          rest = rest[self._file.write(rest):]
      except OSError:
        self._close()  # the next append starts by cutting what of this line was written
        raise

  def read(self) -> Iterator[dict[str, Any]]:
    """Yields the objects in order; none when the file does not exist.

    Raises:
      ConfigError: a line other than the last is not a JSON object.
    """
    if not self.path.exists():
      return
    with open(self.path, 'rb') as f:
      for number, line in enumerate(f, 1):
        if not line.endswith(b'\n'):
          return  # the writer was killed here
        try:
          values = json.loads(line)
        except ValueError as e:
          raise types.ConfigError(f'{self.path}:{number} is not JSON ({e}): the file was damaged.  Delete that line, or the file') from e
        yield values

  def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
    """Keeps only the objects for which `wanted` is true, atomically.  Returns how many were dropped."""
    with self._mutex:
      self._close()
      if not self.path.exists():
        return 0
      dropped, temporary = 0, self.path.with_name(self.path.name + '.partial')
      with explained(temporary), open(temporary, 'wb') as f:
        for values in self.read():
          if wanted(values):
            f.write(json.dumps(values, separators=(',', ':')).encode('ascii') + b'\n')
          else:
            dropped += 1
      os.replace(temporary, self.path)
      return dropped

  def close(self) -> None:
    """Closes the file; a later append opens it again."""
    with self._mutex:
      self._close()

  def _close(self) -> None:
    if self._file is not None:
      file, self._file = self._file, None
      file.close()


class explained:  # a context manager, lower case like contextlib's
  """Turns an OSError while writing `path` into a TsJaxError that names it and says what to do."""

  def __init__(self, path: Path):
    self._path = path

  def __enter__(self) -> None:
    pass

  def __exit__(self, kind, error, trace) -> None:
    if not isinstance(error, OSError):
      return
    if error.errno in _FULL:
      raise safetensors_file.DiskFullError(f'no space left on the disk of {self._path}: free some and start again with the same work folder; '
                             'the run resumes from its last checkpoint') from error
    raise types.TsJaxError(f'cannot write {self._path}: {error.strerror}.  Choose a work folder that can be written') from error


def write_atomically(path: Path, text: str) -> None:
  """Writes a small file so that a reader sees the old text or the new one, never a part."""
  temporary = path.with_name(path.name + '.partial')
  with explained(path):
    temporary.write_text(text, 'utf-8')
    os.replace(temporary, path)


def _encodable(text: str) -> bool:
  try:
    text.encode('utf-8')
  except UnicodeEncodeError:
    return False
  return True


def _cut_unfinished_line(path: Path) -> None:
  """Cuts what follows the last newline."""
  if not path.is_file() or not path.stat().st_size:
    return
  with open(path, 'rb+') as f:
    end = f.seek(0, os.SEEK_END)
    while end:
      start = max(0, end - 65536)
      f.seek(start)
      newline = f.read(end - start).rfind(b'\n')
      if newline >= 0:
        f.truncate(start + newline + 1)
        return
      end = start
    f.truncate(0)
