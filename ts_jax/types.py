"""The vocabulary of ts_jax: frozen records that every layer shares, and no logic beyond their own validity.

A *trajectory* is a token record: the prompt, then turns.  Each turn is the context appended since the
previous turn (an observation rendered through the chat template, never scored) followed by the ids the engine sampled.
Where a template rewrites history, a turn says how much of it stayed, and what came in its place is part of its context: the
record then holds a tree of ids, of which each turn was sampled behind one path.
Ids are the record; text is kept beside them for people and parsers and is never re-encoded.

Every record converts to plain JSON values with `to_json` and back with `from_json`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types as _types
import typing
from typing import Any, Mapping


class TsJaxError(Exception):
  """Base of every error ts_jax raises on purpose: says what was wrong, which value, and what to do."""


class ConfigError(TsJaxError):
  """A configuration value, task folder, weight file or tokenizer is unusable.  Raised before rollout starts."""


class PolicyVersionError(TsJaxError):
  """A record or an engine reply belongs to another policy version than the update in progress."""


class InfrastructureError(TsJaxError):
  """An engine, sandbox or verifier failed.  Such work is retried and never scored."""


class FinishReason(enum.Enum):
  """Why the engine stopped sampling a turn."""

  STOP = 'stop'  # a stop id was sampled (it is part of the turn and is scored)
  LENGTH = 'length'  # the turn's token limit, the trajectory's, or the context's was reached
  ABORT = 'abort'  # the engine gave the request up: never trained on


class TerminalReason(enum.Enum):
  """Why a trajectory ended.  `TERMINAL_OUTCOMES` documents what follows from each."""

  DONE = 'done'  # the agent submitted
  MAX_TURNS = 'max_turns'
  MAX_TOKENS = 'max_tokens'  # generated tokens of the whole trajectory
  CONTEXT_OVERFLOW = 'context_overflow'  # the next turn would not fit the context
  PARSE_ERROR = 'parse_error'  # the last permitted turn held no readable action
  TOOL_TIMEOUT = 'tool_timeout'  # a command outlived its limit; the shell and its process tree were ended
  INFRASTRUCTURE = 'infrastructure'  # engine, sandbox or verifier failure


@dataclasses.dataclass(frozen=True)
class TerminalOutcome:
  """What a terminal reason implies: is the state verified for a reward, are sampled tokens scored, is it retried."""

  verified: bool
  scored: bool
  retried: bool


TERMINAL_OUTCOMES: Mapping[TerminalReason, TerminalOutcome] = _types.MappingProxyType({
    TerminalReason.DONE: TerminalOutcome(verified=True, scored=True, retried=False),
    TerminalReason.MAX_TURNS: TerminalOutcome(verified=True, scored=True, retried=False),
    TerminalReason.MAX_TOKENS: TerminalOutcome(verified=True, scored=True, retried=False),
    TerminalReason.CONTEXT_OVERFLOW: TerminalOutcome(verified=True, scored=True, retried=False),
    TerminalReason.PARSE_ERROR: TerminalOutcome(verified=True, scored=True, retried=False),
    TerminalReason.TOOL_TIMEOUT: TerminalOutcome(verified=True, scored=True, retried=False),
    TerminalReason.INFRASTRUCTURE: TerminalOutcome(verified=False, scored=False, retried=True),
})


class Record:
  """Mixin: JSON conversion for frozen dataclasses, driven by their field types."""

  def to_json(self) -> dict[str, Any]:
    """Returns plain JSON values (enums by value, tuples as lists)."""
    return {f.name: _to_json(getattr(self, f.name)) for f in dataclasses.fields(self)}

  @classmethod
  def from_json(cls, values: Mapping[str, Any]):
    """Inverse of `to_json`.

    Raises:
      ConfigError: a field is unknown or missing.
    """
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - {f.name for f in dataclasses.fields(cls)})
    if unknown:
      raise ConfigError(f'{cls.__name__} record has unknown fields {unknown}: was it written by another version?')
    try:
      return cls(**{k: _from_json(hints[k], v) for k, v in values.items()})
    except TypeError as e:
      raise ConfigError(f'{cls.__name__} record is incomplete or malformed: {e}') from e


def _to_json(value):
  if isinstance(value, enum.Enum):
    return value.value
  if isinstance(value, Record):
    return value.to_json()
  if isinstance(value, (tuple, list)):
    return [_to_json(v) for v in value]
  return value


def _from_json(hint, value):
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if value is None:
    return None
  if origin in (typing.Union, _types.UnionType):
    return _from_json(next(a for a in args if a is not type(None)), value)
  if origin is tuple:
    return tuple(_from_json(args[0], v) for v in value)
  if isinstance(hint, type) and issubclass(hint, enum.Enum):
    return hint(value)
  if isinstance(hint, type) and issubclass(hint, Record):
    return hint.from_json(value)
  return value


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ValueError(message)


def _require_scores(scorer: str, turn: int, log_probs: tuple[float, ...], sampled: int) -> None:
  _require(len(log_probs) == sampled, f'turn {turn}: {len(log_probs)} {scorer} log-probs for {sampled} sampled ids')
  for i, value in enumerate(log_probs):
    _require(math.isfinite(value) and value <= 1e-4,
             f'turn {turn}: {scorer} log-prob {value} of sampled id {i} is not finite or is positive')


# Frozen models that score what the student samples; each has its log-probs in a turn.
SCORERS = ('teacher', 'reference')


@dataclasses.dataclass(frozen=True)
class SampledTokens(Record):
  """What an engine returns for one request.

  Attributes:
    token_ids: sampled ids, the stop id included.
    log_probs: log-probability of each id under the sampled distribution, same length.
    version_start: policy version that produced the first token.
    version_end: policy version that produced the last token.
    finish_reason: why sampling stopped.
    version_tokens: how many tokens each version from `version_start` to `version_end` produced; empty where it is one version, and where
      the engine does not tell.
  """

  token_ids: tuple[int, ...]
  log_probs: tuple[float, ...]
  version_start: int
  version_end: int
  finish_reason: FinishReason
  version_tokens: tuple[int, ...] = ()

  def __post_init__(self):
    _require(len(self.log_probs) == len(self.token_ids),
             f'{len(self.token_ids)} sampled ids but {len(self.log_probs)} log-probs')
    _require(all(math.isfinite(x) and x <= 1e-4 for x in self.log_probs), 'a sampler log-prob is not finite or is positive')
    _require(self.version_start <= self.version_end, f'version span {self.version_start}..{self.version_end} runs backwards')
    span = self.version_end - self.version_start + 1
    _require(not self.version_tokens or (len(self.version_tokens) == span and sum(self.version_tokens) == len(self.token_ids)),
             f'version_tokens {self.version_tokens} are not of {len(self.token_ids)} ids and versions {self.version_start}..{self.version_end}')

  @property
  def versions(self) -> tuple[int, ...]:
    """Policy version of each id; the oldest it can be where the engine does not tell."""
    counts = self.version_tokens or (len(self.token_ids),)
    return tuple(self.version_start + i for i, count in enumerate(counts) for _ in range(count))


@dataclasses.dataclass(frozen=True)
class Turn(Record):
  """One agentic turn: appended context, then sampled action, then what the tool did with it.

  Attributes:
    index: 0-based position in the trajectory.
    context_ids: ids appended before sampling (observation through the chat template); empty for turn 0.
    sampled: the engine's reply.
    scored_mask: which sampled ids carry loss, same length as `sampled.token_ids`.
    action: the parsed command, or None when the reply could not be parsed.
    observation: the tool's (truncated) output as text, or the parser's fixed error.
    request_start_s, request_end_s: engine request, seconds on the run's clock.
    tool_start_s, tool_end_s: tool execution, seconds on the run's clock (equal when no tool ran).
    teacher_log_probs: the teacher's log-probability of each sampled id (temperature 1), or None where no teacher scored it.
    reference_log_probs: the same of the reference model, for a KL to it.
    keeps: ids of the path so far, prompt included, that the context is appended to; None for all of them.
  """

  index: int
  context_ids: tuple[int, ...]
  sampled: SampledTokens
  scored_mask: tuple[bool, ...]
  action: str | None = None
  observation: str = ''
  request_start_s: float = 0.0
  request_end_s: float = 0.0
  tool_start_s: float = 0.0
  tool_end_s: float = 0.0
  teacher_log_probs: tuple[float, ...] | None = None
  reference_log_probs: tuple[float, ...] | None = None
  keeps: int | None = None

  def __post_init__(self):
    _require(self.index >= 0, f'turn index {self.index} is negative')
    _require(len(self.scored_mask) == len(self.sampled.token_ids),
             f'turn {self.index}: mask of {len(self.scored_mask)} for {len(self.sampled.token_ids)} sampled ids')
    for scorer, log_probs in self.scores.items():
      _require_scores(scorer, self.index, log_probs, len(self.sampled.token_ids))

  @property
  def scores(self) -> dict[str, tuple[float, ...]]:
    """Log-probs of the sampled ids by scorer, of those that scored them."""
    named = {'teacher': self.teacher_log_probs, 'reference': self.reference_log_probs}
    return {scorer: log_probs for scorer, log_probs in named.items() if log_probs is not None}


@dataclasses.dataclass(frozen=True)
class Trajectory(Record):
  """The token record of one attempt at one task.

  Attributes:
    update: logical update k this trajectory belongs to.
    group: index of its group (prompt) within the update.
    index: index within the group.
    task_id: task identifier.
    policy_version: version its first token was sampled from: the oldest, since versions only advance.  Under a schedule that does not
      publish in flight every token's; otherwise later turns, and later tokens of a turn, may have newer ones (`SampledTokens`).
    prompt_ids: the prompt shared by the group (system, demonstrations, instruction), never scored.
    turns: the turns, in order.
    terminal_reason: why it ended.
    reward: None until the verifier has answered.
    tests_passed: verifier's detail, "name=1/0" strings.
    start_s, content_s, reward_s: start, content fixed, reward fixed; seconds on the run's clock.
  """

  update: int
  group: int
  index: int
  task_id: str
  policy_version: int
  prompt_ids: tuple[int, ...]
  turns: tuple[Turn, ...]
  terminal_reason: TerminalReason
  reward: float | None = None
  tests_passed: tuple[str, ...] = ()
  start_s: float = 0.0
  content_s: float = 0.0
  reward_s: float = 0.0

  def __post_init__(self):
    _require(len(self.prompt_ids) > 0, f'trajectory {self.key}: empty prompt')
    _require([t.index for t in self.turns] == list(range(len(self.turns))), f'trajectory {self.key}: turns out of order')
    _require(self.reward is None or math.isfinite(self.reward), f'trajectory {self.key}: reward {self.reward} is not finite')
    path = len(self.prompt_ids)
    for t in self.turns:
      kept = path if t.keeps is None else t.keeps
      _require(len(self.prompt_ids) <= kept <= path, f'trajectory {self.key}: turn {t.index} keeps {t.keeps} ids of a path of {path}; the '
               f'{len(self.prompt_ids)} of the prompt must stay')
      path = kept + len(t.context_ids) + len(t.sampled.token_ids)
    if self.reward is not None and not TERMINAL_OUTCOMES[self.terminal_reason].verified:
      raise ValueError(f'trajectory {self.key}: {self.terminal_reason.value} is never scored, yet has reward {self.reward}')

  @property
  def key(self) -> tuple[int, int, int]:
    """(update, group, index): unique within a run."""
    return (self.update, self.group, self.index)

  @property
  def branches(self) -> bool:
    """A turn rewrote history: `completion_ids` is not one sequence, but the turns of a tree, in order."""
    return any(t.keeps is not None for t in self.turns)

  def paths(self) -> tuple[tuple[int, ...], ...]:
    """For each turn, all ids before its context: the prompt and what stayed of the turns before."""
    before, path = [], self.prompt_ids
    for t in self.turns:
      before.append(path[:t.keeps])
      path = before[-1] + t.context_ids + t.sampled.token_ids
    return tuple(before)

  @property
  def longest_completion(self) -> int:
    """Number of ids behind the prompt on the longest path: of `completion_ids`, where there is one path only."""
    longest = path = len(self.prompt_ids)
    for t in self.turns:
      path = (path if t.keeps is None else t.keeps) + len(t.context_ids) + len(t.sampled.token_ids)
      longest = max(longest, path)
    return longest - len(self.prompt_ids)

  @property
  def completion_ids(self) -> tuple[int, ...]:
    """Every id after the prompt."""
    return tuple(i for t in self.turns for i in t.context_ids + t.sampled.token_ids)

  @property
  def completion_mask(self) -> tuple[bool, ...]:
    """Scored mask over `completion_ids`."""
    return tuple(m for t in self.turns for m in (False,) * len(t.context_ids) + t.scored_mask)

  @property
  def completion_log_probs(self) -> tuple[float, ...]:
    """Sampler log-probs over `completion_ids`; 0 where nothing was sampled."""
    return tuple(p for t in self.turns for p in (0.0,) * len(t.context_ids) + t.sampled.log_probs)

  @property
  def completion_teacher_log_probs(self) -> tuple[float, ...] | None:
    """Teacher log-probs over `completion_ids`; 0 where nothing was sampled; None if a turn with sampled ids has no scores."""
    return self._completion_scores('teacher')

  @property
  def completion_reference_log_probs(self) -> tuple[float, ...] | None:
    """Reference log-probs over `completion_ids`, as the teacher's."""
    return self._completion_scores('reference')

  def _completion_scores(self, scorer: str) -> tuple[float, ...] | None:
    if any(scorer not in t.scores and t.sampled.token_ids for t in self.turns):
      return None
    return tuple(p for t in self.turns for p in (0.0,) * len(t.context_ids) + t.scores.get(scorer, ()))

  @property
  def versions(self) -> tuple[int, ...]:
    """Policy version of each sampled token."""
    return tuple(v for t in self.turns for v in t.sampled.versions)

  @property
  def scored_tokens(self) -> int:
    """L_i: number of scored tokens."""
    return sum(sum(t.scored_mask) for t in self.turns)


