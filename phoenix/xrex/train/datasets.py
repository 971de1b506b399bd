"""The data sets of the training example, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from xrex.train import movielens, zipf
from xrex.train.criteo import DEFAULT_BLOCK_BYTES, CriteoFormat, CriteoReader
from xrex.train.data_files import ERROR, expand_globs
from xrex.train.features import Field, split_by_time
from xrex.train.readers import ArrayReader, ExampleReader

MOVIELENS_100K, ZIPF, CRITEO, PARQUET = "movielens_100k", "zipf", "criteo", "parquet"
NAMES = (MOVIELENS_100K, ZIPF, CRITEO, PARQUET)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data to read and how.

    Attributes:
      name: one of NAMES.
      table_rows: V, rows of the table that values are hashed into.
      seed: of generated data.
      zipf_examples: examples to generate, in all three parts together.
      data_dir: folder of the MovieLens-100K files; None for those that came with the program.
      train_files: globs of Criteo-style or Parquet files to train on.
      valid_files: likewise to evaluate on while training.
      test_files: likewise to evaluate on at the end.
      on_malformed: what to do with malformed rows of these files, ERROR or DROP.
      criteo: columns of Criteo-style files.
      label_column: of Parquet files.
      feature_columns: of Parquet files, each as NAME, or NAME:SLOTS for a list column.
      num_processes: how many read a share each.
    """

    name: str
    table_rows: int
    seed: int = 0
    zipf_examples: int = 100_000
    data_dir: Path | None = None
    train_files: tuple[str, ...] = ()
    valid_files: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()
    on_malformed: str = ERROR
    criteo: CriteoFormat = dataclasses.field(default_factory=CriteoFormat)
    label_column: str = "label"
    feature_columns: tuple[str, ...] = ()
    num_processes: int = 1


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set in three parts.

    Attributes:
      train: what to train on.
      valid: what to evaluate on while training.
      test: what to evaluate on at the end.
      max_distinct_rows: distinct table rows that the examples may use, which bounds those of any
        one batch.
      crosses: pairs of fields whose products help the ranker.
    """

    train: ExampleReader
    valid: ExampleReader
    test: ExampleReader
    max_distinct_rows: int
    crosses: tuple[tuple[str, str], ...] = ()


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


def parse_feature_columns(texts: Sequence[str]) -> tuple[Field, ...]:
    """The fields that NAME and NAME:SLOTS texts describe.

    Raises:
      ValueError: there is none, or one is malformed.
    """
    if not texts:
        raise ValueError(
            "no feature columns were named; a Parquet data set needs --feature_columns, such as "
            "user,item,history:20"
        )
    fields = []
    for text in texts:
        name, colon, slots = text.partition(":")
        if not name or (colon and not (slots.isascii() and slots.isdigit() and int(slots) > 0)):
            raise ValueError(
                f"feature column {text!r}; it must read NAME, or NAME:SLOTS with a positive number "
                "of slots for a list column"
            )
        fields.append(Field(name, int(slots) if colon else 1))
    return tuple(fields)


def load_dataset(config: DataConfig) -> Dataset:
    """Opens or generates a data set.

    MovieLens is split by time, 80 / 10 / 10; generated data have parts of these sizes, too. Files
    are split by whoever names them.

    Raises:
      DataFileError: a file is missing or malformed.
      FileNotFoundError: see `movielens_folder`.
      ValueError: the name is unknown, or a setting that the data set needs is missing.
    """
    loaders: dict[str, Callable[[DataConfig], Dataset]] = {
        MOVIELENS_100K: _load_movielens,
        ZIPF: _generate,
        CRITEO: _open_criteo,
        PARQUET: _open_parquet,
    }
    if config.name not in loaders:
        raise ValueError(f"unknown data set {config.name!r}; there are {', '.join(NAMES)}")
    return loaders[config.name](config)


def _load_movielens(config: DataConfig) -> Dataset:
    folder = config.data_dir or movielens_folder()
    splits = split_by_time(*movielens.load_movielens(folder, config.table_rows))
    train, valid, test = (
        ArrayReader(part, config.num_processes)
        for part in (splits.train, splits.valid, splits.test)
    )
    crosses = (("user", "item"), ("item", "history"), ("user", "genres"))
    return Dataset(train, valid, test, splits.num_distinct_rows(), crosses)


def _generate(config: DataConfig) -> Dataset:
    evaluated = config.zipf_examples // 10
    sizes = (config.zipf_examples - 2 * evaluated, evaluated, evaluated)
    train, valid, test = (
        zipf.ZipfReader(
            zipf.ZipfConfig(
                seed=config.seed,
                part=part,
                num_examples=size,
                # Small enough for every process to get some.
                block_examples=min(1024, -(-size // config.num_processes)),
            ),
            config.table_rows,
        )
        for part, size in enumerate(sizes)
    )
    return Dataset(train, valid, test, train.num_distinct_rows())


def _open_criteo(config: DataConfig) -> Dataset:
    def open_part(files: list[Path]) -> CriteoReader:
        num_bytes = sum(path.stat().st_size for path in files)
        return CriteoReader(
            files,
            config.table_rows,
            columns=config.criteo,
            on_malformed=config.on_malformed,
            # Small enough for every process to get some.
            block_bytes=max(1, min(DEFAULT_BLOCK_BYTES, num_bytes // config.num_processes)),
        )

    return _open_files(config, open_part)


def _open_parquet(config: DataConfig) -> Dataset:
    # Arrow is large, and no other data set needs it.
    from xrex.train.parquet import ParquetReader

    features = parse_feature_columns(config.feature_columns)

    def open_part(files: list[Path]) -> ParquetReader:
        return ParquetReader(
            files,
            config.table_rows,
            features=features,
            label=config.label_column,
            on_malformed=config.on_malformed,
        )

    return _open_files(config, open_part)


def _open_files(config: DataConfig, open_part: Callable[[list[Path]], ExampleReader]) -> Dataset:
    parts = []
    for purpose in ("train", "valid", "test"):
        patterns = getattr(config, f"{purpose}_files")
        if not patterns:
            raise ValueError(
                f"the {config.name} data set needs --{purpose}_files; name files or quoted glob "
                "patterns, separated by commas"
            )
        parts.append(open_part(expand_globs(patterns)))
    train, valid, test = parts
    return Dataset(train, valid, test, config.table_rows - 1)
