"""The list of distinct ids of a batch, and which of them each token belongs to."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from xrex.cuda.async_emb import comm_utils

_INT32_MAX = np.iinfo(np.int32).max


def make_segments(ids: ArrayLike, V: int, U: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups the tokens of a global batch by the table row they update.

    A negative id wraps once, as in `table[ids]`. An id that is then outside [0, V) has no row: its
    token gets segment -1, which leaves it out of the update.

    Args:
        ids: integer array of any shape with N elements, the ids of the whole batch in token order.
        V: number of table rows.
        U: capacity of the list of distinct ids.

    Returns:
        `unique_tokens`, int32 [U]: the distinct rows in ascending order, then V in unused slots;
        `segment_ids`, int32 [N]: index into `unique_tokens` for each token, or -1.

    Raises:
        TypeError: `ids` is not an integer array.
        ValueError: there are more than U distinct rows; V or U is not positive or exceeds int32.
    """
    num_rows = require_int32("V", V)
    capacity = require_int32("U", U)
    tokens = require_integers("make_segments got ids", ids).reshape(-1)
    # Bounds first: int64 then holds every value that matters, also of unsigned ids.
    listed = (tokens < num_rows) & (tokens >= -num_rows)
    rows = np.where(listed, tokens, 0).astype(np.int64)
    rows[rows < 0] += num_rows
    distinct, inverse = np.unique(rows[listed], return_inverse=True)
    if distinct.size > capacity:
        raise ValueError(
            f"async_emb: the batch has {distinct.size} distinct ids, but the list of distinct ids "
            f"has a capacity of {capacity}; raise num_unique or make the batch smaller"
        )
    unique_tokens = np.full(capacity, num_rows, np.int32)
    unique_tokens[: distinct.size] = distinct
    segment_ids = np.full(tokens.size, -1, np.int32)
    segment_ids[listed] = inverse
    return unique_tokens, segment_ids


def require_int32(label: str, value: int) -> int:
    """Returns `value` as an int.

    Raises:
        ValueError: it is not a whole number, not positive, or exceeds int32.
    """
    size = comm_utils.require_positive_int(label, value)
    if size > _INT32_MAX:
        raise ValueError(
            f"async_emb: {label}={size} is greater than {_INT32_MAX}; ids and slots are int32"
        )
    return size


def require_integers(label: str, ids: ArrayLike) -> np.ndarray:
    """Returns `ids` as an array of an integer dtype; an empty list counts as integers.

    Raises:
        TypeError: they are something else; the message begins with `label`.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"async_emb: {label} of dtype {array.dtype}; ids are integers: "
            "cast them, for example with ids.astype(np.int32)"
        )
    return array
