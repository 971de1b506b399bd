import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xrex.train.batches import Batch
from xrex.train.metrics import MetricsFile
from xrex.train.train_log import TrainLog
from xrex.train.train_state import StepMetrics

VOCAB_ROWS = 10


class Records:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.closed = False

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


def make_log(
    *writers: Any, log_every: int, train_secs: Callable[[], float] = lambda: 0.0
) -> TrainLog:
    return TrainLog(writers, log_every, vocab_rows=VOCAB_ROWS, train_secs=train_secs)


def batch_and_metrics(
    loss: float, *, skipped: bool = False, ids: tuple[int, ...] = (0, 0, 0, 0)
) -> tuple[Batch, StepMetrics]:
    """Four examples, the last one filling."""
    labels = np.array([0, 1, 1, 0], np.float32)
    weights = np.array([1, 1, 1, 0], np.float32)
    logits = np.array([0.0, 1.0, -1.0, 100.0], np.float32)
    nan = np.float32("nan")
    values: Any = (np.float32(loss), logits, np.float32(2.5), nan, np.bool_(skipped))
    batch = Batch(np.array(ids)[:, None], weights[:, None] > 0, labels, weights)
    return batch, StepMetrics(*values)


def test_a_record_covers_the_steps_since_the_one_before() -> None:
    written = Records()
    with make_log(written, log_every=2) as log:
        for step, loss in enumerate([1.0, 3.0, 5.0, 6.0, 9.0], start=1):
            log.add(step, *batch_and_metrics(loss, skipped=step == 3), dropped_rows=10 * step)
        log.read_all()
        assert log.loss_curve == [(2, 2.0), (4, 5.5)]
    assert [record["step"] for record in written.records] == [2, 4]
    assert [record["log_loss"] for record in written.records] == [2.0, 5.5]
    assert [record["skipped_steps"] for record in written.records] == [0, 1]
    assert [record["dropped_rows"] for record in written.records] == [50, 50]
    assert written.records[0]["sparse_grad_norm"] == 2.5


def test_records_go_to_all_writers_and_these_are_closed(tmp_path: Path) -> None:
    path, written = tmp_path / "metrics.jsonl", Records()
    with make_log(MetricsFile(path), written, log_every=10) as log:
        log.write({"step": 3, "split": "test"})
        assert not written.closed
    assert [json.loads(line) for line in path.read_text().splitlines()] == written.records
    assert written.closed


def test_filling_does_not_count_for_the_auc() -> None:
    with make_log(log_every=1) as log:
        log.add(1, *batch_and_metrics(1.0))
        log.read_all()
        assert log.latest() == {"loss": "1.0000", "AUC": "0.5000", "examples/s": "nan"}


def test_rate_counts_examples_over_the_time_of_their_steps_but_the_first() -> None:
    secs, written = iter([1.0, 1.5]), Records()
    with make_log(written, log_every=3, train_secs=lambda: next(secs)) as log:
        for step in range(1, 7):
            log.add(step, *batch_and_metrics(1.0))
        log.read_all()
    # Three examples a step. All six steps were added before the first record was read.
    first, second = (record["examples_per_sec"] for record in written.records)
    assert first == pytest.approx(5 * 3 / 1.0)
    assert second == first


def test_rate_is_unknown_while_only_the_first_step_is_done() -> None:
    written = Records()
    with make_log(written, log_every=1, train_secs=lambda: 1.0) as log:
        log.add(1, *batch_and_metrics(1.0))
        log.read_all()
    assert math.isnan(written.records[0]["examples_per_sec"])


def test_ids_out_of_range_are_counted_without_padding() -> None:
    written = Records()
    with make_log(written, log_every=1) as log:
        log.add(1, *batch_and_metrics(1.0, ids=(-VOCAB_ROWS, VOCAB_ROWS - 1, 0, VOCAB_ROWS)))
        log.read_all()
        log.add(2, *batch_and_metrics(1.0, ids=(-VOCAB_ROWS - 1, VOCAB_ROWS, 0, 0)))
        log.read_all()
    assert [record["ids_out_of_range"] for record in written.records] == [0, 2]


@pytest.mark.parametrize(
    ("second_total", "second_mean"), [(5.0, 0.5), (1.0, 0.0)], ids=["goes_on", "opened_anew"]
)
def test_exposed_time_is_a_mean_over_the_steps_since_the_record_before(
    second_total: float, second_mean: float
) -> None:
    totals, written = iter([4.0, second_total]), Records()
    with make_log(written, log_every=2) as log:
        log.exposed_secs = lambda: {"lookup": next(totals)}
        for step in range(1, 5):
            log.add(step, *batch_and_metrics(1.0))
        log.read_all()
    assert [record["exposed_lookup_secs"] for record in written.records] == [2.0, second_mean]


def test_nothing_is_shown_before_the_first_record() -> None:
    with make_log(log_every=10) as log:
        log.add(1, *batch_and_metrics(1.0))
        log.read_all()
        assert log.latest() == {}


def test_results_are_not_read_before_a_few_steps_later() -> None:
    class Unreadable:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("read too early")

    with make_log(log_every=1) as log:
        batch, metrics = batch_and_metrics(1.0)
        for step in range(1, 5):
            log.add(step, batch, metrics._replace(aux=Unreadable()))
        assert log.loss_curve == []
