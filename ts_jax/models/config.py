"""Shapes of a decoder-only language model, read from and written to a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from ts_jax import types

_SUPPORTED = ('llama',)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and constants of a Llama-family student.

  Attributes:
    vocab_size, width, ffn_width, layers, heads, kv_heads, head_dim: the usual sizes.
    rope_base: base of the rotary embedding.
    rms_eps: epsilon of RMS norm.
    tied: the output head is the transposed embedding.
    max_positions: longest context the model was made for, tokens.
  """

  vocab_size: int
  width: int
  ffn_width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  rope_base: float = 10000.0
  rms_eps: float = 1e-5
  tied: bool = True
  max_positions: int = 2048

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise types.ConfigError(f'{self.heads} attention heads do not divide into {self.kv_heads} key/value heads')
    if self.head_dim % 2:
      raise types.ConfigError(f'head_dim {self.head_dim} is odd: rotary embedding needs pairs')

  @classmethod
  def from_hf(cls, values: Mapping[str, Any]) -> 'ModelConfig':
    """Reads the dictionary of a Hugging Face config.json.

    Raises:
      ConfigError: another architecture, or a feature this family does not have.
    """
    if values.get('model_type') not in _SUPPORTED:
      raise types.ConfigError(f"model_type {values.get('model_type')!r} is not supported: use one of {list(_SUPPORTED)}")
    rope = values.get('rope_parameters') or values.get('rope_scaling') or {}
    if rope.get('rope_type', rope.get('type', 'default')) != 'default':
      raise types.ConfigError(f'rotary scaling {rope} is not supported: use a checkpoint with plain rotary embedding')
    for flag in ('attention_bias', 'mlp_bias'):
      if values.get(flag):
        raise types.ConfigError(f'{flag}=true is not part of the Llama family here')
    if values.get('hidden_act', 'silu') != 'silu':
      raise types.ConfigError(f"hidden_act {values['hidden_act']!r} is not supported: silu is")
    heads = values['num_attention_heads']
    return cls(
        vocab_size=values['vocab_size'], width=values['hidden_size'], ffn_width=values['intermediate_size'],
        layers=values['num_hidden_layers'], heads=heads, kv_heads=values.get('num_key_value_heads') or heads,
        head_dim=values.get('head_dim') or values['hidden_size'] // heads,
        rope_base=float(rope.get('rope_theta', values.get('rope_theta', 10000.0))),
        rms_eps=values.get('rms_norm_eps', 1e-6), tied=values.get('tie_word_embeddings', False),
        max_positions=values.get('max_position_embeddings', 2048))

  def to_hf(self) -> dict[str, Any]:
    """Returns the config.json dictionary that transformers and vLLM load."""
    return dict(
        architectures=['LlamaForCausalLM'], model_type='llama', vocab_size=self.vocab_size, hidden_size=self.width,
        intermediate_size=self.ffn_width, num_hidden_layers=self.layers, num_attention_heads=self.heads,
        num_key_value_heads=self.kv_heads, head_dim=self.head_dim, rope_theta=self.rope_base, rms_norm_eps=self.rms_eps,
        tie_word_embeddings=self.tied, max_position_embeddings=self.max_positions, hidden_act='silu', attention_bias=False,
        mlp_bias=False, torch_dtype='float32')
