"""One trajectory: ask the engine, run the command, append what is new, until a limit or the agent ends it.

Where the chat template rewrites history, the next request is what stays of the path and what came in place of the rest; the turn
says how much stayed (`types.Turn.keeps`).

How a trajectory ends.  Every reason here leaves content that is verified for a reward and whose sampled tokens are
scored; none is retried.  Conditions are tested after each turn, in this order, and the first that holds is recorded:

| terminal reason    | holds when                                                                                       |
|--------------------|--------------------------------------------------------------------------------------------------|
| `done`             | the turn's command ran `submit` (also when a limit was reached with it)                          |
| `tool_timeout`     | the command outlived `tool_timeout_s`; its process tree and the shell have been ended            |
| `context_overflow` | prompt, turns (what the template keeps of them) and the pending observation leave no token of    |
|                    | `max_context_tokens` for a reply; that observation is not appended, and no turn is removed       |
| `max_tokens`       | `max_trajectory_tokens` have been sampled                                                        |
| `parse_error`      | `max_turns` turns have been taken and the last held no readable action                           |
| `max_turns`        | `max_turns` turns have been taken                                                                |

A reply cut by a token limit is parsed like any other (its block must be closed) and its command is run, also when no
further turn follows: the verifier sees the state after the last action.  An unreadable reply consumes its turn and is
answered by a fixed observation.

`infrastructure`: an engine, environment or verifier failure is never a trajectory.  The attempt is made again with the same
seeds on a fresh environment; once the content is fixed, the recorded actions are replayed on a fresh environment and only
the verification is repeated.  When the retries are used up the error is raised.  A scorer's failure is raised at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from typing import Any, Awaitable, Callable, Protocol, Sequence

from ts_jax import types
from ts_jax.agents import environment as environment_lib
from ts_jax.agents import limits as limits_lib
from ts_jax.agents import observation
from ts_jax.agents import parser
from ts_jax.agents import prompt as prompt_lib
from ts_jax.agents import shell as shell_lib
from ts_jax.agents import teacher as teacher_lib
from ts_jax.rollout import protocol

_STEP_MARGIN_S = 30.0  # for ending a process tree after its timeout
_BACKOFF_S = 0.25
_log = logging.getLogger(__name__)

EnvironmentFactory = Callable[[Any], environment_lib.Environment]
EmitEvent = Callable[[types.RolloutEvent], None]
EmitSpan = Callable[[types.Span], None]


class Engine(Protocol):
  """What the loop needs of an engine client."""

  async def generate(self, request: protocol.GenerateRequest) -> types.SampledTokens:
    """Samples one reply, within its own deadline and retries."""


class Verdict(Protocol):
  """What a verifier returns: `reward` and `tests_passed` ("name=1" strings)."""

  reward: float
  tests_passed: tuple[str, ...]


Verifier = Callable[[Any, Any], Awaitable[Verdict]]  # (task, work folder) -> verdict


@dataclasses.dataclass(frozen=True)
class Deadlines:
  """Seconds each phase of an environment may take before the attempt counts as an infrastructure failure."""

  reset_s: float = 150.0
  verify_s: float = 600.0
  close_s: float = 15.0


@dataclasses.dataclass(frozen=True)
class Assignment:
  """One trajectory to sample.  `task` has a `task_id`; the rest is as in `types.Trajectory`.

  `newer_too`: versions published since it was submitted may sample it too, from any token on.
  """

  update: int
  group: int
  index: int
  task: Any
  prompt_ids: tuple[int, ...]
  policy_version: int
  run_seed: int
  newer_too: bool = False


@dataclasses.dataclass(frozen=True)
class AgentSetup:
  """What all trajectories of a run share.

  Attributes:
    environment_factory: task -> a fresh environment, not yet reset.
    template: ts_jax.models.chat.ChatTemplate (or an equal).
    verifier: called with (task, work folder) after the agent's processes have ended.
    limits: Table 6.
    deadlines: of the environment and the verifier.
    retries: further attempts after an infrastructure failure.
    teacher: scores each turn's sampled ids; None where nothing is distilled.
    reference: scores them likewise; None without a KL term.
    messages: task -> what its prompt was rendered from; None will do where the template only appends.
  """

  environment_factory: EnvironmentFactory
  template: Any
  verifier: Verifier
  limits: limits_lib.Limits = limits_lib.Limits()
  deadlines: Deadlines = Deadlines()
  retries: int = 2
  teacher: teacher_lib.Teacher | None = None
  reference: teacher_lib.Teacher | None = None
  messages: Callable[[Any], Sequence[prompt_lib.Message]] | None = None

  @property
  def scorers(self) -> dict[str, teacher_lib.Teacher]:
    """Those there are, by name."""
    named = {'teacher': self.teacher, 'reference': self.reference}
    return {name: scorer for name, scorer in named.items() if scorer is not None}


async def run_trajectory(assignment: Assignment, setup: AgentSetup, engine: Engine, *, emit_event: EmitEvent,
                         emit_span: EmitSpan, on_content: Callable[[], None] = lambda: None,
                         verify_slots: asyncio.Semaphore | None = None) -> types.Trajectory:
  """Samples one trajectory and has it verified.

  Emits `TurnFixed` per turn, before its command runs (again, with the same tokens, when an attempt is repeated),
  `ContentFixed` once, before the verification, and `RewardFixed` once, after it; spans 'engine', 'tool' and 'verify'.
  With a teacher or reference, also `TurnScored` per turn with sampled ids, at any time between its `TurnFixed` and `ContentFixed`
  (again, when an attempt is repeated), and spans 'teacher' or 'reference'; the trajectory's turns then hold the scores.

  Args:
    assignment: what to sample.
    setup: how.
    engine: the client.
    emit_event: called in order; must not block.
    emit_span: called when an interval has ended; must not block.
    on_content: called once, when the engine is no longer needed (scores may still be outstanding).
    verify_slots: bounds how many verifications run at once.

  Returns:
    The trajectory with its reward.

  Raises:
    InfrastructureError: engine, environment or verifier failed at every attempt.
    PolicyVersionError: the engine kept answering with another policy version.
    ConfigError: the task itself is at fault, or the teacher refuses its ids.
    TeacherError: a scorer failed (then also an InfrastructureError) or gave an unusable answer; the attempt is not repeated.
  """
  key = (assignment.update, assignment.group, assignment.index)
  who = f'trajectory {key} of task {assignment.task.task_id}'
  environment: environment_lib.Environment | None = None
  try:
    for attempt in range(setup.retries + 1):
      environment = setup.environment_factory(assignment.task)
      try:
        async with teacher_lib.scoring(setup.scorers, key, attempt, emit_event, emit_span) as scores:
          trajectory = await _sample(assignment, setup, engine, environment, attempt, scores, emit_event, emit_span)
          on_content()
        break
      except teacher_lib.TeacherError:
        raise
      except (types.InfrastructureError, types.PolicyVersionError) as e:
        await _close(environment, setup.deadlines)
        await _before_retry(e, attempt, setup.retries, who)
    trajectory = scores.fill(trajectory)
    emit_event(types.ContentFixed(trajectory))

    for attempt in range(setup.retries + 1):
      try:
        if attempt:
          environment = setup.environment_factory(assignment.task)
          await _replay(trajectory, setup, environment)
        async with verify_slots or _NoLimit():
          trajectory = await _verify(assignment, trajectory, setup, environment, emit_span)
        break
      except types.InfrastructureError as e:
        await _close(environment, setup.deadlines)
        await _before_retry(e, attempt, setup.retries, f'the verification of {who}')
    emit_event(types.RewardFixed(trajectory))
    return trajectory
  finally:
    if environment is not None:
      await _close(environment, setup.deadlines)


async def _sample(assignment: Assignment, setup: AgentSetup, engine: Engine, environment: environment_lib.Environment,
                  attempt: int, scores: teacher_lib.Scores, emit_event: EmitEvent, emit_span: EmitSpan) -> types.Trajectory:
  """Runs turns until a terminal reason; the agent's processes have ended when it returns."""
  limits, template, a = setup.limits, setup.template, assignment
  start_s = time.time()
  await _guard('environment reset', setup.deadlines.reset_s, environment.reset())
  turns: list[types.Turn] = []
  messages, encoded = None if setup.messages is None else setup.messages(a.task), {}
  context, keeps, pending, generated, reason = tuple(a.prompt_ids), None, (), 0, None
  while reason is None:
    index = len(turns)
    context = context[:keeps] + pending
    request = protocol.GenerateRequest(
        token_ids=context, max_tokens=limits.reply_tokens(generated, len(context)), temperature=limits.temperature,
        seed=protocol.sampling_seed(a.run_seed, a.update, a.task.task_id, a.index, index), stop_token_ids=template.stop_ids,
        expected_version=a.policy_version, request_id=f'{a.update}-{a.group}-{a.index}-{index}-{attempt}', newer_too=a.newer_too)
    request_start_s = time.time()
    sampled = await engine.generate(request)
    request_end_s = time.time()
    _check_reply(sampled, request)
    emit_span(types.Span('engine', request_start_s, request_end_s, a.update, a.group, a.index, index,
                         tokens=len(sampled.token_ids), version=sampled.version_start))
    generated += len(sampled.token_ids)
    turn = types.Turn(index=index, context_ids=pending, sampled=sampled, scored_mask=(True,) * len(sampled.token_ids),
                      request_start_s=request_start_s, request_end_s=request_end_s, tool_start_s=request_end_s,
                      tool_end_s=request_end_s, keeps=keeps)
    emit_event(types.TurnFixed(a.update, a.group, a.index, turn))
    scores.start(turn, context)
    context += sampled.token_ids

    action, result, text = None, None, parser.PARSE_ERROR_OBSERVATION
    parsed = parser.parse_action(_reply_text(sampled, template), sampled.finish_reason is types.FinishReason.STOP)
    tool_start_s = tool_end_s = time.time()
    if not isinstance(parsed, parser.ParseError):
      action = parsed
      result = await _guard('environment step', limits.tool_timeout_s + _STEP_MARGIN_S,
                            environment.step(action, limits.tool_timeout_s))
      tool_end_s = time.time()
      emit_span(types.Span('tool', tool_start_s, tool_end_s, a.update, a.group, a.index, index))
      text = observe(result, setup)
    turns.append(dataclasses.replace(turn, action=action, observation=text, tool_start_s=tool_start_s, tool_end_s=tool_end_s))
    keeps, pending = template.following(messages, [(t.sampled.token_ids, t.observation) for t in turns], context, encoded)
    reason = terminal_reason(limits, turns=len(turns), generated=generated, context=len(context[:keeps]) + len(pending), result=result)
  await _guard('environment freeze', setup.deadlines.close_s, environment.freeze())
  oldest = min((t.sampled.version_start for t in turns if t.sampled.token_ids), default=a.policy_version)
  return types.Trajectory(update=a.update, group=a.group, index=a.index, task_id=a.task.task_id, policy_version=oldest,
                          prompt_ids=tuple(a.prompt_ids), turns=tuple(turns), terminal_reason=reason, start_s=start_s,
                          content_s=time.time())


