"""Metrics records: one per update and one per evaluation, as JSON lines and as TensorBoard scalars."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, Callable, Iterable, Mapping, Sequence

from ts_jax import types
from ts_jax.telemetry import rundir

# Reward of SETA: r = p + 0.5 [p = 1].
FULL_REWARD = 1.5


@dataclasses.dataclass(frozen=True)
class UpdateRecord(types.Record):
  """What one update did.  Times in seconds; a value that could not be measured is None.

  Attributes:
    update: 0-based.
    policy_version: version of the parameters its gradients were taken at.
    time_s: when it ended, on the run's clock.
    reward_mean, reward_std: over trajectories, population std.
    success_rate: share of trajectories that passed every test.
    reward_by_family, count_by_family: mean reward and number of trajectories of each task family.
    groups, groups_uniform: groups, and those without a reward difference.
    trajectories: number that entered the update.
    turns_mean: turns per trajectory.
    scored_tokens, generated_tokens: tokens with loss, and tokens sampled.
    sampler_gap_mean, sampler_gap_max: |engine log-prob - learner log-prob| over the scored tokens that the learner ran.
    sampler_kl_k1, sampler_kl_k3: estimates of KL(engine || learner) from them, nats per token (`streaming.mismatch`).
    sampler_ess: effective sample size of the importance weights learner / engine, as a share of the tokens.
    grad_norm: global norm before clipping.
    learning_rate: of the optimizer step.
    step_s: whole update; where batches are sampled ahead, from when the learner was free.
    rollout_s: first request to last reward, what of it lies within the step.
    learner_busy_s, learner_idle_s: of the step, summed over lanes and divided by their number.
    tail_s: learner work that remained after the last reward.
    optimizer_s, publish_s: reduction and optimizer step; publication up to the last acknowledgement.
    tokens_per_s: generated tokens per second from first request to last reward.
    skipped_sources, wasted_sources: sources of uniform groups that were never started, and that were computed in vain.
    terminal: trajectories by terminal reason.
    lag_mean, lag_max: `policy_version` minus the version a token was sampled from, over all sampled tokens.
  """

  update: int
  policy_version: int
  time_s: float
  reward_mean: float | None
  reward_std: float | None
  success_rate: float | None
  reward_by_family: dict
  count_by_family: dict
  groups: int
  groups_uniform: int
  trajectories: int
  turns_mean: float | None
  scored_tokens: int
  generated_tokens: int
  sampler_gap_mean: float | None
  sampler_gap_max: float | None
  sampler_kl_k1: float | None
  sampler_kl_k3: float | None
  sampler_ess: float | None
  grad_norm: float | None
  learning_rate: float | None
  step_s: float
  rollout_s: float
  learner_busy_s: float
  learner_idle_s: float
  tail_s: float
  optimizer_s: float
  publish_s: float
  tokens_per_s: float | None
  skipped_sources: int
  wasted_sources: int
  terminal: dict
  lag_mean: float | None = None
  lag_max: int | None = None

  kind = 'update'


@dataclasses.dataclass(frozen=True)
class EvalRecord(types.Record):
  """One evaluation.

  Attributes:
    update: how many updates the evaluated policy has had (0: before training).
    split: 'dev' or 'held_out'.
    reward_mean: over attempts.
    success_rate: share of attempts that passed every test.
    attempts: number of attempts.
    reward_by_family: mean reward of each task family.
    time_s: when it ended, on the run's clock.
  """

  update: int
  split: str
  reward_mean: float | None
  success_rate: float | None
  attempts: int
  reward_by_family: dict
  time_s: float = 0.0

  kind = 'eval'

  def __post_init__(self):
    if self.split not in ('dev', 'held_out'):
      raise ValueError(f"evaluation split {self.split!r} is neither 'dev' nor 'held_out'")


class MetricsWriter:
  """Writes records to metrics.jsonl and their scalars to TensorBoard."""

  def __init__(self, run: rundir.RunDirectory, first_update: int = 0):
    """Opens the event file.

    Args:
      run: opened for writing.
      first_update: next update to run; TensorBoard hides what an interrupted start had written from there on.
    """
    import tensorboardX  # here: readers of records need no event writer

    self._run = run
    self._events = tensorboardX.SummaryWriter(str(run.tensorboard), purge_step=first_update or None)

  def write(self, record: UpdateRecord | EvalRecord) -> dict[str, Any]:
    """Appends one record.

    Returns:
      The record as JSON values.

    Raises:
      TsJaxError: the disk is full or the file cannot be written.
    """
    values = finite({'kind': record.kind, **record.to_json()})
    self._run.append_metrics(values)
    for tag, value in scalars(values):
      self._events.add_scalar(tag, value, record.update)
    self._events.flush()
    return values

  def close(self) -> None:
    """Closes the event file."""
    self._events.close()


def scalars(values: Mapping[str, Any]) -> list[tuple[str, float]]:
  """Returns (TensorBoard tag, value) of a record's numbers: 'train/reward_mean', 'dev/reward/copy', ..."""
  prefix = 'train' if values['kind'] == 'update' else values['split']
  flat = []
  for key, value in values.items():
    if isinstance(value, Mapping):
      name = {'reward_by_family': 'reward', 'count_by_family': 'count'}.get(key, key)
      flat += [(f'{prefix}/{name}/{k}', float(v)) for k, v in value.items() if v is not None]
    elif key not in ('kind', 'split', 'update') and isinstance(value, (int, float)):
      flat.append((f'{prefix}/{key}', float(value)))
  return flat


