from collections.abc import Iterator

import numpy as np
import pytest

from xrex.train.batches import empty_batch, join_batches, look_ahead, make_batch
from xrex.train.features import PADDING_ROW, ExampleSet, FeatureLayout, Field

EXAMPLES = ExampleSet(
    FeatureLayout((Field("pair", 2),)),
    np.array([[1, 2], [3, 4]], np.int32),
    np.ones((2, 2), np.bool_),
    np.ones(2, np.float32),
)


def test_short_batch_is_filled_up_without_weight() -> None:
    batch = make_batch(EXAMPLES, batch_size=3)
    assert batch.ids.tolist() == [[1, 2], [3, 4], [PADDING_ROW, PADDING_ROW]]
    assert batch.mask.tolist() == [[True, True], [True, True], [False, False]]
    assert batch.weights.tolist() == [1, 1, 0]
    assert batch.labels.tolist() == [1, 1, 0]


def test_too_many_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="2 examples do not fit into a batch of 1"):
        make_batch(EXAMPLES, batch_size=1)


def test_parts_are_joined_in_order() -> None:
    joined = join_batches([empty_batch(1, 2), make_batch(EXAMPLES, 2)])
    assert joined.ids.tolist() == [[PADDING_ROW, PADDING_ROW], [1, 2], [3, 4]]
    assert joined.weights.tolist() == [0, 1, 1]


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
