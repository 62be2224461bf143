"""The client against servers that misbehave: every fault ends in a clear error, by the deadline."""

import asyncio
import contextlib
import hashlib
import json
import time

from aiohttp import web
import pytest

from ts_jax import types
from ts_jax.rollout import client as client_lib
from ts_jax.rollout import supervision
from ts_jax.rollout import protocol
from ts_jax.rollout.client import GenerateRequest

GOOD = {'choices': [{'token_ids': [4, 5],
                     'logprobs': {'content': [{'token_id': 4, 'logprob': -1.0}, {'token_id': 5, 'logprob': -2.0}]},
                     'finish_reason': 'length', 'weight_versions': [{'version': 3, 'start': 0, 'end': 2}]}]}


def changed(**changes):
  return {'choices': [GOOD['choices'][0] | changes]}


async def healthy(_):
  return web.json_response({})


@contextlib.asynccontextmanager
async def serving(handler):
  app = web.Application()
  app.add_routes([web.post('/inference/v1/generate', handler), web.get('/health', healthy)])
  runner = web.AppRunner(app, shutdown_timeout=0.1)
  await runner.setup()
  port = supervision.free_port()
  await web.TCPSite(runner, '127.0.0.1', port).start()
  try:
    async with client_lib.EngineClient(f'http://127.0.0.1:{port}', model='m') as client:
      yield client
  finally:
    await runner.cleanup()


def replying(text, request=GenerateRequest((1,), 2, request_id='r7'), timeout_s=5.0, status=200):
  async def go():
    async def handler(_):
      return web.Response(text=text, status=status)
    async with serving(handler) as client:
      return await client.generate(request, timeout_s=timeout_s)
  return asyncio.run(go())


def test_good_reply():
  reply = replying(json.dumps(GOOD))
  assert reply == types.SampledTokens((4, 5), (-1.0, -2.0), 3, 3, types.FinishReason.LENGTH)


@pytest.mark.parametrize('text, message', [
    ('<html>', 'not JSON'),
    ('', 'not JSON'),
    (json.dumps(GOOD)[:-20], 'not JSON'),
    ('[]', 'not a generate reply'),
    ('{"choices": []}', 'not a generate reply'),
    (json.dumps(changed(token_ids=[4], weight_versions=[{'version': 3, 'start': 0, 'end': 1}])), '1 sampled ids but 2 log-probs'),
    (json.dumps(changed(logprobs=None)), '2 sampled ids but 0 log-probs'),
    (json.dumps(changed(logprobs={'content': [{'logprob': float('nan')}, {'logprob': -1}]})), 'not finite'),
    (json.dumps(changed(logprobs={'content': [{'logprob': float('-inf')}, {'logprob': -1}]})), 'not finite'),
    (json.dumps(changed(logprobs={'content': [{'logprob': None}, {'logprob': -1}]})), 'not a generate reply'),
    (json.dumps(changed(logprobs={'content': [{'token_id': 9, 'logprob': -1}, {'logprob': -1}]})), 'log-prob is of token 9'),
    (json.dumps(changed(finish_reason='tired')), 'tired'),
    (json.dumps(changed(weight_versions=[])), 'do not cover'),
    (json.dumps(changed(weight_versions=[{'version': 3, 'start': 0, 'end': 1}])), 'do not cover'),
    (json.dumps(changed(token_ids=[], logprobs=None, weight_versions=[])), 'without a token'),
])
def test_replies_that_make_no_sense_are_clear_errors(text, message):
  with pytest.raises(types.InfrastructureError, match=message) as e:
    replying(text)
  assert 'r7' in str(e.value) and '127.0.0.1' in str(e.value)


def test_versions_that_changed_within_the_reply_are_caught():
  spans = [{'version': 2, 'start': 0, 'end': 1}, {'version': 3, 'start': 1, 'end': 2}]
  with pytest.raises(types.PolicyVersionError, match='2..3, expected 3'):
    replying(json.dumps(changed(weight_versions=spans)), GenerateRequest((1,), 2, expected_version=3))


def test_a_reply_may_hold_newer_versions_where_weights_are_published_in_flight():
  spans = [{'version': 2, 'start': 0, 'end': 1}, {'version': 4, 'start': 1, 'end': 2}]
  ask = lambda expected: replying(json.dumps(changed(weight_versions=spans)), GenerateRequest((1,), 2, expected_version=expected, newer_too=True))
  reply = ask(2)
  assert (reply.version_start, reply.version_end, reply.version_tokens, reply.versions) == (2, 4, (1, 0, 1), (2, 4))
  with pytest.raises(types.PolicyVersionError, match='2..4, expected 3 or newer'):
    ask(3)


