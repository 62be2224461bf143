"""Turns what happens in a training run into progress on the terminal and records in its run directory."""

from __future__ import annotations

import time
from typing import Callable, Sequence

from experiments import rollouts, trainer as trainer_lib
from ts_jax import types
from ts_jax.telemetry import metrics, progress as progress_lib, rundir


class Journal:
  """A `trainer.Journal`."""

  def __init__(self, run: rundir.RunDirectory, progress: progress_lib.TrainProgress, writer: metrics.MetricsWriter,
               family_of: Callable[[str], str], learning_rate: float):
    """Args: where to write, and what records say that no event does."""
    self._run, self._progress, self._writer = run, progress, writer
    self._family_of, self._learning_rate = family_of, learning_rate
    self._running: set[tuple[int, int, int]] = set()
    self._rewards: dict[tuple[int, int, int], float] = {}  # of trajectories that are not trained
    self._begin_s, self._tokens, self._busy_s = time.time(), 0, 0.0

  def begin(self, update: int, total: int) -> None:
    """A new update starts."""
    self._begin_s, self._tokens, self._busy_s = time.time(), 0, 0.0
    self._progress.begin_update(update, total)
    self._show()

  def __call__(self, event: rollouts.Event) -> None:
    """Takes one event or span."""
    match event:
      case types.Span():
        if event.lane >= 0:
          self._busy_s += event.end_s - event.start_s
        self._run.append_span(event)
      case types.TurnFixed():
        self._running.add((event.update, event.group, event.index))
        self._tokens += len(event.turn.sampled.token_ids)
      case types.RewardFixed():
        self._run.append_trajectory(event.trajectory)
        self._running.discard(event.trajectory.key)
        self._rewards[event.trajectory.key] = event.trajectory.reward
    self._show()

  def _show(self) -> None:
    elapsed, done = max(time.time() - self._begin_s, 1e-3), len(self._rewards)
    self._progress.set(done=done, running=len(self._running), tokens_per_s=self._tokens / elapsed,
                       reward_mean=sum(self._rewards.values()) / done if done else None, learner_busy=min(1.0, self._busy_s / elapsed))

  def phase(self, name: str) -> None:
    """What the run does now."""
    self._progress.set(phase=name)

  def warn(self, message: str) -> None:
    """Leaves a line on the terminal."""
    self._progress.line.lasting(f'WARNING   {message}')

  def batch(self, update: int, planned: Sequence[tuple[int, int]]) -> None:
    """Records which groups an update takes."""
    self._run.append_batch(update, planned)

  def trained(self, done: trainer_lib.Done) -> None:
    """Records an update."""
    result, step_s = done.result, done.end_s - done.begin_s
    trajectories = result.batch.trajectories
    groups = done.planned or [(done.update, g.index) for g in result.batch.groups]
    for t in trajectories:
      self._rewards.pop((*groups[t.group], t.index), None)
    summary = metrics.summarise(trajectories, self._family_of)
    busy_s, optimizer_s = sum(s.end_s - s.start_s for s in result.spans), done.step_end_s - done.barrier_s
    rollout_end_s = max(result.rollout_end_s, done.begin_s + 1e-3)  # it may have nothing left to sample
    rollout_s = rollout_end_s - done.begin_s
    tail_s = step_s - rollout_s - optimizer_s - done.publish_s if done.ahead else result.learner_end_s - rollout_end_s
    sampling_s = rollout_end_s - min(t.start_s for t in trajectories) if done.ahead else rollout_s
    self._progress.finish_update(self._writer.write(metrics.UpdateRecord(
        **summary, **result.mismatch.summary(), **result.staleness.summary(), update=done.update,
        policy_version=result.batch.policy_version, time_s=done.end_s, grad_norm=done.norm, learning_rate=self._learning_rate, step_s=step_s, rollout_s=rollout_s,
        learner_busy_s=busy_s, learner_idle_s=max(0.0, step_s - busy_s - optimizer_s), tail_s=tail_s,
        optimizer_s=optimizer_s, publish_s=done.publish_s, tokens_per_s=summary['generated_tokens'] / max(sampling_s, 1e-3),
        skipped_sources=result.skipped, wasted_sources=result.wasted)))

  def evaluated(self, update: int, split: str, trajectories: Sequence[types.Trajectory]) -> None:
    """Records an evaluation."""
    self._progress.finish_evaluation(self._writer.write(metrics.eval_record(update, split, trajectories, self._family_of, time.time())))
