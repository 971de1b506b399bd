import hashlib

import numpy as np
import pytest

from xrex.train.features import (
    PADDING_ROW,
    ExampleSet,
    FeatureLayout,
    Field,
    Splits,
    concatenate,
    hash_row,
    hash_rows,
    pad_rows,
    split_by_time,
)


def numbered_examples(count: int) -> ExampleSet:
    """Example i, from 0, has the value i + 1 in its only slot."""
    return ExampleSet(
        FeatureLayout((Field("only"),)),
        np.arange(1, count + 1, dtype=np.int32)[:, None],
        np.ones((count, 1), np.bool_),
        np.zeros(count, np.float32),
    )


def split(times: list[int], *fractions: float) -> Splits:
    return split_by_time(numbered_examples(len(times)), np.asarray(times), *fractions)


def test_hash_is_the_documented_one() -> None:
    digest = hashlib.blake2b(b"user\x007", digest_size=8).digest()
    assert hash_row("user", "7", 1000) == 1 + int.from_bytes(digest, "little") % 999


def test_same_value_of_two_fields_gets_two_rows() -> None:
    assert hash_row("user", "7", 1 << 40) != hash_row("item", "7", 1 << 40)


def test_no_value_is_hashed_to_the_padding_row() -> None:
    rows = hash_rows("user", [str(value) for value in range(1000)], 5)
    assert set(rows.tolist()) == {1, 2, 3, 4}


def test_table_without_room_beside_the_padding_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a table of 1 rows has none beside padding row 0"):
        hash_row("user", "7", 1)


def test_short_examples_are_padded() -> None:
    assert pad_rows([[5], [], [6, 7]], 2).tolist() == [
        [5, PADDING_ROW],
        [PADDING_ROW, PADDING_ROW],
        [6, 7],
    ]


def test_example_with_more_values_than_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="example 1 has 3 values for 2 slots"):
        pad_rows([[5], [1, 2, 3]], 2)


def test_layout_gives_each_field_its_slots() -> None:
    layout = FeatureLayout((Field("a"), Field("b", 3)))
    assert layout.num_slots == 4
    assert layout.slices() == {"a": slice(0, 1), "b": slice(1, 4)}


def test_layout_with_one_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        FeatureLayout((Field("a"), Field("a")))


def test_parts_of_the_split_do_not_overlap_in_time() -> None:
    times = np.random.default_rng(0).integers(0, 40, 500)
    splits = split(times.tolist())
    train, valid, test = (
        times[part.rows[:, 0] - 1] for part in (splits.train, splits.valid, splits.test)
    )
    assert train.max() < valid.min()
    assert valid.max() < test.min()


def test_split_keeps_every_example_once() -> None:
    splits = split(np.random.default_rng(0).integers(0, 40, 500).tolist())
    rows = np.concatenate([part.rows for part in (splits.train, splits.valid, splits.test)])
    assert sorted(rows[:, 0].tolist()) == list(range(1, 501))


def test_split_sizes_follow_the_fractions() -> None:
    splits = split(list(range(100)), 0.7, 0.2)
    assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [70, 20, 10]


def test_split_that_leaves_a_part_empty_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parts of \[0, 0, 10\]"):
        split([5] * 10)


def test_fractions_that_leave_no_test_part_are_refused() -> None:
    with pytest.raises(ValueError, match="leave a positive rest for test"):
        split([1, 2, 3], 0.5, 0.5)


def test_sets_are_joined_in_order() -> None:
    examples = numbered_examples(5)
    joined = concatenate([examples.take(slice(3, 5)), examples.take(slice(0, 3))])
    assert joined.rows[:, 0].tolist() == [4, 5, 1, 2, 3]
    assert joined.layout == examples.layout