def test_server_errors_are_retried_a_few_times_then_reported():
  with pytest.raises(types.InfrastructureError, match='failed 3 times.*boom'):
    replying('{"error": {"message": "boom"}}', status=500)


def test_a_hung_server_ends_in_a_deadline_error():
  async def go():
    async def handler(_):
      await asyncio.sleep(30)
    async with serving(handler) as client:
      await client.generate(GenerateRequest((1,), 2), timeout_s=0.5)
  start = time.monotonic()
  with pytest.raises(types.InfrastructureError, match='no reply within 0.5 s'):
    asyncio.run(go())
  assert time.monotonic() - start < 5


def test_a_server_that_is_not_there_ends_in_a_deadline_error():
  async def go():
    async with client_lib.EngineClient(f'http://127.0.0.1:{supervision.free_port()}') as client:
      await client.generate(GenerateRequest((1,), 2), timeout_s=0.6)
  with pytest.raises(types.InfrastructureError, match='not back within 0.6 s'):
    asyncio.run(go())


def test_a_server_without_our_extension_is_refused_before_anything_is_published():
  async def go():
    async with serving(healthy) as client:
      await asyncio.to_thread(client.control.check_takes_weights)
  with pytest.raises(types.ConfigError, match='takes no weights .*404.* start it with experiments.serve'):
    asyncio.run(go())


def test_a_reply_cut_off_in_the_middle_is_asked_for_again():
  attempts = []

  async def go():
    async def handler(request):
      attempts.append(await request.json())
      if len(attempts) == 1:
        response = web.StreamResponse(headers={'Content-Length': '500'})
        await response.prepare(request)
        await response.write(json.dumps(GOOD)[:50].encode())
        request.transport.close()
        return response
      return web.json_response(GOOD)
    async with serving(handler) as client:
      return await client.generate(GenerateRequest((1,), 2, seed=9), timeout_s=10)

  assert asyncio.run(go()).token_ids == (4, 5)
  assert len(attempts) == 2 and attempts[0] == attempts[1]


def test_sampling_seeds_depend_on_what_is_sampled_only():
  keys = [(s, u, t, i, n) for s in (0, 1) for u in (0, 1) for t in ('a', 'a1') for i in (0, 1) for n in range(3)]
  seeds = [protocol.sampling_seed(*k) for k in keys]
  assert len(set(seeds)) == len(keys) and all(0 <= s < 2**63 for s in seeds)
  assert [protocol.sampling_seed(*k) for k in reversed(keys)] == seeds[::-1]
  expected = hashlib.sha256('42\x1f1\x1ftask\x1f2\x1f3'.encode()).digest()  # fixed for ever: records are replayed by it
  assert protocol.sampling_seed(42, 1, 'task', 2, 3) == int.from_bytes(expected[:8], 'big') & (2**63 - 1)


@pytest.mark.parametrize('changes', [dict(token_ids=()), dict(max_tokens=0), dict(temperature=float('nan')), dict(seed=-1),
                                     dict(seed=2**63)])
def test_nonsensical_requests_are_refused_at_construction(changes):
  with pytest.raises(ValueError):
    GenerateRequest(**dict(token_ids=(1,), max_tokens=1) | changes)


# Servers without the generate route.


class Completions:
  """A server that has /v1/completions only, as vLLM's answers there; `versions` are what it states, one after the other."""

  def __init__(self, versions=(3,), refusal=403, reply=None):
    self.versions, self.refusal, self.asked = list(versions), refusal, []
    self.reply = reply or {'choices': [{
        'token_ids': [4, 5], 'finish_reason': 'length', 'prompt_logprobs': [None, {'8': {'logprob': -0.5}}],
        'logprobs': {'tokens': ['token_id:4', 'token_id:5'], 'token_logprobs': [-1.0, -2.0]}}]}

  async def refuse(self, _):
    self.asked.append('generate')
    return web.json_response({'error': {'message': 'disabled'}}, status=self.refusal)

  async def version(self, _):
    return web.json_response({'weight_version': str(self.versions.pop(0) if len(self.versions) > 1 else self.versions[0])})

  async def complete(self, request):
    self.asked.append(await request.json())
    return web.json_response(self.reply)

  def __call__(self, *calls, patient=False, weight_info=True):
    """Answers of calls on one client, or their errors."""
    async def go():
      app = web.Application()
      app.add_routes([web.post('/v1/completions', self.complete), web.get('/health', healthy)])
      if self.refusal == 403:
        app.add_routes([web.post('/inference/v1/generate', self.refuse)])
      if weight_info:
        app.add_routes([web.get('/weight_info', self.version)])
      runner = web.AppRunner(app, shutdown_timeout=0.1)
      await runner.setup()
      port = supervision.free_port()
      await web.TCPSite(runner, '127.0.0.1', port).start()
      try:
        async with client_lib.EngineClient(f'http://127.0.0.1:{port}', model='m', timeout_s=5.0, patient=patient) as client:
          return await asyncio.gather(*(call(client) for call in calls), return_exceptions=True)
      finally:
        await runner.cleanup()
    return asyncio.run(go())


