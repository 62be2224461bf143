"""The engine against an independent full pass: caches, chunks, batching, versions, pauses and death change nothing else."""

import time

import numpy as np
import pytest

from tests.rollout import tiny_engine
from tests.rollout.tiny_engine import Asked, ask, prompt, reference_log_probs
from ts_jax import types
from ts_jax.rollout.engine import core as core_lib


def matches_reference(params, tokens, result, temperature=1.0):
  expected = reference_log_probs(params, list(tokens) + result.token_ids, temperature)[len(tokens) - 1:]
  np.testing.assert_allclose(result.log_probs, expected, atol=1e-5)


@pytest.mark.parametrize('length', [1, 2, 15, 17, 65, 250, 300])  # every chunk size, with and without padding, and growth
def test_sampled_log_probs_equal_a_full_pass(make_core, model, length):
  core, tokens = make_core(), prompt(length, length)
  result = ask(core, tokens, max_tokens=20)
  assert len(result.token_ids) == 20 and result.finish_reason == 'length'
  matches_reference(model.params, tokens, result)


def test_temperature_scales_the_distribution_and_zero_is_greedy(make_core, model):
  core, tokens = make_core(), prompt(1, 30)
  warm = ask(core, tokens, max_tokens=20, temperature=0.6, seed=3)
  matches_reference(model.params, tokens, warm, 0.6)
  greedy = [ask(core, tokens, temperature=0.0, seed=s) for s in (1, 2)]
  assert greedy[0].token_ids == greedy[1].token_ids
  logits = tiny_engine.reference_logits(model.params, list(tokens) + greedy[0].token_ids)[len(tokens) - 1:-1]
  chosen = logits[np.arange(8), greedy[0].token_ids]
  np.testing.assert_allclose(chosen, logits.max(axis=-1), atol=1e-5)


def test_a_request_does_not_depend_on_its_batch(make_core):
  core = make_core()
  asks = [dict(tokens=prompt(s, 20 + 31 * s), max_tokens=30, seed=s) for s in range(7)]
  together = [r.result() for r in [Asked(core, **a) for a in asks]]
  core.reset_cache()
  alone = [ask(core, **a) for a in reversed(asks)][::-1]
  for a, b in zip(together, alone):
    assert a.token_ids == b.token_ids
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
  assert len({tuple(a.token_ids) for a in together}) == 7


def test_seeds_reproduce_and_differ(make_core):
  core, tokens = make_core(), prompt(5, 12)
  results = [ask(core, tokens, seed=s).token_ids for s in (1, 2, 2**40 + 1, 1)]
  assert results[0] == results[3]
  assert len({tuple(r) for r in results}) == 3  # the high word counts too


def test_a_group_prefills_its_prompt_once(make_core, model):
  core, tokens = make_core(), prompt(6, 200)
  core.pause('keep').result()
  asked = [Asked(core, tokens, seed=s) for s in range(4)]
  core.resume()
  results = [a.result() for a in asked]
  assert core.stats['prefilled_tokens'] == 199
  assert sorted(r.cached_tokens for r in results) == [0, 199, 199, 199]
  for r in results:
    matches_reference(model.params, tokens, r)


def test_next_turn_continues_from_the_previous_one(make_core, model):
  core, tokens = make_core(), prompt(7, 100)
  first = ask(core, tokens)
  longer = tokens + tuple(first.token_ids) + prompt(8, 20)
  second = ask(core, longer)
  assert second.cached_tokens == 107  # all but the last sampled token, whose keys were never needed
  matches_reference(model.params, longer, second)


def test_prefixes_that_lost_their_slot_come_back_from_the_store(make_core, model):
  core = make_core(slots=2)
  prompts = [prompt(s, 150 + 40 * s) for s in range(5)]
  for p in prompts:
    ask(core, p)
  assert core.counts()['stored_prefixes'] >= 3
  again = [ask(core, p, seed=9) for p in prompts]
  assert [r.cached_tokens for r in again] == [len(p) - 1 for p in prompts]
  for p, r in zip(prompts, again):
    matches_reference(model.params, p, r)


