"""Batches of a fixed size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from xrex.train.features import PADDING_ROW, ExampleSet


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The examples of one global batch, B of them with F slots each.

    Examples that only fill up the batch have no value in any slot and weight 0, so a rank whose
    share of the batch is all filling takes part in every exchange and contributes nothing.

    Attributes:
      ids: int32 [B, F], table rows. This and the others are NumPy or JAX arrays.
      mask: bool [B, F], True where a slot holds a value; the other slots are padding.
      labels: float32 [B].
      weights: float32 [B], 1 for an example and 0 for filling.
    """

    ids: Any
    mask: Any
    labels: Any
    weights: Any


def make_batch(examples: ExampleSet, batch_size: int) -> Batch:
    """The examples, at most `batch_size` of them, filled up to `batch_size`."""
    count = len(examples)
    if count > batch_size:
        raise ValueError(f"{count} examples do not fit into a batch of {batch_size}")
    batch = empty_batch(batch_size, examples.layout.num_slots)
    batch.ids[:count] = examples.rows
    batch.mask[:count] = examples.mask
    batch.labels[:count] = examples.labels
    batch.weights[:count] = 1
    return batch


def empty_batch(batch_size: int, num_slots: int) -> Batch:
    """A batch of nothing but filling, in host memory."""
    shape = (batch_size, num_slots)
    return Batch(
        np.full(shape, PADDING_ROW, np.int32),
        np.zeros(shape, np.bool_),
        np.zeros(batch_size, np.float32),
        np.zeros(batch_size, np.float32),
    )


def join_batches(parts: Sequence[Batch]) -> Batch:
    """The batch whose examples are those of the parts, in order; parts of the host's memory."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def look_ahead[Item](items: Iterable[Item]) -> Iterator[tuple[Item, Item | None]]:
    """Yields every item with its successor; the last one comes with None."""
    iterator = iter(items)
    try:
        current = next(iterator)
    except StopIteration:
        return
    for successor in iterator:
        yield current, successor
        current = successor
    yield current, None