def finite(value: Any) -> Any:
  """Returns JSON values with None for every NaN or infinity, which JSON does not have."""
  if isinstance(value, Mapping):
    return {k: finite(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [finite(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def is_success(trajectory: types.Trajectory) -> bool:
  """Whether every test passed."""
  if trajectory.reward is None:
    return False
  if trajectory.tests_passed:
    return all(t.endswith('=1') for t in trajectory.tests_passed)
  return trajectory.reward >= FULL_REWARD - 1e-9


def summarise(trajectories: Sequence[types.Trajectory], family_of: Callable[[str], str]) -> dict[str, Any]:
  """Returns the fields of an `UpdateRecord` that trajectories alone decide.

  Args:
    trajectories: those of one update (or of one evaluation); those without a reward do not count towards rewards.
    family_of: task id -> family.
  """
  rewarded = [t for t in trajectories if t.reward is not None]
  rewards = [t.reward for t in rewarded]
  mean = _mean(rewards)
  by_family = collections.defaultdict(list)
  by_group = collections.defaultdict(list)
  for t in rewarded:
    by_family[family_of(t.task_id)].append(t.reward)
    by_group[t.group].append(t.reward)
  return {
      'reward_mean': mean,
      'reward_std': math.sqrt(_mean([(r - mean)**2 for r in rewards])) if rewards else None,
      'success_rate': _mean([float(is_success(t)) for t in rewarded]),
      'reward_by_family': {f: _mean(r) for f, r in sorted(by_family.items())},
      'count_by_family': {f: len(r) for f, r in sorted(by_family.items())},
      'groups': len({t.group for t in trajectories}),
      'groups_uniform': sum(len(set(r)) == 1 for r in by_group.values()),
      'trajectories': len(trajectories),
      'turns_mean': _mean([len(t.turns) for t in trajectories]),
      'scored_tokens': sum(t.scored_tokens for t in trajectories),
      'generated_tokens': sum(len(turn.sampled.token_ids) for t in trajectories for turn in t.turns),
      'terminal': dict(sorted(collections.Counter(t.terminal_reason.value for t in trajectories).items())),
  }


def eval_record(update: int, split: str, trajectories: Sequence[types.Trajectory], family_of: Callable[[str], str],
                time_s: float = 0.0) -> EvalRecord:
  """Returns the record of one evaluation from its attempts."""
  values = summarise(trajectories, family_of)
  return EvalRecord(update=update, split=split, attempts=len(trajectories), time_s=time_s,
                    **{k: values[k] for k in ('reward_mean', 'success_rate', 'reward_by_family')})


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The figures a run is judged by; None where it has no such record.

  Attributes:
    first_quarter, last_quarter: mean training reward of the first and of the last quarter of the updates.
    dev_before, dev_after: dev reward of the first and of the last evaluation.
    held_out_before, held_out_after: the same for the held-out family.
  """

  first_quarter: float | None
  last_quarter: float | None
  dev_before: float | None
  dev_after: float | None
  held_out_before: float | None
  held_out_after: float | None


def outcome(records: Iterable[Mapping[str, Any]]) -> Outcome:
  """Returns the headline figures of a run from its metrics records (any order)."""
  records = sorted(records, key=lambda r: r['update'])
  rewards = [r['reward_mean'] for r in records if r['kind'] == 'update' and r['reward_mean'] is not None]
  quarter = max(1, len(rewards) // 4)
  ends = []
  for split in ('dev', 'held_out'):
    found = [r['reward_mean'] for r in records if r['kind'] == 'eval' and r['split'] == split]
    ends += [found[0] if found else None, found[-1] if len(found) > 1 else None]
  return Outcome(_mean(rewards[:quarter]), _mean(rewards[-quarter:]), *ends)


def _mean(values: Sequence[float]) -> float | None:
  return sum(values) / len(values) if values else None