def test_store_is_bounded_and_may_be_absent(make_core, model):
  core = make_core(slots=1, store_bytes=0)
  for s in (0, 1, 0):
    result = ask(core, prompt(s, 150))
  assert result.cached_tokens == 0 and core.counts()['stored_prefixes'] == 0
  entry = 192 * 2 * 2 * 2 * 8 * 4  # a 150-token prefix, rounded to 192: layers, keys and values, heads, width, bytes
  core = make_core(slots=1, store_bytes=2 * entry)
  for s in range(6):
    ask(core, prompt(s, 150))
  assert core.counts()['stored_prefixes'] == 2


def test_capacity_shrinks_when_contexts_get_shorter_and_nothing_is_lost(make_core, model):
  core, long = make_core(), prompt(1, 550)
  ask(core, long)
  grown = core.counts()['capacity']
  result = ask(core, prompt(2, 20))
  assert core.counts()['capacity'] < grown
  matches_reference(model.params, prompt(2, 20), result)
  again = ask(core, long)
  assert again.cached_tokens == 549
  matches_reference(model.params, long, again)


def test_salts_do_not_share(make_core):
  core, tokens = make_core(), prompt(3, 90)
  ask(core, tokens, salt='a')
  assert ask(core, tokens, salt='b').cached_tokens == 0
  assert ask(core, tokens, salt='a').cached_tokens == 89


def test_running_streams_advance_while_a_long_prompt_is_prefilled(make_core):
  core = make_core()
  stream = Asked(core, prompt(1, 10), max_tokens=500)
  while core.stats['steps'] < 5:
    time.sleep(0.01)
  ask(core, prompt(2, 590), max_tokens=1)
  assert core.counts()['running'] == 1
  core.cancel(stream.request)


def test_prompt_log_probs_equal_a_full_pass(make_core, model):
  core, tokens = make_core(), prompt(4, 300)
  expected = reference_log_probs(model.params, tokens)
  whole = ask(core, tokens, score=True, reuse=False, max_tokens=1)
  assert whole.prompt_log_probs[0] is None
  np.testing.assert_allclose(whole.prompt_log_probs[1:], expected, atol=1e-5)
  tail = ask(core, tokens + (5, 6, 7), score=True, max_tokens=1)
  known = [p is not None for p in tail.prompt_log_probs]
  assert known == [i > tail.cached_tokens for i in range(303)]


def test_weight_update_in_flight_recomputes_and_labels_every_token(make_core, model):
  core, tokens, new = make_core(), prompt(2, 80), tiny_engine.random_params(1)
  asked = Asked(core, tokens, max_tokens=400)
  while core.stats['decoded_tokens'] < 10:
    time.sleep(0.002)
  core.pause('keep').result()
  core.load(tiny_engine.handed_over(new))
  core.set_version(1)
  core.resume()
  result = asked.result()
  (v0, a0, b0), (v1, a1, b1) = result.spans
  assert (v0, a0, v1, b1) == (0, 0, 1, 400) and b0 == a1 >= 10
  sequence = list(tokens) + result.token_ids
  for params, low, high in ((model.params, 0, b0), (new, b0, 400)):
    expected = reference_log_probs(params, sequence)[len(tokens) - 1:]
    np.testing.assert_allclose(result.log_probs[low:high], expected[low:high], atol=1e-5)


def test_loading_weights_drops_every_cache(make_core):
  core, tokens, new = make_core(slots=1), prompt(2, 80), tiny_engine.random_params(1)
  for other in (tokens, prompt(3, 80), tokens):
    before = ask(core, other)
  assert before.cached_tokens == 79 and core.counts()['stored_prefixes'] >= 1
  core.load(tiny_engine.handed_over(new))
  after = ask(core, tokens)
  assert after.cached_tokens == 0 and core.counts()['stored_prefixes'] == 0
  matches_reference(new, tokens, after)