def terminal_reason(limits: limits_lib.Limits, *, turns: int, generated: int, context: int,
                    result: shell_lib.CommandResult | None) -> types.TerminalReason | None:
  """Decides after a turn whether, and why, the trajectory ends.  The module's table, in order.

  Args:
    limits: the ceilings.
    turns: turns taken.
    generated: tokens sampled in the trajectory.
    context: tokens before the next reply, the pending observation included.
    result: of the turn's command; None when the reply could not be parsed.

  Returns:
    The reason, or None to go on.
  """
  if result is not None and result.submitted:
    return types.TerminalReason.DONE
  if result is not None and result.timed_out:
    return types.TerminalReason.TOOL_TIMEOUT
  if context >= limits.max_context_tokens:
    return types.TerminalReason.CONTEXT_OVERFLOW
  if generated >= limits.max_trajectory_tokens:
    return types.TerminalReason.MAX_TOKENS
  if turns >= limits.max_turns:
    return types.TerminalReason.PARSE_ERROR if result is None else types.TerminalReason.MAX_TURNS
  return None


def observe(result: shell_lib.CommandResult, setup: AgentSetup) -> str:
  """Returns the observation text of a command, within the token limit."""
  output = observation.truncate(result.output.rstrip('\n'), setup.limits.max_observation_tokens,
                                lambda text: setup.template.tokenizer.encode(text, allow_special=False))
  return observation.format_result(output, result.exit_code)


