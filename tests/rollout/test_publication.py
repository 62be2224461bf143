"""Publications to real embedded engines: differences, their fallbacks, and the probe."""

import os
import signal
import threading

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.rollout import tiny_engine
from ts_jax import types
from ts_jax.models import safetensors_file, weights
from ts_jax.rollout import control as control_lib, publication
from ts_jax.rollout.publication import probe as probe_lib, sparse

BF16 = ml_dtypes.bfloat16
PROMPT = tiny_engine.prompt(9, 120)


def stepped(params, rate: float, seed: int = 0):
  """The parameters after an optimizer step that moves every weight by `rate`."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: (x + rate * rng.choice([-1, 1], x.shape)).astype(np.float32), params)


def as_published(params):
  return jax.tree.map(lambda x: x.astype(BF16).astype(np.float32), params)


def probe(tolerance: float = 1e-4):
  made = publication.learner_probe(tiny_engine.CONFIG, PROMPT)
  return publication.Probe(made.token_ids, lambda params: made.log_probs(as_published(params)), tolerance)


@pytest.fixture
def params():
  return tiny_engine.random_params(4)


@pytest.fixture
def publisher(engine, tmp_path):
  made = publication.Publisher([engine], tmp_path / 'exchange', BF16, probe=probe(), restart_timeout_s=5.0)
  yield made
  made.close()


def served_log_probs(engine):
  values, _ = engine.control.prompt_log_probs(PROMPT[:100])
  return np.array(values[1:], float)


def assert_serves(engine, published, params):
  info = engine.control.weight_info()
  assert (info.version, info.checksum) == (published.version, published.checksum)
  assert published.checksum == weights.weights_checksum(params, tiny_engine.CONFIG, BF16)
  engine.control.reset_prefix_cache()
  np.testing.assert_allclose(served_log_probs(engine), tiny_engine.reference_log_probs(as_published(params), PROMPT[:100]), atol=1e-5)


def test_a_small_step_is_published_as_a_difference_with_the_same_bits(engine, publisher, params):
  assert 'changed weights' in publisher.description and 'bfloat16' in publisher.description and 'probe' in publisher.description
  sizes = []
  for version in range(11, 14):
    published = publisher.publish(params, tiny_engine.CONFIG, version)
    delivery = publisher.deliveries[engine.url]
    assert (delivery.version, delivery.sparse) == (version, version > 11)
    assert_serves(engine, published, params)
    sizes.append(delivery.size_bytes)
    params = stepped(params, 1e-6, version)
  assert max(sizes[1:]) < 0.2 * sizes[0]


def test_nothing_changed_and_everything_changed(engine, publisher, params):
  publisher.publish(params, tiny_engine.CONFIG, 21)
  assert_serves(engine, publisher.publish(params, tiny_engine.CONFIG, 22), params)
  assert publisher.deliveries[engine.url].sparse
  other = tiny_engine.random_params(5)
  assert_serves(engine, publisher.publish(other, tiny_engine.CONFIG, 23), other)
  assert not publisher.deliveries[engine.url].sparse  # a difference would be larger than the file
  other = stepped(other, 1e-6)
  assert_serves(engine, publisher.publish(other, tiny_engine.CONFIG, 24), other)
  assert publisher.deliveries[engine.url].sparse


def test_a_replica_that_missed_a_version_or_was_loaded_by_others_gets_whole_files(engine, start_engine, publisher, params, tmp_path):
  late = start_engine()
  publisher.publish(params, tiny_engine.CONFIG, 31)
  publisher.add(late)
  params = stepped(params, 1e-6)
  assert_serves(late, publisher.publish(params, tiny_engine.CONFIG, 32), params)
  assert (publisher.deliveries[engine.url].sparse, publisher.deliveries[late.url].sparse) == (True, False)
  strange = tmp_path / 'strange.safetensors'
  engine.control.load_weights(str(strange), weights.save_weights(strange, tiny_engine.random_params(6), tiny_engine.CONFIG, BF16))
  params = stepped(params, 1e-6, 1)
  assert_serves(engine, publisher.publish(params, tiny_engine.CONFIG, 33), params)
  assert (publisher.deliveries[engine.url].sparse, publisher.deliveries[late.url].sparse) == (False, True)


def test_a_restarted_replica_gets_the_current_version_in_full_and_the_next_as_a_difference(start_engine, params, tmp_path):
  publisher = publication.Publisher([], tmp_path, BF16, probe=probe())
  engine = start_engine(bring_up=publisher.bring_up_to_date)
  publisher.add(engine)
  publisher.publish(params, tiny_engine.CONFIG, 1)
  params = stepped(params, 1e-6)
  published = publisher.publish(params, tiny_engine.CONFIG, 2)
  os.kill(engine.pid, signal.SIGKILL)
  while not engine.restarts:
    threading.Event().wait(0.05)
  engine.wait_ready(60)
  assert_serves(engine, published, params)
  assert not publisher.deliveries[engine.url].sparse
  params = stepped(params, 1e-6, 1)
  assert_serves(engine, publisher.publish(params, tiny_engine.CONFIG, 3), params)
  assert publisher.deliveries[engine.url].sparse


def test_a_damaged_patch_is_noticed_by_the_checksum_of_the_result_and_the_weights_come_in_full(engine, publisher, params, monkeypatch):
  publisher.publish(params, tiny_engine.CONFIG, 41)
  written = safetensors_file.write

  def damaged(path, *args):
    crcs = written(path, *args)
    if path.name.startswith('patch'):
      data = bytearray(path.read_bytes())
      data[-1] ^= 1
      path.write_bytes(data)
    return crcs

  monkeypatch.setattr(safetensors_file, 'write', damaged)
  params = stepped(params, 1e-6)
  assert_serves(engine, publisher.publish(params, tiny_engine.CONFIG, 42), params)
  assert not publisher.deliveries[engine.url].sparse


def test_a_file_that_is_no_patch_is_an_error_and_the_engine_serves_what_it_did(engine, publisher, params, tmp_path):
  published = publisher.publish(params, tiny_engine.CONFIG, 51)
  path, values = tmp_path / 'p.safetensors', {'unknown.gaps': np.zeros(1, np.uint8), 'unknown.values': np.zeros(1, np.uint16)}
  safetensors_file.write(path, {n: safetensors_file.TensorSpec(v.shape, v.dtype) for n, v in values.items()}, values.__getitem__)
  with pytest.raises(types.InfrastructureError, match='no patch of these weights'):
    engine.control.apply_patch(str(path), published.checksum, 'x')
  assert_serves(engine, published, params)
  params = stepped(params, 1e-6)
  assert_serves(engine, publisher.publish(params, tiny_engine.CONFIG, 52), params)


def test_float32_goes_in_full_unless_asked_otherwise(engine, params, tmp_path):
  publisher = publication.Publisher([engine], tmp_path)
  assert 'whole files' in publisher.description
  publisher.publish(params, tiny_engine.CONFIG, 61)
  publisher = publication.Publisher([engine], tmp_path, mode='sparse')
  publisher.publish(params, tiny_engine.CONFIG, 62)
  params = {**params, 'final_norm': {'scale': params['final_norm']['scale'] * 2}}
  published = publisher.publish(params, tiny_engine.CONFIG, 63)
  assert publisher.deliveries[engine.url].sparse and published.checksum == weights.weights_checksum(params, tiny_engine.CONFIG)
  with pytest.raises(types.ConfigError, match="publication 'smoke'"):
    publication.Publisher([], tmp_path, mode='smoke')


def test_a_publication_without_room_leaves_the_next_one_possible(engine, publisher, params, monkeypatch):
  publisher.publish(params, tiny_engine.CONFIG, 71)

  def full(path, *args):
    raise safetensors_file.DiskFullError(f'no room for {path}')

  monkeypatch.setattr(safetensors_file, 'write', full)
  with pytest.raises(safetensors_file.DiskFullError, match='patch-72'):
    publisher.publish(stepped(params, 1e-6), tiny_engine.CONFIG, 72)
  with pytest.raises(types.InfrastructureError, match='publish again'):
    publisher.bring_up_to_date(engine)
  monkeypatch.undo()
  assert_serves(engine, publisher.publish(params, tiny_engine.CONFIG, 72), params)


def test_the_probe_stops_a_replica_that_computes_with_other_weights(engine, params, tmp_path):
  good = probe()
  wrong = publication.Probe(good.token_ids, lambda p: good.log_probs(tiny_engine.random_params(8)), good.tolerance)
  publisher = publication.Publisher([engine], tmp_path, BF16, probe=wrong, restart_timeout_s=1.0)
  with pytest.raises(types.InfrastructureError, match=f'{engine.url} gives the probe prompt.*it is paused'):
    publisher.publish(params, tiny_engine.CONFIG, 81)
  assert engine.control.is_paused()
  engine.control.resume()


def test_the_probe_finds_caches_that_were_kept(engine, publisher, params, monkeypatch):
  publisher.publish(params, tiny_engine.CONFIG, 91)
  # An engine that ignores every request to drop its caches, as one with running requests may: the last step is to ask once more
  # before the probe's own question.
  resume = control_lib.EngineControl.resume

  def resume_and_refill(control):
    resume(control)
    control.prompt_log_probs(PROMPT)

  monkeypatch.setattr(control_lib.EngineControl, 'resume', resume_and_refill)
  with pytest.raises(types.InfrastructureError, match='kept keys and values of .* tokens across the publication'):
    publisher.publish(stepped(params, 1e-6), tiny_engine.CONFIG, 92)
  monkeypatch.undo()
  engine.control.resume()


def test_tolerances_know_the_dtypes_of_servers():
  assert set(probe_lib.TOLERANCES) == {'float32', 'float16', 'bfloat16'}
  with pytest.raises(types.ConfigError, match='int8'):
    publication.learner_probe(tiny_engine.CONFIG, PROMPT, 'int8')


def test_a_patch_does_not_depend_on_the_callers_arrays(params):
  old = sparse.bits(np.array([1, 2, 3], np.float32))
  new = old.copy()
  new[1] ^= 5
  patch = sparse.diff(old, new)
  new[:] = 0
  result = old.copy()
  sparse.apply(result, patch)
  assert result[1] == old[1] ^ 5
