import math
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from xrex.train.criteo import CriteoFormat, CriteoReader, integer_bucket
from xrex.train.data_files import DROP, DataFileError, Dropped
from xrex.train.features import PADDING_ROW, ExampleSet, concatenate, hash_row

NUM_ROWS = 1 << 30
TWO_AND_TWO = CriteoFormat(2, 2)
GOOD = "1\t5\t-1\t0a\tff\n"

HEX = st.text("0123456789abcdefABCDEF", min_size=1, max_size=16)
INTEGER = st.integers(-(10**18) + 1, 10**18 - 1)
LINE = st.tuples(
    st.integers(0, 1),
    st.none() | INTEGER,
    st.none() | INTEGER,
    st.none() | HEX,
    st.none() | HEX,
)
LINES = st.lists(LINE, min_size=1, max_size=20)
SHARED_FOLDER = hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None
)


def write(folder: Path, text: str | bytes, name: str = "day.tsv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def open_file(path: Path, **options: Any) -> CriteoReader:
    return CriteoReader([path], NUM_ROWS, columns=TWO_AND_TWO, **options)


def read_all(reader: CriteoReader) -> tuple[ExampleSet, Dropped]:
    blocks = [reader.read(block) for block in range(reader.num_blocks)]
    dropped = sum((block.dropped for block in blocks), Dropped())
    return concatenate([block.examples for block in blocks]), dropped


def as_text(lines: list[tuple[Any, ...]], end: str = "\n") -> str:
    return "".join(
        "\t".join("" if cell is None else str(cell) for cell in line) + end for line in lines
    )


def expected_rows(line: tuple[Any, ...]) -> list[int]:
    def row(field: str, text: str | None) -> int:
        return PADDING_ROW if text is None else hash_row(field, text, NUM_ROWS)

    _, *integers, first, second = line
    buckets = [None if value is None else str(integer_bucket(value)) for value in integers]
    categories = [None if value is None else value.lower() for value in (first, second)]
    return [
        row(field, text)
        for field, text in zip(("I1", "I2", "C1", "C2"), [*buckets, *categories], strict=True)
    ]


@SHARED_FOLDER
@hypothesis.given(lines=LINES, end=st.sampled_from(["\n", "\r\n"]))
def test_every_line_becomes_its_hashed_values(
    tmp_path: Path, lines: list[tuple[Any, ...]], end: str
) -> None:
    examples, dropped = read_all(open_file(write(tmp_path, as_text(lines, end))))
    assert examples.labels.tolist() == [line[0] for line in lines]
    assert examples.rows.tolist() == [expected_rows(line) for line in lines]
    np.testing.assert_array_equal(examples.mask, examples.rows != PADDING_ROW)
    assert dropped == Dropped()


@SHARED_FOLDER
@hypothesis.given(lines=LINES, block_bytes=st.integers(1, 200), last_end=st.booleans())
def test_blocks_of_any_size_hold_every_line_once_in_order(
    tmp_path: Path, lines: list[tuple[Any, ...]], block_bytes: int, last_end: bool
) -> None:
    text = as_text(lines)
    path = write(tmp_path, text if last_end else text.removesuffix("\n"))
    whole, _ = read_all(open_file(path))
    examples, _ = read_all(open_file(path, block_bytes=block_bytes))
    np.testing.assert_array_equal(examples.rows, whole.rows)
    np.testing.assert_array_equal(examples.labels, whole.labels)


@SHARED_FOLDER
@hypothesis.given(
    text=st.binary(min_size=1, max_size=120) | st.text("01\t\n\rafx-", min_size=1).map(str.encode),
    block_bytes=st.integers(1, 150),
)
def test_whatever_a_file_holds_each_line_is_kept_or_counted(
    tmp_path: Path, text: bytes, block_bytes: int
) -> None:
    hypothesis.assume(not text.startswith(b"\x1f\x8b"))
    reader = open_file(write(tmp_path, text), on_malformed=DROP, block_bytes=block_bytes)
    examples, dropped = read_all(reader)
    assert len(examples) + dropped.num_rows == len(text.removesuffix(b"\n").split(b"\n"))
    assert sum(dropped.by_column.values()) == dropped.num_rows


@SHARED_FOLDER
@hypothesis.given(good=st.integers(0, 30), block_bytes=st.integers(1, 100))
def test_error_names_the_line_in_whatever_block_it_is(
    tmp_path: Path, good: int, block_bytes: int
) -> None:
    path = write(tmp_path, GOOD * good + "2\t\t\t\t\n" + GOOD)
    with pytest.raises(DataFileError) as caught:
        read_all(open_file(path, block_bytes=block_bytes))
    assert (caught.value.path, caught.value.place) == (str(path), good + 1)


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ("1\t5\t-1\t0a", None, "4 tab-separated cells; a line has 5"),
        ("1\t5\t-1\t0a\tff\t", None, "6 tab-separated cells; a line has 5"),
        ("", None, "1 tab-separated cells; a line has 5"),
        ("2\t5\t-1\t0a\tff", "label", "'2' is not a label; it must be 0 or 1"),
        ("\t5\t-1\t0a\tff", "label", "'' is not a label"),
        ("1\t5.0\t-1\t0a\tff", "I1", "'5.0' is not a whole number"),
        ("1\t5\t 1\t0a\tff", "I2", "' 1' is not a whole number"),
        ("1\t5\t1_0\t0a\tff", "I2", "'1_0' is not a whole number"),
        ("1\t5\t" + "9" * 19 + "\t0a\tff", "I2", "of at most 18 digits"),
        ("1\t5\t-1\t0x\tff", "C1", "'0x' is not a hexadecimal number"),
        ("1\t5\t-1\t0a\t" + "f" * 17, "C2", "of at most 16 digits"),
    ],
)
def test_malformed_line_is_refused_with_its_place(
    tmp_path: Path, line: str, column: str | None, reason: str
) -> None:
    path = write(tmp_path, GOOD + line + "\n" + GOOD)
    with pytest.raises(DataFileError) as caught:
        read_all(open_file(path))
    assert (caught.value.place, caught.value.column) == (2, column)
    assert reason in str(caught.value)


