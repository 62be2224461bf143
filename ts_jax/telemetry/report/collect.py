"""Reads a run directory into the compact JSON that the report page draws."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Iterable, Mapping, Sequence

from ts_jax import types
from ts_jax.models import tokenizer as tokenizer_lib
from ts_jax.telemetry import metrics
from ts_jax.telemetry import rundir
from ts_jax.telemetry import trace
from ts_jax.telemetry.report import schedules

SPAN_KINDS = tuple(trace.KINDS)
_MAX_TEXT = 6000  # characters of one observation or prompt that the page carries
_REPLACEMENT = '\ufffd'


@dataclasses.dataclass(frozen=True)
class Caps:
  """How much of a very long run the page carries.  Whole updates are left out, evenly; the page says so.

  Attributes:
    trajectories: most trajectories in the browser.
    spans: most spans in the timelines.
  """

  trajectories: int = 2000
  spans: int = 60_000


def collect(run: rundir.RunDirectory, caps: Caps = Caps(), beside: Sequence[rundir.RunDirectory] = ()) -> dict[str, Any]:
  """Returns the page's data as JSON values; timelines of `beside` under the run's own.

  Raises:
    ConfigError: a folder is not a run directory, or a file in it is damaged.
  """
  config, manifest = run.read_config(), run.read_manifest() if run.manifest_path.exists() else {}
  records = run.read_metrics()
  updates = sorted((r for r in records if r['kind'] == 'update'), key=lambda r: r['update'])
  tokenizer, tokenizer_note = _load_tokenizer(manifest.get('model_folder'))
  texts = TokenTexts(tokenizer)
  browser, browser_note = _trajectories(run, manifest, texts, caps.trajectories)
  timelines, timeline_note = _timelines(run.trace.read(), caps.spans)
  return metrics.finite({
      'config': config,
      'manifest': {k: v for k, v in manifest.items() if k not in ('task_digests', 'task_families')},
      'tasks': len(manifest.get('task_digests') or {}),
      'outcome': dataclasses.asdict(metrics.outcome(records)),
      'full_reward': metrics.FULL_REWARD,
      'updates': updates,
      'evals': sorted((r for r in records if r['kind'] == 'eval'), key=lambda r: r['update']),
      'kinds': list(SPAN_KINDS),
      'timelines': timelines,
      'schedules': _schedules([run, *beside]) if beside else [],
      'trajectories': browser,
      'tokens': texts.table(),
      'notes': [n for n in (tokenizer_note, browser_note, timeline_note) if n],
  })


def family_of(task_id: str, manifest: Mapping[str, Any]) -> str:
  """Returns a task's family: as the manifest says, else what stands before the last '/' or '-' of its id."""
  known = (manifest.get('task_families') or {}).get(task_id)
  if known:
    return known
  cut = max(task_id.rfind('/'), task_id.rfind('-'))
  return task_id[:cut] if cut > 0 else task_id


class TokenTexts:
  """Text of ids; each token's text is stored once for the page."""

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer | None):
    self._tokenizer = tokenizer
    self._table: dict[int, str] = {}

  def table(self) -> dict[str, str]:
    """Returns id -> text of every sampled id seen."""
    return {str(k): v for k, v in sorted(self._table.items())}

  def text(self, ids: Sequence[int]) -> str:
    """Returns the text of appended ids (the ids themselves without a tokenizer), cut when very long."""
    if self._tokenizer is None:
      return shorten(' '.join(map(str, ids)))
    return shorten(self._tokenizer.decode(ids))

  def sampled(self, ids: Sequence[int]) -> list[str] | None:
    """Records the ids' texts.

    Returns:
      None when the table is enough, else one text a token: of a character cut into several tokens the first carries it.
    """
    if self._tokenizer is None:
      return None
    for i in ids:
      if i not in self._table:
        self._table[i] = self._tokenizer.decode([i])
    if not any(_REPLACEMENT in self._table[i] for i in ids):
      return None
    return pieces(ids, self._tokenizer.decode)


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
  """Returns one text a token whose concatenation is the text of all; a cut character stands at its first token."""
  texts, start = [''] * len(ids), 0
  for end in range(1, len(ids) + 1):
    text = decode(ids[start:end])
    # A character has at most 4 bytes: what is still broken after 4 tokens is not going to become one.
    if text.endswith(_REPLACEMENT) and end < len(ids) and end - start < 4:
      continue
    texts[start], start = text, end
  return texts


def shorten(text: str) -> str:
  """Cuts the middle out of a very long text, and says so."""
  if len(text) <= _MAX_TEXT:
    return text
  half = _MAX_TEXT // 2
  return f'{text[:half]}\n[... {len(text) - 2 * half} characters left out of this page ...]\n{text[-half:]}'


def evenly(items: Sequence[int], sizes: Mapping[int, int], cap: int) -> list[int]:
  """Chooses items whose sizes sum to at most `cap`: first, last and evenly between; always at least one."""
  if sum(sizes[i] for i in items) <= cap:
    return list(items)
  for count in range(len(items) - 1, 1, -1):
    chosen = sorted({items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)})
    if sum(sizes[i] for i in chosen) <= cap:
      return chosen
  return [items[-1]]


def _load_tokenizer(folder: str | None) -> tuple[tokenizer_lib.Tokenizer | None, str]:
  if not folder:
    return None, 'The manifest names no model folder: token ids are shown instead of text.'
  try:
    return tokenizer_lib.Tokenizer.load(folder), ''
  except types.ConfigError as e:
    return None, f'The model folder {folder} has no usable tokenizer any more: token ids are shown instead of text. ({e})'


