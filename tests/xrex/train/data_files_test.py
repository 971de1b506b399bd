from pathlib import Path

import pytest

from xrex.train.data_files import (
    DROP,
    ERROR,
    DataFileError,
    Dropped,
    RowFaults,
    expand_globs,
    require_policy,
)


def locate(row: int, column: str | None, reason: str) -> DataFileError:
    return DataFileError("data.tsv", row + 1, column, reason)


def faults() -> RowFaults:
    found = RowFaults()
    found.add(3, "age", "is odd")
    found.add(1, None, "is short")
    found.add(1, "age", "is odd")
    found.add(4, "age", "is odd")
    return found


def test_error_names_file_line_and_column() -> None:
    assert str(DataFileError("a.tsv", 7, "age", "is odd")) == "a.tsv:7: column 'age': is odd"
    assert str(DataFileError("a.parquet", "row group 0, row 7", None, "is odd")) == (
        "a.parquet: row group 0, row 7: is odd"
    )


def test_files_are_sorted_and_stand_once(tmp_path: Path) -> None:
    for name in ("b.tsv", "a.tsv", "c.txt"):
        (tmp_path / name).touch()
    (tmp_path / "d.tsv").mkdir()
    found = expand_globs([str(tmp_path / "c.txt"), str(tmp_path / "*.tsv"), str(tmp_path / "a*")])
    assert [path.name for path in found] == ["c.txt", "a.tsv", "b.tsv"]


def test_pattern_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\*\.tsv' names no file; check the path"):
        expand_globs([str(tmp_path / "*.tsv")])


def test_no_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="no data files were named"):
        expand_globs([])


def test_first_malformed_row_stops_the_reading() -> None:
    with pytest.raises(DataFileError, match=r"^data.tsv:2: is short$"):
        faults().settle(ERROR, 5, locate)


def test_malformed_rows_are_dropped_and_counted_by_their_first_fault() -> None:
    keep, dropped = faults().settle(DROP, 5, locate)
    assert keep.tolist() == [True, False, True, False, False]
    assert dropped == Dropped(3, {"whole row": 1, "age": 2}, "data.tsv:2: is short")


def test_good_rows_are_all_kept() -> None:
    keep, dropped = RowFaults().settle(ERROR, 2, locate)
    assert keep.tolist() == [True, True]
    assert dropped == Dropped()


def test_counts_of_dropped_rows_add_up() -> None:
    total = Dropped() + Dropped(3, {"a": 2, "b": 1}, "first") + Dropped(1, {"a": 1}, "second")
    assert total == Dropped(4, {"a": 3, "b": 1}, "first")


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="on_malformed='skip'; it must be 'error'"):
        require_policy("skip")
