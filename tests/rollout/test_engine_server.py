"""A real engine process over HTTP: what it answers, what it refuses, and what a vanished client leaves behind."""

import asyncio
import time

import httpx
import numpy as np
import pytest

from tests.rollout import tiny_engine
from tests.rollout.tiny_engine import prompt
from ts_jax import types
from ts_jax.rollout import client as client_lib, control as control_lib
from ts_jax.rollout import protocol
from ts_jax.rollout.client import GenerateRequest


def generate(engine, *requests, **kwargs):
  async def go():
    async with client_lib.EngineClient(engine.url, **kwargs) as client:
      return await asyncio.gather(*(client.generate(r) for r in requests))
  return asyncio.run(go())


def post(engine, **changes):
  body = protocol.generate_body(GenerateRequest((5, 6, 7), 4), 'policy')
  body['sampling_params'] |= changes.pop('sampling_params', {})
  return httpx.post(engine.url + '/inference/v1/generate', json=body | changes, timeout=60)


def test_many_concurrent_requests_get_their_own_replies(engine, model):
  requests = [GenerateRequest(prompt(s % 3, 40), 12, seed=s, expected_version=0, request_id=str(s)) for s in range(24)]
  replies = generate(engine, *requests)
  for request, reply in zip(requests, replies):
    assert reply.finish_reason in (types.FinishReason.LENGTH, types.FinishReason.STOP)
    expected = tiny_engine.reference_log_probs(model.params, request.token_ids + reply.token_ids)[39:]
    np.testing.assert_allclose(reply.log_probs, expected, atol=1e-5)


def test_reply_has_the_parts_of_vllms(engine):
  reply = post(engine, request_id='abc').json()
  choice = reply['choices'][0]
  assert reply['request_id'] == 'abc' and choice['index'] == 0
  assert [c['token_id'] for c in choice['logprobs']['content']] == choice['token_ids']
  assert choice['weight_versions'] == [{'version': 0, 'start': 0, 'end': len(choice['token_ids'])}]
  assert reply['usage']['prompt_tokens'] == 3 and 'cached_tokens' in reply['usage']['prompt_tokens_details']


def test_score_equals_sampler_log_probs(engine, model):
  tokens = prompt(77, 120)

  async def go():
    async with client_lib.EngineClient(engine.url) as client:
      reply = await client.generate(GenerateRequest(tokens, 20, seed=5))
      sequence = tokens + reply.token_ids
      # The second call finds the prefix cached right up to the end, and has to ask in full.
      return sequence, reply, [await client.score(sequence, 120), await client.score(sequence, 1)]

  sequence, reply, (tail, whole) = asyncio.run(go())
  np.testing.assert_allclose(tail, reply.log_probs, atol=1e-5)
  np.testing.assert_allclose(whole, tiny_engine.reference_log_probs(model.params, sequence), atol=1e-5)


def test_equal_trajectories_are_each_scored_in_full_at_most_once(engine, model):
  ids = prompt(78, 200)
  expected = tiny_engine.reference_log_probs(model.params, ids)
  ways = []

  async def go():
    async with client_lib.EngineClient(engine.url) as client:
      post = client._post

      async def recorded(body, *args, **kwargs):
        ways.append((body.get('cache_salt', ''), body['sampling_params']['skip_reading_prefix_cache']))
        return await post(body, *args, **kwargs)

      client._post = recorded
      for trajectory in range(2):
        for end in (80, 120, 160, 200):
          yield end, await client.score(ids[:end], end - 30, salt=f'trajectory {trajectory}')

  async def all_scores():
    return [found async for found in go()]

  for end, found in asyncio.run(all_scores()):
    np.testing.assert_allclose(found, expected[end - 31:end - 1], atol=1e-5)
  assert ways == [('', False)] * 4 + [('', False), ('trajectory 1', False)] * 4


def test_eos_stops_unless_ignored(engine):
  # With temperature 100 the 300 ids are about equally likely; 250 of them are declared stop ids.
  stops = list(range(3, 253))
  stopped = post(engine, sampling_params=dict(temperature=100.0, max_tokens=60, stop_token_ids=stops)).json()['choices'][0]
  assert stopped['finish_reason'] == 'stop' and stopped['stop_reason'] == stopped['token_ids'][-1] in stops
  ignored = post(engine, sampling_params=dict(temperature=100.0, max_tokens=60, stop_token_ids=stops, ignore_eos=True)).json()
  assert len(ignored['choices'][0]['token_ids']) == 60
  biased = [post(engine, sampling_params=dict(temperature=100.0, max_tokens=200, seed=s)).json()['choices'][0] for s in range(8)]
  ended = [c for c in biased if c['finish_reason'] == 'stop']
  assert ended and all(c['token_ids'][-1] == tiny_engine.EOS for c in ended)


