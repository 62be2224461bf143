"""What consecutive updates of one schedule took, and schedules side by side."""

from __future__ import annotations

import dataclasses
from typing import Callable, Mapping, Sequence

import numpy as np

from experiments import trainer as trainer_lib
from ts_jax.streaming import staleness


@dataclasses.dataclass(frozen=True)
class Figures:
  """One schedule on one workload; times in seconds, means over its updates without the first, in which caches and pipelines fill.

  Attributes:
    step_s: from the end of one update to the end of the next.
    rollout_s: part of the step up to the last reward of its batch (of a schedule that samples ahead: what is left to wait for).
    publish_s: part of the step in which nothing but publication happens.
    residual_s: the rest: learner work behind the rollout, optimizer step.
    service_s: learner work, wherever in the step it was.
    suffix_s: P, from the barrier to the end.
    lag_mean, lag_max: of trained tokens, in updates.
    skipped, wasted: sources of an update that were left out, and computed in vain, because their group was uniform.
    trajectories: of an update.
    credited_flops_per_s: F_train over step time (Equation 10 without the peak rate).
    source_s_per_token: service of trajectories per token.
    rollout_s_per_token: time from the update's beginning to its last reward, per sampled token.
    peak_bytes: of learner memory.
    accumulator_bytes: most that sums of gradients held at once.
  """

  step_s: float
  rollout_s: float
  publish_s: float
  residual_s: float
  service_s: float
  suffix_s: float
  lag_mean: float
  lag_max: int
  skipped: float
  wasted: float
  trajectories: float
  credited_flops_per_s: float
  source_s_per_token: float
  rollout_s_per_token: float
  peak_bytes: int = 0
  accumulator_bytes: int = 0

  @property
  def bound(self) -> float:
    """(R + L + P) / (max(R, L) + P) of these updates (Equation 17); of Sync's it is what overlap within an update can give at most."""
    return (self.rollout_s + self.service_s + self.suffix_s) / (max(self.rollout_s, self.service_s) + self.suffix_s)


def of(done: Sequence[trainer_lib.Done], credited: Callable[[trainer_lib.Done], int], **memory: int) -> Figures:
  """Figures of consecutive updates.

  Args:
    done: at least two.
    credited: FLOPs that an update counts.
    **memory: fields of `Figures`.

  Raises:
    ValueError: fewer than two updates.
  """
  if len(done) < 2:
    raise ValueError(f'{len(done)} update: the first is left out, so run at least two')
  pairs = list(zip(done, done[1:]))
  steady = [d for _, d in pairs]
  mean = lambda values: float(np.mean(list(values)))
  steps = [d.end_s - before.end_s for before, d in pairs]
  waits = [max(0.0, d.result.rollout_end_s - before.end_s) for before, d in pairs]
  lags = [d.result.staleness for d in steady]
  trajectories = [t for d in steady for t in d.result.batch.trajectories]
  sources = [s for d in steady for s in d.result.spans if s.kind == 'source']
  seconds = lambda spans: sum(s.end_s - s.start_s for s in spans)
  rollout_s = sum(max(0.0, d.result.rollout_end_s - d.begin_s) for d in steady)
  return Figures(
      step_s=mean(steps), rollout_s=mean(waits), publish_s=mean(d.publish_s for d in steady),
      residual_s=mean(step - wait - d.publish_s for step, wait, d in zip(steps, waits, steady)),
      service_s=mean(seconds(d.result.spans) for d in steady), suffix_s=mean(d.end_s - d.barrier_s for d in steady),
      **_lag(lags), skipped=mean(d.result.skipped for d in steady), wasted=mean(d.result.wasted for d in steady),
      trajectories=len(trajectories) / len(steady), credited_flops_per_s=sum(map(credited, steady)) / sum(steps),
      source_s_per_token=seconds(sources) / max(1, sum(s.tokens for s in sources)),
      rollout_s_per_token=rollout_s / max(1, sum(len(u.sampled.token_ids) for t in trajectories for u in t.turns)), **memory)


