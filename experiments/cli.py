"""What every experiment script does around its work: quiet libraries, no stray arguments, errors as one line."""

from __future__ import annotations

import sys
from typing import Any, Callable, Sequence

from absl import app, flags, logging

from ts_jax import types


def _parse(argv: Sequence[str]):
  """Flags as absl parses them; a bad --config value or key becomes one line instead of a traceback."""
  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, KeyError, TypeError, ValueError, OSError) as e:
    while e.args and isinstance(e.args[0], BaseException):  # ml_collections wraps its own
      e = e.args[0]
    print(f'error: {e.args[0] if e.args else e}\nconfigs/defaults.py lists every setting', file=sys.stderr)
    sys.exit(1)


def rounded(figures: Any, digits: int = 6) -> Any:
  """Figures, nested in mappings, with `digits` significant digits."""
  if isinstance(figures, dict):
    return {k: rounded(v, digits) for k, v in figures.items()}
  return float(f'{figures:.{digits}g}') if isinstance(figures, float) else figures


def run(work: Callable[[], None]) -> None:
  """Parses flags and runs `work`; an error of ours ends the process with its message and status 1."""
  def main(argv):
    if len(argv) > 1:
      raise app.UsageError(f'unexpected arguments {argv[1:]}')
    if not flags.FLAGS['verbosity'].present:
      logging.set_verbosity(logging.WARNING)
    try:
      work()
    except types.TsJaxError as e:
      logging.error('%s: %s', type(e).__name__, e)
      sys.exit(1)

  app.run(main, flags_parser=_parse)
