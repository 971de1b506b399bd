"""Batches of a fixed size, in an order that depends on nothing but the seed and the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from xrex.train.features import PADDING_ROW, ExampleSet

Array = np.ndarray | jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The examples of one global batch, B of them with F slots each.

    Examples that only fill up the batch have no value in any slot and weight 0, so a rank whose
    share of the batch is all filling takes part in every exchange and contributes nothing.

    Attributes:
      ids: int32 [B, F], table rows.
      mask: bool [B, F], True where a slot holds a value; the other slots are padding.
      labels: float32 [B].
      weights: float32 [B], 1 for an example and 0 for filling.
    """

    ids: Array
    mask: Array
    labels: Array
    weights: Array


def make_batch(examples: ExampleSet, index: np.ndarray, batch_size: int) -> Batch:
    """The examples at `index`, filled up to `batch_size`."""
    count = len(index)
    if count > batch_size:
        raise ValueError(f"{count} examples do not fit into a batch of {batch_size}")
    shape = (batch_size, examples.layout.num_slots)
    batch = Batch(
        np.full(shape, PADDING_ROW, np.int32),
        np.zeros(shape, np.bool_),
        np.zeros(batch_size, np.float32),
        np.zeros(batch_size, np.float32),
    )
    batch.ids[:count] = examples.rows[index]
    batch.mask[:count] = examples.mask[index]
    batch.labels[:count] = examples.labels[index]
    batch.weights[:count] = 1
    return batch


def steps_per_epoch(examples: ExampleSet, batch_size: int) -> int:
    """Batches that cover all examples once; the last may be filled up."""
    return -(-len(examples) // batch_size)


def training_batches(
    examples: ExampleSet, batch_size: int, seed: int, first_step: int, end_step: int
) -> Iterator[Batch]:
    """Batches of the steps [first_step, end_step), shuffled anew in every epoch.

    The batch of a step is a function of (examples, batch_size, seed, step), so a resumed run goes
    on with the batch that the interrupted one would have taken.
    """
    per_epoch = steps_per_epoch(examples, batch_size)
    order, order_epoch = np.empty(0, np.int64), -1
    for step in range(first_step, end_step):
        epoch, position = divmod(step, per_epoch)
        if epoch != order_epoch:
            rng = np.random.Generator(np.random.PCG64([seed, epoch]))
            order, order_epoch = rng.permutation(len(examples)), epoch
        yield make_batch(
            examples, order[position * batch_size : (position + 1) * batch_size], batch_size
        )


def sequential_batches(examples: ExampleSet, batch_size: int) -> Iterator[Batch]:
    """All examples once, in their order; for evaluation."""
    for start in range(0, len(examples), batch_size):
        yield make_batch(
            examples, np.arange(start, min(start + batch_size, len(examples))), batch_size
        )


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
