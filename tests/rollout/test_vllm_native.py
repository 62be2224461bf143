"""vLLM's own weight-transfer routes, driven by the sender; the backend is a test's, because vLLM has none for a CPU."""

import os
import pathlib
import shutil

import pytest

from tests import placement
from tests.rollout import fault_stage
from tests.rollout.test_vllm_publication import stepped
from ts_jax import types
from ts_jax.models import weights
from ts_jax.rollout import publication
from ts_jax.rollout.publication import native
from ts_jax.rollout.vllm import environment, process


def test_versions_arrive_through_vllms_own_routes(tmp_path):
  folder, config, params = fault_stage.write_model(tmp_path / 'model', seed=1), fault_stage.SIZES, fault_stage.random_params(1)
  python = environment.ensure(pathlib.Path(__file__).parents[2] / '.venv-vllm', 'cpu')
  engine = process.VllmProcess(python, folder, log_path=tmp_path / 'vllm.log', slots=4, max_context=256, weight_transfer='test_file',
                               cores=placement.engine_cores(), bring_up=lambda control: control.set_version(0))
  plugin = tmp_path / 'vllm_extension'
  shutil.copyfile(pathlib.Path(__file__).with_name('vllm_file_backend.py'), plugin / 'vllm_file_backend.py')
  info = plugin / 'test_plugin-1.dist-info'
  info.mkdir()
  (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: test-plugin\nVersion: 1\n')
  (info / 'entry_points.txt').write_text('[vllm.general_plugins]\ntest_file = vllm_file_backend:register\n')
  exchange = tmp_path / 'exchange'
  transfer = native.NativeTransfer(exchange, 'float32', python, 'vllm_file_backend:Trainer',
                                   {**os.environ, 'PYTHONPATH': str(plugin)}, timeout_s=300.0)
  publisher = publication.Publisher([engine], exchange, probe=publication.learner_probe(config, range(100, 196)), transfer=transfer,
                                    restart_timeout_s=20.0)
  assert "vLLM's own weight transfer" in publisher.description and 'probe' in publisher.description
  with engine:
    reference = tmp_path / 'reference.safetensors'
    for version, rate in ((1, 0.0), (2, 1e-3)):
      params = stepped(params, rate)
      published = publisher.publish(params, config, version)
      assert engine.control.weight_info().version == version
      assert weights.save_weights(reference, params, config) == published.checksum
      assert engine.control.differing_weights(str(reference))[1] == 0
    sender = transfer._senders[engine.url]
    assert sender.alive
    transfer._path = lambda version: tmp_path / 'nowhere'  # the sender meets a file that is not there
    with pytest.raises(types.InfrastructureError, match='did not take the weights of version 3.*nowhere'):
      publisher.publish(params, config, 3)
    assert engine.control.is_paused() and not sender.alive
    transfer._path = lambda version: exchange / f'weights-{version}.safetensors'
    publisher.publish(params, config, 4)  # by a new sender
    assert engine.control.weight_info().version == 4 and engine.control.differing_weights(str(reference))[1] == 0
    publisher.close()
  assert not list(exchange.iterdir()) and not transfer._senders
