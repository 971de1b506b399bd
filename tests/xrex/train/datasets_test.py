import sys
from pathlib import Path

import pytest

from xrex.train.datasets import ZIPF, load_dataset, movielens_folder


def test_generated_data_follow_seed_and_size() -> None:
    def load(seed: int) -> list[int]:
        splits = load_dataset(
            ZIPF, data_dir=None, table_rows=1000, seed=seed, num_examples=200
        ).splits
        assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [160, 20, 20]
        return splits.train.rows[:, 0].tolist()

    assert load(1) == load(1) != load(2)


def test_unknown_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown data set 'criteo'"):
        load_dataset("criteo", data_dir=tmp_path, table_rows=9, seed=0, num_examples=9)


def test_without_bazel_the_way_to_the_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "movielens_100k", None)
    with pytest.raises(FileNotFoundError, match=r"bazelw run //phoenix/xrex/train:train_recsys"):
        movielens_folder()
