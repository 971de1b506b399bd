"""Id features of examples and how they share one embedding table.

Every feature value (a user, an item, a genre, ...) is hashed to a row of one table of V rows. The
hash is salted with the feature's name, so that user "7" and item "7" get rows of their own, and it
is the same in every process and every run.

Padding. Multi-valued features have a fixed number of slots, and the last batch of an epoch is
filled up with empty examples. A slot without a value holds `PADDING_ROW`, a row that no value is
ever hashed to, so that the lookup reads a real row and the counter of out-of-range ids stays a
counter of data bugs. The mask says which slots hold a value; the others take part in no pooling
and get segment -1, so the padding row is never updated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

PADDING_ROW = 0


@dataclasses.dataclass(frozen=True)
class Field:
    """One feature: its name, which salts the hash, and how many values an example may hold."""

    name: str
    slots: int = 1

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"field {self.name!r} has {self.slots} slots; it needs at least 1")


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """The fields of an example in the order of its slots."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if not names:
            raise ValueError("a feature layout needs at least one field")
        if len(set(names)) != len(names):
            raise ValueError(f"field names must be distinct, got {names}")

    @property
    def num_slots(self) -> int:
        """Slots of one example, F."""
        return sum(field.slots for field in self.fields)

    def slices(self) -> dict[str, slice]:
        """The slots of each field, by name."""
        result: dict[str, slice] = {}
        start = 0
        for field in self.fields:
            result[field.name] = slice(start, start + field.slots)
            start += field.slots
        return result


@dataclasses.dataclass(frozen=True)
class ExampleSet:
    """Examples in memory.

    Attributes:
      layout: what the slots mean.
      rows: int32 [n, F], table rows; `PADDING_ROW` where `mask` is False.
      mask: bool [n, F], True where a slot holds a value.
      labels: float32 [n], 0 or 1.
    """

    layout: FeatureLayout
    rows: np.ndarray
    mask: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        shape = (len(self.labels), self.layout.num_slots)
        if self.rows.shape != shape or self.mask.shape != shape:
            raise ValueError(
                f"rows {self.rows.shape} and mask {self.mask.shape} must both be {shape}: "
                "examples by slots of the layout"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: np.ndarray | slice) -> ExampleSet:
        """The examples at `index`, in its order."""
        return ExampleSet(self.layout, self.rows[index], self.mask[index], self.labels[index])


def concatenate(parts: Sequence[ExampleSet]) -> ExampleSet:
    """The examples of several sets of one layout, in order; at least one set."""
    if len(parts) == 1:
        return parts[0]
    return ExampleSet(
        parts[0].layout,
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.mask for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


@dataclasses.dataclass(frozen=True)
class Splits:
    """Examples split by time: all of `train` lies before all of `valid`, and that before `test`."""

    train: ExampleSet
    valid: ExampleSet
    test: ExampleSet

    def num_distinct_rows(self) -> int:
        """Distinct table rows that the examples use, which bounds those of any one batch."""
        used = [part.rows[part.mask] for part in (self.train, self.valid, self.test)]
        return len(np.unique(np.concatenate(used)))


def hash_row(field: str, value: str, num_rows: int) -> int:
    """Row of a feature value, in [1, num_rows): BLAKE2b of the salted value, modulo num_rows - 1.

    Raises:
      ValueError: `num_rows` leaves no row beside the padding row.
    """
    if num_rows < 2:
        raise ValueError(
            f"a table of {num_rows} rows has none beside padding row {PADDING_ROW}; use at least 2"
        )
    key = f"{field}\0{value}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % (num_rows - 1)


def hash_rows(field: str, values: Sequence[str], num_rows: int) -> np.ndarray:
    """`hash_row` of every value: int32 [len(values)]. Each distinct value is hashed once."""
    row_of = {value: hash_row(field, value, num_rows) for value in set(values)}
    return np.fromiter((row_of[value] for value in values), np.int32, len(values))


def pad_rows(rows_of_examples: Iterable[Sequence[int]], slots: int) -> np.ndarray:
    """Rows of a multi-valued feature: int32 [n, slots], filled up with `PADDING_ROW`.

    Raises:
      ValueError: an example has more values than there are slots.
    """
    examples = list(rows_of_examples)
    result = np.full((len(examples), slots), PADDING_ROW, np.int32)
    for position, rows in enumerate(examples):
        if len(rows) > slots:
            raise ValueError(
                f"example {position} has {len(rows)} values for {slots} slots; "
                "give the field more slots"
            )
        result[position, : len(rows)] = rows
    return result


def split_by_time(
    examples: ExampleSet,
    times: np.ndarray,
    train_fraction: float = 0.8,
    valid_fraction: float = 0.1,
) -> Splits:
    """Splits by time. Events of one time are never torn apart: they go to the later part.

    Args:
      examples: n of them.
      times: [n], when each of them happened, in any unit.
      train_fraction: share of the examples that the first part gets, about.
      valid_fraction: likewise the second part; the test part gets the rest.

    Raises:
      ValueError: the fractions do not leave something for every part, or a part stays empty.
    """
    test_fraction = 1 - train_fraction - valid_fraction
    if min(train_fraction, valid_fraction, test_fraction) <= 0:
        raise ValueError(
            f"fractions train={train_fraction} and valid={valid_fraction} must be positive and "
            "leave a positive rest for test"
        )
    order = np.argsort(times, kind="stable")
    ordered, ordered_times = examples.take(order), times[order]
    count = len(ordered)
    cuts = [0]
    for fraction in (train_fraction, train_fraction + valid_fraction):
        position = min(round(count * fraction), count - 1)
        cuts.append(int(np.searchsorted(ordered_times, ordered_times[position], side="left")))
    cuts.append(count)
    parts = [ordered.take(slice(start, end)) for start, end in itertools.pairwise(cuts)]
    if any(len(part) == 0 for part in parts):
        raise ValueError(
            f"splitting {count} examples by time gives parts of {[len(p) for p in parts]}; "
            "each needs at least one example"
        )
    return Splits(*parts)
