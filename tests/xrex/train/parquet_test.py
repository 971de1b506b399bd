from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from xrex.train.data_files import DROP, DataFileError, Dropped
from xrex.train.features import PADDING_ROW, ExampleSet, Field, concatenate, hash_row
from xrex.train.parquet import ParquetReader

NUM_ROWS = 1 << 30
SLOTS = 3
FEATURES = (Field("user"), Field("word"), Field("tags", SLOTS))
SCHEMA = pa.schema(
    {"label": pa.int8(), "user": pa.int64(), "word": pa.string(), "tags": pa.list_(pa.string())}
)
GOOD: dict[str, Any] = {"label": 1, "user": 7, "word": "a", "tags": ["x"]}

WORD = st.text(max_size=5)
ROW = st.fixed_dictionaries(
    {
        "label": st.integers(0, 1),
        "user": st.none() | st.integers(-(2**63), 2**63 - 1),
        "word": st.none() | WORD,
        "tags": st.none() | st.lists(WORD, max_size=SLOTS),
    }
)


def write(folder: Path, rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA, **how: Any) -> Path:
    path = folder / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema), path, **how)
    return path


def open_file(path: Path, features: tuple[Field, ...] = FEATURES, **options: Any) -> ParquetReader:
    return ParquetReader([path], NUM_ROWS, features=features, label="label", **options)


def read_all(reader: ParquetReader) -> tuple[ExampleSet, Dropped]:
    blocks = [reader.read(block) for block in range(reader.num_blocks)]
    dropped = sum((block.dropped for block in blocks), Dropped())
    return concatenate([block.examples for block in blocks]), dropped


def expected_rows(row: dict[str, Any]) -> list[int]:
    def hashed(field: str, value: Any) -> int:
        return PADDING_ROW if value is None else hash_row(field, str(value), NUM_ROWS)

    tags = [hashed("tags", tag) for tag in row["tags"] or []]
    padding = [PADDING_ROW] * (SLOTS - len(tags))
    return [hashed("user", row["user"]), hashed("word", row["word"]), *tags, *padding]


@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None
)
@hypothesis.given(
    rows=st.lists(ROW, min_size=1, max_size=20),
    group_rows=st.integers(1, 20),
    large=st.booleans(),
    dictionary=st.booleans(),
)
def test_every_row_becomes_its_hashed_values(
    tmp_path: Path, rows: list[dict[str, Any]], group_rows: int, large: bool, dictionary: bool
) -> None:
    word = pa.large_string() if large else pa.string()
    tags = pa.large_list(word) if large else pa.list_(word)
    schema = SCHEMA.set(3, pa.field("tags", tags))
    schema = schema.set(
        2, pa.field("word", pa.dictionary(pa.int32(), word) if dictionary else word)
    )
    examples, dropped = read_all(
        open_file(write(tmp_path, rows, schema, row_group_size=group_rows))
    )
    assert examples.labels.tolist() == [row["label"] for row in rows]
    assert examples.rows.tolist() == [expected_rows(row) for row in rows]
    np.testing.assert_array_equal(examples.mask, examples.rows != PADDING_ROW)
    assert dropped == Dropped()


def test_each_row_group_is_a_block(tmp_path: Path) -> None:
    reader = open_file(write(tmp_path, [GOOD] * 5, row_group_size=2))
    assert (reader.num_blocks, reader.num_examples) == (3, 5)
    assert [len(reader.read(block).examples) for block in range(3)] == [2, 2, 1]


@pytest.mark.parametrize("kind", [pa.bool_(), pa.float32(), pa.float16(), pa.uint8()])
def test_label_may_be_bool_or_number(tmp_path: Path, kind: pa.DataType) -> None:
    label = pa.array([0, 1, 1], pa.int8()).cast(pa.float32() if kind == pa.float16() else kind)
    table = pa.table({"label": label.cast(kind), "user": [1, 2, 3]})
    pq.write_table(table, tmp_path / "data.parquet")
    examples, _ = read_all(open_file(tmp_path / "data.parquet", (Field("user"),)))
    assert examples.labels.tolist() == [0, 1, 1]


def test_booleans_are_hashed_as_words(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"label": [0, 0], "new": [True, False]}), path)
    examples, _ = read_all(open_file(path, (Field("new"),)))
    assert examples.rows[:, 0].tolist() == [
        hash_row("new", text, NUM_ROWS) for text in ("true", "false")
    ]


BAD_ROWS: list[tuple[dict[str, Any], str, str]] = [
    ({"label": 2}, "label", "2 is not a label; it must be 0 or 1"),
    ({"label": None}, "label", "None is not a label"),
    ({"tags": ["a", "b", "c", "d"]}, "tags", "4 values for 3 slots"),
    ({"tags": ["a", None]}, "tags", "a null inside the list"),
]


@pytest.mark.parametrize(("change", "column", "reason"), BAD_ROWS)
def test_malformed_row_is_refused_with_its_place(
    tmp_path: Path, change: dict[str, Any], column: str, reason: str
) -> None:
    path = write(tmp_path, [GOOD, GOOD, GOOD, GOOD | change], row_group_size=2)
    with pytest.raises(DataFileError) as caught:
        read_all(open_file(path))
    assert (caught.value.path, caught.value.column) == (str(path), column)
    assert caught.value.place == "row group 1, row 1"
    assert reason in str(caught.value)


def test_malformed_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [GOOD, *(GOOD | change for change, _, _ in BAD_ROWS), GOOD | {"user": 8}]
    reader = open_file(write(tmp_path, rows), on_malformed=DROP)
    examples, dropped = read_all(reader)
    assert examples.rows.tolist() == [expected_rows(rows[0]), expected_rows(rows[-1])]
    assert (dropped.num_rows, dropped.by_column) == (4, {"label": 2, "tags": 2})
    assert reader.num_examples is None


@pytest.mark.parametrize(
    ("kind", "slots", "reason"),
    [
        (pa.float32(), 1, "it is float; features are ids: bucket it into integers first"),
        (pa.list_(pa.float64()), 2, "features are ids"),
        (pa.list_(pa.int32()), 1, "a list column needs a number of slots .* name it as x:20"),
        (pa.int32(), 2, "it is int32, one value a row; 2 slots are for list columns"),
        (pa.timestamp("s"), 1, "a feature must be integer, text, bool, or a list of these"),
        (pa.list_(pa.list_(pa.int32())), 2, "a feature must be"),
    ],
)
def test_column_of_an_unusable_type_is_refused(
    tmp_path: Path, kind: pa.DataType, slots: int, reason: str
) -> None:
    path = write(tmp_path, [], pa.schema({"label": pa.int8(), "x": kind}))
    with pytest.raises(DataFileError, match=reason) as caught:
        open_file(path, (Field("x", slots),))
    assert caught.value.column == "x"


def test_label_of_an_unusable_type_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [], pa.schema({"label": pa.string(), "user": pa.int8()}))
    with pytest.raises(DataFileError, match="a label cannot be string"):
        open_file(path, (Field("user"),))


def test_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, [GOOD])
    with pytest.raises(DataFileError, match=r"column 'item': there is no such column; .*'user'"):
        open_file(path, (Field("item"),))


def test_label_among_the_features_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'label' is named as label and as feature"):
        open_file(write(tmp_path, [GOOD]), (Field("label"),))


def test_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_text("label\tuser\n")
    with pytest.raises(DataFileError, match=r"data.parquet: cannot be read: not a Parquet file"):
        open_file(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"absent: cannot be read"):
        open_file(tmp_path / "absent")


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="no file has any row"):
        open_file(write(tmp_path, []))