@dataclasses.dataclass(frozen=True)
class Group(Record):
  """The trajectories sampled for one prompt of an update."""

  index: int
  task_id: str
  prompt_ids: tuple[int, ...]
  trajectories: tuple[Trajectory, ...]

  def __post_init__(self):
    _require(len(self.trajectories) > 0, f'group {self.index} ({self.task_id}) has no trajectories')
    for t in self.trajectories:
      _require(t.group == self.index and t.prompt_ids == self.prompt_ids,
               f'trajectory {t.key} does not belong to group {self.index} ({self.task_id})')


@dataclasses.dataclass(frozen=True)
class LogicalBatch(Record):
  """B_k: the groups of one update; `policy_version` is the learner's, and in sync and thundersync that of every token."""

  update: int
  policy_version: int
  groups: tuple[Group, ...]

  def __post_init__(self):
    _require([g.index for g in self.groups] == list(range(len(self.groups))), f'update {self.update}: groups out of order')
    for t in self.trajectories:
      _require(t.update == self.update, f'trajectory {t.key} is not of update {self.update}')

  @property
  def trajectories(self) -> tuple[Trajectory, ...]:
    """All trajectories, by group then index."""
    return tuple(t for g in self.groups for t in g.trajectories)


@dataclasses.dataclass(frozen=True)
class GroupPlan(Record):
  """What an update will sample: registered before rollout starts, so that the barrier knows what to wait for."""

  index: int
  task_id: str
  prompt_ids: tuple[int, ...]
  size: int

  def __post_init__(self):
    _require(self.size > 0, f'group {self.index} ({self.task_id}) has size {self.size}')
    _require(len(self.prompt_ids) > 0, f'group {self.index} ({self.task_id}): empty prompt')