def _trajectories(run: rundir.RunDirectory, manifest: Mapping[str, Any], texts: TokenTexts, cap: int) -> tuple[dict, str]:
  """Returns {'prompts': [...], 'items': [...]} and a note about what was left out."""
  updates = run.updates_with_trajectories()
  counts = {}
  # Only one update is held at a time: a long run's trajectories need not fit the memory.
  for u in updates:
    with open(run.trajectories / f'update_{u:06d}.jsonl', 'rb') as f:
      counts[u] = sum(1 for _ in f)
  chosen = evenly(updates, counts, cap) if updates else []
  prompts: dict[tuple[int, ...], int] = {}
  prompt_texts, items = [], []
  for u in chosen:
    for t in run.read_trajectories(u):
      if t.prompt_ids not in prompts:
        prompts[t.prompt_ids] = len(prompts)
        prompt_texts.append({'text': texts.text(t.prompt_ids), 'tokens': len(t.prompt_ids)})
      items.append(_trajectory(t, prompts[t.prompt_ids], family_of(t.task_id, manifest), texts))
  note = ''
  if len(chosen) < len(updates):
    note = f'The trajectory browser holds {len(items)} of {sum(counts.values())} trajectories: updates {_listed(chosen)} of {len(updates)}.'
  return {'prompts': prompt_texts, 'items': items}, note


def _trajectory(t: types.Trajectory, prompt: int, family: str, texts: TokenTexts) -> dict[str, Any]:
  return {
      'u': t.update, 'g': t.group, 'i': t.index, 'task': t.task_id, 'family': family, 'version': t.policy_version, 'prompt': prompt,
      'end': t.terminal_reason.value, 'reward': t.reward, 'success': metrics.is_success(t), 'tests': list(t.tests_passed),
      'seconds': [round(t.content_s - t.start_s, 3), round(t.reward_s - t.content_s, 3)], 'turns': [_turn(turn, texts) for turn in t.turns],
  }


def _turn(turn: types.Turn, texts: TokenTexts) -> dict[str, Any]:
  ids = turn.sampled.token_ids
  values: dict[str, Any] = {
      'context': [len(turn.context_ids), texts.text(turn.context_ids)], 'ids': list(ids),
      'lp': [round(x, 3) for x in turn.sampled.log_probs], 'finish': turn.sampled.finish_reason.value,
      'action': None if turn.action is None else shorten(turn.action), 'seen': shorten(turn.observation),
      'seconds': [round(turn.request_end_s - turn.request_start_s, 3), round(turn.tool_end_s - turn.tool_start_s, 3)],
  }
  split = texts.sampled(ids)
  if split is not None:
    values['pieces'] = split
  if turn.keeps is not None:
    values['keeps'] = turn.keeps
  if not all(turn.scored_mask):
    values['unscored'] = [n for n, scored in enumerate(turn.scored_mask) if not scored]
  return values


def _timelines(spans: Iterable[Mapping[str, Any]], cap: int) -> tuple[dict[str, Any], str]:
  """Returns update -> {'start', 'spans': rows of numbers} and a note about what was left out."""
  by_update: dict[int, list[Mapping[str, Any]]] = {}
  for span in spans:
    if span['update'] >= 0 and span['kind'] in SPAN_KINDS:
      by_update.setdefault(span['update'], []).append(span)
  updates = sorted(by_update)
  chosen = evenly(updates, {u: len(by_update[u]) for u in updates}, cap) if updates else []
  timelines = {}
  for u in chosen:
    start = min(s['start_s'] for s in by_update[u])
    rows = sorted(by_update[u], key=lambda s: s['start_s'])
    timelines[str(u)] = {'start': start, 'spans': [_row(s, start) for s in rows]}
  note = ''
  if len(chosen) < len(updates):
    note = f'Timelines are shown for updates {_listed(chosen)} of {len(updates)}.'
  return timelines, note


def _schedules(runs: Sequence[rundir.RunDirectory]) -> list[dict[str, Any]]:
  """Timelines of runs; shares in whole percent."""
  percent = lambda shares: [round(100 * float(v)) for v in shares]
  return [{'name': t.name, 'bin': t.bin_s, 'rollout': percent(t.rollout), 'learner': percent(t.learner), 'steps': list(t.steps_s),
           'end': t.end_s, 'idle': list(t.idle())} for t in schedules.timelines([schedules.of_run(r) for r in runs])]


def _row(span: Mapping[str, Any], start: float) -> list[Any]:
  """[kind, start, duration, group, index, turn, lane, tokens, ready]; milliseconds after the update's first span."""
  ready = span['ready_s']
  return [SPAN_KINDS.index(span['kind']), _ms(span['start_s'] - start), _ms(span['end_s'] - span['start_s']), span['group'], span['index'],
          span['turn'], span['lane'], span['tokens'], _ms(ready - start) if ready > 0 else None]


def _ms(seconds: float) -> float:
  return round(max(0.0, seconds) * 1000, 2) if math.isfinite(seconds) else 0.0


def _listed(numbers: Sequence[int]) -> str:
  if len(numbers) <= 8:
    return ', '.join(map(str, numbers))
  return f'{numbers[0]}, {numbers[1]}, {numbers[2]}, ..., {numbers[-1]} ({len(numbers)})'
