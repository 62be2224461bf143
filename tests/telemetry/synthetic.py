"""Writes a run directory that looks like a real one: for tests of its readers, and to look at the report.

    python tests/telemetry/synthetic.py FOLDER [--model FOLDER]
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ts_jax import types
from ts_jax.models import tokenizer as tokenizer_lib
from ts_jax.telemetry import metrics
from ts_jax.telemetry import rundir

HOSTILE = '</script><script>alert("no")</script><img src=x onerror=alert(1)> <!-- é 漢字 \u2028 -->'
FAMILIES = {
    'write_word': ('Create the file {0}.txt that holds the word {1}.', ["printf '{1}' > {0}.txt"]),
    'rename': ('Rename the file {0} to {1}.', ['ls', 'mv {0} {1}']),
    'count_lines': ('Write the number of lines of {0}.log to {1}.', ['ls -l', 'wc -l {0}.log', 'wc -l < {0}.log > {1}']),
    'find_largest': ('Delete the largest file below {0}/.', ['ls -lR {0}', 'rm {0}/{1}.bin']),
}
_WORDS = 'amber birch cedar delta ember fjord grove harbor indigo juniper kestrel lagoon'.split()
_SLOTS, _UPDATES, _GROUPS, _SIZE = 12, 12, 6, 8
_START_S = 1_760_000_000.0


def write_tokenizer(folder: Path) -> Path:
  """Writes a small byte-level tokenizer as a model folder."""
  folder.mkdir(parents=True, exist_ok=True)
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  corpus = [t for f in FAMILIES.values() for t in (f[0], *f[1])] + _WORDS + ['```bash\n```', 'user\nassistant\n', 'I will look at it. ' * 3]
  trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=['<|im_start|>', '<|im_end|>'], show_progress=False,
                                initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
  backend.train_from_iterator(corpus, trainer)
  backend.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '<|im_end|>'}))
  return folder


class _Update:
  """Simulates one update of a streaming run with `_SLOTS` engine slots and one learner lane."""

  def __init__(self, update: int, start_s: float, skill: float, tokenizer: tokenizer_lib.Tokenizer, groups: int, size: int):
    self.update, self.start_s, self.skill, self.tokenizer = update, start_s, skill, tokenizer
    self.random = random.Random(1000 + update)
    self.spans: list[types.Span] = []
    self.slots = [start_s] * _SLOTS
    self.trajectories = [self._trajectory(g, i) for g in range(groups) for i in range(size)]
    self._learn()

  def _span(self, kind, start_s, end_s, **fields):
    self.spans.append(types.Span(kind=kind, start_s=start_s, end_s=end_s, update=self.update, **fields))

  def _trajectory(self, group: int, index: int) -> types.Trajectory:
    family = list(FAMILIES)[group % len(FAMILIES)]
    words = random.Random(f'{self.update}/{group}').sample(_WORDS, 2)
    instruction, commands = FAMILIES[family]
    rng, key = self.random, {'group': group, 'index': index}
    text = ('<|im_start|>system\nYou are an agent in a shell. Reply with one ```bash block.<|im_end|>\n<|im_start|>user\n'
            f'{instruction.format(*words)}<|im_end|>\n<|im_start|>assistant\n')
    prompt = self.tokenizer.encode(text, allow_special=True)
    now = start = heapq.heappop(self.slots)
    turns, context, reason, passed = [], (), types.TerminalReason.MAX_TURNS, 0
    plan = [c.format(*words) for c in commands] + ['submit']
    for step in range(6):
      good = rng.random() < self.skill
      command = plan[min(passed, len(plan) - 1)] if good else rng.choice(['ls', 'cat ' + words[0], 'echo "caf\u00e9 \u6f22\u5b57"', 'help'])
      thought = rng.choice(['', 'I will look at it. ', 'Next: ', f'The file {words[0]} is needed. '])
      readable = good or rng.random() > 0.15
      reply = f'{thought}```bash\n{command}\n```' if readable else f'{thought}{command}'
      ids = self.tokenizer.encode(reply, allow_special=False) + (self.tokenizer.eos_id,)
      log_probs = tuple(-min(12.0, rng.expovariate(1.4 + 4 * self.skill)) for _ in ids)
      engine_end = now + 0.15 + len(ids) * rng.uniform(0.018, 0.03)
      self._span('engine', now, engine_end, turn=step, tokens=len(ids), **key)
      tool_end = engine_end + (rng.lognormvariate(-2.6, 1.1) if readable else 0.0)
      if readable:
        self._span('tool', engine_end, tool_end, turn=step, **key)
      passed += good
      submitted = readable and command == 'submit'
      observation = ('No command found. Reply with one ```bash block.' if not readable else '' if submitted else
                     rng.choice(['(no output)', f'{words[0]}\n{words[1]}\nexit code 0', f'bash: {command}: error\nexit code 1', HOSTILE]))
      turns.append(types.Turn(
          index=step, context_ids=context, scored_mask=(True,) * len(ids), action=command if readable else None, observation=observation,
          sampled=types.SampledTokens(ids, log_probs, self.update, self.update, types.FinishReason.STOP),
          request_start_s=now, request_end_s=engine_end, tool_start_s=engine_end, tool_end_s=tool_end))
      context = self.tokenizer.encode('\n<|im_start|>user\n', True) + self.tokenizer.encode(observation, False) + self.tokenizer.encode(
          '<|im_end|>\n<|im_start|>assistant\n', True)
      now = tool_end
      if submitted:
        reason = types.TerminalReason.DONE
        break
    else:
      reason = reason if readable else types.TerminalReason.PARSE_ERROR
    heapq.heappush(self.slots, now)
    verified = now + rng.uniform(0.15, 0.5)
    self._span('verify', now, verified, **key)
    tests = 3
    done = min(tests, tests * passed // (len(commands) + 1))
    reward = done / tests + (0.5 if done == tests else 0.0)
    return types.Trajectory(
        update=self.update, group=group, index=index, task_id=f'{family}/{self.update:03d}_{group}', policy_version=self.update,
        prompt_ids=prompt, turns=tuple(turns), terminal_reason=reason, reward=reward,
        tests_passed=tuple(f'test_{n}={int(n < done)}' for n in range(tests)), start_s=start, content_s=now, reward_s=verified)

  def _learn(self):
    lane_s = self.start_s
    seen = set()
    for t in sorted(self.trajectories, key=lambda t: t.content_s):
      begin = max(lane_s, t.content_s)
      if t.group not in seen:
        seen.add(t.group)
        self._span('prompt', begin, begin + 0.12, group=t.group, lane=0, tokens=len(t.prompt_ids), ready_s=self.start_s)
        begin += 0.12
      lane_s = begin + 0.02 + 0.0016 * len(t.completion_ids)
      self._span('source', begin, lane_s, group=t.group, index=t.index, lane=0, tokens=len(t.completion_ids), ready_s=t.content_s)
    self.last_reward_s = max(t.reward_s for t in self.trajectories)
    lane_s = max(lane_s, self.last_reward_s)
    self.tail_s = lane_s - self.last_reward_s
    self._span('reduce', lane_s, lane_s + 0.2, lane=0)
    self._span('optimizer', lane_s + 0.2, lane_s + 0.6, lane=0)
    self._span('publish', lane_s + 0.6, lane_s + 1.3)
    self.end_s = lane_s + 1.3

  def record(self) -> metrics.UpdateRecord:
    """Returns the update's metrics record."""
    busy = sum(s.end_s - s.start_s for s in self.spans if s.lane == 0)
    summary = metrics.summarise(self.trajectories, family_of)
    step, rollout = self.end_s - self.start_s, self.last_reward_s - self.start_s
    return metrics.UpdateRecord(
        update=self.update, policy_version=self.update, time_s=self.end_s, **summary, sampler_gap_mean=2e-6 * (1 + self.random.random()),
        sampler_gap_max=3e-5 * (1 + self.random.random()), sampler_kl_k1=1e-8 * self.random.gauss(0, 1),
        sampler_kl_k3=5e-11 * (1 + self.random.random()), sampler_ess=1 - 1e-10, grad_norm=1.8 * math.exp(-self.update / 9) * (0.8 + 0.4 * self.random.random()),
        learning_rate=2e-5, step_s=step, rollout_s=rollout, learner_busy_s=busy, learner_idle_s=step - busy, tail_s=self.tail_s,
        optimizer_s=0.6, publish_s=0.7, tokens_per_s=summary['generated_tokens'] / rollout, skipped_sources=self.random.randrange(4),
        wasted_sources=self.random.randrange(9))


