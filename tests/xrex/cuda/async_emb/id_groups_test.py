from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from xrex.cuda.async_emb.id_groups import IdGroups, SharedRows, group_ids, plan_shared_rows
from xrex.cuda.async_emb.segments import make_segments

VOCAB_ROWS = 12
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
MANY_EXAMPLES = settings(max_examples=200, deadline=None)


@st.composite
def integers_of_any_dtype(draw, shapes, vocab_rows):
    """Ids of every integer dtype and byte order: near the table, and at the ends of the dtype."""
    dtype = np.dtype(draw(st.sampled_from(INTEGERS))).newbyteorder(draw(st.sampled_from("<>")))
    least, greatest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    near = st.integers(max(least, -2 * vocab_rows), min(greatest, 2 * vocab_rows))
    ends = st.sampled_from([least, greatest])
    return draw(hnp.arrays(dtype, shapes, elements=st.one_of(near, near, near, ends)))


def shapes_up_to_three_dimensions():
    return hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7)


def assert_same_arrays(groups: IdGroups, expected: tuple[np.ndarray, np.ndarray]) -> None:
    for found, wanted in zip(groups[:2], expected, strict=True):
        assert found.dtype == wanted.dtype == np.int32
        np.testing.assert_array_equal(found, wanted)


@given(st.data())
@MANY_EXAMPLES
def test_groups_are_those_of_make_segments(data):
    vocab_rows = data.draw(st.sampled_from([1, 2, 12, 100, 5000]))
    ids = data.draw(integers_of_any_dtype(shapes_up_to_three_dimensions(), vocab_rows))
    groups = group_ids(ids, vocab_rows, ids.size + 1)
    assert_same_arrays(groups, make_segments(ids, vocab_rows, ids.size + 1))
    assert groups.num_rows == int((groups.unique_tokens < vocab_rows).sum())


@given(st.data())
@MANY_EXAMPLES
def test_masked_tokens_are_grouped_like_padding(data):
    ids = data.draw(integers_of_any_dtype(shapes_up_to_three_dimensions(), VOCAB_ROWS))
    mask = data.draw(hnp.arrays(bool, ids.shape))
    tokens = zip(ids.reshape(-1).tolist(), mask.reshape(-1).tolist(), strict=True)
    # uint64's greatest id stays outside the table when int64 has to hold it.
    padded = [min(token_id, 2**62) if counts else VOCAB_ROWS for token_id, counts in tokens]
    groups = group_ids(ids, VOCAB_ROWS, ids.size + 1, mask=mask)
    assert_same_arrays(groups, make_segments(padded, VOCAB_ROWS, ids.size + 1))


@given(st.data())
@MANY_EXAMPLES
def test_ids_outside_the_table_are_counted_unless_masked(data):
    ids = data.draw(integers_of_any_dtype(shapes_up_to_three_dimensions(), VOCAB_ROWS))
    mask = data.draw(st.none() | hnp.arrays(bool, ids.shape))
    counted = np.ones(ids.size, bool) if mask is None else mask.reshape(-1)
    outside = [
        position
        for position, token_id in enumerate(ids.reshape(-1).tolist())
        if counted[position] and not -VOCAB_ROWS <= token_id < VOCAB_ROWS
    ]
    groups = group_ids(ids, VOCAB_ROWS, ids.size + 1, mask=mask)
    assert groups.num_out_of_range == len(outside)
    assert groups.first_out_of_range == (outside[0] if outside else -1)


@pytest.mark.parametrize("vocab_rows", [4_000_000, 2**31 - 1])
@pytest.mark.parametrize("kind", ["uniform", "skewed", "strided"])
def test_groups_of_a_large_batch_are_those_of_make_segments(vocab_rows, kind):
    rng = np.random.default_rng(0)
    ids = {
        "uniform": lambda: rng.integers(-vocab_rows - 9, vocab_rows + 9, 40_000),
        "skewed": lambda: (rng.random(40_000) ** 8 * vocab_rows).astype(np.int64),
        "strided": lambda: np.arange(40_000) * 2**14 % vocab_rows,
    }[kind]()
    expected = make_segments(ids, vocab_rows, ids.size)
    assert_same_arrays(group_ids(ids, vocab_rows, ids.size), expected)


def test_ids_that_are_not_contiguous_count_in_token_order():
    ids = np.arange(24, dtype=np.int32).reshape(4, 6)[::-1, ::2]
    mask = np.arange(24).reshape(6, 4).T[:, ::2] % 4 < 2
    segment_ids = group_ids(ids, 24, 12, mask=mask).segment_ids
    expected = make_segments(np.where(mask, ids, 24), 24, 12)[1]
    np.testing.assert_array_equal(segment_ids, expected)


def test_more_rows_than_slots_are_refused_with_both_numbers():
    message = (
        "async_emb: the batch has 5 distinct ids, but the list of distinct ids has a capacity of "
        "3; raise num_unique or make the batch smaller"
    )
    for group in (group_ids, make_segments):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            group([4, 4, 1, 2, 3, 0], VOCAB_ROWS, 3)


