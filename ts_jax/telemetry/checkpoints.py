"""Checkpoints of the learner's state (parameters, optimizer state, policy version), through orbax."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp

from ts_jax import types
from ts_jax.telemetry import interruption


class Checkpoints:
  """Checkpoints of one run, named by the next update to run."""

  def __init__(self, folder: str | pathlib.Path, keep: int = 2):
    """Args: the folder (made if needed) and how many checkpoints stay.  Of several processes only those that make one read and write."""
    folder, me = pathlib.Path(folder).resolve(), jax.process_index()
    folder.mkdir(parents=True, exist_ok=True)
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=False, enable_async_checkpointing=False,
                                           multiprocessing_options=alone if jax.process_count() > 1 else ocp.options.MultiprocessingOptions())
    self._manager = ocp.CheckpointManager(folder, options=options)

  @property
  def latest(self) -> int | None:
    """The next update of the newest checkpoint; None without one."""
    return self._manager.latest_step()

  def save(self, next_update: int, state: NamedTuple) -> None:
    """Writes a checkpoint of a named tuple of pytrees unless one for `next_update` is there; an interruption waits for it.

    Raises:
      TsJaxError: it could not be written (a full disk, for instance).
    """
    if next_update in self._manager.all_steps():
      return
    try:
      with interruption.delayed():
        self._manager.save(next_update, args=ocp.args.StandardSave(state._asdict()))
        self._manager.wait_until_finished()
    except (OSError, ValueError) as e:
      raise types.TsJaxError(f'checkpoint {next_update} could not be written to {self._manager.directory}: {e}. Free space '
                             'there and run the same command again') from e

  def restore(self, like: NamedTuple) -> tuple[int, NamedTuple]:
    """Returns (next update, state) of the newest checkpoint; the state has the type, shapes and placement of `like`."""
    step = self._manager.latest_step()
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
    return step, type(like)(**self._manager.restore(step, args=ocp.args.StandardRestore(abstract)))

  def close(self) -> None:
    """Releases the manager."""
    self._manager.close()