def _lag(lags: Sequence[staleness.Staleness]) -> dict[str, float]:
  tokens = sum(s.tokens for s in lags)
  return dict(lag_mean=sum(s.total for s in lags) / max(1, tokens), lag_max=max(s.largest for s in lags))


class Comparison:
  """Figures of schedules on equal workloads, several times over."""

  def __init__(self, rounds: Sequence[Mapping[str, Figures]]):
    """Args: by schedule, 'sync' among them; at least one round."""
    self.rounds = tuple(rounds)
    self.names = tuple(self.rounds[0])

  def each(self, value: Callable[[Figures, Figures], float], name: str) -> np.ndarray:
    """[rounds] of a function of a schedule's figures and Sync's."""
    return np.array([value(r[name], r['sync']) for r in self.rounds], float)

  def speedup(self, name: str) -> np.ndarray:
    """[rounds] Sync's step time over the schedule's."""
    return self.each(lambda mine, sync: sync.step_s / mine.step_s, name)

  def fraction_of_bound(self, name: str) -> np.ndarray:
    """[rounds] speedup over the bound of the round's Sync."""
    return self.each(lambda mine, sync: sync.step_s / mine.step_s / sync.bound, name)

  def balance(self) -> np.ndarray:
    """[rounds] Sync's rollout time over its learner time."""
    return self.each(lambda mine, sync: sync.rollout_s / sync.service_s, 'sync')

  def bound(self) -> np.ndarray:
    """[rounds] of Sync."""
    return self.each(lambda mine, sync: sync.bound, 'sync')

  def rows(self) -> dict[str, dict[str, float]]:
    """By schedule: means, and where several rounds ran standard deviations (`_std`)."""
    table = {}
    for name in self.names:
      mean = lambda field, name=name: float(self.each(lambda mine, sync: getattr(mine, field), name).mean())
      ratio = self.each(lambda mine, sync: mine.credited_flops_per_s / sync.credited_flops_per_s, name)
      spread = {'step_s': self.each(lambda mine, sync: mine.step_s, name), 'speedup': self.speedup(name),
                'fraction_of_bound': self.fraction_of_bound(name), 'mfu_over_sync': ratio}
      table[name] = {key: float(v.mean()) for key, v in spread.items()} | {f'{key}_std': float(v.std()) for key, v in spread.items()}
      table[name] |= {f.name: mean(f.name) for f in dataclasses.fields(Figures) if f.name not in table[name]}
      table[name]['lag_max'] = int(self.each(lambda mine, sync: mine.lag_max, name).max())
    return table

  def print(self, title: str) -> None:
    """Prints the table."""
    sync = self.rows()['sync']
    print(f'{title}: {sync["trajectories"]:.0f} trajectories an update, {len(self.rounds)} round{"s" * (len(self.rounds) > 1)}; Sync: '
          f'R {sync["rollout_s"]:.2f} s, L {sync["service_s"]:.2f} s, P {sync["suffix_s"]:.2f} s, R / L {self.balance().mean():.2f}, '
          f'bound {self.bound().mean():.3f}')
    print(f'{"schedule":13}{"step s":>15}{"speedup":>15}{"of bound":>10}{"rollout":>9}{"residual":>10}{"publish":>9}{"service":>9}{"lag":>13}'
          f'{"MFU ratio":>11}{"peak MB":>9}{"sums MB":>9}{"skipped":>9}{"wasted":>8}')
    for name, row in self.rows().items():
      print(f'{name:13}{_spread(row, "step_s"):>15}{_spread(row, "speedup"):>15}{row["fraction_of_bound"]:10.3f}{row["rollout_s"]:9.2f}'
            f'{row["residual_s"]:10.2f}{row["publish_s"]:9.2f}{row["service_s"]:9.2f}{row["lag_mean"]:6.2f}, max {row["lag_max"]:<2}'
            f'{row["mfu_over_sync"]:11.3f}{row["peak_bytes"] / 1e6:9.0f}{row["accumulator_bytes"] / 1e6:9.0f}{row["skipped"]:9.1f}{row["wasted"]:8.1f}')
    print()


def _spread(row: Mapping[str, float], key: str) -> str:
  return f'{row[key]:.3f} ± {row[f"{key}_std"]:.3f}'
