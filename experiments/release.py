"""A recorded update as jobs of Equation 14 of ThunderSyncRL: as it ran, and as other granularities would have released it."""

from __future__ import annotations

import dataclasses
from typing import Mapping, Sequence

import numpy as np

from experiments import schedules
from ts_jax import types
from ts_jax.streaming import scheduler
from ts_jax.telemetry import rundir, trace
from ts_jax.theory import jobs as jobs_lib, release, replay

_SOURCE_KINDS = ('source', 'turn', 'forward')
_LEAST_WAIT_S = 1e-3  # a replay needs a rollout; a batch that was sampled ahead may have nothing left to wait for


@dataclasses.dataclass(frozen=True)
class Shares:
  """Cost of working on turns of running trajectories, measured (`experiments.bench_granularity`).

  Attributes:
    share: fraction of the streamed service that is released turn by turn.
    work: streamed service over that of one full pass over the complete trajectory.
  """

  share: float
  work: float


@dataclasses.dataclass(frozen=True)
class Update:
  """One recorded update.  Times in seconds, those without `_s` of their own kind on the run's clock.

  Attributes:
    number: k.
    granularity: at which it was released ('batch' for sync).
    needs_rewards: sources' coefficients wait for rewards.
    skips_uniform: groups whose rewards are all equal have no work once these are known.
    trajectories: all of them.
    spans: the learner's.
    scored_s: when a turn (group, index, turn) had its last score, on the run's clock; of scored turns only.
    start_s: on the run's clock.
    rollout_s: R.
    suffix_s: P: what follows the last group's work, up to the last acknowledgement.
    step_s: measured wall time, None where it was not recorded.
    lanes: number of learner lanes.
    ahead: its schedule sampled ahead of the learner: the update starts where the learner is free, and R is what was left to wait for.
  """

  number: int
  granularity: str
  needs_rewards: bool
  skips_uniform: bool
  trajectories: tuple[types.Trajectory, ...]
  spans: tuple[types.Span, ...]
  scored_s: Mapping[tuple[int, int, int], float]
  start_s: float
  rollout_s: float
  suffix_s: float
  step_s: float | None
  lanes: int
  ahead: bool = False

  def since(self, at_s: float) -> float:
    """Seconds after the start, within the rollout window."""
    return min(max(at_s - self.start_s, 0.0), self.rollout_s)

  def closed_s(self, group: int) -> float:
    """When everything that a group waits for was fixed (of group -1: that the batch waits for), after the start."""
    at = [t.reward_s if self.needs_rewards else t.content_s for t in self.trajectories if group in (t.group, -1)]
    return self.since(max(at))

  def dropped(self, group: int) -> bool:
    """The group has no direction, and Sync does not work on it."""
    rewards = {t.reward for t in self.trajectories if t.group == group}
    return self.skips_uniform and len(rewards) == 1


def updates(run: rundir.RunDirectory) -> list[Update]:
  """The updates of a run directory that are complete in its trace; of a schedule that samples ahead, those with a record of their step.

  Raises:
    ConfigError: nothing in it is complete.
  """
  config, traced = run.read_config(), trace.by_update(run.read_trace())
  schedule, objective = config['schedule'], config['objective']
  ahead = schedule['name'] in schedules.STALE
  granularity = schedule['granularity'] if schedule['name'] == 'thundersync' else 'batch'
  needs_rewards = objective['name'] != 'opd'
  skips = needs_rewards and objective.get('baseline', 'group') == 'group' and not objective.get('kl') and not objective.get('entropy')
  measured = {r['update']: r for r in run.read_metrics() if r['kind'] == 'update'}
  found = []
  for number, trajectories in _batches(run).items():
    spans = traced.get(number, [])
    kinds = {s.kind for s in spans}
    if not kinds.issuperset(trace.BARRIER) or not kinds.intersection(trace.LEARNER) or (ahead and number not in measured):
      continue  # interrupted, or without learner work
    if any(s.kind == 'prompt' and not s.work for s in spans):
      raise types.ConfigError(f"{run.path} has a trace of an earlier version, which does not tell a prompt's passes apart: run it again")
    found.append(_update(number, granularity, needs_rewards, skips, trajectories, spans, measured.get(number), ahead))
  if not found:
    raise types.ConfigError(f'{run.path} has no complete update in its trace: let the run take at least one optimizer step')
  return found


