import json
from pathlib import Path
from typing import Any

import numpy as np

from xrex.train.batches import Batch
from xrex.train.train_log import TrainLog
from xrex.train.train_state import StepMetrics


def batch_and_metrics(loss: float, *, skipped: bool = False) -> tuple[Batch, StepMetrics]:
    labels = np.array([0, 1, 1, 0], np.float32)
    weights = np.array([1, 1, 1, 0], np.float32)
    empty = np.zeros((4, 1))
    logits = np.array([0.0, 1.0, -1.0, 100.0], np.float32)
    values: Any = (np.float32(loss), logits, np.float32(2.5), np.bool_(skipped))
    return Batch(empty, empty, labels, weights), StepMetrics(*values)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_covers_the_steps_since_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with TrainLog(path, log_every=2) as log:
        for step, loss in enumerate([1.0, 3.0, 5.0, 6.0, 9.0], start=1):
            log.add(step, *batch_and_metrics(loss, skipped=step == 3))
        log.read_all()
        assert log.loss_curve == [(2, 2.0), (4, 5.5)]
    assert [record["step"] for record in records(path)] == [2, 4]
    assert [record["skipped_steps"] for record in records(path)] == [0, 1]
    assert records(path)[0]["sparse_grad_norm"] == 2.5


def test_filling_does_not_count_for_the_auc(tmp_path: Path) -> None:
    with TrainLog(tmp_path / "metrics.jsonl", log_every=1) as log:
        log.add(1, *batch_and_metrics(1.0))
        log.read_all()
        assert log.latest() == {"loss": 1.0, "AUC": 0.5}


def test_nothing_is_shown_before_the_first_record(tmp_path: Path) -> None:
    with TrainLog(tmp_path / "metrics.jsonl", log_every=10) as log:
        log.add(1, *batch_and_metrics(1.0))
        log.read_all()
        assert log.latest() == {}


def test_results_are_not_read_before_a_few_steps_later(tmp_path: Path) -> None:
    class Unreadable:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("read too early")

    with TrainLog(tmp_path / "metrics.jsonl", log_every=1) as log:
        batch, metrics = batch_and_metrics(1.0)
        for step in range(1, 5):
            log.add(step, batch, metrics._replace(aux=Unreadable()))
        assert log.loss_curve == []
