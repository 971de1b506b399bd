import numpy as np
import pytest

from xrex.train.features import ExampleSet, FeatureLayout, Field
from xrex.train.readers import ArrayReader

EXAMPLES = ExampleSet(
    FeatureLayout((Field("only"),)),
    np.arange(1, 8, dtype=np.int32)[:, None],
    np.ones((7, 1), np.bool_),
    np.zeros(7, np.float32),
)


def rows(reader: ArrayReader) -> list[list[int]]:
    return [reader.read(block).examples.rows[:, 0].tolist() for block in range(reader.num_blocks)]


def test_one_block_holds_everything() -> None:
    assert rows(ArrayReader(EXAMPLES)) == [[1, 2, 3, 4, 5, 6, 7]]


def test_blocks_are_of_nearly_equal_size() -> None:
    reader = ArrayReader(EXAMPLES, 3)
    assert (reader.num_blocks, reader.num_examples) == (3, 7)
    assert rows(reader) == [[1, 2], [3, 4], [5, 6, 7]]


@pytest.mark.parametrize("num_blocks", [0, 8])
def test_blocks_without_an_example_are_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} for 7 examples"):
        ArrayReader(EXAMPLES, num_blocks)
