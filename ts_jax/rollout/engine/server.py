"""The embedded engine as a process: `python -m ts_jax.rollout.engine.server --model DIR`.

Serves the subset of vLLM's API that ts_jax uses.  Its routes are not guarded: bind it to a loopback or private address.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import functools
import json
import logging
import os
import pathlib
import re
import signal
import sys
import uuid

from aiohttp import web

from ts_jax import types
from ts_jax.models import weights as weights_lib
from ts_jax.models.config import ModelConfig
from ts_jax.rollout.engine import core as core_lib
from ts_jax.rollout.engine import loading
from ts_jax.rollout.engine import wire

_MAX_BODY_BYTES = 64 * 2**20


def stop_ids_of(folder: pathlib.Path) -> tuple[int, ...]:
  """The model's own end-of-sequence ids: generation_config.json, else config.json."""
  for name in ('generation_config.json', 'config.json'):
    if (folder / name).exists():
      eos = json.loads((folder / name).read_text()).get('eos_token_id')
      if eos is not None:
        return tuple(eos) if isinstance(eos, list) else (eos,)
  return ()


def _error(status: int, message: str) -> web.Response:
  return web.json_response({'error': {'message': message, 'type': 'invalid_request_error' if status < 500 else 'engine_error',
                                      'code': status}}, status=status)


@web.middleware
async def _errors_as_json(request: web.Request, handler) -> web.StreamResponse:
  try:
    return await handler(request)
  except wire.BadRequest as e:
    return _error(e.status, str(e))
  except core_lib.BusyError as e:
    return _error(409, str(e))
  except types.ConfigError as e:
    return _error(400, str(e))
  except core_lib.EngineError as e:
    return _error(500, str(e))
  except web.HTTPException as e:
    return _error(e.status, f'{request.method} {request.path}: {e.reason}')
  except Exception as e:  # a fault of this server: the caller learns of it, the log holds the trace
    logging.exception('%s %s failed', request.method, request.path)
    return _error(500, f'{type(e).__name__}: {e}')


async def _json(request: web.Request):
  try:
    return await request.json()
  except ValueError as e:
    raise wire.BadRequest(f'the body is not JSON: {e}') from e


class Server:
  """HTTP routes around one `EngineCore`."""

  def __init__(self, core: core_lib.EngineCore, model: str, eos_ids: tuple[int, ...], checksum: str):
    """Args: core: the engine; model: served name; eos_ids: the model's own stop ids; checksum: of the weights it holds."""
    self._core, self._model, self._eos_ids = core, model, eos_ids
    self._weights = loading.LoadedWeights(core, checksum)

  def app(self) -> web.Application:
    """The aiohttp application."""
    app = web.Application(middlewares=[_errors_as_json], client_max_size=_MAX_BODY_BYTES)
    app.add_routes([
        web.post('/inference/v1/generate', self._generate), web.get('/health', self._health), web.get('/v1/models', self._models),
        web.get('/weight_info', self._weight_info), web.post('/pause', self._pause), web.post('/resume', self._resume),
        web.post('/reset_prefix_cache', self._reset), web.post('/collective_rpc', self._rpc),
        web.post('/update_weight_version', self._set_version), web.get('/is_paused', self._is_paused)])
    return app

  async def _off_loop(self, function, *args):
    """Runs a call that waits for the engine thread, so that the event loop keeps answering."""
    return await asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *args))

  async def _generate(self, request: web.Request) -> web.Response:
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(outcome):
      if future.done():
        return
      if isinstance(outcome, BaseException):
        future.set_exception(outcome)
      else:
        future.set_result(outcome)

    body = await _json(request)
    parsed = wire.parse(body, self._core, self._model, self._eos_ids, lambda outcome: loop.call_soon_threadsafe(settle, outcome))
    self._core.submit(parsed)
    try:
      result = await future
    except asyncio.CancelledError:  # the client went away
      self._core.cancel(parsed)
      raise
    return web.json_response(wire.reply(str(body.get('request_id') or uuid.uuid4().hex), parsed, result))

  async def _health(self, request: web.Request) -> web.Response:
    if self._core.error:
      return _error(500, self._core.error)
    return web.json_response({'status': 'ok', 'pid': os.getpid(), **self._core.counts()})

  async def _models(self, request: web.Request) -> web.Response:
    return web.json_response({'object': 'list', 'data': [
        {'id': self._model, 'object': 'model', 'owned_by': 'ts_jax', 'max_model_len': self._core.max_context}]})

  async def _weight_info(self, request: web.Request) -> web.Response:
    return web.json_response({'weight_version': self._core.version, 'checksum': self._weights.checksum})

  async def _pause(self, request: web.Request) -> web.Response:
    mode = request.query.get('mode', 'abort')
    if mode not in ('keep', 'abort', 'wait'):
      raise wire.BadRequest(f'mode={mode!r} must be keep, abort or wait')
    clear = request.query.get('clear_cache', 'true').lower()
    if clear not in ('true', 'false'):
      raise wire.BadRequest(f'clear_cache={clear!r} must be true or false')
    await asyncio.wrap_future(self._core.pause(mode, clear == 'true'))
    return web.json_response({'status': 'paused', 'mode': mode})

  async def _resume(self, request: web.Request) -> web.Response:
    await self._off_loop(self._core.resume)
    return web.json_response({'status': 'resumed'})

  async def _reset(self, request: web.Request) -> web.Response:
    await self._off_loop(self._core.reset_cache)
    return web.json_response({'status': 'reset'})

  async def _set_version(self, request: web.Request) -> web.Response:
    version = (await _json(request) or {}).get('new_version')
    if not re.fullmatch(r'\d{1,18}', str(version)):
      raise wire.BadRequest(f'new_version={version!r} must be a non-negative integer, also as a string')
    await self._off_loop(self._core.set_version, int(version))
    return web.json_response({'weight_version': int(version)})

  async def _is_paused(self, request: web.Request) -> web.Response:
    return web.json_response({'is_paused': self._core.counts()['paused']})

  async def _rpc(self, request: web.Request) -> web.Response:
    body = await _json(request) or {}
    method, args = body.get('method'), tuple(body.get('args') or ())
    if method == 'takes_weights':
      return web.json_response({'results': [True]})
    kinds, needed = {'load_weights': ((str, str, bool), 1), 'apply_patch': ((str, str, str), 3)}.get(method, (None, 0))
    if kinds is None:
      raise wire.BadRequest(f'method {method!r} is not known: takes_weights, load_weights and apply_patch are')
    if not needed <= len(args) <= len(kinds) or not all(isinstance(a, k) for a, k in zip(args, kinds)):
      raise wire.BadRequest({'load_weights': 'load_weights takes a path and optionally its checksum and whether to keep a host copy',
                             'apply_patch': 'apply_patch takes a path and the checksums before and after'}[method])
    checksum = await self._off_loop(getattr(self._weights, method), *args)
    return web.json_response({'results': [{'checksum': checksum}]})