def family_of(task_id: str) -> str:
  """Family of a synthetic task."""
  return task_id.split('/')[0]


def write_run(folder: Path, model_folder: Path, updates: int = _UPDATES, groups: int = _GROUPS, size: int = _SIZE) -> rundir.RunDirectory:
  """Writes a finished run and closes it."""
  tokenizer = tokenizer_lib.Tokenizer.load(model_folder)
  run = rundir.RunDirectory(folder)
  run.open({'seed': 42, 'updates': updates, 'schedule': {'name': 'thundersync'}, 'rollout': {'slots': _SLOTS, 'temperature': 1.0},
            'batch': {'prompts': groups, 'group_size': size}, 'optimizer': {'learning_rate': 2e-5, 'clip': 1.0}})
  writer = metrics.MetricsWriter(run)
  start_s, families = _START_S, {}
  for update in range(updates):
    skill = 0.25 + 0.7 / (1 + math.exp(-(update - updates / 3) / 1.8))
    for split, offset in (('dev', 0.0), ('held_out', -0.15)):
      if update % 4 == 0 or update == updates - 1:
        number = update + (update == updates - 1)
        # What `eval_record` makes of attempts; the attempts themselves are not kept.
        writer.write(metrics.EvalRecord(number, split, max(0.0, 1.6 * (skill + offset) - 0.3), max(0.0, skill + offset - 0.2), 24,
                                        {'count_lines': skill} if split == 'held_out' else {f: skill for f in list(FAMILIES)[:3]}, start_s))
    result = _Update(update, start_s, skill, tokenizer, groups, size)
    for trajectory in sorted(result.trajectories, key=lambda t: t.reward_s):
      run.append_trajectory(trajectory)
      families[trajectory.task_id] = family_of(trajectory.task_id)
    for span in sorted(result.spans, key=lambda s: s.end_s):
      run.append_span(span)
    writer.write(result.record())
    start_s = result.end_s + 0.05
  run.write_manifest({**rundir.environment_facts(), 'model': 'synthetic', 'model_folder': str(model_folder), 'model_checksum': '0' * 16,
                      'task_families': families, 'task_digests': {t: f'{n:08x}' for n, t in enumerate(families)}, 'sandbox': 'bubblewrap',
                      'seed': 42})
  writer.close()
  run.close()
  return run


if __name__ == '__main__':
  parser = argparse.ArgumentParser()
  parser.add_argument('folder', type=Path)
  parser.add_argument('--model', type=Path)
  parser.add_argument('--updates', type=int, default=_UPDATES)
  arguments = parser.parse_args()
  write_run(arguments.folder, arguments.model or write_tokenizer(arguments.folder / 'model'), arguments.updates)
