from pathlib import Path

import pytest

from xrex.train.atomic_files import read_atomic_file
from xrex.train.data_files import DataFileError

WANTED = {"id": "token", "score": "float", "tags": "token_seq"}
HEADER = "id:token\tname:token\tscore:float\ttags:token_seq\n"


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "data.inter"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_wanted_columns_are_read_and_others_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "7\tx\t2.5\ta b\n8\ty\t-1\t\n")
    table = read_atomic_file(path, WANTED)
    assert table.tokens("id") == ["7", "8"]
    assert table.floats("score") == [2.5, -1.0]
    assert table.token_lists("tags") == [["a", "b"], []]
    assert "name" not in table.columns


def test_rows_know_their_line(tmp_path: Path) -> None:
    table = read_atomic_file(write(tmp_path, HEADER + "7\tx\t2\ta\n8\ty\t1\tb\n"), WANTED)
    assert table.lines == [2, 3]
    assert str(table.error(1, "id", "is odd")).endswith("data.inter:3: column 'id': is odd")


def test_last_line_needs_no_line_end(tmp_path: Path) -> None:
    table = read_atomic_file(write(tmp_path, HEADER + "7\tx\t2\ta"), WANTED)
    assert table.tokens("id") == ["7"]


def test_windows_line_ends_are_no_part_of_the_last_cell(tmp_path: Path) -> None:
    text = (HEADER + "7\tx\t2\ta\n").replace("\n", "\r\n")
    assert read_atomic_file(write(tmp_path, text), WANTED).token_lists("tags") == [["a"]]


@pytest.mark.parametrize(
    ("content", "line", "column", "reason"),
    [
        ("", None, None, "the file is empty"),
        ("id\tscore:float\n", 1, "id", "must read name:type"),
        ("id:token\tid:token\n", 1, "id", "appears twice"),
        ("id:float\tscore:float\ttags:token_seq\n", 1, "id", "type 'float', expected 'token'"),
        ("id:token\tscore:float\n", 1, None, "columns ['tags'] are missing"),
        (HEADER + "7\tx\t2\ta\n7\tx\t2\n", 3, None, "3 tab-separated cells, the header has 4"),
        (HEADER + "7\tx\t2\ta\n\n", 3, None, "1 tab-separated cells"),
        (HEADER + "7\tx\tgood\ta\n", 2, "score", "'good' is not a number"),
        (HEADER + "7\tx\tnan\ta\n", 2, "score", "'nan' is not finite"),
        (HEADER + "\tx\t1\ta\n", 2, "id", "empty"),
        (HEADER.encode() + b"7\t\xff\t1\ta\n", 2, None, "byte 2 of the line is not UTF-8"),
    ],
)
def test_malformed_files_are_refused_with_the_place(
    tmp_path: Path, content: str | bytes, line: int | None, column: str | None, reason: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DataFileError) as caught:
        read_atomic_file(path, WANTED)
    assert (caught.value.path, caught.value.place, caught.value.column) == (str(path), line, column)
    assert reason in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"absent.inter: cannot be read: No such file"):
        read_atomic_file(tmp_path / "absent.inter", WANTED)


def test_unknown_column_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown column types \['int'\]"):
        read_atomic_file(write(tmp_path, HEADER), {"id": "int"})
