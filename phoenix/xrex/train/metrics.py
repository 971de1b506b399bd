"""Ranking and probability metrics, and the JSON-lines file that a run writes them to."""

from __future__ import annotations

import collections
import json
import math
import os
from collections.abc import Mapping
from typing import IO

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve, exactly, from ranks.

    The probability that a random positive example scores higher than a random negative one, a tie
    counting half (the Mann-Whitney U statistic over the number of pairs).

    Args:
      labels: [n], positive where > 0.5.
      scores: [n], any monotone score.

    Returns:
      The area in [0, 1]; NaN when the labels are all of one class.

    Raises:
      ValueError: the shapes differ or a score is NaN, which has no rank.
    """
    labels, scores = np.asarray(labels), np.asarray(scores)
    if labels.shape != scores.shape or labels.ndim != 1:
        raise ValueError(
            f"labels {labels.shape} and scores {scores.shape} must be equal vectors; flatten both"
        )
    if np.isnan(scores).any():
        raise ValueError(f"{np.isnan(scores).sum()} of {len(scores)} scores are NaN: no rank")
    positive = labels > 0.5
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    if num_positive == 0 or num_negative == 0:
        return math.nan
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(np.sum(mean_rank[group][positive]))
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float:
    """Mean binary cross entropy in nats, from logits, in float64 and stable at large values."""
    labels, logits = np.asarray(labels, np.float64), np.asarray(logits, np.float64)
    losses = np.maximum(logits, 0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))
    return float(np.mean(losses))


class RunningAuc:
    """AUC over the latest `window` examples, for a progress display."""

    def __init__(self, window: int = 8192) -> None:
        self._window = window
        self._chunks: collections.deque[tuple[np.ndarray, np.ndarray]] = collections.deque()
        self._count = 0

    def add(self, labels: np.ndarray, scores: np.ndarray) -> None:
        """Adds examples and forgets the oldest chunks that the window no longer needs."""
        self._chunks.append((labels, scores))
        self._count += len(labels)
        while self._count - len(self._chunks[0][0]) >= self._window:
            self._count -= len(self._chunks.popleft()[0])

    def value(self) -> float:
        """The AUC, NaN while there is nothing to rank."""
        if not self._chunks:
            return math.nan
        labels, scores = (np.concatenate(parts) for parts in zip(*self._chunks, strict=True))
        finite = ~np.isnan(scores)
        return auc(labels[finite], scores[finite])


class MetricsFile:
    """A file of JSON lines, one record a line, appended to and flushed at every record.

    Numbers that JSON has no word for (NaN, infinities) are written as null.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file: IO[str] = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (owned)

    def write(self, record: Mapping[str, float | int | str]) -> None:
        """Appends one record."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
