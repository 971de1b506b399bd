"""How examples are read: in blocks, each of which can be read by itself and any number of times."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from xrex.train.data_files import Dropped
from xrex.train.features import ExampleSet, FeatureLayout


@dataclasses.dataclass(frozen=True)
class Block:
    """What a reader found in one block: its examples in order, and what it left out."""

    examples: ExampleSet
    dropped: Dropped = dataclasses.field(default_factory=Dropped)


class ExampleReader(Protocol):
    """A data set in blocks.

    A block is what is read at once, so it must fit into memory several times over. A reader keeps
    no position, and reading a block gives the same examples every time: what comes when is the
    business of `BatchStream`. The blocks and their order are the same in every process.
    """

    @property
    def layout(self) -> FeatureLayout:
        """What the slots of an example mean."""
        ...

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, at least 1."""
        ...

    @property
    def num_examples(self) -> int | None:
        """Examples in all blocks; None if only reading them all would tell."""
        ...

    def read(self, block: int) -> Block:
        """Reads block number `block`, in [0, num_blocks).

        Raises:
          DataFileError: a file cannot be read, or a row is malformed and none may be dropped.
        """
        ...


class ArrayReader:
    """Examples in memory, as a reader.

    Args:
      examples: at least one.
      num_blocks: blocks to cut them into, of nearly equal size; at least one for each process
        that reads a share.
    """

    def __init__(self, examples: ExampleSet, num_blocks: int = 1) -> None:
        if not 1 <= num_blocks <= len(examples):
            raise ValueError(
                f"num_blocks={num_blocks} for {len(examples)} examples; every block must hold at "
                "least one: give more examples or fewer blocks"
            )
        self._examples, self._num_blocks = examples, num_blocks

    @property
    def layout(self) -> FeatureLayout:
        """See `ExampleReader`."""
        return self._examples.layout

    @property
    def num_blocks(self) -> int:
        """See `ExampleReader`."""
        return self._num_blocks

    @property
    def num_examples(self) -> int:
        """See `ExampleReader`."""
        return len(self._examples)

    def read(self, block: int) -> Block:
        """See `ExampleReader`."""
        cuts = np.arange(self._num_blocks + 1) * len(self._examples) // self._num_blocks
        return Block(self._examples.take(slice(int(cuts[block]), int(cuts[block + 1]))))
