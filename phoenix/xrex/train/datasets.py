"""The data sets of the training example, by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from xrex.train import movielens, zipf
from xrex.train.features import Splits, split_by_time

MOVIELENS_100K, ZIPF = "movielens_100k", "zipf"
NAMES = (MOVIELENS_100K, ZIPF)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set, and the pairs of its fields whose products help the ranker."""

    splits: Splits
    crosses: tuple[tuple[str, str], ...]


def movielens_folder() -> Path:
    """Where Bazel laid the MovieLens-100K files.

    Raises:
      FileNotFoundError: the program was not started through Bazel.
    """
    try:
        import movielens_100k  # lies beside the files, in Bazel's repository of that name
    except ImportError:
        raise FileNotFoundError(
            "the MovieLens-100K files come with the Bazel target; start the program with "
            "`./bazelw run //phoenix/xrex/train:train_recsys`, or name a folder with the files "
            "ml-100k.inter, ml-100k.user and ml-100k.item by --data_dir"
        ) from None
    return Path(movielens_100k.DATA_DIR)


def load_dataset(
    name: str, *, data_dir: Path | None, table_rows: int, seed: int, num_examples: int
) -> Dataset:
    """Loads or generates a data set and splits it by time, 80 / 10 / 10.

    Args:
      name: one of NAMES.
      data_dir: folder of the MovieLens-100K files; None for those that came with the program.
      table_rows: V, rows of the table that ids are hashed into.
      seed: of generated data.
      num_examples: of generated data.

    Raises:
      DataFileError: a file is missing or malformed.
      FileNotFoundError: see `movielens_folder`.
      ValueError: the name is unknown.
    """
    if name == MOVIELENS_100K:
        examples = movielens.load_movielens(data_dir or movielens_folder(), table_rows)
        crosses: tuple[tuple[str, str], ...] = (
            ("user", "item"),
            ("item", "history"),
            ("user", "genres"),
        )
    elif name == ZIPF:
        config = zipf.ZipfConfig(seed=seed, num_examples=num_examples)
        examples, crosses = zipf.generate(config, table_rows), ()
    else:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(NAMES)}")
    return Dataset(split_by_time(examples), crosses)