def _die_with(parent: int) -> None:
  """Asks the kernel to end this process when its parent ends (Linux; elsewhere the parent must do it)."""
  if sys.platform != 'linux':
    return
  ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
  if os.getppid() != parent:
    sys.exit(f'the parent process {parent} has already ended')


def _flags() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog='python -m ts_jax.rollout.engine.server', description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', required=True, help='Hugging Face model folder')
  parser.add_argument('--served_model_name', default='policy')
  parser.add_argument('--host', default='127.0.0.1')
  parser.add_argument('--port', type=int, default=8017)
  parser.add_argument('--slots', type=int, default=16, help='requests that decode together')
  parser.add_argument('--max_context', type=int, default=2048, help='prompt and reply of one request, tokens')
  parser.add_argument('--prefix_store_mb', type=int, default=512, help='memory for prefixes that lost their slot; 0 is none')
  parser.add_argument('--cores', default='', help='comma-separated core numbers to run on; empty is all')
  parser.add_argument('--compile_cache', default='', help='folder of the persistent compilation cache')
  parser.add_argument('--warm_up', type=int, default=0, help='compile before serving what requests up to this many tokens need')
  parser.add_argument('--weight_version', type=int, default=0, help='policy version of the weights in the folder')
  parser.add_argument('--paused', action='store_true', help='serve nothing until /resume')
  parser.add_argument('--die_with_parent', type=int, default=0, help='process id of the parent to end with')
  return parser.parse_args()


def _prepare_jax(cores: list[int], compile_cache: str) -> None:
  """Pins this process and configures JAX; before the backend starts, since its threads inherit both."""
  if cores:
    os.sched_setaffinity(0, cores)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  if cores and len(cores) == 1:  # a thread pool of one only adds hand-overs
    os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_cpu_multi_thread_eigen=false'
  import jax  # after the environment is set
  if compile_cache:
    jax.config.update('jax_compilation_cache_dir', compile_cache)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def main() -> None:
  """Loads the model, then serves until SIGTERM."""
  flags = _flags()
  if flags.die_with_parent:
    _die_with(flags.die_with_parent)
  logging.basicConfig(level=logging.INFO, format='%(asctime)s %(levelname)s %(message)s', stream=sys.stderr)
  logging.getLogger('aiohttp.access').setLevel(logging.WARNING)
  try:
    _prepare_jax([int(c) for c in flags.cores.split(',') if c], flags.compile_cache)
    folder = pathlib.Path(flags.model)
    config: ModelConfig = weights_lib.load_config(folder)
    core = core_lib.EngineCore(config, weights_lib.load_params(folder), slots=flags.slots, max_context=flags.max_context,
                               store_bytes=flags.prefix_store_mb * 2**20, version=flags.weight_version, paused=flags.paused)
    server = Server(core, flags.served_model_name, stop_ids_of(folder), weights_lib.weights_checksum(folder))
    if flags.warm_up:
      core.warm_up(min(flags.warm_up, flags.max_context))
  except types.TsJaxError as e:
    sys.exit(f'{type(e).__name__}: {e}')
  except OSError as e:
    sys.exit(f'cannot start with {flags}: {e}')
  logging.info('serving %s (version %d) at http://%s:%d', folder, core.version, flags.host, flags.port)
  try:
    web.run_app(server.app(), host=flags.host, port=flags.port, handler_cancellation=True, print=None, shutdown_timeout=1.0)
  except OSError as e:
    sys.exit(f'cannot listen on {flags.host}:{flags.port}: {e.strerror}: is another engine running there?')


if __name__ == '__main__':
  main()
