"""Forward on arrival, backward at completion, against the gradient of independent full sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments import offline, reference
from tests.streaming import cases
from ts_jax import types
from ts_jax.models import staged as staged_model
from ts_jax.streaming import sources, staged

_SCORED = 24  # room for scored tokens, of which there are fewer


@pytest.fixture(scope='module')
def params64():
  with jax.enable_x64(True):
    yield cases.tiny_params('float64')


def trajectory(rng, turns: int, prompt: int = 7) -> types.Trajectory:
  """Turns of an observation and an action, of random lengths and masks (possibly without any scored token)."""
  made = []
  ids = lambda n: tuple(int(i) for i in rng.integers(0, cases.TINY.vocab_size, n))
  for t in range(turns):
    action = ids(rng.integers(1, 5))
    sampled = types.SampledTokens(action, (-1.0,) * len(action), 0, 0, types.FinishReason.STOP)
    made.append(types.Turn(t, ids(rng.integers(0, 4)) if t else (), sampled, tuple(bool(x) for x in rng.random(len(action)) < 0.7)))
  return types.Trajectory(0, 0, 0, 'task', 0, ids(prompt), tuple(made), types.TerminalReason.DONE, 1.0)


def streamed(params, t: types.Trajectory, weights, *, keep='all', dtype='float64', teacher=None, head_per_turn=False):
  """Gradient of a trajectory turn by turn."""
  functions = sources.SourceFunctions(cases.TINY, dtype=dtype)
  prompt_ids = np.asarray(t.prompt_ids[:-1], np.int32)
  prompt_tokens = np.zeros((1, 12), np.int32)
  prompt_tokens[0, :len(prompt_ids)] = prompt_ids
  prompt = functions.segment_forward(params, functions.root(), prompt_tokens, np.int32(len(prompt_ids)), prompt_tokens.shape[1])
  kept, before, scored = staged.begin(functions, prompt, 48, keep), t.prompt_ids[-1], 0
  inputs, done, cotangent, gradients = np.zeros((1, 48), np.int32), 0, 0.0, []

  def head(first, positions, targets):
    fill = lambda x, value: np.concatenate([x, np.full(_SCORED - len(x), value, np.asarray(x).dtype)])
    part = slice(first, first + len(positions))
    # Whatever stands at masked places must not enter, NaN included.
    scores = None if teacher is None else fill(np.asarray(teacher[part]), np.nan)
    return staged.head_gradient(functions, params, kept.hidden, fill(np.asarray(positions, np.int32), kept.capacity),
                                fill(np.asarray(targets, np.int32), 0), fill(np.asarray(weights[part], np.float64), 0.0), scores)

  waiting_positions, waiting_targets = [], []
  for turn in t.turns:
    ids = turn.context_ids + turn.sampled.token_ids
    segment = np.asarray((before, *ids[:-1]), np.int32)
    padded = np.zeros((1, 8), np.int32)
    padded[0, :len(segment)] = segment
    inputs[0, done:done + len(segment)] = segment
    kept = staged.turn_forward(functions, params, kept, padded, np.int32(len(segment)), kept.memory.keys.shape[1], keep)
    at = [done + len(turn.context_ids) + i for i, m in enumerate(turn.scored_mask) if m]
    targets = [a for a, m in zip(turn.sampled.token_ids, turn.scored_mask) if m]
    done, before = done + len(segment), ids[-1]
    waiting_positions, waiting_targets = waiting_positions + at, waiting_targets + targets
    if head_per_turn:
      result = head(scored, waiting_positions, waiting_targets)
      gradients.append(result.gradient)
      cotangent = result.cotangent + cotangent
      scored, waiting_positions, waiting_targets = scored + len(at), [], []
  if not head_per_turn:
    result = head(0, waiting_positions, waiting_targets)
    gradients, cotangent = [result.gradient], result.cotangent
  heads = jax.tree.map(lambda *parts: sum(parts), *gradients)
  own, adjoint = staged.complete(functions, params, kept, inputs, prompt, heads, cotangent)
  below = functions.segment_gradient(params, functions.root(), prompt_tokens, adjoint)[0]
  return jax.tree.map(lambda a, b: np.asarray(a, np.float64) + b, own, below)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 5), keep=st.sampled_from(staged_model.KEEP))
def test_grpo_score_gradient_of_any_turns_is_the_full_sequences(params64, seed, turns, keep):
  with jax.enable_x64(True):
    t = trajectory(np.random.default_rng(seed), turns)
    weights = np.full(t.scored_tokens, 0.25)
    got = streamed(params64, t, weights, keep=keep)
    expected, _ = reference.weighted_gradient(cases.TINY, params64, t, weights)
    if not t.scored_tokens:
      assert not any(np.any(x) for x in jax.tree.leaves(got))
    else:
      assert offline.relative_error(got, expected) <= 1e-10


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 5), keep=st.sampled_from(staged_model.KEEP), at_once=st.booleans())
def test_distillation_gradient_of_any_turns_is_the_full_sequences(params64, seed, turns, keep, at_once):
  with jax.enable_x64(True):
    rng = np.random.default_rng(seed)
    t = trajectory(rng, turns)
    teacher = rng.normal(-2.0, 1.0, t.scored_tokens)
    got = streamed(params64, t, np.ones(t.scored_tokens), keep=keep, teacher=teacher, head_per_turn=not at_once)
    expected = reference.opd_gradient(cases.TINY, params64, t, teacher)
    if not t.scored_tokens:
      assert not any(np.any(x) for x in jax.tree.leaves(got))
    else:
      assert offline.relative_error(got, expected) <= 1e-10


def test_equal_teacher_and_student_log_probs_give_exactly_zero():
  params, functions = cases.tiny_params('float32'), sources.SourceFunctions(cases.TINY)
  hidden = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, cases.TINY.width)), jnp.float32)
  places, targets, weights = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32), np.ones(4)
  own = staged.head_gradient(functions, params, hidden, places, targets, weights).log_probs
  zero = staged.head_gradient(functions, params, hidden, places, targets, weights, own)
  assert not any(np.any(x) for x in jax.tree.leaves((zero.gradient, zero.cotangent)))
  some = staged.head_gradient(functions, params, hidden, places, targets, weights, own + 1.0)
  assert all(np.any(x) for x in jax.tree.leaves((some.gradient, some.cotangent)))


def test_what_is_kept_changes_only_rounding_and_memory():
  params, t = cases.tiny_params('float32'), trajectory(np.random.default_rng(5), 4)
  weights = np.ones(t.scored_tokens)
  one = streamed(params, t, weights, keep='all', dtype='float32')
  other = streamed(params, t, weights, keep='inputs', dtype='float32')
  assert offline.relative_error(one, other) <= 2e-6
  config = cases.TINY
  assert staged_model.token_bytes(config, 'inputs') < staged_model.token_bytes(config, 'all')
  kept = staged_model.begin(config, sources.llama.empty_boundary(config), 16, 'all')
  assert sum(x.nbytes for x in jax.tree.leaves((kept.values, kept.memory.keys, kept.memory.values, kept.hidden))) == 16 * staged_model.token_bytes(config, 'all')
  with pytest.raises(ValueError, match="keep='some' is unknown"):
    staged_model.token_bytes(config, 'some')
