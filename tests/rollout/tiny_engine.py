"""A tiny random model: on disk, as parameters, and with an independent full-sequence forward pass."""

import json
import pathlib
import queue

import jax
import numpy as np
import scipy.special

from ts_jax.models import llama
from ts_jax.models import weights as weights_lib
from ts_jax.models.config import ModelConfig
from ts_jax.rollout.engine import requests

EOS = 2
CONFIG = ModelConfig(vocab_size=300, width=32, ffn_width=64, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=1024)


def random_params(seed: int):
  """Weights large enough that the distributions are far from uniform."""
  return jax.tree.map(np.asarray, llama.init_params(CONFIG, jax.random.key(seed), scale=0.15))


def handed_over(params):
  """A pytree that the engine may empty."""
  return {**params, 'layers': {k: dict(v) for k, v in params['layers'].items()}}


def write_folder(folder: pathlib.Path, params) -> pathlib.Path:
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps({**CONFIG.to_hf(), 'eos_token_id': EOS}))
  weights_lib.save_weights(folder / 'model.safetensors', params, CONFIG, np.float32)
  return folder


@jax.jit
def _reference(params, ids):
  hidden, _ = llama.forward(CONFIG, params, ids[None], llama.empty_boundary(CONFIG))
  return hidden[0] @ llama.head_matrix(params).T


def reference_logits(params, ids) -> np.ndarray:
  """Logits [len(ids), V] from one full pass without any cache."""
  padded = np.zeros(-(-len(ids) // 256) * 256, np.int32)
  padded[:len(ids)] = ids
  return np.asarray(_reference(params, padded))[:len(ids)]


def reference_log_probs(params, ids, temperature: float = 1.0) -> np.ndarray:
  """Log-probs of ids[1:], from one full pass without any cache."""
  log_probs = scipy.special.log_softmax(reference_logits(params, ids[:-1]).astype(np.float64) / temperature, axis=-1)
  return log_probs[np.arange(len(ids) - 1), np.asarray(ids[1:])]


def prompt(seed: int, length: int) -> tuple[int, ...]:
  return tuple(int(t) for t in np.random.default_rng(seed).integers(3, CONFIG.vocab_size, length))


class Asked:
  """A request handed to an in-process engine."""

  def __init__(self, core, tokens, max_tokens=8, temperature=1.0, seed=0, stop_ids=(), salt='', score=False, reuse=True):
    self._replies = queue.SimpleQueue()
    self.request = requests.Request(tuple(tokens), max_tokens, temperature, seed, frozenset(stop_ids), salt, score, reuse,
                                    self._replies.put)
    core.submit(self.request)

  def result(self) -> requests.Result:
    outcome = self._replies.get(timeout=60)
    if isinstance(outcome, BaseException):
      raise outcome
    return outcome


def ask(core, tokens, **kwargs) -> requests.Result:
  return Asked(core, tokens, **kwargs).result()