def sampling(**changes):
  return lambda client: client.generate(GenerateRequest(**dict(token_ids=(1, 2), max_tokens=2, seed=9, stop_token_ids=(2,)) | changes))


@pytest.mark.parametrize('refusal', [403, 404])
def test_completions_are_asked_the_same_where_the_generate_route_is_closed(refusal, caplog):
  server = Completions(refusal=refusal)
  replies = server(sampling(), sampling(), sampling())  # at once: each finds the route closed
  assert replies == [types.SampledTokens((4, 5), (-1.0, -2.0), 3, 3, types.FinishReason.LENGTH)] * 3
  asked = [body for body in server.asked if body != 'generate']
  assert asked[0] == asked[1] == asked[2] == {
      'model': 'm', 'prompt': [1, 2], 'stream': False, 'max_tokens': 2, 'temperature': 1.0, 'top_p': 1.0, 'top_k': 0, 'min_p': 0.0,
      'repetition_penalty': 1.0, 'seed': 9, 'logprobs': 0, 'stop_token_ids': [2], 'ignore_eos': False, 'return_token_ids': True,
      'return_tokens_as_token_ids': True}
  assert caplog.text.count('has no /inference/v1/generate') == 1


def test_a_version_that_changed_around_a_completion_is_caught():
  (error,) = Completions(versions=(3, 4))(sampling(expected_version=4))
  assert isinstance(error, types.PolicyVersionError) and '3..4, expected 4' in str(error)
  (reply,) = Completions(versions=(3, 4))(sampling())
  assert (reply.version_start, reply.version_end) == (3, 4) and reply.versions == (3, 3)  # not told: the oldest it can be
  (error,) = Completions(versions=(4, 3))(sampling())  # it came back with an older one
  assert isinstance(error, types.InfrastructureError) and 'runs backwards' in str(error)


def test_an_unpublished_server_is_not_asked_for_completions():
  server = Completions(versions=('default',))
  (error,) = server(sampling())
  assert isinstance(error, client_lib.EngineGone) and not error.answered and server.asked == ['generate']


def test_completions_score_without_a_version():
  server = Completions(versions=('default',))
  (scores,) = server(lambda client: client.score((7, 8), 1))
  assert scores == (-0.5,) and server.asked[-1]['prompt_logprobs'] == 0 and 'skip_reading_prefix_cache' not in server.asked[-1]


@pytest.mark.parametrize('choice, told', [
    (dict(token_ids=None), 'not a completion with token ids'),
    (dict(logprobs={'tokens': ['token_id:4'], 'token_logprobs': [-1.0, -2.0]}), 'not a completion with token ids'),
    (dict(logprobs={'tokens': ['token_id:9', 'token_id:5'], 'token_logprobs': [-1.0, -2.0]}), 'log-prob is of token 9'),
    (dict(logprobs=None), '2 sampled ids but 0 log-probs'),
])
def test_completions_that_make_no_sense_are_clear_errors(choice, told):
  server = Completions()
  server.reply['choices'][0] |= choice
  (error,) = server(sampling())
  assert isinstance(error, types.InfrastructureError) and told in str(error)


def test_a_server_that_states_no_version_says_what_it_lacks():
  (error,) = Completions()(sampling(), weight_info=False)
  assert isinstance(error, types.ConfigError) and '--enable-scale-out' in str(error)


def test_an_impatient_client_gives_a_lost_engine_up_at_once():
  async def go():
    async with client_lib.EngineClient(f'http://127.0.0.1:{supervision.free_port()}', patient=False) as client:
      await client.generate(GenerateRequest((1,), 2, request_id='r7'))
  with pytest.raises(client_lib.EngineGone, match="request 'r7': ClientConnectorError") as e:
    asyncio.run(go())
  assert not e.value.answered
