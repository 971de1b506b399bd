import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xrex.train.criteo import CriteoFormat
from xrex.train.data_files import DROP, DataFileError
from xrex.train.datasets import (
    CRITEO,
    PARQUET,
    ZIPF,
    DataConfig,
    load_dataset,
    movielens_folder,
    parse_feature_columns,
)
from xrex.train.features import Field

LINE = "1\t5\tff\n"


def config(name: str, **changes: Any) -> DataConfig:
    return DataConfig(**({"name": name, "table_rows": 1000} | changes))


def files(folder: Path) -> dict[str, tuple[str, ...]]:
    """Settings that name one pattern for each part."""
    return {f"{part}_files": (str(folder / f"{part}*"),) for part in ("train", "valid", "test")}


def write_criteo(folder: Path, train: str = LINE * 8) -> dict[str, Any]:
    for part, text in (("train-0", train), ("valid", LINE * 2), ("test", LINE * 3)):
        (folder / part).write_text(text)
    return files(folder) | {"criteo": CriteoFormat(1, 1)}


def test_generated_data_follow_seed_and_size() -> None:
    def load(seed: int) -> list[int]:
        dataset = load_dataset(config(ZIPF, seed=seed, zipf_examples=200))
        parts = (dataset.train, dataset.valid, dataset.test)
        assert [part.num_examples for part in parts] == [160, 20, 20]
        return dataset.train.read(0).examples.rows[:, 0].tolist()

    assert load(1) == load(1) != load(2)


def test_generated_data_have_a_block_for_every_process() -> None:
    dataset = load_dataset(config(ZIPF, zipf_examples=200, num_processes=3))
    assert dataset.valid.num_blocks == 3


def test_criteo_files_are_found_by_their_patterns(tmp_path: Path) -> None:
    settings = write_criteo(tmp_path)
    (tmp_path / "train-1").write_text(LINE)
    dataset = load_dataset(config(CRITEO, **settings))
    assert dataset.train.num_blocks == 2
    assert len(dataset.test.read(0).examples) == 3
    assert dataset.max_distinct_rows == 999


def test_criteo_file_has_a_block_for_every_process(tmp_path: Path) -> None:
    dataset = load_dataset(config(CRITEO, num_processes=4, **write_criteo(tmp_path)))
    assert dataset.train.num_blocks == 4


def test_policy_for_malformed_rows_reaches_the_reader(tmp_path: Path) -> None:
    settings = write_criteo(tmp_path, train=LINE + "odd\n")
    with pytest.raises(DataFileError, match=r"train-0:2"):
        load_dataset(config(CRITEO, **settings)).train.read(0)
    dropping = load_dataset(config(CRITEO, on_malformed=DROP, **settings))
    assert dropping.train.read(0).dropped.num_rows == 1


def test_parquet_files_are_read_by_the_named_columns(tmp_path: Path) -> None:
    table = pa.table({"click": [True, False], "user": [1, 2], "tags": [["a"], []]})
    for part in ("train", "valid", "test"):
        pq.write_table(table, tmp_path / part)
    dataset = load_dataset(
        config(PARQUET, label_column="click", feature_columns=("user", "tags:2"), **files(tmp_path))
    )
    assert dataset.train.layout.fields == (Field("user"), Field("tags", 2))
    assert dataset.train.read(0).examples.labels.tolist() == [1, 0]


@pytest.mark.parametrize("text", ["", ":3", "tags:", "tags:x", "tags:0", "tags:-1"])
def test_malformed_feature_column_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"feature column '{text}'; it must read NAME"):
        parse_feature_columns([text])


def test_parquet_without_feature_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="needs --feature_columns"):
        load_dataset(config(PARQUET))


def test_missing_files_of_a_part_are_asked_for(tmp_path: Path) -> None:
    settings = write_criteo(tmp_path) | {"valid_files": ()}
    with pytest.raises(ValueError, match="the criteo data set needs --valid_files"):
        load_dataset(config(CRITEO, **settings))


def test_unknown_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown data set 'other'; there are movielens_100k"):
        load_dataset(config("other"))


def test_without_bazel_the_way_to_the_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "movielens_100k", None)
    with pytest.raises(FileNotFoundError, match=r"bazelw run //phoenix/xrex/train:train_recsys"):
        movielens_folder()