def test_malformed_lines_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "1\n" + GOOD + "1\tx\t\t\t\n0\tx\ty\t\t\n")
    examples, dropped = read_all(open_file(path, on_malformed=DROP))
    assert len(examples) == 2
    assert (dropped.num_rows, dropped.by_column) == (3, {"whole row": 1, "I1": 2})
    assert dropped.first is not None
    assert dropped.first.startswith(f"{path}:2: 1 tab-separated cells")


def test_files_follow_each_other(tmp_path: Path) -> None:
    files = [write(tmp_path, "0\t\t\t\t\n", "a"), write(tmp_path, "1\t\t\t\t\n" * 2, "b")]
    examples, _ = read_all(CriteoReader(files, NUM_ROWS, columns=TWO_AND_TWO))
    assert examples.labels.tolist() == [0, 1, 1]


def test_columns_are_those_of_criteo_by_default(tmp_path: Path) -> None:
    path = write(tmp_path, "1" + "\t7" * 13 + "\tab" * 26)
    examples, _ = read_all(CriteoReader([path], NUM_ROWS))
    names = [field.name for field in examples.layout.fields]
    assert (names[0], names[12], names[13], names[-1], len(names)) == ("I1", "I13", "C1", "C26", 39)


def test_large_integers_share_buckets() -> None:
    assert [integer_bucket(value) for value in (-7, 0, 1, 2, 3)] == [-7, 0, 1, 2, 1]
    assert integer_bucket(1000) == math.floor(math.log(1000) ** 2) == integer_bucket(1010)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "the file is empty"), (b"\x1f\x8b\x08", "is compressed, .* unpack it with gunzip")],
)
def test_file_that_cannot_be_read_in_blocks_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(DataFileError, match=reason):
        open_file(write(tmp_path, content))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"absent: cannot be read: No such file"):
        open_file(tmp_path / "absent")


@pytest.mark.parametrize("counts", [(-1, 3), (0, 0)])
def test_impossible_column_counts_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"num_integers={counts[0]}"):
        CriteoFormat(*counts)


def test_blocks_without_a_byte_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_bytes=0"):
        open_file(write(tmp_path, GOOD), block_bytes=0)
