"""Saving a training state, and going on from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from xrex.train.train_state import TrainState

_STATE, _CONFIG, _DATA = "state", "config", "data"


class CheckpointConfigError(ValueError):
    """A checkpoint that belongs to a run with other settings."""


class Flushable(Protocol):
    """What a checkpoint needs of a training step."""

    def flush(self, state: TrainState) -> TrainState:
        """Brings what is in flight to rest; see `PipelinedTrainStep.flush`."""


class Checkpoints:
    """The last few checkpoints of a run, in one folder.

    A checkpoint is written beside the others and takes its name when it is complete, so an
    interrupted save leaves the last good one in place. It holds the global arrays; the number of
    devices that wrote it does not matter to those that read it.

    Args:
      folder: where they lie; made if it is not there.
      config: settings that a run must share with the checkpoints it resumes from.
      keep: how many to keep.
    """

    def __init__(
        self, folder: str | os.PathLike[str], config: Mapping[str, Any], *, keep: int = 3
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}; at least one checkpoint must be kept")
        self.folder = Path(folder).absolute()
        self._config = dict(config)
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, enable_async_checkpointing=False
            ),
            item_names=(_STATE, _CONFIG, _DATA),
        )

    def save(
        self,
        train_step: Flushable,
        state: TrainState,
        data_position: Mapping[str, Any] | None = None,
    ) -> TrainState:
        """Flushes the pipeline and saves the state under its step. Returns when it is on disk.

        A checkpoint of this step that is there already is left as it is.

        Args:
          train_step: the step that the state came out of.
          state: the state that came out last. It is used up.
          data_position: where the data go on after the state's last step, in plain JSON values.

        Returns:
          The flushed state, to go on with.
        """
        state = train_step.flush(state)
        number = int(state.step)
        if number in self._manager.all_steps():
            return state
        self._manager.save(
            number,
            args=ocp.args.Composite(
                **{
                    _STATE: ocp.args.StandardSave(state),
                    _CONFIG: ocp.args.JsonSave(self._config),
                    _DATA: ocp.args.JsonSave({"position": data_position}),
                }
            ),
        )
        return state

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return self._manager.latest_step()

    def restore(self, like: TrainState) -> TrainState:
        """Reads the newest checkpoint, in the shapes, types and shardings of `like`.

        Raises:
          FileNotFoundError: there is none.
          CheckpointConfigError: it belongs to a run with other settings.
        """
        step = self._require_latest()
        self._require_same(self._restore_json(step, _CONFIG), step)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        state = self._manager.restore(step, args=args)[_STATE]
        # Arrays of the run's own: those of the reader cannot always be donated.
        shardings = jax.tree.map(lambda x: x.sharding, state)
        return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(state)

    def data_position(self) -> Mapping[str, Any] | None:
        """The data position that was saved with the newest checkpoint; None if there was none.

        Raises:
          FileNotFoundError: there is no checkpoint.
        """
        return self._restore_json(self._require_latest(), _DATA)["position"]

    def _require_latest(self) -> int:
        step = self.latest_step()
        if step is None:
            raise FileNotFoundError(f"there is no checkpoint in {self.folder}")
        return step

    def _restore_json(self, step: int, item: str) -> Any:
        args = ocp.args.Composite(**{item: ocp.args.JsonRestore()})
        return self._manager.restore(step, args=args)[item]

    def _require_same(self, saved: Mapping[str, Any], step: int) -> None:
        differing = [
            f"{name}: {saved.get(name)!r} there, {self._config.get(name)!r} here"
            for name in sorted({*saved, *self._config})
            if saved.get(name) != self._config.get(name)
        ]
        if differing:
            raise CheckpointConfigError(
                f"the checkpoint of step {step} in {self.folder} was made with other settings "
                f"({'; '.join(differing)}); resume with those, or use another folder"
            )

    def close(self) -> None:
        """Releases the folder."""
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
