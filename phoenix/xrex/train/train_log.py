"""The record of a run's training steps: running metrics, curves, and the metrics file."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from xrex.train.batches import Batch
from xrex.train.metrics import MetricsFile, RunningAuc
from xrex.train.train_state import StepMetrics

# Results are read this many steps late, so that reading them does not stop the pipeline.
_READ_LAG = 4


class TrainLog:
    """Takes the results of steps as they are dispatched, and reads them a few steps later.

    Args:
      path: the metrics file, JSON lines; appended to.
      log_every: steps that a training record and a point of the curves cover.

    Attributes:
      loss_curve: (step, mean loss of the steps since the point before).
      auc_curve: (step, AUC over the latest training examples).
    """

    def __init__(self, path: str | os.PathLike[str], log_every: int) -> None:
        self.loss_curve: list[tuple[int, float]] = []
        self.auc_curve: list[tuple[int, float]] = []
        self._log_every = log_every
        self._file = MetricsFile(path)
        self._unread: collections.deque[tuple[int, Batch, StepMetrics]] = collections.deque()
        self._running_auc = RunningAuc()
        self._losses: list[float] = []
        self._num_skipped = 0

    def add(self, step: int, batch: Batch, metrics: StepMetrics) -> None:
        """Takes the results of a step (its aux are logits [B]) and reads those old enough."""
        self._unread.append((step, batch, metrics))
        if len(self._unread) > _READ_LAG:
            self._read_oldest()

    def read_all(self) -> None:
        """Waits for all results and reads them."""
        while self._unread:
            self._read_oldest()

    def latest(self) -> dict[str, float]:
        """The newest points, loss and AUC; empty before the first."""
        curves = {"loss": self.loss_curve, "AUC": self.auc_curve}
        return {name: curve[-1][1] for name, curve in curves.items() if curve}

    def write(self, record: Mapping[str, float | int | str]) -> None:
        """Writes a record to the metrics file."""
        self._file.write(record)

    def _read_oldest(self) -> None:
        step, batch, metrics = self._unread.popleft()
        real = np.asarray(batch.weights) > 0
        self._running_auc.add(np.asarray(batch.labels)[real], np.asarray(metrics.aux)[real])
        self._losses.append(float(metrics.loss))
        self._num_skipped += int(metrics.skipped)
        if step % self._log_every == 0:
            self._close_interval(step, float(metrics.norm))

    def _close_interval(self, step: int, norm: float) -> None:
        loss, auc = float(np.mean(self._losses)), self._running_auc.value()
        self.loss_curve.append((step, loss))
        self.auc_curve.append((step, auc))
        self._losses.clear()
        self.write(
            {
                "step": step,
                "split": "train",
                "loss": loss,
                "auc": auc,
                "sparse_grad_norm": norm,
                "skipped_steps": self._num_skipped,
            }
        )

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()
