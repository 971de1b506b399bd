"""Reader of Parquet files, one example a row.

The caller names the feature columns; each is a field, and its values are hashed to table rows by
`hash_row`, salted with the column's name, in their text form (7, abc, true).

  * A plain column of integers, text or booleans has one slot. A null is a missing value: its slot
    is padding.
  * A list column of such values needs a number of slots, which short lists are padded to. A null
    list is an empty one. A row with more values than slots, or with a null inside its list, is
    malformed: what to leave out is for whoever writes the file to decide.
  * Floating-point columns are refused: nearly equal numbers would get rows of their own.

The label column holds booleans or the numbers 0 and 1. A block is a row group, so write row groups
that fit into memory several times over (some 100,000 rows), and at least one for each process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xrex.train.data_files import ERROR, DataFileError, RowFaults, require_policy
from xrex.train.features import PADDING_ROW, ExampleSet, FeatureLayout, Field, hash_row
from xrex.train.readers import Block


class _RowGroup(NamedTuple):
    """A block: one row group of a file."""

    path: Path
    number: int


class ParquetReader:
    """Reads Parquet files; see the module.

    Args:
      files: what to read, in this order. All have the named columns.
      num_rows: V, rows of the table that values are hashed into.
      features: the feature columns and their slots.
      label: the label column.
      on_malformed: ERROR, or DROP to leave malformed rows out.

    Raises:
      DataFileError: a file is not Parquet, has no rows, or a column is missing or of a type that
        cannot be used.
      ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        files: Sequence[Path],
        num_rows: int,
        *,
        features: Sequence[Field],
        label: str,
        on_malformed: str = ERROR,
    ) -> None:
        self._layout = FeatureLayout(tuple(features))
        self._label, self._num_rows = label, num_rows
        self._policy = require_policy(on_malformed)
        if label in self._layout.slices():
            raise ValueError(
                f"column {label!r} is named as label and as feature; a model that sees its label "
                "learns nothing else: take it out of one of the two"
            )
        self._row_groups: list[_RowGroup] = []
        self._total = 0
        for path in files:
            self._add_file(path)
        if not self._row_groups:
            raise DataFileError(files[0], None, None, "no file has any row; give files with data")

    @property
    def layout(self) -> FeatureLayout:
        """See `ExampleReader`."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """See `ExampleReader`."""
        return len(self._row_groups)

    @property
    def num_examples(self) -> int | None:
        """See `ExampleReader`. Known unless malformed rows are dropped."""
        return self._total if self._policy == ERROR else None

    def read(self, block: int) -> Block:
        """See `ExampleReader`."""
        path, number = self._row_groups[block]
        names = [self._label, *self._layout.slices()]
        try:
            with pq.ParquetFile(path) as file:
                table = file.read_row_group(number, columns=names)
        except (OSError, pa.ArrowException) as error:
            raise DataFileError(
                path, f"row group {number}", None, f"cannot be read: {error}"
            ) from (error)
        faults = RowFaults()
        labels = _read_labels(table.column(self._label), self._label, faults)
        parts = [
            _read_feature(table.column(field.name), field, self._num_rows, faults)
            for field in self._layout.fields
        ]
        rows = np.concatenate(parts, axis=1)

        def locate(row: int, column: str | None, reason: str) -> DataFileError:
            return DataFileError(path, f"row group {number}, row {row}", column, reason)

        keep, dropped = faults.settle(self._policy, len(labels), locate)
        rows = rows[keep]
        return Block(ExampleSet(self._layout, rows, rows != PADDING_ROW, labels[keep]), dropped)

    def _add_file(self, path: Path) -> None:
        try:
            with pq.ParquetFile(path) as file:
                schema, metadata = file.schema_arrow, file.metadata
        except (OSError, pa.ArrowException) as error:
            reason = getattr(error, "strerror", None) or f"not a Parquet file: {error}"
            raise DataFileError(path, None, None, f"cannot be read: {reason}") from error
        self._check_schema(path, schema)
        for number in range(metadata.num_row_groups):
            if metadata.row_group(number).num_rows > 0:
                self._row_groups.append(_RowGroup(path, number))
        self._total += metadata.num_rows

    def _check_schema(self, path: Path, schema: pa.Schema) -> None:
        for name in (self._label, *self._layout.slices()):
            count = schema.names.count(name)
            if count != 1:
                found = "there is no such column" if count == 0 else "the name stands twice"
                raise DataFileError(
                    path, None, name, f"{found}; the file's columns are {schema.names}"
                )
        label = schema.field(self._label).type
        if not (
            pa.types.is_boolean(label) or pa.types.is_integer(label) or pa.types.is_floating(label)
        ):
            raise DataFileError(
                path, None, self._label, f"a label cannot be {label}; it must be bool or number"
            )
        for field in self._layout.fields:
            if problem := _type_problem(schema.field(field.name).type, field):
                raise DataFileError(path, None, field.name, problem)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _type_problem(kind: pa.DataType, field: Field) -> str | None:
    """What speaks against a column of this type for the field; None if nothing does."""
    if _is_list(kind):
        if field.slots == 1:
            return (
                f"it is {kind}: a list column needs a number of slots to be padded to; name it as "
                f"{field.name}:20, for 20 slots"
            )
        kind = kind.value_type
    elif field.slots > 1:
        return f"it is {kind}, one value a row; {field.slots} slots are for list columns"
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return f"it is {kind}; features are ids: bucket it into integers first"
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (text or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return f"it is {kind}; a feature must be integer, text, bool, or a list of these"
    return None


def _read_labels(column: pa.ChunkedArray, name: str, faults: RowFaults) -> np.ndarray:
    """Labels float32 [n]; malformed ones are noted."""
    values = pc.cast(column, pa.float64(), safe=False).to_numpy()  # null becomes NaN
    for row in np.flatnonzero((values != 0) & (values != 1)).tolist():
        faults.add(row, name, f"{column[row].as_py()!r} is not a label; it must be 0 or 1")
    return values.astype(np.float32)


def _read_feature(
    column: pa.ChunkedArray, field: Field, num_rows: int, faults: RowFaults
) -> np.ndarray:
    """Table rows int32 [n, slots] of a column; malformed rows are noted."""
    if not _is_list(column.type):
        return _hash_values(column, field.name, num_rows)[:, None]
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    values = _hash_values(pc.list_flatten(column), field.name, num_rows)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    for row in np.flatnonzero(lengths > field.slots).tolist():
        faults.add(row, field.name, f"{lengths[row]} values for {field.slots} slots")
    for row in np.unique(owner[values == PADDING_ROW]).tolist():
        faults.add(row, field.name, "a null inside the list; leave it out")
    result = np.full((len(lengths), field.slots), PADDING_ROW, np.int32)
    fits = position < field.slots
    result[owner[fits], position[fits]] = values[fits]
    return result


def _hash_values(column: pa.ChunkedArray, field: str, num_rows: int) -> np.ndarray:
    """The table row of every value, int32 [n]; `PADDING_ROW` for null. Each is hashed once."""
    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, column.type.value_type)
    encoded = column.dictionary_encode().combine_chunks()
    texts = (_text(value) for value in encoded.dictionary.to_pylist())
    row_of = [hash_row(field, text, num_rows) for text in texts]
    indices = pc.fill_null(encoded.indices, -1).to_numpy()
    return np.asarray([PADDING_ROW, *row_of], np.int32)[indices + 1]


def _text(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
