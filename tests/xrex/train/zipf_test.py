import numpy as np
import pytest

from xrex.train.metrics import auc
from xrex.train.zipf import LAYOUT, ZipfConfig, generate

NUM_ROWS = 10_000
SMALL = ZipfConfig(seed=5, num_examples=2000, vocabulary=300)


def test_same_seed_gives_the_same_examples() -> None:
    first, second = generate(SMALL, NUM_ROWS), generate(SMALL, NUM_ROWS)
    np.testing.assert_array_equal(first.rows, second.rows)
    np.testing.assert_array_equal(first.labels, second.labels)


def test_another_seed_gives_other_examples() -> None:
    other = ZipfConfig(seed=6, num_examples=2000, vocabulary=300)
    assert (generate(SMALL, NUM_ROWS).rows != generate(other, NUM_ROWS).rows).any()


def test_popularity_follows_the_power_law() -> None:
    config = ZipfConfig(num_examples=50_000, vocabulary=100, exponent=1.0)
    rows = generate(config, 10_000_000).rows[:, 0]
    counts = np.sort(np.unique(rows, return_counts=True)[1])[::-1]
    harmonic = np.sum(1 / np.arange(1, 101))
    expected = 50_000 / harmonic / np.arange(1, 6)
    np.testing.assert_allclose(counts[:5], expected, rtol=0.1)


def test_labels_follow_the_planted_effects() -> None:
    examples = generate(ZipfConfig(num_examples=20_000, vocabulary=50), NUM_ROWS)
    column = examples.rows[:, LAYOUT.slices()["field_0"]][:, 0]
    half = len(examples) // 2
    rates = {row: examples.labels[:half][column[:half] == row].mean() for row in set(column[:half])}
    scores = np.array([rates.get(row, 0.5) for row in column[half:]])
    assert auc(examples.labels[half:], scores) > 0.55


def test_bags_hold_between_one_and_all_slots() -> None:
    filled = generate(SMALL, NUM_ROWS).mask[:, LAYOUT.slices()["bag"]].sum(axis=1)
    assert (filled.min(), filled.max()) == (1, 10)


@pytest.mark.parametrize("name", ["num_examples", "vocabulary", "exponent"])
def test_sizes_that_are_not_positive_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        ZipfConfig(**{name: 0})