@pytest.mark.parametrize('changes, status, message', [
    (dict(model='other'), 404, "serves 'policy'"),
    (dict(token_ids=[]), 400, 'empty'),
    (dict(token_ids=[1] * 256), 400, '256 tokens'),
    (dict(token_ids=[1, 300]), 400, 'outside the vocabulary of 300'),
    (dict(token_ids=[1, -1]), 400, 'outside the vocabulary'),
    (dict(token_ids=[1, True]), 400, 'list of integers'),
    (dict(token_ids='text'), 400, 'list of integers'),
    (dict(stream=True), 400, 'stream'),
    (dict(sampling_params=dict(top_p=0.9)), 400, 'top_p=0.9 is not supported'),
    (dict(sampling_params=dict(top_k=5)), 400, 'top_k=5 is not supported'),
    (dict(sampling_params=dict(temprature=1)), 400, 'temprature'),
    (dict(sampling_params=dict(temperature=-1)), 400, 'temperature=-1'),
    (dict(sampling_params=dict(seed=-1)), 400, 'seed=-1'),
    (dict(sampling_params=dict(max_tokens=0)), 400, 'max_tokens=0'),
    (dict(sampling_params=dict(max_tokens=1.5)), 400, 'max_tokens=1.5'),
    (dict(sampling_params=dict(stop_token_ids=[300])), 400, 'stop_token_ids holds 300'),
])
def test_unservable_requests_are_refused_with_the_reason(engine, changes, status, message):
  reply = post(engine, **changes)
  assert reply.status_code == status and message in reply.json()['error']['message']


def test_says_that_it_takes_weights(engine):
  control_lib.EngineControl(engine.url).check_takes_weights()


def test_bodies_that_are_not_requests_are_refused(engine):
  for content in (b'{', b'[]', b'null'):
    reply = httpx.post(engine.url + '/inference/v1/generate', content=content)
    assert reply.status_code == 400 and reply.json()['error']['message']
  assert httpx.get(engine.url + '/nothing').json()['error']['code'] == 404
  assert 'new_version' in httpx.post(engine.url + '/update_weight_version', json={'new_version': 'x'}).json()['error']['message']
  assert 'keep, abort or wait' in httpx.post(engine.url + '/pause?mode=maybe').json()['error']['message']
  assert 'load_weights' in httpx.post(engine.url + '/collective_rpc', json={'method': 'exec'}).json()['error']['message']


def test_refusals_reach_the_caller_as_config_errors(engine):
  with pytest.raises(types.ConfigError, match='shorten it'):
    generate(engine, GenerateRequest(tuple([1] * 300), 4))
  with pytest.raises(types.ConfigError, match="'other' is not served"):
    generate(engine, GenerateRequest((1, 2), 4), model='other')


def test_a_client_that_goes_away_frees_its_slot(engine):
  async def go():
    async with client_lib.EngineClient(engine.url) as client:
      tasks = [asyncio.create_task(client.generate(GenerateRequest((5, s), 250, ignore_eos=True))) for s in range(9)]
      while (await client.health())['running'] < 4:
        await asyncio.sleep(0.005)
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
      end = time.monotonic() + 20
      while (h := await client.health())['running'] or h['waiting']:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
      return h['decoded_tokens']

  before = engine.control.health()['decoded_tokens']
  assert asyncio.run(go()) - before < 9 * 250  # they were cut off, not finished


def test_another_version_than_expected_is_an_error(engine):
  with pytest.raises(types.PolicyVersionError, match='version 0..0, expected 3'):
    generate(engine, GenerateRequest((1, 2), 4, expected_version=3))


def test_one_client_serves_several_event_loops(engine):
  client = client_lib.EngineClient(engine.url)
  replies = []
  for _ in range(2):
    async def go():
      replies.append(await client.generate(GenerateRequest((9, 8, 7), 5, seed=1)))
      await client.close()
    asyncio.run(go())
  assert replies[0].token_ids == replies[1].token_ids
