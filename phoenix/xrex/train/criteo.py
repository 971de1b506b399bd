"""Reader of tab-separated click logs in the format of the Criteo data sets.

A line is an example: the label (0 or 1), then `num_integers` whole numbers, then
`num_categoricals` hexadecimal numbers, separated by tabs, with no header. In Criteo's own files
these are 13 and 26. An empty cell is a missing value: its slot is padding.

Every column is a field with one slot: I1, I2, ..., C1, C2, .... The value is hashed to a table row
by `hash_row`, salted with the field's name:

  * a categorical value as it stands, in lower case;
  * an integer v by its bucket: v itself up to 2, floor(ln(v)^2) above, so that large counts share
    rows with their likes.

Files are read in blocks of about `block_bytes`; a line belongs to the block in which it begins.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xrex.train.data_files import ERROR, DataFileError, RowFaults, require_policy
from xrex.train.features import PADDING_ROW, ExampleSet, FeatureLayout, Field, hash_row
from xrex.train.readers import Block

LABEL = "label"
DEFAULT_BLOCK_BYTES = 1 << 22
_MALFORMED = -1  # in the place of a table row
_GZIP_MAGIC = b"\x1f\x8b"
_INTEGER = re.compile(rb"-?[0-9]{1,18}")
_HEXADECIMAL = re.compile(rb"[0-9a-fA-F]{1,16}")


@dataclasses.dataclass(frozen=True)
class CriteoFormat:
    """How many columns of each kind a line has."""

    num_integers: int = 13
    num_categoricals: int = 26

    def __post_init__(self) -> None:
        if min(self.num_integers, self.num_categoricals) < 0 or self.num_features == 0:
            raise ValueError(
                f"num_integers={self.num_integers} and num_categoricals={self.num_categoricals}; "
                "neither may be negative, and together they must be at least 1"
            )

    @property
    def num_features(self) -> int:
        """Cells of a line beside the label."""
        return self.num_integers + self.num_categoricals

    def layout(self) -> FeatureLayout:
        """I1, I2, ..., C1, C2, ..., one slot each."""
        integers = [Field(f"I{index + 1}") for index in range(self.num_integers)]
        categoricals = [Field(f"C{index + 1}") for index in range(self.num_categoricals)]
        return FeatureLayout((*integers, *categoricals))


def integer_bucket(value: int) -> int:
    """The bucket of an integer feature: the value up to 2, floor(ln(value)^2) above."""
    return value if value <= 2 else math.floor(math.log(value) ** 2)


class _Range(NamedTuple):
    """A block: the lines of a file that begin in [start, end), in bytes."""

    path: Path
    start: int
    end: int


class CriteoReader:
    """Reads Criteo-style files; see the module.

    Args:
      files: what to read, in this order.
      num_rows: V, rows of the table that values are hashed into.
      columns: how many columns there are.
      on_malformed: ERROR, or DROP to leave malformed rows out.
      block_bytes: bytes of a block. Memory for about ten times as much is used while one is read.

    Raises:
      DataFileError: a file is missing, empty or compressed.
      ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        files: Sequence[Path],
        num_rows: int,
        *,
        columns: CriteoFormat | None = None,
        on_malformed: str = ERROR,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes={block_bytes}; a block needs at least 1 byte")
        self._format = columns or CriteoFormat()
        self._layout = self._format.layout()
        self._num_rows, self._policy = num_rows, require_policy(on_malformed)
        self._ranges = [
            _Range(path, start, min(start + block_bytes, size))
            for path, size in ((path, _checked_size(path)) for path in files)
            for start in range(0, size, block_bytes)
        ]

    @property
    def layout(self) -> FeatureLayout:
        """See `ExampleReader`."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """See `ExampleReader`."""
        return len(self._ranges)

    @property
    def num_examples(self) -> None:
        """See `ExampleReader`: lines are not counted beforehand."""
        return None

    def read(self, block: int) -> Block:
        """See `ExampleReader`."""
        where = self._ranges[block]
        lines, first_byte = _read_lines(where)
        faults = RowFaults()
        cells = self._split(lines, faults)
        columns = list(zip(*cells, strict=True)) or [()] * (1 + self._format.num_features)
        labels = _convert(columns[0], _label)
        _note(faults, LABEL, columns[0], labels, "is not a label; it must be 0 or 1")
        rows = np.empty((len(lines), self._layout.num_slots), np.int32)
        for slot, (field, column) in enumerate(zip(self._layout.fields, columns[1:], strict=True)):
            if slot < self._format.num_integers:
                parse, rule = _bucket_text, "is not a whole number of at most 18 digits"
            else:
                parse, rule = _category_text, "is not a hexadecimal number of at most 16 digits"
            rows[:, slot] = _convert(column, self._row_of(field.name, parse))
            _note(faults, field.name, column, rows[:, slot], rule)

        def locate(row: int, column: str | None, reason: str) -> DataFileError:
            before = first_byte + sum(len(line) + 1 for line in lines[:row])
            return DataFileError(where.path, _line_number(where.path, before), column, reason)

        keep, dropped = faults.settle(self._policy, len(lines), locate)
        rows = rows[keep]
        labels = labels[keep].astype(np.float32)
        return Block(ExampleSet(self._layout, rows, rows != PADDING_ROW, labels), dropped)

    def _split(self, lines: Sequence[bytes], faults: RowFaults) -> list[list[bytes]]:
        """The cells of every line; those of a line with too few or too many are made up."""
        expected = 1 + self._format.num_features
        cells = [line.removesuffix(b"\r").split(b"\t") for line in lines]
        for row, found in enumerate(cells):
            if len(found) != expected:
                faults.add(
                    row,
                    None,
                    f"{len(found)} tab-separated cells; a line has {expected}: a label, "
                    f"{self._format.num_integers} integers and {self._format.num_categoricals} "
                    "categorical values",
                )
                cells[row] = [b""] * expected
        return cells

    def _row_of(self, field: str, parse: Callable[[bytes], str | None]) -> Callable[[bytes], int]:
        def row_of(cell: bytes) -> int:
            if not cell:
                return PADDING_ROW
            text = parse(cell)
            return _MALFORMED if text is None else hash_row(field, text, self._num_rows)

        return row_of


def _label(cell: bytes) -> int:
    return {b"0": 0, b"1": 1}.get(cell, _MALFORMED)


def _bucket_text(cell: bytes) -> str | None:
    return str(integer_bucket(int(cell))) if _INTEGER.fullmatch(cell) else None


def _category_text(cell: bytes) -> str | None:
    return cell.decode().lower() if _HEXADECIMAL.fullmatch(cell) else None


def _convert(cells: Sequence[bytes], convert: Callable[[bytes], int]) -> np.ndarray:
    """The converted cells, int32; each distinct cell is converted once."""
    converted = {cell: convert(cell) for cell in set(cells)}
    return np.fromiter((converted[cell] for cell in cells), np.int32, len(cells))


def _note(
    faults: RowFaults, column: str, cells: Sequence[bytes], converted: np.ndarray, rule: str
) -> None:
    for row in np.flatnonzero(converted == _MALFORMED).tolist():
        text = cells[row].decode(errors="backslashreplace")
        faults.add(row, column, f"{text!r} {rule}")


def _checked_size(path: Path) -> int:
    """The file's size in bytes."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GZIP_MAGIC))
            size = file.seek(0, 2)
    except OSError as error:
        raise DataFileError(path, None, None, f"cannot be read: {error.strerror}") from error
    if magic == _GZIP_MAGIC:
        raise DataFileError(
            path, None, None, "is compressed, so it cannot be read in blocks; unpack it with gunzip"
        )
    if size == 0:
        raise DataFileError(path, None, None, "the file is empty; it needs at least one line")
    return size


def _read_lines(where: _Range) -> tuple[list[bytes], int]:
    """The lines that begin in the range, without their ends, and where the first one begins."""
    try:
        with where.path.open("rb") as file:
            if where.start > 0:
                file.seek(where.start - 1)
                file.readline()  # the rest of a line that began earlier
            first = file.tell()
            content = file.read(max(0, where.end - first))
            if content and not content.endswith(b"\n"):
                content += file.readline()
    except OSError as error:
        raise DataFileError(where.path, None, None, f"cannot be read: {error.strerror}") from error
    return content.removesuffix(b"\n").split(b"\n") if content else [], first


def _line_number(path: Path, offset: int) -> int:
    """The number, from 1, of the line that begins at byte `offset`."""
    number, chunk_bytes = 1, 1 << 20
    with path.open("rb") as file:
        while offset > 0 and (chunk := file.read(min(chunk_bytes, offset))):
            number += chunk.count(b"\n")
            offset -= len(chunk)
    return number
