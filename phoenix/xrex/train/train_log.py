"""The record of a run's training steps: running metrics, curves, and what they are written to."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from xrex.train.batches import Batch
from xrex.train.metrics import RunningAuc
from xrex.train.train_state import StepMetrics

# Results are read this many steps late, so that reading them does not stop the pipeline.
_READ_LAG = 4


class MetricsWriter(Protocol):
    """Where records go."""

    def write(self, record: Mapping[str, float | int | str]) -> None:
        """Writes one record."""

    def close(self) -> None:
        """Ends the writing."""


class TrainLog:
    """Takes the results of steps as they are dispatched, and reads them a few steps later.

    Args:
      writers: what records are written to; the log closes them.
      log_every: steps that a training record and a point of the curves cover.
      vocab_rows: V, which tells the ids that are out of range.
      train_secs: seconds spent on steps so far, the first step of the run left out.

    Attributes:
      exposed_secs: seconds that steps stood still for the exchange so far, by purpose; set once the
        step is there.
      loss_curve: (step, mean loss of the steps since the point before).
      auc_curve: (step, AUC over the latest training examples).
    """

    def __init__(
        self,
        writers: Sequence[MetricsWriter],
        log_every: int,
        *,
        vocab_rows: int,
        train_secs: Callable[[], float],
    ) -> None:
        self.exposed_secs: Callable[[], Mapping[str, float]] = dict
        self.loss_curve: list[tuple[int, float]] = []
        self.auc_curve: list[tuple[int, float]] = []
        self._writers, self._log_every = list(writers), log_every
        self._vocab_rows, self._train_secs = vocab_rows, train_secs
        self._unread: collections.deque[tuple[int, Batch, StepMetrics]] = collections.deque()
        self._running_auc = RunningAuc()
        self._losses: list[float] = []
        self._num_skipped = self._ids_out_of_range = 0
        self._is_first_step = True
        self._num_examples, self._secs_before = 0, 0.0
        self._exposed_before: dict[str, float] = {}
        self._examples_per_sec = math.nan
        self._dropped_rows = 0

    def add(self, step: int, batch: Batch, metrics: StepMetrics, dropped_rows: int = 0) -> None:
        """Takes the results of a step (its aux are logits [B]) and reads those old enough.

        Args:
          step: its number.
          batch: what it was trained on, in host memory.
          metrics: its results.
          dropped_rows: malformed rows that were left out of the data so far.
        """
        self._dropped_rows = dropped_rows
        self._ids_out_of_range += int(np.sum(batch.mask & ~self._in_range(batch.ids)))
        if not self._is_first_step:
            self._num_examples += int(np.sum(batch.weights > 0))
        self._is_first_step = False
        self._unread.append((step, batch, metrics))
        if len(self._unread) > _READ_LAG:
            self._read_oldest()

    def read_all(self) -> None:
        """Waits for all results and reads them."""
        while self._unread:
            self._read_oldest()

    def latest(self) -> dict[str, str]:
        """The newest values, as texts for a progress display; empty before the first record."""
        if not self.loss_curve:
            return {}
        return {
            "loss": f"{self.loss_curve[-1][1]:.4f}",
            "AUC": f"{self.auc_curve[-1][1]:.4f}",
            "examples/s": f"{self._examples_per_sec:.0f}",
        }

    def write(self, record: Mapping[str, float | int | str]) -> None:
        """Writes a record, with its step and split, to all writers."""
        for writer in self._writers:
            writer.write(record)

    def _in_range(self, ids: np.ndarray) -> np.ndarray:
        return (ids >= -self._vocab_rows) & (ids < self._vocab_rows)

    def _read_oldest(self) -> None:
        step, batch, metrics = self._unread.popleft()
        real = np.asarray(batch.weights) > 0
        self._running_auc.add(np.asarray(batch.labels)[real], np.asarray(metrics.aux)[real])
        self._losses.append(float(metrics.loss))
        self._num_skipped += int(metrics.skipped)
        if step % self._log_every == 0:
            self._close_interval(step, float(metrics.norm))

    def _close_interval(self, step: int, norm: float) -> None:
        num_steps = len(self._losses)
        loss, auc = float(np.mean(self._losses)), self._running_auc.value()
        self.loss_curve.append((step, loss))
        self.auc_curve.append((step, auc))
        self._losses.clear()
        secs = self._train_secs()
        if self._num_examples and secs > self._secs_before:
            self._examples_per_sec = self._num_examples / (secs - self._secs_before)
        self._num_examples, self._secs_before = 0, secs
        self.write(
            {
                "step": step,
                "split": "train",
                "log_loss": loss,
                "auc": auc,
                "examples_per_sec": self._examples_per_sec,
                "sparse_grad_norm": norm,
                "skipped_steps": self._num_skipped,
                "ids_out_of_range": self._ids_out_of_range,
                "dropped_rows": self._dropped_rows,
                **self._exposed_secs_per_step(num_steps),
            }
        )

    def _exposed_secs_per_step(self, num_steps: int) -> dict[str, float]:
        """By purpose; an engine that was opened anew counts from zero."""
        now, before = dict(self.exposed_secs()), self._exposed_before
        self._exposed_before = now
        return {
            f"exposed_{purpose}_secs": max(0.0, secs - before.get(purpose, 0.0)) / num_steps
            for purpose, secs in now.items()
        }

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, *exception: Any) -> None:
        for writer in self._writers:
            writer.close()