def _check_reply(sampled: types.SampledTokens, request: protocol.GenerateRequest) -> None:
  if sampled.finish_reason is types.FinishReason.ABORT:
    raise types.InfrastructureError(f'the engine gave request {request.request_id} up after {len(sampled.token_ids)} tokens')
  if len(sampled.token_ids) > request.max_tokens:
    raise types.InfrastructureError(f'the engine returned {len(sampled.token_ids)} tokens for request {request.request_id} of at '
                                    f'most {request.max_tokens}')
  request.check_version(sampled, f'request {request.request_id}')


def _reply_text(sampled: types.SampledTokens, template: Any) -> str:
  ids = sampled.token_ids
  if ids and ids[-1] in template.stop_ids:
    ids = ids[:-1]
  return template.tokenizer.decode(ids)


async def _verify(assignment, trajectory, setup, environment, emit_span) -> types.Trajectory:
  start_s = time.time()
  workdir = await _guard('environment freeze', setup.deadlines.close_s, environment.freeze())
  verdict = await _guard('verifier', setup.deadlines.verify_s, setup.verifier(assignment.task, workdir))
  end_s = time.time()
  emit_span(types.Span('verify', start_s, end_s, assignment.update, assignment.group, assignment.index,
                       ready_s=trajectory.content_s))
  return dataclasses.replace(trajectory, reward=float(verdict.reward), tests_passed=tuple(verdict.tests_passed), reward_s=end_s)


