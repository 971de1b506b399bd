import json
import math
from pathlib import Path

import numpy as np
import pytest

from xrex.train.metrics import MetricsFile, RunningAuc, auc, log_loss


def brute_force_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    wins = [
        1.0 if positive > negative else 0.5 if positive == negative else 0.0
        for positive in scores[labels > 0.5]
        for negative in scores[labels < 0.5]
    ]
    return sum(wins) / len(wins)


@pytest.mark.parametrize("distinct_scores", [2, 7, 1000])
def test_auc_equals_the_count_of_ordered_pairs(distinct_scores: int) -> None:
    rng = np.random.default_rng(distinct_scores)
    labels = rng.integers(0, 2, 150)
    scores = rng.integers(0, distinct_scores, 150).astype(np.float32)
    assert auc(labels, scores) == pytest.approx(brute_force_auc(labels, scores), abs=1e-12)


def test_auc_of_perfect_and_reversed_order() -> None:
    labels, scores = np.array([0, 0, 1, 1]), np.array([1.0, 2.0, 3.0, 4.0])
    assert (auc(labels, scores), auc(labels, -scores)) == (1.0, 0.0)


def test_auc_of_one_class_is_nan() -> None:
    assert math.isnan(auc(np.ones(3), np.arange(3.0)))


def test_auc_refuses_a_score_without_rank() -> None:
    with pytest.raises(ValueError, match="1 of 2 scores are NaN"):
        auc(np.array([0, 1]), np.array([math.nan, 1.0]))


def test_auc_refuses_unequal_shapes() -> None:
    with pytest.raises(ValueError, match=r"labels \(3,\) and scores \(2,\)"):
        auc(np.ones(3), np.ones(2))


def test_log_loss_equals_its_definition() -> None:
    labels, logits = np.array([0, 1, 1]), np.array([0.3, -1.2, 2.0])
    probability = 1 / (1 + np.exp(-logits))
    expected = -np.mean(labels * np.log(probability) + (1 - labels) * np.log(1 - probability))
    assert log_loss(labels, logits) == pytest.approx(expected, rel=1e-12)


def test_log_loss_of_a_huge_wrong_logit_is_finite() -> None:
    assert log_loss(np.array([0.0]), np.array([1e4])) == pytest.approx(1e4)


def test_running_auc_covers_only_its_window() -> None:
    running = RunningAuc(window=4)
    running.add(np.array([0, 0, 1, 1]), np.array([9.0, 8.0, 1.0, 2.0]))
    running.add(np.array([0, 0, 1, 1]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert running.value() == 1.0


def test_running_auc_leaves_out_scores_of_failed_steps() -> None:
    running = RunningAuc()
    running.add(np.array([0, 1, 1]), np.array([1.0, 2.0, math.nan]))
    assert running.value() == 1.0


def test_running_auc_of_nothing_is_nan() -> None:
    assert math.isnan(RunningAuc().value())


def test_metrics_file_appends_a_line_per_record(tmp_path: Path) -> None:
    for step in (1, 2):
        metrics = MetricsFile(tmp_path / "metrics.jsonl")
        metrics.write({"step": step, "loss": 0.5})
        metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_metrics_file_writes_non_finite_numbers_as_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write({"auc": math.nan})
    metrics.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"auc": None}
