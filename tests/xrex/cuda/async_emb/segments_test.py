from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrex.cuda.async_emb.async_emb import make_segments

VOCAB_ROWS = 12
ids_near_the_table = st.lists(st.integers(-2 * VOCAB_ROWS, 2 * VOCAB_ROWS), max_size=40)


def row_of(token_id: int) -> int | None:
    """The row that `table[token_id]` means, by the rule of one wrap; None if there is none."""
    row = token_id + VOCAB_ROWS if token_id < 0 else token_id
    return row if 0 <= row < VOCAB_ROWS else None


@given(ids_near_the_table)
@settings(max_examples=200, deadline=None)
def test_each_token_points_to_its_row(ids):
    unique_tokens, segment_ids = make_segments(ids, VOCAB_ROWS, VOCAB_ROWS)
    found = [None if s == -1 else unique_tokens[s] for s in segment_ids]
    assert found == [row_of(token_id) for token_id in ids]


@given(ids_near_the_table)
@settings(max_examples=200, deadline=None)
def test_slots_are_the_distinct_rows_and_then_unused(ids):
    unique_tokens, _ = make_segments(ids, VOCAB_ROWS, VOCAB_ROWS + 1)
    rows = sorted({row for token_id in ids if (row := row_of(token_id)) is not None})
    assert unique_tokens.tolist() == rows + [VOCAB_ROWS] * (VOCAB_ROWS + 1 - len(rows))


@given(ids_near_the_table, st.integers(1, VOCAB_ROWS))
@settings(max_examples=200, deadline=None)
def test_only_too_many_distinct_rows_are_refused(ids, capacity):
    num_rows = len({row for token_id in ids if (row := row_of(token_id)) is not None})
    if num_rows <= capacity:
        make_segments(ids, VOCAB_ROWS, capacity)
        return
    message = rf"{num_rows} distinct ids.*capacity of {capacity}"
    with pytest.raises(ValueError, match=message):
        make_segments(ids, VOCAB_ROWS, capacity)


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
)
def test_ids_at_the_ends_of_any_integer_dtype_are_out_of_range(dtype):
    ends = [np.iinfo(dtype).min, np.iinfo(dtype).max, 3]
    ids = np.array(ends, dtype)
    unique_tokens, segment_ids = make_segments(ids, VOCAB_ROWS, 2)
    lowest_is_row_0 = ends[0] == 0
    assert segment_ids.tolist() == ([0, -1, 1] if lowest_is_row_0 else [-1, -1, 0])
    assert unique_tokens.tolist() == ([0, 3] if lowest_is_row_0 else [3, VOCAB_ROWS])


def test_results_are_int32_and_flat_in_token_order():
    unique_tokens, segment_ids = make_segments(np.array([[5, 1], [1, 7]]), VOCAB_ROWS, 4)
    assert unique_tokens.dtype == np.int32
    assert segment_ids.dtype == np.int32
    assert segment_ids.tolist() == [1, 0, 0, 2]


def test_batch_of_padding_only_has_no_segment():
    unique_tokens, segment_ids = make_segments(np.full(4, VOCAB_ROWS), VOCAB_ROWS, 2)
    assert unique_tokens.tolist() == [VOCAB_ROWS] * 2
    assert segment_ids.tolist() == [-1] * 4


def test_greatest_table_leaves_an_unused_slot_out_of_range():
    unique_tokens, _ = make_segments([0, -1], 2**31 - 1, 3)
    assert unique_tokens.tolist() == [0, 2**31 - 2, 2**31 - 1]


@pytest.mark.parametrize("ids", [[0.5], [True], ["a"]])
def test_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(TypeError, match="ids are integers"):
        make_segments(ids, VOCAB_ROWS, 2)


@pytest.mark.parametrize(
    ("num_rows", "capacity", "message"),
    [
        (0, 2, "V=0"),
        (-4, 2, "V=-4"),
        (2**31, 2, "V=2147483648 is greater than 2147483647"),
        (5, 0, "U=0"),
        (5, 2.5, "U=2.5 is a float; it is a size: give a whole number"),
    ],
)
def test_sizes_out_of_range_are_refused(num_rows, capacity, message):
    with pytest.raises(ValueError, match=message):
        make_segments([0], num_rows, capacity)
