"""Safetensors files as memory-mapped numpy arrays in, and as parallel positioned writes out.

The layout (public specification): 8 bytes little-endian header length, a JSON header of name -> dtype, shape, byte range,
then the tensors.  The library's numpy reader and writer copy every tensor several times and know no bfloat16 by
themselves; weights move at every update, so here they move once.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import struct
import uuid
from concurrent import futures
from pathlib import Path
from typing import Callable, Mapping, NamedTuple

import ml_dtypes
import numpy as np

from ts_jax import types
from ts_jax.models import fingerprint

_DTYPES = {'F64': np.dtype(np.float64), 'F32': np.dtype(np.float32), 'F16': np.dtype(np.float16),
           'BF16': np.dtype(ml_dtypes.bfloat16)}
_CODES = {v: k for k, v in _DTYPES.items()}
_INTEGERS = {'U8': np.dtype(np.uint8), 'U16': np.dtype(np.uint16), 'U32': np.dtype(np.uint32), 'U64': np.dtype(np.uint64)}
_ALL_CODES = {**_CODES, **{v: k for k, v in _INTEGERS.items()}}
_MAX_HEADER_BYTES = 100_000_000  # of the specification


class DiskFullError(types.TsJaxError):
  """No room for a file; whatever was there under its name before is still there."""


class TensorSpec(NamedTuple):
  """Shape and dtype of one tensor of a file to be written."""
  shape: tuple[int, ...]
  dtype: np.dtype


def dtype_code(dtype) -> str:
  """Returns the format's name of a dtype ('F32', 'BF16', ...); ConfigError for those that weights are not stored in."""
  try:
    return _CODES[np.dtype(dtype)]
  except KeyError as e:
    raise types.ConfigError(f'weights cannot be stored as {np.dtype(dtype)}: use one of {[str(d) for d in _CODES]}') from e


def read(path: str | Path, integers: bool = False) -> dict[str, np.ndarray]:
  """Maps a file into memory: name -> read-only array backed by the file.

  Args:
    path: the file.
    integers: it is not weights, and holds unsigned integers.

  Raises:
    ConfigError: missing, not a safetensors file, cut short, or of other dtypes (weights are floats).
  """
  dtypes = _INTEGERS if integers else _DTYPES
  path = Path(path)
  try:
    with path.open('rb') as f:
      size = os.fstat(f.fileno()).st_size
      if size < 8:
        raise types.ConfigError(f'{path} is {size} bytes: not a safetensors file.  Copy it again')
      mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
  except OSError as e:
    raise types.ConfigError(f'weights {path} cannot be opened: {e.strerror}') from e
  length = struct.unpack('<Q', mapped[:8])[0]
  if length > min(size - 8, _MAX_HEADER_BYTES):
    raise types.ConfigError(f'{path} is not a safetensors file (header of {length} bytes in a file of {size}).  Copy it again')
  try:
    header = json.loads(mapped[8:8 + length])
  except ValueError as e:
    raise types.ConfigError(f'{path} is not a safetensors file: {e}.  Copy it again') from e
  header.pop('__metadata__', None)
  arrays = {}
  for name, entry in header.items():
    dtype = dtypes.get(entry['dtype'])
    if dtype is None:
      raise types.ConfigError(f'{path}: tensor {name!r} has dtype {entry["dtype"]}, which is not one of {list(dtypes)}')
    begin, end = entry['data_offsets']
    count = int(np.prod(entry['shape'], dtype=np.int64))
    if 8 + length + end > size or end - begin != count * dtype.itemsize:
      raise types.ConfigError(f'{path} is cut short or damaged at tensor {name!r}.  Copy it again')
    arrays[name] = np.frombuffer(mapped, dtype, count, 8 + length + begin).reshape(entry['shape'])
  return arrays


def write(path: str | Path, tensors: Mapping[str, TensorSpec], produce: Callable[[str], np.ndarray]) -> dict[str, int]:
  """Writes a file atomically (other name, then rename; mode 0644), several tensors at once.

  Args:
    path: file to write or replace.
    tensors: what it holds, in file order.
    produce: name -> C-contiguous array as specified; called from several threads.

  Returns:
    Name -> fingerprint of the tensor's bytes.

  Raises:
    DiskFullError: no room; the old file, if any, is untouched.
  """
  path = Path(path)
  header, offset = {'__metadata__': {'format': 'pt'}}, 0  # transformers insists on the metadata
  for name, (shape, dtype) in tensors.items():
    end = offset + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    header[name] = {'dtype': _ALL_CODES.get(np.dtype(dtype)) or dtype_code(dtype), 'shape': list(shape), 'data_offsets': [offset, end]}
    offset = end
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-(8 + len(text)) % 64)  # aligned tensors
  start, total = 8 + len(text), 8 + len(text) + offset
  temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex[:8]}')

  def write_one(name: str) -> int:
    array = np.ascontiguousarray(produce(name)).reshape(-1)
    _write_at(fd, memoryview(array.view(np.uint8)), start + header[name]['data_offsets'][0])
    return fingerprint.fingerprint(array)

  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
      os.fchmod(fd, 0o644)  # whatever the umask: servers under another user read it
      _write_at(fd, memoryview(struct.pack('<Q', len(text)) + text), 0)
      checksums = dict(zip(tensors, in_parallel(write_one, tensors)))
    finally:
      os.close(fd)
    os.rename(temporary, path)
  except OSError as e:
    if e.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    free = shutil.disk_usage(path.parent).free
    raise DiskFullError(f'no room for {path}: it needs {total} bytes and {free} are free.  '
                        'Free space there or choose another folder') from e
  finally:
    temporary.unlink(missing_ok=True)
  return checksums


def checksums(tensors: Mapping[str, np.ndarray]) -> dict[str, int]:
  """Returns name -> fingerprint of each tensor's bytes, in the order given."""
  return dict(zip(tensors, in_parallel(lambda name: fingerprint.fingerprint(np.ascontiguousarray(tensors[name])), tensors)))


def in_parallel(function: Callable, items) -> list:
  """Maps over items on the cores this process may use (copies and checksums release the interpreter lock)."""
  workers = min(8, len(os.sched_getaffinity(0)))
  if workers == 1:
    return [function(x) for x in items]
  with futures.ThreadPoolExecutor(workers) as pool:
    return list(pool.map(function, items))


def _write_at(fd: int, data: memoryview, offset: int) -> None:
  while len(data):
    written = os.pwrite(fd, data, offset)
    data, offset = data[written:], offset + written
