import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrex.train.token_layout import TokenLayout

NUM_EXAMPLES, TABLE_ROWS, WIDTH = 4, 30, 2
TABLE = np.arange(TABLE_ROWS * WIDTH, dtype=np.float32).reshape(TABLE_ROWS, WIDTH)
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@st.composite
def features(draw: st.DrawFn) -> Any:
    """A pytree of ids [B, ...] of the table, of any integer types."""

    def leaf() -> np.ndarray:
        shape = draw(st.lists(st.integers(1, 3), max_size=3))
        size = NUM_EXAMPLES * math.prod(shape)
        ids = draw(st.lists(st.integers(0, TABLE_ROWS - 1), min_size=size, max_size=size))
        return np.array(ids, draw(st.sampled_from(INTEGERS))).reshape(NUM_EXAMPLES, *shape)

    leaves = [leaf() for _ in range(draw(st.integers(1, 4)))]
    trees: list[Any] = [
        leaves,
        tuple(leaves),
        {f"feature{number}": x for number, x in enumerate(leaves)},
        {"nested": leaves[1:], "first": (leaves[0],)},
    ]
    return draw(st.sampled_from(trees))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(features())
def test_rows_of_the_joined_ids_split_into_the_rows_of_each_feature(ids: Any) -> None:
    layout = TokenLayout.of(ids)
    joined = layout.join(jax.tree.leaves(ids))
    assert joined.shape == (NUM_EXAMPLES, layout.num_tokens)
    rows = layout.split(jnp.asarray(TABLE[joined.reshape(-1)]))
    jax.tree.map(np.testing.assert_array_equal, rows, jax.tree.map(lambda x: TABLE[x], ids))


def test_one_array_keeps_its_type() -> None:
    ids = np.zeros((NUM_EXAMPLES, 2), np.uint64)
    assert TokenLayout.of(ids).join([ids]).dtype == np.uint64


def test_layouts_of_equal_features_are_equal() -> None:
    first, second = ({"a": np.zeros((size, 3)), "b": np.zeros(size)} for size in (4, 8))
    assert TokenLayout.of(first) == TokenLayout.of(second)
    assert hash(TokenLayout.of(first)) == hash(TokenLayout.of(second))


@pytest.mark.parametrize("signed", [np.int8, np.int64])
def test_ids_too_large_for_a_common_type_stay_large(signed: Any) -> None:
    ids = [np.array([[-1]], signed), np.array([[2**64 - 1]], np.uint64)]
    joined = TokenLayout.of(ids).join(ids)
    assert joined.tolist() == [[-1, 2**63 - 1]]
