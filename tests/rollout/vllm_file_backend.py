"""A weight-transfer backend of vLLM's that needs no GPU: the worker reads the file whose path it is told.  Runs inside vLLM."""

import dataclasses

import safetensors
from ts_jax_vllm_extension import _repack_tied
from vllm.distributed.weight_transfer import base, factory
from vllm.model_executor.model_loader import reload


@dataclasses.dataclass
class Init(base.WeightTransferInitInfo):
  pass


@dataclasses.dataclass
class Update(base.WeightTransferUpdateInfo):
  path: str


class Worker(base.WeightTransferEngine):
  init_info_cls, update_info_cls = Init, Update
  initialised = False

  def init_transfer_engine(self, init_info):
    self.initialised = True

  def start_weight_update(self):
    reload.initialize_layerwise_reload(self.model)

  def receive_weights(self, update_info):
    assert self.initialised
    with safetensors.safe_open(update_info.path, framework='pt') as file:
      self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())

  def finish_weight_update(self):
    reload.finalize_layerwise_reload(self.model, self.model_config)
    _repack_tied(self.model)

  def shutdown(self):
    self.initialised = False


def register():
  """The entry point of the group vllm.general_plugins; called in every process of the server."""
  if 'test_file' not in factory.WeightTransferEngineFactory._registry:
    factory.WeightTransferEngineFactory.register_engine('test_file', Worker)


class Trainer:
  def __init__(self, client, source):
    self._client, self._source = client, source
    client.init_weight_transfer_engine({})

  def send_weights(self):
    assert [m.name for m in self._source.metadata()] == [name for name, _ in self._source]
    self._client.start_weight_update()
    self._client.update_weights({'path': self._source.path})
    self._client.finish_weight_update()
