"""Distinct rows of a batch, and those that two steps share, found natively in host memory.

`group_ids` gives what `make_segments` gives, many times faster; `plan_shared_rows` tells which rows
the next step reads of those that a step updates. Neither needs a context or a device. Both work
without the GIL, so a thread can prepare batches beside a step.

Letters: N tokens of the global batch, R ranks that own T = N / R of them each, rank after rank;
V table rows; U slots for the distinct rows of a batch.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from xrex.cuda.async_emb import native
from xrex.cuda.async_emb.options import OutOfRange
from xrex.cuda.async_emb.segments import require_int32, require_integers

_INT64_MAX = np.iinfo(np.int64).max


class IdGroups(NamedTuple):
    """The tokens of a batch by the table row that they update.

    Attributes:
        unique_tokens: int32 [U], the distinct rows in ascending order, then V in unused slots.
        segment_ids: int32 [N], index into `unique_tokens` for each token, -1 for one that is masked
            or whose id is outside the table.
        num_rows: distinct rows, the slots in use.
        num_out_of_range: ids of tokens not masked that are outside the table, negative ones wrapped
            once.
        first_out_of_range: position of the first of these among the N tokens, -1 if there is none.
    """

    unique_tokens: np.ndarray
    segment_ids: np.ndarray
    num_rows: int
    num_out_of_range: int
    first_out_of_range: int


class SharedRows(NamedTuple):
    """Rows that a step updates and the next one reads, and the tokens of both steps in them.

    C is the capacity for rows, S the capacity for the tokens of one rank. Where `fits` is false,
    the counts hold and the arrays are None.

    Attributes:
        num_rows: shared rows.
        num_tokens: tokens of the running step in shared rows, of all ranks.
        max_rank_tokens: the most of these on one rank.
        fits: whether num_rows <= C and max_rank_tokens <= S.
        rows: int32 [C], shared rows in ascending order, then V.
        tokens: int32 [R * S], for each rank the positions 0..T-1 of its tokens of the running step
            in shared rows, ascending, then 0.
        segments: int32 [R * S], index into `rows` for each of these, -1 for padding.
        rest_unique: int32 [U], `unique_tokens` of the running step with V in the slots of shared
            rows.
        rest_segments: int32 [N], `segment_ids` of the running step with -1 for tokens of shared
            rows.
        next_index: int32 [N], for each token of the next step the index into `rows` of the row that
            it reads, or -1.
    """

    num_rows: int
    num_tokens: int
    max_rank_tokens: int
    fits: bool
    rows: np.ndarray | None = None
    tokens: np.ndarray | None = None
    segments: np.ndarray | None = None
    rest_unique: np.ndarray | None = None
    rest_segments: np.ndarray | None = None
    next_index: np.ndarray | None = None


def group_ids(
    ids: ArrayLike, vocab_rows: int, num_unique: int, *, mask: ArrayLike | None = None
) -> IdGroups:
    """Groups the tokens of a global batch by the table row that they update.

    A negative id wraps once, as in `table[ids]`. An id that is then outside [0, V) has no row: its
    token gets segment -1, which leaves it out of the update, and is counted. The arrays equal those
    of `make_segments` bit for bit. Time is linear in N.

    Args:
        ids: N integers of any integer dtype and any shape, the ids of the whole batch in token
            order.
        vocab_rows: V, rows of the table.
        num_unique: U, capacity of the list of distinct rows.
        mask: bool, of the shape of `ids`, False for tokens to leave out; None counts all.

    Raises:
        ImportError: the native module is not built.
        TypeError: `ids` is not an integer array or `mask` not a bool array.
        ValueError: there are more than U distinct rows; `mask` has another shape; a size is not
            positive or exceeds int32.
    """
    num_rows = require_int32("vocab_rows", vocab_rows)
    capacity = require_int32("num_unique", num_unique)
    tokens = require_integers("group_ids got ids", ids)
    flat_mask = None if mask is None else _flat_mask(mask, tokens.shape)
    unique_tokens = np.empty(capacity, np.int32)
    segment_ids = np.empty(tokens.size, np.int32)
    counts = native.load().group_ids(
        _flat_ids(tokens), flat_mask, num_rows, unique_tokens, segment_ids
    )
    return IdGroups(unique_tokens, segment_ids, *counts)


def plan_shared_rows(
    groups: IdGroups,
    next_ids: ArrayLike,
    vocab_rows: int,
    *,
    num_ranks: int,
    row_capacity: int,
    token_capacity: int,
    out_of_range: str,
) -> SharedRows:
    """Splits what a step updates into the rows that the next step reads and the rest.

    A row is shared if it is one of the `groups` and at least one token of the next step reads it.
    All tokens of a batch are looked up, masked ones too. Every token of the running step that has a
    segment is in exactly one part, and both parts keep the order of tokens and rows. Time is linear
    in N.

    Args:
        groups: what the running step updates, as `group_ids` gives it.
        next_ids: N integers of any integer dtype and any shape, the ids of all tokens of the next
            step. A negative id wraps once.
        vocab_rows: V, rows of the table.
        num_ranks: R; must divide N.
        row_capacity: C, room for shared rows.
        token_capacity: S, room for the tokens of one rank in shared rows.
        out_of_range: what the next step reads for an id outside the table: "clip", the nearest row;
            "zero", none.

    Raises:
        ImportError: the native module is not built.
        TypeError: `next_ids` is not an integer array, or an array of `groups` not int32 [...].
        ValueError: sizes do not fit together; a size is not positive or exceeds int32; `groups` is
            no grouping; `out_of_range` is unknown.
    """
    num_rows = require_int32("vocab_rows", vocab_rows)
    ranks = require_int32("num_ranks", num_ranks)
    rows_room = require_int32("row_capacity", row_capacity)
    tokens_room = ranks * require_int32("token_capacity", token_capacity)
    tokens = require_integers("plan_shared_rows got next_ids", next_ids)
    if out_of_range not in get_args(OutOfRange):
        raise ValueError(
            f"async_emb: out_of_range={out_of_range!r} is unknown; choose one of "
            f"{', '.join(get_args(OutOfRange))}"
        )
    unique_tokens = _int32_list("groups.unique_tokens", groups.unique_tokens)
    segment_ids = _int32_list("groups.segment_ids", groups.segment_ids)
    plan = [
        np.empty(size, np.int32)
        for size in (
            rows_room,
            tokens_room,
            tokens_room,
            unique_tokens.size,
            segment_ids.size,
            segment_ids.size,
        )
    ]
    num_shared, num_shared_tokens, max_rank_tokens, fits = native.load().plan_shared_rows(
        unique_tokens,
        segment_ids,
        groups.num_rows,
        _flat_ids(tokens),
        num_rows,
        ranks,
        out_of_range == "clip",
        *plan,
    )
    arrays = plan if fits else ()
    return SharedRows(num_shared, num_shared_tokens, max_rank_tokens, fits, *arrays)


def _flat_ids(ids: np.ndarray) -> np.ndarray:
    """Returns ids as contiguous int32 or int64 [N]; what neither holds stays outside any table."""
    if ids.dtype.kind == "u" and ids.dtype.itemsize == 8:
        ids = np.minimum(ids, ids.dtype.type(_INT64_MAX))
    wide = not np.can_cast(ids.dtype, np.int32)
    return np.ascontiguousarray(ids, np.int64 if wide else np.int32).reshape(-1)


def _flat_mask(mask: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(mask)
    if array.dtype != np.bool_:
        raise TypeError(
            f"async_emb: group_ids got a mask of dtype {array.dtype}; a mask is bool: give True "
            "for the tokens that count"
        )
    if array.shape != shape:
        raise ValueError(
            f"async_emb: group_ids got ids of shape {list(shape)} and a mask of shape "
            f"{list(array.shape)}; give one element of the mask for each id"
        )
    return np.ascontiguousarray(array).reshape(-1)


def _int32_list(label: str, array: np.ndarray) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
        raise TypeError(
            f"async_emb: {label} is no int32 array of one dimension; give the groups as group_ids "
            "made them"
        )
    return np.ascontiguousarray(array)