async def _replay(trajectory: types.Trajectory, setup: AgentSetup, environment: environment_lib.Environment) -> None:
  """Brings a fresh environment to the trajectory's final state."""
  await _guard('environment reset', setup.deadlines.reset_s, environment.reset())
  for turn in trajectory.turns:
    if turn.action is not None:
      await _guard('environment step', setup.limits.tool_timeout_s + _STEP_MARGIN_S,
                   environment.step(turn.action, setup.limits.tool_timeout_s))


async def _guard(what: str, deadline_s: float, work: Awaitable):
  """Awaits outside code: whatever it raises, or a missed deadline, is an infrastructure failure unless it is ours."""
  try:
    async with asyncio.timeout(deadline_s):
      return await work
  except types.TsJaxError:
    raise
  except TimeoutError as e:
    raise types.InfrastructureError(f'{what} gave no answer within {deadline_s:g} s') from e
  except Exception as e:  # any error of an environment or verifier: named, retried, and raised in the end
    raise types.InfrastructureError(f'{what} failed: {type(e).__name__}: {e}') from e


async def _close(environment: environment_lib.Environment, deadlines: Deadlines) -> None:
  """Closes within the deadline, also while being cancelled; a failure is logged, since the attempt's outcome stands."""
  closing = asyncio.ensure_future(_guard('environment close', deadlines.close_s, environment.close()))
  try:
    await asyncio.shield(closing)
  except asyncio.CancelledError:
    await asyncio.wait([closing])
    raise
  except types.TsJaxError as e:
    _log.warning('%s', e)


async def _before_retry(error: types.TsJaxError, attempt: int, retries: int, who: str) -> None:
  """Waits before the next attempt; re-raises when there is none."""
  if attempt >= retries:
    raise type(error)(f'{who} failed {attempt + 1} times, last: {error}') from error
  _log.warning('%s failed (attempt %d of %d), trying again with the same seeds: %s', who, attempt + 1, retries + 1, error)
  await asyncio.sleep(_BACKOFF_S * 2**attempt)


class _NoLimit:
  """An async context that always admits."""

  async def __aenter__(self):
    return None

  async def __aexit__(self, *exc):
    return None