def _batches(run: rundir.RunDirectory) -> dict[int, list[types.Trajectory]]:
  """Trajectories by the update that trained them, with the group numbers they had in it."""
  planned = {number: run.read_trajectories(number) for number in run.updates_with_trajectories()}
  composed = run.read_batches()
  if not composed:
    return planned
  return {number: [dataclasses.replace(t, update=number, group=i) for i, (update, group) in enumerate(groups)
                   for t in planned.get(update, ()) if t.group == group] for number, groups in sorted(composed.items())}


def _update(number: int, granularity: str, needs_rewards: bool, skips: bool, trajectories: Sequence[types.Trajectory],
            spans: Sequence[types.Span], record: Mapping | None, ahead: bool) -> Update:
  if record is not None:
    start_s = record['time_s'] - record['step_s']
  else:
    start_s = min([t.start_s for t in trajectories] + [s.start_s for s in spans])
  barrier = [s for s in spans if s.kind in trace.BARRIER or (s.group < 0 and (s.kind == 'reduce' or s.work == 'backward'))]
  learner = tuple(s for s in spans if s.kind in trace.LEARNER and s not in barrier)
  rollout_s = max(max(t.reward_s for t in trajectories) - start_s, _LEAST_WAIT_S if ahead else 0.0)
  scored_s: dict[tuple[int, int, int], float] = {}
  for s in spans:
    if s.kind in types.SCORERS:
      at = s.group, s.index, s.turn
      scored_s[at] = max(s.end_s, scored_s.get(at, s.end_s))
  return Update(number, granularity, needs_rewards, skips, tuple(trajectories), learner, scored_s, start_s, rollout_s,
                sum(s.end_s - s.start_s for s in barrier), record and record['step_s'], 1 + max(s.lane for s in learner), ahead)


def recorded(update: Update) -> jobs_lib.Jobs:
  """The learner's spans as jobs: ready when the run's schedule could have started them."""
  ready = []
  for s in update.spans:
    closing = s.kind == 'reduce' or s.work in ('backward', 'held')
    if update.granularity == 'batch':
      ready.append(update.rollout_s)
    elif s.kind in ('source', 'fold') and not closing and update.granularity == 'group':
      ready.append(update.closed_s(s.group))
    else:
      ready.append(update.since(s.ready_s))
  return jobs_lib.Jobs(np.array(ready), np.array([s.end_s - s.start_s for s in update.spans]), np.array([s.lane for s in update.spans]))


def workload(update: Update, shares: Mapping[str, Shares]) -> jobs_lib.Workload:
  """What the learner's work on trajectories would be in one full pass each.

  A source that ran for several trajectories, and early work of one, is shared out by tokens; a trajectory's turns likewise.
  Those that were never computed have no service, the paper's comparison of equal physical work.

  Args:
    update: as recorded.
    shares: costs of granularities that work on turns.
  """
  work = shares[update.granularity].work if update.granularity in shares else 1.0
  at = {(t.group, t.index): n for n, t in enumerate(update.trajectories)}
  service, lane = np.zeros(len(at)), np.zeros(len(at), int)
  for s in update.spans:
    if s.kind in _SOURCE_KINDS or s.kind == 'fold':
      rows = [at[s.group, i] for i in s.members or (s.index,)]
      tokens = np.array([len(update.trajectories[r].completion_ids) for r in rows], float)
      service[rows] += (s.end_s - s.start_s) / work * tokens / max(tokens.sum(), 1.0)
      lane[rows] = s.lane
  turns = []
  for n, t in enumerate(update.trajectories):
    tokens = np.array([len(u.context_ids) + len(u.sampled.token_ids) for u in t.turns], float)
    complete = update.since(t.content_s)
    parts = tokens / tokens.sum() if tokens.sum() else np.full(len(tokens), 1 / max(len(tokens), 1))
    ready = [max(u.request_end_s, update.scored_s.get((t.group, t.index, u.index), u.request_end_s)) for u in t.turns]
    turns += [(min(update.since(at_s), complete), service[n] * p, n) for at_s, p in zip(ready, parts)]
  columns = [np.array(c) for c in zip(*turns)]
  groups = sorted({t.group for t in update.trajectories})
  complete_s = np.array([update.since(t.content_s) for t in update.trajectories])
  return jobs_lib.Workload(columns[0], columns[1], columns[2].astype(int), complete_s,
                           np.array([groups.index(t.group) for t in update.trajectories]), lane)


