"""Reader of RecBole's "atomic files": tab-separated columns under a header of `name:type`.

Types: `token` (text), `float` (a finite number), `token_seq` (texts separated by blanks). Anything
malformed stops the reading with the file, the line and the column at fault.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from xrex.train.data_files import DataFileError


@dataclasses.dataclass(frozen=True)
class AtomicTable:
    """The requested columns of one file (checked text), and the line that each row came from."""

    path: Path
    columns: Mapping[str, list[str]]
    lines: list[int]

    def tokens(self, column: str) -> list[str]:
        """A `token` column."""
        return self.columns[column]

    def floats(self, column: str) -> list[float]:
        """A `float` column."""
        return [float(text) for text in self.columns[column]]

    def token_lists(self, column: str) -> list[list[str]]:
        """A `token_seq` column."""
        return [text.split() for text in self.columns[column]]

    def error(self, row: int, column: str, reason: str) -> DataFileError:
        """An error about one cell of this file."""
        return DataFileError(self.path, self.lines[row], column, reason)


def _check_token(text: str) -> None:
    if not text:
        raise ValueError("empty; a token needs at least one character")


def _check_float(text: str) -> None:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not finite")


def _check_token_seq(text: str) -> None:
    del text  # any text is a sequence of tokens, the empty one included


_CHECKS: Mapping[str, Callable[[str], None]] = {
    "token": _check_token,
    "float": _check_float,
    "token_seq": _check_token_seq,
}


def _read_header(path: Path, header: str, wanted: Mapping[str, str]) -> list[str]:
    """Checks the header and returns the column names in the file's order."""
    names: list[str] = []
    for cell in header.split("\t"):
        name, colon, kind = cell.partition(":")
        if not colon or not name or not kind:
            raise DataFileError(path, 1, cell, "a header cell must read name:type")
        if name in names:
            raise DataFileError(path, 1, name, "the column appears twice in the header")
        if name in wanted and wanted[name] != kind:
            raise DataFileError(
                path, 1, name, f"the header says type {kind!r}, expected {wanted[name]!r}"
            )
        names.append(name)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise DataFileError(path, 1, None, f"columns {missing} are missing; the header has {names}")
    return names


def read_atomic_file(path: str | os.PathLike[str], wanted: Mapping[str, str]) -> AtomicTable:
    """Reads the `wanted` columns (name -> type) of a file.

    Raises:
      DataFileError: the file is missing, empty or not UTF-8; the header is malformed or lacks a
        column; a row has another number of cells than the header; a cell is malformed.
    """
    path = Path(path)
    unknown = {kind for kind in wanted.values() if kind not in _CHECKS}
    if unknown:
        raise ValueError(f"unknown column types {sorted(unknown)}; known are {sorted(_CHECKS)}")
    try:
        raw_lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataFileError(path, None, None, f"cannot be read: {error.strerror}") from error
    if raw_lines[-1] == b"":
        raw_lines.pop()
    if not raw_lines:
        raise DataFileError(path, None, None, "the file is empty; it needs a header of name:type")
    names = _read_header(path, _decode(path, 1, raw_lines[0]), wanted)
    columns: dict[str, list[str]] = {name: [] for name in wanted}
    lines = list(range(2, len(raw_lines) + 1))
    for line, raw in zip(lines, raw_lines[1:], strict=True):
        _append_row(path, line, _decode(path, line, raw).split("\t"), names, wanted, columns)
    return AtomicTable(path, columns, lines)


def _decode(path: Path, line: int, raw: bytes) -> str:
    try:
        return raw.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} of the line is not UTF-8"
        raise DataFileError(path, line, None, reason) from error


def _append_row(
    path: Path,
    line: int,
    cells: Sequence[str],
    names: Sequence[str],
    wanted: Mapping[str, str],
    columns: Mapping[str, list[str]],
) -> None:
    if len(cells) != len(names):
        reason = f"{len(cells)} tab-separated cells, the header has {len(names)}"
        raise DataFileError(path, line, None, reason)
    for name, cell in zip(names, cells, strict=True):
        if name not in wanted:
            continue
        try:
            _CHECKS[wanted[name]](cell)
        except ValueError as error:
            raise DataFileError(path, line, name, str(error)) from error
        columns[name].append(cell)