def test_loading_under_running_requests_is_refused(make_core, model):
  core = make_core()
  asked = Asked(core, prompt(1, 10), max_tokens=500)
  while not core.stats['steps']:
    time.sleep(0.002)
  with pytest.raises(core_lib.BusyError, match='pause'):
    core.load(model.params)
  core.cancel(asked.request)


def test_reset_drops_slots_and_store_also_under_running_requests(make_core, model):
  core = make_core(slots=2)
  prompts = [prompt(s, 150) for s in range(4)]
  for p in prompts:
    ask(core, p)
  asked = Asked(core, prompts[0], max_tokens=300)
  while core.stats['decoded_tokens'] < 40:
    time.sleep(0.002)
  core.reset_cache()
  matches_reference(model.params, prompts[0], asked.result())
  core.reset_cache()
  assert core.counts()['stored_prefixes'] == 0
  assert [ask(core, p).cached_tokens for p in prompts] == [0] * 4


def test_pause_modes(make_core):
  core = make_core(slots=2)
  asked = [Asked(core, prompt(s, 20), max_tokens=500) for s in range(3)]
  while core.stats['decoded_tokens'] < 5:
    time.sleep(0.002)
  core.pause('abort').result()
  results = [a.result() for a in asked]
  assert [r.finish_reason for r in results] == ['abort'] * 3 and results[0].token_ids and not results[2].token_ids
  core.resume()
  short, late = Asked(core, prompt(8, 20), max_tokens=30), None
  while core.counts()['running'] == 0:
    time.sleep(0.002)
  paused = core.pause('wait')
  late = Asked(core, prompt(9, 20), max_tokens=3)
  paused.result(30)
  assert short.result().finish_reason == 'length'
  assert core.counts() | dict(waiting=1, running=0, paused=True) == core.counts()
  core.resume()
  assert len(late.result().token_ids) == 3


def test_stop_id_ends_and_is_part_of_the_reply(make_core):
  core, tokens = make_core(), prompt(1, 20)
  free = ask(core, tokens, max_tokens=30)
  stop = free.token_ids[12]
  stopped = ask(core, tokens, max_tokens=30, stop_ids=[stop])
  end = free.token_ids.index(stop) + 1
  assert stopped.token_ids == free.token_ids[:end] and stopped.finish_reason == 'stop' and stopped.stop_id == stop


def test_context_limit_ends_a_request(make_core):
  core = make_core(max_context=64)
  result = ask(core, prompt(1, 60), max_tokens=100)
  assert len(result.token_ids) == 4 and result.finish_reason == 'length'


def test_non_finite_weights_fail_the_request_and_say_so(make_core):
  core, bad = make_core(), tiny_engine.random_params(0)
  bad['final_norm'] = {'scale': np.full(32, np.nan, np.float32)}
  core.load(bad)
  with pytest.raises(core_lib.EngineError, match='non-finite'):
    ask(core, prompt(1, 10))
  assert core.error is None


def test_a_dying_engine_thread_fails_everyone_and_hangs_nobody(make_core):
  core = make_core(slots=1)
  asked = [Asked(core, prompt(s, 10), max_tokens=500) for s in range(3)]
  with pytest.raises(core_lib.EngineError):
    core._forward = None  # the next step raises inside the engine thread
    asked[0].result()
  for a in asked[1:]:
    with pytest.raises(core_lib.EngineError, match='engine thread died'):
      a.result()
  with pytest.raises(core_lib.EngineError, match='engine thread died'):
    core.submit(asked[0].request)


def test_sizes_that_cannot_be_served_are_refused(model):
  with pytest.raises(types.ConfigError, match='1024 positions'):
    core_lib.EngineCore(tiny_engine.CONFIG, model.params, max_context=4096)