@dataclasses.dataclass(frozen=True)
class TurnFixed(Record):
  """Rollout event: the tokens of one more turn are fixed.

  Its command has not run yet: `turn` has no action, no observation and equal tool times.  The trajectory has the whole turn.
  """

  update: int
  group: int
  index: int
  turn: Turn


@dataclasses.dataclass(frozen=True)
class TurnScored(Record):
  """Rollout event: `scorer` has scored the sampled ids of turn `turn`, which was announced by `TurnFixed` before."""

  update: int
  group: int
  index: int
  turn: int
  log_probs: tuple[float, ...]
  scorer: str = 'teacher'

  def __post_init__(self):
    _require(self.scorer in SCORERS, f'scorer {self.scorer!r} is none of {SCORERS}')
    _require_scores(self.scorer, self.turn, self.log_probs, len(self.log_probs))


@dataclasses.dataclass(frozen=True)
class ContentFixed(Record):
  """Rollout event: the trajectory's tokens are final; its reward may still be pending."""

  trajectory: Trajectory


@dataclasses.dataclass(frozen=True)
class RewardFixed(Record):
  """Rollout event: the verifier answered; `trajectory.reward` is set."""

  trajectory: Trajectory


@dataclasses.dataclass(frozen=True)
class RolloutFailed(Record):
  """Rollout event: the rollout side cannot go on.  The update stops with this message."""

  update: int
  message: str


