"""Sends weights files to one vLLM server through its own weight-transfer API: `sender.py URL BACKEND`.

The learner has no torch, so this runs in the server's environment, on a GPU of its own or the learner's.  It keeps the connection (for
NCCL a process group: rank 0 here, the server's workers behind it) and reads lines of JSON {"path", "version"}; each is answered by a
line of JSON, {"sent": bytes} or {"error": message}.  Depends on torch, safetensors and vLLM only.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import urllib.request

import safetensors
import torch
from vllm.distributed.weight_transfer import base, clients


class File(base.WeightSource):
  """The tensors of the file that is sent next."""

  path = ''

  def metadata(self):
    with safetensors.safe_open(self.path, framework='pt') as file:
      tensors = ((name, file.get_tensor(name)) for name in file.keys())
      return [base.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]

  def __iter__(self):
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else 'cpu'
    with safetensors.safe_open(self.path, framework='pt') as file:
      for name in file.keys():
        yield name, file.get_tensor(name).to(device)


class Client(clients.HTTPVLLMWeightSyncClient):
  """vLLM's own, which labels what it finishes."""

  version = ''

  def finish_weight_update(self, weight_version: str | None = None) -> None:
    super().finish_weight_update(weight_version or self.version)


def connect(url: str, backend: str, source: File, client: Client):
  """The trainer's side: NCCL, or 'MODULE:FUNCTION' called with client and source."""
  if backend != 'nccl':
    module, _, function = backend.partition(':')
    return getattr(importlib.import_module(module), function)(client, source)
  from vllm.distributed.weight_transfer import nccl_engine
  with urllib.request.urlopen(f'{url}/get_world_size', timeout=30) as reply:
    workers = json.load(reply)['world_size']
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  return nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(
      nccl_engine.NCCLTrainerInitInfo(master_address='127.0.0.1', master_port=port, world_size=workers + 1), client=client, source=source)


def main() -> None:
  """Serves until its input ends."""
  url, backend = sys.argv[1:]
  answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no answer
  source, client, engine = File(), Client(url), None
  for line in sys.stdin:
    order = json.loads(line)
    source.path, client.version = order['path'], str(order['version'])
    try:
      engine = engine or connect(url, backend, source, client)
      engine.send_weights()
      answer = {'sent': os.path.getsize(source.path)}
    except Exception as e:  # handed over, whatever it is
      answer = {'error': f'{type(e).__name__}: {e}'}
    print(json.dumps(answer), file=answers, flush=True)
    if 'error' in answer:
      os._exit(1)  # a group whose collective failed cannot be used or joined: the next order meets a new process


if __name__ == '__main__':
  main()
