from collections.abc import Iterator

import numpy as np
import pytest

from xrex.train.batches import (
    Batch,
    look_ahead,
    make_batch,
    sequential_batches,
    steps_per_epoch,
    training_batches,
)
from xrex.train.features import PADDING_ROW, ExampleSet, FeatureLayout, Field


def numbered_examples(count: int) -> ExampleSet:
    rows = np.arange(1, 2 * count + 1, dtype=np.int32).reshape(count, 2)
    return ExampleSet(
        FeatureLayout((Field("pair", 2),)),
        rows,
        np.ones_like(rows, np.bool_),
        np.ones(count, np.float32),
        np.arange(count, dtype=np.int64),
    )


def first_rows(batch: Batch) -> list[int]:
    return np.asarray(batch.ids)[:, 0].tolist()


def test_short_batch_is_filled_up_without_weight() -> None:
    batch = make_batch(numbered_examples(3), np.array([2]), batch_size=3)
    assert first_rows(batch) == [5, PADDING_ROW, PADDING_ROW]
    assert np.asarray(batch.mask).tolist() == [[True, True], [False, False], [False, False]]
    assert np.asarray(batch.weights).tolist() == [1, 0, 0]
    assert np.asarray(batch.labels).tolist() == [1, 0, 0]


def test_too_many_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="3 examples do not fit into a batch of 2"):
        make_batch(numbered_examples(3), np.arange(3), batch_size=2)


def test_epoch_covers_every_example_once() -> None:
    examples = numbered_examples(10)
    assert steps_per_epoch(examples, 4) == 3
    seen = [row for batch in training_batches(examples, 4, 1, 0, 3) for row in first_rows(batch)]
    assert sorted(seen) == [PADDING_ROW] * 2 + list(range(1, 20, 2))


def test_epochs_are_shuffled_differently() -> None:
    batches = [first_rows(batch) for batch in training_batches(numbered_examples(50), 50, 1, 0, 2)]
    assert batches[0] != batches[1]
    assert sorted(batches[0]) == sorted(batches[1])


@pytest.mark.parametrize("first_step", [0, 2, 3, 4, 7])
def test_resumed_stream_equals_the_rest_of_the_whole_one(first_step: int) -> None:
    examples = numbered_examples(10)
    whole = [first_rows(batch) for batch in training_batches(examples, 4, 1, 0, 8)]
    resumed = [first_rows(batch) for batch in training_batches(examples, 4, 1, first_step, 8)]
    assert resumed == whole[first_step:]


def test_sequential_batches_keep_the_order() -> None:
    batches = [first_rows(batch) for batch in sequential_batches(numbered_examples(3), 2)]
    assert batches == [[1, 3], [5, PADDING_ROW]]


@pytest.mark.parametrize(
    ("items", "expected"),
    [([], []), ([1], [(1, None)]), ([1, 2, 3], [(1, 2), (2, 3), (3, None)])],
)
def test_look_ahead_pairs_each_item_with_its_successor(
    items: list[int], expected: list[tuple[int, int | None]]
) -> None:
    assert list(look_ahead(items)) == expected


def test_look_ahead_takes_one_item_in_advance_and_no_more() -> None:
    taken = []

    def source() -> Iterator[int]:
        for item in range(5):
            taken.append(item)
            yield item

    pairs = look_ahead(source())
    next(pairs)
    assert taken == [0, 1]