RolloutEvent = TurnFixed | TurnScored | ContentFixed | RewardFixed | RolloutFailed


@dataclasses.dataclass(frozen=True)
class Span(Record):
  """One interval of work: a line of a run's trace.  `ts_jax.telemetry.trace` has the kinds, and checks what it reads.

  Attributes:
    kind: one of `telemetry.trace.KINDS`.
    start_s, end_s: seconds on the run's clock.
    update, group, index, turn: what it belongs to (-1 where it does not apply).
    lane: learner lane (-1 for rollout work).
    tokens: tokens processed.
    ready_s: when its inputs were fixed.
    task: task id of its group, on learner work.
    version: policy version it was computed at; of an engine request, that of its first token.
    scored: scored tokens among those processed.
    members: trajectories of the group that a source, or its fold, is for; several ran as one batch.
    work: of a source what was known when it started, 'final', 'known' or 'content' (see `streaming.scheduler`); of a prompt the pass,
      'forward' or 'backward'; of a fold 'held' where the gradient had waited for its reward.
  """

  kind: str
  start_s: float
  end_s: float
  update: int
  group: int = -1
  index: int = -1
  turn: int = -1
  lane: int = -1
  tokens: int = 0
  ready_s: float = -1.0
  task: str = ''
  version: int = -1
  scored: int = 0
  members: tuple[int, ...] = ()
  work: str = ''
