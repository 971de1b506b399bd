"""Data files: which they are, what is wrong with them, and what becomes of malformed rows."""

from __future__ import annotations

import collections
import dataclasses
import glob
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

ERROR, DROP = "error", "drop"
POLICIES = (ERROR, DROP)


class DataFileError(ValueError):
    """A data file that cannot be used: says which file, where in it, which column, and why.

    Attributes:
      path: the file.
      place: a line's number from 1, or a description such as "row group 0, row 7", or None.
      column: name of the column at fault, or None.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        place: int | str | None,
        column: str | None,
        reason: str,
    ) -> None:
        where = str(path)
        if place is not None:
            where += f":{place}" if isinstance(place, int) else f": {place}"
        if column is not None:
            where += f": column {column!r}"
        super().__init__(f"{where}: {reason}")
        self.path, self.place, self.column = str(path), place, column


def expand_globs(patterns: Sequence[str]) -> list[Path]:
    """The files that the patterns name, sorted within each pattern, each file once.

    Raises:
      ValueError: there is no pattern, or one that names no file.
    """
    if not patterns:
        raise ValueError("no data files were named; give at least one path or glob pattern")
    files: dict[Path, None] = {}
    for pattern in patterns:
        found = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
        found = [path for path in found if path.is_file()]
        if not found:
            raise ValueError(
                f"{pattern!r} names no file; check the path, and quote a pattern so that the shell "
                "leaves it alone"
            )
        files.update(dict.fromkeys(found))
    return list(files)


@dataclasses.dataclass(frozen=True)
class Dropped:
    """Malformed rows that were left out.

    Attributes:
      num_rows: how many.
      by_column: how many of them for each column at fault; "whole row" where it is no column.
      first: the error of the first of them, with its place; None if there is none.
    """

    num_rows: int = 0
    by_column: Mapping[str, int] = dataclasses.field(default_factory=dict)
    first: str | None = None

    def __add__(self, other: Dropped) -> Dropped:
        by_column = collections.Counter(self.by_column) + collections.Counter(other.by_column)
        return Dropped(self.num_rows + other.num_rows, dict(by_column), self.first or other.first)


class RowFaults:
    """What is wrong with the rows of one block. The fault noted first for a row is the row's."""

    def __init__(self) -> None:
        self._faults: dict[int, tuple[str | None, str]] = {}

    def add(self, row: int, column: str | None, reason: str) -> None:
        """Notes a fault of a row; column None if the whole row is at fault."""
        self._faults.setdefault(row, (column, reason))

    def settle(
        self,
        policy: str,
        num_rows: int,
        locate: Callable[[int, str | None, str], DataFileError],
    ) -> tuple[np.ndarray, Dropped]:
        """Does with the malformed rows what the policy says.

        Args:
          policy: ERROR or DROP.
          num_rows: rows of the block, malformed ones included.
          locate: (row, column, reason) -> the error that says where the row is.

        Returns:
          bool [num_rows], True for the rows to keep; and what was dropped.

        Raises:
          DataFileError: the policy is ERROR and there is a malformed row; about the first one.
        """
        keep = np.ones(num_rows, np.bool_)
        if not self._faults:
            return keep, Dropped()
        first = min(self._faults)
        error = locate(first, *self._faults[first])
        if policy == ERROR:
            raise error
        keep[list(self._faults)] = False
        by_column = collections.Counter(
            column or "whole row" for column, _ in self._faults.values()
        )
        return keep, Dropped(len(self._faults), dict(by_column), str(error))


def require_policy(policy: str) -> str:
    """Returns the policy for malformed rows.

    Raises:
      ValueError: there is no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(
            f"on_malformed={policy!r}; it must be {ERROR!r} (stop at the first malformed row) or "
            f"{DROP!r} (leave malformed rows out and count them)"
        )
    return policy
