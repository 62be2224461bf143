"""Starts the engines that a config names, and keeps them running for training runs in other terminals or on other hosts.

    python -m experiments.serve --config=configs/serve.py

Prints their URLs, the flags that give them to `experiments.train`, and as its last line the URLs as JSON; then restarts what
dies until it is interrupted (SIGINT or SIGTERM; a second one kills at once).  Rollout replicas answer nobody until a run has
published its weights to them; one that was restarted is brought up to date by the run that uses it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import pathlib
import signal
import sys
import time

from absl import flags
from ml_collections import config_flags

from experiments import cli
from ts_jax import types

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Whose engines to serve; see configs/.', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/serve', 'Folder of the logs.')
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'IPv4 address of the interface to listen on: loopback, or one of a private network.')
_PORT = flags.DEFINE_integer('port', None, 'Port of the first engine, the others follow it; default: free ones.')
flags.mark_flag_as_required('config')

_WATCH_S = 0.5


def main() -> None:
  servers: list = []
  ending = False

  def end(*_):
    nonlocal ending
    for server in servers if ending else ():
      server.kill()
    if not ending:
      ending = True
      raise KeyboardInterrupt

  signal.signal(signal.SIGINT, end)
  signal.signal(signal.SIGTERM, end)
  try:
    serve(_CONFIG.value, pathlib.Path(_WORKDIR.value).resolve(), _HOST.value, _PORT.value, servers)
  except KeyboardInterrupt:
    print('\nEvery engine has ended.', file=sys.stderr)


def serve(config, workdir: pathlib.Path, host: str, port: int | None, servers: list) -> None:
  """Serves until interrupted.

  Args:
    config: a training run's.
    workdir: of the logs.
    host: address to listen on.
    port: of the first engine; None: free ones.
    servers: receives the processes.

  Raises:
    ConfigError: something in the config cannot be served.
    InfrastructureError: an engine did not come up, or one role has no engine left.
  """
  from experiments import engines, wiring  # imports JAX: after the flags are known to be right

  # ---- What could be wrong is checked first -------------------------------------------------------------------------
  _check_host(host)
  for role in ('rollout', *types.SCORERS):
    if config[role].urls:
      raise types.ConfigError(f'config.{role}.urls names engines that already run: leave it empty to start some')
  usable = sorted(os.sched_getaffinity(0))
  cores = wiring.parse_cores(config.rollout.cores, usable, usable)
  student = wiring.load_student(config)
  scorers = [found for name in types.SCORERS if (found := engines.load_teacher(config, student, cores, usable, name))]
  cache, logs = wiring.compile_cache(), workdir / 'logs'

  with contextlib.ExitStack() as stack:
    # ---- Start, all at once ------------------------------------------------------------------------------------------
    roles = {'rollout': engines.start(stack, engines.unpublished_maker(config, student, logs, cache, host, port), cores,
                                      config.rollout.replicas, servers)}
    for found in scorers:
      make = engines.teacher_maker(config, found, logs, cache, host, port and port + len(servers))
      roles[found.name] = engines.start(stack, make, found.cores, config[found.name].replicas, servers)
    print(f'starting  {len(servers)} engines; logs in {logs}', file=sys.stderr)
    for server in servers:
      server.wait_started()

    # ---- Tell, and keep running --------------------------------------------------------------------------------------
    urls = {role: [server.url for server in started] for role, started in roles.items()}
    print(_told(urls, host))
    print(json.dumps({**urls, 'pid': os.getpid(), 'logs': str(logs)}), flush=True)
    while True:
      for role, started in roles.items():
        if all(server.failure for server in started):
          raise types.InfrastructureError(f'no engine of {role} is left: {"; ".join(server.failure for server in started)}')
      time.sleep(_WATCH_S)


def _check_host(host: str) -> None:
  try:
    address = ipaddress.IPv4Address(host)
  except ValueError:
    raise types.ConfigError(f'--host={host!r} is not an IPv4 address') from None
  if address.is_unspecified or not (address.is_private or address.is_loopback):
    raise types.ConfigError(f'--host={host} would open routes that load weights and run methods to everybody: name the address of one '
                            'private interface')
  if not address.is_loopback:
    logging.warning('Everybody who reaches %s can load weights into the engines and run methods in them: the development routes are '
                    'not guarded, by no key either. Let only the training hosts reach it.', host)


def _told(urls: dict[str, list[str]], host: str) -> str:
  lines = [f'{role:<10}{"  ".join(found)}' for role, found in urls.items()]
  given = ' '.join(f'"--config.{role}.urls={tuple(found)!r}"' for role, found in urls.items())
  lines += ['', 'Give them to a run of the same config:', f'  python -m experiments.train --config=... --workdir=... {given}']
  if host != '127.0.0.1':
    lines.append('On another host add --config.rollout.exchange=FOLDER, on a disk that both hosts see at the same path.')
  return '\n'.join(lines)


if __name__ == '__main__':
  cli.run(main)