def jobs(update: Update, granularity: str, shares: Mapping[str, Shares]) -> jobs_lib.Jobs:
  """Jobs of an update at any granularity, from its recorded service.

  A source is ready with its content; a group's when its last reward is there (content, for an objective without rewards), and
  so are its reduction and its prompt's backward pass; the prompt's forward pass at the start.

  Raises:
    ConfigError: the granularity is unknown, or its shares are not given.
  """
  if granularity == update.granularity:
    return recorded(update)
  if granularity not in scheduler.GRANULARITIES:
    raise types.ConfigError(f'granularity {granularity!r} is unknown, or not one that Equation 14 describes: use some of '
                            f'{scheduler.GRANULARITIES}')
  if granularity in ('turn', 'forward') and granularity not in shares:
    raise types.ConfigError(f'granularity {granularity!r} needs a measured cost share: give --{granularity}_share (see '
                            'experiments.bench_granularity), or a run recorded at it')
  load = workload(update, shares)
  if granularity in ('batch', 'group'):  # released by closing times, which may be later than content; of uniform groups nothing
    groups = sorted({t.group for t in update.trajectories})
    kept = np.array([not update.dropped(groups[g]) for g in load.group])
    closed = np.array([update.closed_s(g) for g in groups])
    own = jobs_lib.Jobs(closed[load.group][kept], load.service_s[kept], load.lane[kept])
  else:
    early = shares[granularity] if granularity in shares else Shares(0.0, 1.0)
    own = jobs_lib.release(release.Granularity(turn=early.share, work=early.work), load)
  fixed = [s for s in update.spans if s.kind not in (*_SOURCE_KINDS, 'fold')]
  if granularity == 'batch':
    fixed = [s for s in fixed if s.group < 0 or not update.dropped(s.group)]
  ready = [0.0 if s.work == 'forward' else update.closed_s(s.group) for s in fixed]
  found = jobs_lib.Jobs(np.append(own.ready_s, ready), np.append(own.service_s, [s.end_s - s.start_s for s in fixed]),
                        np.append(own.lane, [s.lane for s in fixed]).astype(int))
  return found._replace(ready_s=np.full(len(found.ready_s), update.rollout_s)) if granularity == 'batch' else found


def sync_service_s(update: Update, shares: Mapping[str, Shares]) -> np.ndarray:
  """[lanes] service of Sync on this update's trajectories: one full pass each, groups without a direction left out."""
  load = workload(update, shares)
  groups = sorted({t.group for t in update.trajectories})
  kept = np.array([not update.dropped(groups[g]) for g in load.group])
  service = np.bincount(load.lane, load.service_s * kept, minlength=update.lanes)
  for s in update.spans:
    if s.kind not in (*_SOURCE_KINDS, 'fold') and not (s.group >= 0 and update.dropped(s.group)):
      service[s.lane] += s.end_s - s.start_s
  return service


def predict(update: Update, granularity: str, shares: Mapping[str, Shares]) -> replay.Replay:
  """The update replayed at a granularity (Equation 14, lane by lane), beside the Sync that does the cheapest pass.

  Raises:
    ConfigError: as `jobs`; or another granularity than its own of an update that was sampled ahead: what would have been sampled
      then, and at which version, is not in its trace.
  """
  if update.ahead and granularity != update.granularity:
    raise types.ConfigError(f'granularity {granularity!r} of a schedule that samples ahead is no replay of its trace, in which updates overlap: '
                            'leave --granularities out, or take runs of sync or thundersync')
  return replay.replay(*jobs(update, granularity, shares), lanes=update.lanes, rollout_s=update.rollout_s, suffix_s=update.suffix_s,
                       sync_service_s=sync_service_s(update, shares))


def early_share(found: Sequence[Update]) -> float:
  """Fraction of the service of trajectories that went into turns of running ones."""
  own = [s for u in found for s in u.spans if s.kind in (*_SOURCE_KINDS, 'fold')]
  seconds = lambda spans: sum(s.end_s - s.start_s for s in spans)
  return seconds(s for s in own if s.kind in ('turn', 'forward')) / seconds(own)