@pytest.mark.parametrize("ids", [[0.5], [True], ["a"]])
def test_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(TypeError, match=r"group_ids got ids of dtype .*; ids are integers"):
        group_ids(ids, VOCAB_ROWS, 2)


def test_mask_that_is_not_bool_is_refused():
    with pytest.raises(TypeError, match="mask of dtype int64; a mask is bool"):
        group_ids([1], VOCAB_ROWS, 2, mask=np.array([1]))


def test_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"ids of shape \[1, 2\] and a mask of shape \[2, 1\]"):
        group_ids([[1, 2]], VOCAB_ROWS, 2, mask=[[True], [True]])


@pytest.mark.parametrize(
    ("vocab_rows", "num_unique", "message"),
    [
        (0, 2, "vocab_rows=0"),
        (2**31, 2, "vocab_rows=2147483648 is greater than 2147483647"),
        (5, 0, "num_unique=0"),
        (5, 2.5, "num_unique=2.5 is a float; it is a size: give a whole number"),
    ],
)
def test_sizes_out_of_range_are_refused(vocab_rows, num_unique, message):
    with pytest.raises(ValueError, match=message):
        group_ids([0], vocab_rows, num_unique)


class Steps(NamedTuple):
    """Two steps on R ranks and what the first updates."""

    groups: IdGroups
    next_ids: np.ndarray
    num_ranks: int
    out_of_range: str

    def plan(self, row_capacity: int, token_capacity: int) -> SharedRows:
        return plan_shared_rows(
            self.groups,
            self.next_ids,
            VOCAB_ROWS,
            num_ranks=self.num_ranks,
            row_capacity=row_capacity,
            token_capacity=token_capacity,
            out_of_range=self.out_of_range,
        )

    def roomy_plan(self) -> SharedRows:
        num_tokens = self.groups.segment_ids.size
        return self.plan(VOCAB_ROWS + 1, max(1, num_tokens // self.num_ranks + 1))

    def row_read(self, token_id: int) -> int | None:
        """The row that the next step reads for an id, in Python's own integers."""
        row = token_id + VOCAB_ROWS if token_id < 0 else token_id
        if 0 <= row < VOCAB_ROWS:
            return row
        return None if self.out_of_range == "zero" else min(max(row, 0), VOCAB_ROWS - 1)

    def rows_read(self) -> list[int | None]:
        return [self.row_read(token_id) for token_id in self.next_ids.reshape(-1).tolist()]

    def rows_updated(self) -> list[int | None]:
        """By token; None for one that updates nothing."""
        unique_tokens = self.groups.unique_tokens.tolist()
        return [None if s == -1 else unique_tokens[s] for s in self.groups.segment_ids.tolist()]

    def shared(self) -> set[int]:
        return {row for row in set(self.rows_updated()) & set(self.rows_read()) if row is not None}

    def shared_tokens(self) -> list[list[int]]:
        """The local positions of tokens that update shared rows, rank by rank."""
        shared = self.shared()
        by_rank = np.array([row in shared for row in self.rows_updated()], bool)
        return [np.flatnonzero(rank).tolist() for rank in by_rank.reshape(self.num_ranks, -1)]


@st.composite
def two_steps(draw):
    num_ranks = draw(st.integers(1, 4))
    num_tokens = num_ranks * draw(st.integers(0, 8))
    ids = draw(integers_of_any_dtype((num_tokens,), VOCAB_ROWS))
    mask = draw(st.none() | hnp.arrays(bool, (num_tokens,)))
    groups = group_ids(ids, VOCAB_ROWS, VOCAB_ROWS + draw(st.integers(0, 3)), mask=mask)
    next_ids = draw(integers_of_any_dtype((num_ranks, num_tokens // num_ranks), VOCAB_ROWS))
    return Steps(groups, next_ids, num_ranks, draw(st.sampled_from(["clip", "zero"])))


@given(two_steps())
@MANY_EXAMPLES
def test_shared_rows_are_updated_by_one_step_and_read_by_the_next(steps):
    plan = steps.roomy_plan()
    rows = sorted(steps.shared())
    assert plan.num_rows == len(rows)
    assert plan.rows.tolist() == rows + [VOCAB_ROWS] * (VOCAB_ROWS + 1 - len(rows))


@given(two_steps())
@MANY_EXAMPLES
def test_every_updated_token_is_in_exactly_one_part(steps):
    plan = steps.roomy_plan()
    rows = plan.rows.tolist()
    in_shared = dict[int, int]()
    tokens = plan.tokens.reshape(steps.num_ranks, -1)
    segments = plan.segments.reshape(steps.num_ranks, -1)
    tokens_per_rank = steps.groups.segment_ids.size // steps.num_ranks
    for rank, (positions, indices) in enumerate(zip(tokens, segments, strict=True)):
        for position, index in zip(positions.tolist(), indices.tolist(), strict=True):
            if index != -1:
                in_shared[rank * tokens_per_rank + position] = rows[index]
    in_rest = {
        token: int(plan.rest_unique[segment])
        for token, segment in enumerate(plan.rest_segments.tolist())
        if segment != -1
    }
    assert not in_shared.keys() & in_rest.keys()
    updated = {token: row for token, row in enumerate(steps.rows_updated()) if row is not None}
    assert in_shared | in_rest == updated
    assert set(in_rest.values()).isdisjoint(steps.shared())


@given(two_steps())
@MANY_EXAMPLES
def test_tokens_of_shared_rows_keep_their_order_and_are_padded(steps):
    plan = steps.roomy_plan()
    room = plan.tokens.size // steps.num_ranks
    for rank, expected in enumerate(steps.shared_tokens()):
        places = slice(rank * room, (rank + 1) * room)
        padding = room - len(expected)
        assert plan.tokens[places].tolist() == expected + [0] * padding
        assert plan.segments[places][len(expected) :].tolist() == [-1] * padding


@given(two_steps())
@MANY_EXAMPLES
def test_rest_keeps_the_slots_of_its_rows(steps):
    plan = steps.roomy_plan()
    shared = steps.shared()
    rows = steps.groups.unique_tokens.tolist()
    assert plan.rest_unique.tolist() == [VOCAB_ROWS if row in shared else row for row in rows]
    assert plan.rest_segments.tolist() == [
        -1 if row in shared else segment
        for row, segment in zip(
            steps.rows_updated(), steps.groups.segment_ids.tolist(), strict=True
        )
    ]


@given(two_steps())
@MANY_EXAMPLES
def test_next_tokens_point_to_the_shared_rows_that_they_read(steps):
    plan = steps.roomy_plan()
    shared = steps.shared()
    found = [None if index == -1 else plan.rows[index] for index in plan.next_index]
    assert found == [row if row in shared else None for row in steps.rows_read()]


@given(two_steps(), st.integers(1, VOCAB_ROWS), st.integers(1, 9))
@MANY_EXAMPLES
def test_counts_hold_whether_or_not_there_is_room(steps, row_capacity, token_capacity):
    plan = steps.plan(row_capacity, token_capacity)
    num_tokens = [len(tokens) for tokens in steps.shared_tokens()]
    num_rows = len(steps.shared())
    fits = num_rows <= row_capacity and max(num_tokens) <= token_capacity
    assert plan[:4] == (num_rows, sum(num_tokens), max(num_tokens), fits)
    assert [array is not None for array in plan[4:]] == [fits] * 6


def test_plan_of_a_large_batch_is_that_of_sets():
    rng = np.random.default_rng(0)
    vocab_rows, num_tokens = 1_000_000, 40_000
    ids, next_ids = (rng.random((2, num_tokens)) ** 6 * vocab_rows).astype(np.int64)
    groups = group_ids(ids, vocab_rows, num_tokens)
    plan = plan_shared_rows(
        groups,
        next_ids,
        vocab_rows,
        num_ranks=8,
        row_capacity=num_tokens,
        token_capacity=num_tokens // 8,
        out_of_range="clip",
    )
    shared = np.intersect1d(ids, next_ids)
    np.testing.assert_array_equal(plan.rows[: plan.num_rows], shared)
    np.testing.assert_array_equal(plan.rest_segments == -1, np.isin(ids, shared))
    np.testing.assert_array_equal(plan.next_index != -1, np.isin(next_ids, shared))
    assert plan.num_tokens == np.isin(ids, shared).sum()


def good_steps(**changes) -> Steps:
    groups = group_ids([1, 2, 2, 5], VOCAB_ROWS, 4)
    return Steps(groups, np.array([2, 2, 3, 1]), 2, "clip")._replace(**changes)


def test_plan_arrays_are_int32():
    assert {array.dtype for array in good_steps().plan(2, 2)[4:]} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ranks": 3}, "num_ranks is 3: it must be at least 1 and divide the 4 tokens"),
        ({"num_ranks": 0}, "num_ranks=0"),
        ({"next_ids": np.array([1])}, "next_ids has 1 elements: it must have 4"),
        ({"out_of_range": "wrap"}, "out_of_range='wrap' is unknown; choose one of clip, zero"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        good_steps(**changes).plan(2, 2)


@pytest.mark.parametrize(("rows", "tokens", "name"), [(0, 1, "row"), (1, 0, "token")])
def test_capacities_that_are_not_positive_are_refused(rows, tokens, name):
    with pytest.raises(ValueError, match=f"{name}_capacity=0; it is a size"):
        good_steps().plan(rows, tokens)


def test_next_ids_that_are_no_integers_are_refused():
    steps = good_steps(next_ids=np.array([0.5, 1, 2, 3]))
    with pytest.raises(TypeError, match="plan_shared_rows got next_ids of dtype float64"):
        steps.plan(2, 2)


def test_groups_of_another_dtype_are_refused():
    groups = good_steps().groups
    wide = groups._replace(segment_ids=groups.segment_ids.astype(np.int64))
    with pytest.raises(TypeError, match=r"groups\.segment_ids is no int32 array"):
        good_steps(groups=wide).plan(2, 2)


def test_groups_with_segments_beyond_their_rows_are_refused():
    groups = good_steps().groups
    with pytest.raises(ValueError, match=r"segment_ids\[3\] is 2: .* num_rows=2"):
        good_steps(groups=groups._replace(num_rows=2)).plan(2, 2)
