"""Inputs and comparisons that the tests of the arithmetic share."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from xrex.cuda.async_emb.reference import (
    BFLOAT16,
    Batch,
    Bf16Array,
    EagerDecay,
    LazyDecay,
    TableState,
)

EAGER = EagerDecay(decay_factor=0.875, weight_decay_factor=0.99)
LAZY = LazyDecay(step=9, accum_decay_rate=0.02, weight_decay_rate=0.003)


class UpdateCase(NamedTuple):
    """One update's inputs, global arrays."""

    state: TableState
    grads: Bf16Array
    segment_ids: np.ndarray
    unique_tokens: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.segment_ids)

    @property
    def num_slots(self) -> int:
        return len(self.unique_tokens)


def on_ranks(*counts: int) -> Any:
    """Parametrises `num_ranks`; numbers that this process has no devices for are skipped.

    On GPUs one rank is always among the numbers, as there may be only one.
    """
    chosen = sorted({1, *counts}) if jax.default_backend() == "gpu" else counts
    return pytest.mark.parametrize(
        "num_ranks",
        [
            pytest.param(
                count,
                marks=pytest.mark.skipif(
                    jax.device_count() < count, reason=f"needs {count} devices"
                ),
            )
            for count in chosen
        ],
    )


def bits(values: Any) -> np.ndarray:
    """The array as unsigned integers of the same width."""
    array = np.asarray(values)
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def assert_same_bits(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(bits(found), bits(expected))


def assert_same_state(found: TableState, expected: TableState) -> None:
    assert_same_bits(found.table, expected.table)
    assert_same_bits(found.row_state, expected.row_state)
    assert (found.last_step is None) == (expected.last_step is None)
    if found.last_step is not None:
        np.testing.assert_array_equal(found.last_step, expected.last_step)


def bf16(values: Any) -> Bf16Array:
    return np.asarray(values, np.float32).astype(BFLOAT16)


def any_bits(rng: np.random.Generator, *shape: int) -> Bf16Array:
    """Random bit patterns: NaNs with payloads, infinities, both zeros, subnormals."""
    return rng.integers(0, 2**16, shape, np.uint16).view(BFLOAT16)


def make_state(rng: np.random.Generator, num_rows: int, emb_width: int) -> TableState:
    return TableState(
        bf16(rng.standard_normal((num_rows, emb_width))),
        rng.exponential(0.1, num_rows).astype(np.float32),
        rng.integers(0, 12, num_rows).astype(np.int32),
    )


def make_batch(rng: np.random.Generator, num_tokens: int, num_rows: int, num_slots: int) -> Batch:
    """Skewed ids, some of them negative and some out of range.

    Slots are in random order; tokens of rows without a slot are left out.
    """
    rows = rng.zipf(1.3, num_tokens) % num_rows
    rows = np.where(rng.random(num_tokens) < 0.2, rows - num_rows, rows)
    strays = rng.choice([num_rows, -num_rows - 1, 2**31 - 1, -(2**31)], num_tokens)
    ids = np.where(rng.random(num_tokens) < 0.1, strays, rows).astype(np.int32)
    in_range = ids[(ids >= -num_rows) & (ids < num_rows)].astype(np.int64)
    listed = rng.permutation(np.unique(in_range % num_rows))[:num_slots]
    unique_tokens = np.full(num_slots, num_rows, np.int32)
    unique_tokens[: len(listed)] = listed
    slot_of_row = {int(row): slot for slot, row in enumerate(listed)}
    segment_ids = [
        slot_of_row.get(k % num_rows, -1) if -num_rows <= k < num_rows else -1 for k in ids.tolist()
    ]
    return Batch(ids, np.array(segment_ids, np.int32), unique_tokens)


def make_case(
    rng: np.random.Generator, num_tokens: int, num_rows: int, emb_width: int, num_slots: int
) -> UpdateCase:
    batch = make_batch(rng, num_tokens, num_rows, num_slots)
    grads = bf16(rng.standard_normal((num_tokens, emb_width)))
    state = make_state(rng, num_rows, emb_width)
    return UpdateCase(state, grads, batch.segment_ids, batch.unique_tokens)


@st.composite
def update_cases(draw: st.DrawFn, num_ranks: int = 1) -> UpdateCase:
    """Updates of any small shape that `num_ranks` ranks can share."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_tokens = num_ranks * draw(st.integers(1, 300 // num_ranks))
    emb_width = num_ranks * draw(st.integers(1, 24 // num_ranks))
    num_rows = draw(st.integers(1, 80))
    num_slots = draw(st.integers(1, 90))
    case = make_case(rng, num_tokens, num_rows, emb_width, num_slots)
    exponents = rng.uniform(-draw(st.sampled_from([0, 3, 12])), 0, (num_tokens, 1))
    grads = case.grads.astype(np.float32) * np.float32(2) ** exponents.astype(np.float32)
    case.state.row_state[: num_rows // 2] = draw(st.sampled_from([0.0, 0.1]))
    return case._replace(grads=bf16(grads))


def invalid_cases(case: UpdateCase) -> Iterator[tuple[str, UpdateCase]]:
    """The ways in which an update's indices can be wrong."""
    for name, index in (("below", -2), ("beyond", case.num_slots), ("huge", 2**31 - 1)):
        segment_ids = case.segment_ids.copy()
        segment_ids[case.num_tokens // 2] = index
        yield f"segment {name}", case._replace(segment_ids=segment_ids)
    num_rows = len(case.state.table)
    for name, ids in (("equal", [1, 1]), ("equal once wrapped", [-1, num_rows - 1])):
        unique_tokens = case.unique_tokens.copy()
        unique_tokens[:] = num_rows
        unique_tokens[-2:] = ids
        yield f"slots {name}", case._replace(unique_tokens=unique_tokens)
