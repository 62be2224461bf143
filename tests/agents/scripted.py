"""A scripted engine, and trajectories and pools that run on it with everything they emit."""

import asyncio
import collections
import dataclasses
import queue

from ts_jax import types
from ts_jax.agents import environment as environment_lib
from ts_jax.agents import limits as limits_lib
from ts_jax.agents import loop as loop_lib
from ts_jax.agents import pool as pool_lib
from ts_jax.agents import prompt
from ts_jax.rollout import protocol, replicas

Finish = types.FinishReason
Verdict = collections.namedtuple('Verdict', 'reward tests_passed')


@dataclasses.dataclass(frozen=True)
class Task:
  task_id: str = 'task'


def block(command):
  return f'```bash\n{command}\n```'


class ScriptedEngine:
  """Answers turn n of every trajectory with reply n, cut to the request's tokens, ended by the end-of-turn id."""

  def __init__(self, template, replies, version=0, fail=lambda request: None, delay_s=0.0):
    self.template, self.replies, self.version, self.fail, self.delay_s = template, replies, version, fail, delay_s
    self.requests: list[protocol.GenerateRequest] = []

  async def generate(self, request):
    self.requests.append(request)
    await asyncio.sleep(self.delay_s)
    self.fail(request)
    turn = int(request.request_id.split('-')[3])
    reply = self.replies[min(turn, len(self.replies) - 1)]
    ids = self.template.tokenizer.encode(reply, allow_special=True) + (self.template.end_of_turn_id,)
    finish = Finish.STOP if len(ids) <= request.max_tokens else Finish.LENGTH
    ids = ids[:request.max_tokens]
    return types.SampledTokens(ids, (-0.5,) * len(ids), self.version, self.version, finish)

  async def close(self):
    pass


class Run:
  """One trajectory or pool, with everything it emitted."""

  def __init__(self, template, sandbox, folder, replies, *, verifier=None, factory=None, retries=0, engine=None, deadlines=None,
               teacher=None, reference=None, messages=None, **limits):
    self.events, self.spans, self.workdirs = [], [], []
    self.engine = engine or ScriptedEngine(template, replies)
    self.template = template
    self.limits = limits_lib.Limits(**limits)
    self.messages = messages or prompt.initial_messages('do it')

    async def verify(task, workdir):
      self.workdirs.append(workdir)
      self.events.append('verifier')
      return Verdict(1.0, (f'made={int((workdir / "made").exists())}',))
    self.setup = loop_lib.AgentSetup(
        environment_factory=factory or (lambda task: environment_lib.TerminalEnvironment(sandbox, folder)), template=template,
        verifier=verifier or verify, limits=self.limits, retries=retries, deadlines=deadlines or loop_lib.Deadlines(), teacher=teacher,
        reference=reference, messages=lambda task: self.messages)

  def go(self):
    ids = self.template.initial(self.messages)
    assignment = loop_lib.Assignment(update=3, group=1, index=2, task=Task(), prompt_ids=ids, policy_version=0, run_seed=42)
    self.trajectory = asyncio.run(loop_lib.run_trajectory(assignment, self.setup, self.engine, emit_event=self.events.append,
                                                          emit_span=self.spans.append))
    return self.trajectory


def kinds(events):
  return [e if isinstance(e, str) else type(e).__name__ for e in events]


def failing(times, error):
  """A function that raises `error` the first `times` calls."""
  calls = iter([error] * times)

  def fail(*_):
    e = next(calls, None)
    if e is not None:
      raise e
  return fail


def make_pool(run, engines=None, concurrency=4, **kwargs):
  events = queue.Queue()
  pool = pool_lib.AgentPool(run.setup, replicas.ReplicaSet(engines or [run.engine]), run_seed=42, concurrency=concurrency,
                            emit_event=events.put_nowait, emit_span=lambda span: None, **kwargs)
  return pool, events


def groups_of(run, sizes):
  ids = prompt.prompt_ids(run.template, 'do it', (), run.limits, 'task')
  return [(types.GroupPlan(i, f'task-{i}', ids, size), Task(f'task-{i}')) for i, size in enumerate(sizes)]


def drain(events):
  return [events.get_nowait() for _ in range(events.qsize())]
