import numpy as np
import pytest

from xrex.train.features import ExampleSet, concatenate
from xrex.train.metrics import auc
from xrex.train.zipf import LAYOUT, ZipfConfig, ZipfReader

NUM_ROWS = 10_000


def small(**changes: int) -> ZipfConfig:
    return ZipfConfig(**({"seed": 5, "num_examples": 2000, "vocabulary": 300} | changes))


def generate(config: ZipfConfig, num_rows: int = NUM_ROWS) -> ExampleSet:
    """The examples of all blocks."""
    reader = ZipfReader(config, num_rows)
    return concatenate([reader.read(block).examples for block in range(reader.num_blocks)])


def test_same_seed_gives_the_same_examples() -> None:
    first, second = generate(small()), generate(small())
    np.testing.assert_array_equal(first.rows, second.rows)
    np.testing.assert_array_equal(first.labels, second.labels)


@pytest.mark.parametrize("change", [{"seed": 6}, {"part": 1}])
def test_another_seed_or_part_gives_other_examples(change: dict[str, int]) -> None:
    assert (generate(small()).rows != generate(small(**change)).rows).any()


def test_block_is_the_same_whatever_was_read_before() -> None:
    config = small(block_examples=100)
    late = generate(config).rows[700:800]
    np.testing.assert_array_equal(ZipfReader(config, NUM_ROWS).read(7).examples.rows, late)


def test_blocks_hold_the_examples_asked_for() -> None:
    reader = ZipfReader(small(num_examples=250, block_examples=100), NUM_ROWS)
    assert (reader.num_blocks, reader.num_examples) == (3, 250)
    assert [len(reader.read(block).examples) for block in range(3)] == [100, 100, 50]


def test_distinct_rows_are_those_that_examples_may_use() -> None:
    reader = ZipfReader(small(num_examples=20_000, vocabulary=4), 1_000_000)
    examples = generate(small(num_examples=20_000, vocabulary=4), 1_000_000)
    assert reader.num_distinct_rows() == len(np.unique(examples.rows[examples.mask])) == 28


def test_popularity_follows_the_power_law() -> None:
    config = ZipfConfig(num_examples=50_000, vocabulary=100, exponent=1.0)
    rows = generate(config, 10_000_000).rows[:, 0]
    counts = np.sort(np.unique(rows, return_counts=True)[1])[::-1]
    harmonic = np.sum(1 / np.arange(1, 101))
    expected = 50_000 / harmonic / np.arange(1, 6)
    np.testing.assert_allclose(counts[:5], expected, rtol=0.1)


def test_parts_share_the_planted_effects() -> None:
    train, test = (
        generate(ZipfConfig(num_examples=10_000, vocabulary=50, part=part)) for part in (0, 1)
    )
    slot = LAYOUT.slices()["field_0"].start
    seen = train.rows[:, slot]
    rates = {row: train.labels[seen == row].mean() for row in set(seen)}
    scores = np.array([rates.get(row, 0.5) for row in test.rows[:, slot]])
    assert auc(test.labels, scores) > 0.55


def test_bags_hold_between_one_and_all_slots() -> None:
    filled = generate(small()).mask[:, LAYOUT.slices()["bag"]].sum(axis=1)
    assert (filled.min(), filled.max()) == (1, 10)


@pytest.mark.parametrize("name", ["num_examples", "vocabulary", "exponent", "block_examples"])
def test_sizes_that_are_not_positive_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        ZipfConfig(**{name: 0})


def test_negative_part_is_refused() -> None:
    with pytest.raises(ValueError, match="part must be at least 0, got -1"):
        ZipfConfig(part=-1)
