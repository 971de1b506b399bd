"""Trains a click model on MovieLens-100K, or on generated data, with the embedding engine.

The embedding table is sharded over several devices, by default four virtual CPU devices. While the
dense model computes, the rows of the next batch are looked up and the gradients of the batch before
are applied. Progress is shown, and the run ends with test metrics, a plot, and where the time went.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import app, flags, logging
from tqdm import tqdm

from xrex.cuda.async_emb.async_emb import RankStats
from xrex.train import datasets
from xrex.train.cpu_devices import cpu_mesh
from xrex.train.criteo import CriteoFormat
from xrex.train.data_files import ERROR, POLICIES
from xrex.train.datasets import DataConfig, Dataset
from xrex.train.phase_timer import PhaseTimer
from xrex.train.trainer import PIPELINED, SYNCHRONOUS, TrainConfig, Trainer, TrainReport

_DATASET = flags.DEFINE_enum(
    "dataset",
    datasets.MOVIELENS_100K,
    datasets.NAMES,
    "Data to train on. zipf is generated; criteo (tab-separated) and parquet read --train_files, "
    "--valid_files and --test_files.",
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder of the MovieLens-100K files, if not those that Bazel fetched."
)
_NUM_EXAMPLES = flags.DEFINE_integer(
    "zipf_examples", 100_000, "Examples that --dataset=zipf generates.", lower_bound=100
)
_TRAIN_FILES = flags.DEFINE_list(
    "train_files", [], "Paths or quoted glob patterns of the files to train on, by commas."
)
_VALID_FILES = flags.DEFINE_list("valid_files", [], "Likewise, to evaluate on while training.")
_TEST_FILES = flags.DEFINE_list("test_files", [], "Likewise, to evaluate on at the end.")
_ON_MALFORMED = flags.DEFINE_enum(
    "on_malformed",
    ERROR,
    POLICIES,
    "What a malformed row of these files does. error: stops the run with its place. drop: it is "
    "left out and counted.",
)
_CRITEO_INTEGERS = flags.DEFINE_integer(
    "criteo_integers", 13, "Integer columns of --dataset=criteo.", lower_bound=0
)
_CRITEO_CATEGORICALS = flags.DEFINE_integer(
    "criteo_categoricals", 26, "Hexadecimal columns of --dataset=criteo.", lower_bound=0
)
_LABEL_COLUMN = flags.DEFINE_string(
    "label_column", "label", "Label column of --dataset=parquet: bool, or the numbers 0 and 1."
)
_FEATURE_COLUMNS = flags.DEFINE_list(
    "feature_columns",
    [],
    "Feature columns of --dataset=parquet: NAME, or NAME:SLOTS for a list column.",
)
_SHUFFLE_EXAMPLES = flags.DEFINE_integer(
    "shuffle_examples",
    131_072,
    "Training examples that are shuffled among each other and held in memory, at least. 0 keeps "
    "the order of the data.",
    lower_bound=0,
)
_PREFETCH_BATCHES = flags.DEFINE_integer(
    "prefetch_batches", 2, "Batches that are made ready ahead of the step.", lower_bound=1
)
_MODE = flags.DEFINE_enum(
    "mode",
    PIPELINED,
    [PIPELINED, SYNCHRONOUS],
    "pipelined: with the native engine, updates are applied one step late. synchronous: plain JAX, "
    "one thing after the other, to compare with.",
)
_DEVICES = flags.DEFINE_integer("devices", 4, "Virtual CPU devices.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Passes over the training data.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Steps to train in all; overrides --epochs.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 512, "Examples of a batch over all devices.", lower_bound=1
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Of initial values, order of examples, and generated data.", lower_bound=0
)
_TABLE_ROWS = flags.DEFINE_integer(
    "table_rows", 65_536, "Rows of the embedding table, which ids are hashed into.", lower_bound=2
)
_EMB_WIDTH = flags.DEFINE_integer("emb_width", 64, "Columns of the table.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.1, "Of the table, by rowwise Adagrad.", lower_bound=0.0
)
_DENSE_LEARNING_RATE = flags.DEFINE_float(
    "dense_learning_rate", 1e-3, "Of the MLP, by Adam.", lower_bound=0.0
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for all that is written. By default a new temporary folder."
)
_RESUME = flags.DEFINE_bool("resume", False, "Go on from the newest checkpoint in --workdir.")
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", None, "Steps between checkpoints; by default an epoch.", lower_bound=1
)
_KEEP_CHECKPOINTS = flags.DEFINE_integer(
    "keep_checkpoints", 3, "Checkpoints to keep.", lower_bound=1
)
_LOG_EVERY = flags.DEFINE_integer(
    "log_every", 10, "Steps between training records in metrics.jsonl.", lower_bound=1
)


def choose_workdir(given: str | None, *, resume: bool) -> Path:
    """The run's folder, made if it is not there. Relative to where the user called Bazel.

    Raises:
      ValueError: resuming needs a folder, and a new run one without checkpoints of another.
    """
    if given is None:
        if resume:
            raise ValueError("--resume needs the --workdir of the run to go on with")
        return Path(tempfile.mkdtemp(prefix="train_recsys-"))
    workdir = Path(os.environ.get("BUILD_WORKING_DIRECTORY", ".")).absolute() / given
    if not resume and (workdir / "checkpoints").exists():
        raise ValueError(
            f"{workdir} holds the checkpoints of another run; give --resume to go on with it, or "
            "another --workdir"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    return workdir


def describe_report(report: TrainReport, seconds: Mapping[str, float]) -> str:
    """The text that a run ends with."""
    lines = ["", f"{'':12}{'AUC':>8}{'log loss':>10}{'examples':>10}"]
    for name, part in (("validation", report.valid), ("test", report.test)):
        lines.append(f"{name:12}{part.auc:8.4f}{part.log_loss:10.4f}{part.num_examples:10}")
    if report.dropped_rows:
        lines += ["", f"{report.dropped_rows} malformed training rows were left out."]
    lines += ["", "Where the time went:"]
    for phase, spent in seconds.items():
        share = spent / seconds["total"]
        lines.append(f"  {phase:16}{spent:8.1f} s {share:7.1%}")
    if report.counters:
        lines += ["", "Embedding engine:", *_describe_counters(report.counters)]
    lines += ["", "Written:"]
    lines += [f"  {purpose:12}{path}" for purpose, path in report.files.items()]
    return "\n".join(lines)


def _describe_counters(counters: Mapping[int, RankStats]) -> list[str]:
    ranks = list(counters.values())
    first = ranks[0]
    wait_secs = sum(rank.wait_secs for rank in ranks) / len(ranks)
    return [
        f"  {len(ranks)} ranks, {first.lookup_steps_done} lookups, "
        f"{first.update_steps_done} updates ({first.updates_skipped_pending} with nothing to do, "
        f"{first.updates_skipped_non_finite + first.updates_skipped_invalid} skipped)",
        f"  {sum(rank.ids_out_of_range for rank in ranks)} ids out of range, "
        f"{sum(rank.bytes_sent for rank in ranks) / 1e6:.0f} MB exchanged, "
        f"{wait_secs:.1f} s waited per rank",
    ]


def _data_config() -> DataConfig:
    return DataConfig(
        name=_DATASET.value,
        table_rows=_TABLE_ROWS.value,
        seed=_SEED.value,
        zipf_examples=_NUM_EXAMPLES.value,
        data_dir=Path(_DATA_DIR.value) if _DATA_DIR.value else None,
        train_files=tuple(_TRAIN_FILES.value),
        valid_files=tuple(_VALID_FILES.value),
        test_files=tuple(_TEST_FILES.value),
        on_malformed=_ON_MALFORMED.value,
        criteo=CriteoFormat(_CRITEO_INTEGERS.value, _CRITEO_CATEGORICALS.value),
        label_column=_LABEL_COLUMN.value,
        feature_columns=tuple(_FEATURE_COLUMNS.value),
    )


def _train_config() -> TrainConfig:
    return TrainConfig(
        dataset=_DATASET.value,
        mode=_MODE.value,
        batch_size=_BATCH_SIZE.value,
        num_epochs=None if _STEPS.value else _EPOCHS.value,
        end_step=_STEPS.value,
        seed=_SEED.value,
        table_rows=_TABLE_ROWS.value,
        emb_width=_EMB_WIDTH.value,
        learning_rate=_LEARNING_RATE.value,
        dense_learning_rate=_DENSE_LEARNING_RATE.value,
        shuffle_examples=_SHUFFLE_EXAMPLES.value,
        prefetch_batches=_PREFETCH_BATCHES.value,
        checkpoint_every=_CHECKPOINT_EVERY.value,
        keep_checkpoints=_KEEP_CHECKPOINTS.value,
        log_every=_LOG_EVERY.value,
    )


def _describe_sizes(dataset: Dataset) -> str:
    parts = {"training": dataset.train, "validation": dataset.valid, "test": dataset.test}
    return ", ".join(
        f"{purpose} part of {reader.num_blocks} blocks"
        if reader.num_examples is None
        else f"{reader.num_examples} {purpose} examples"
        for purpose, reader in parts.items()
    )


def _run() -> None:
    timer = PhaseTimer()
    workdir = choose_workdir(_WORKDIR.value, resume=_RESUME.value)
    print(f"work folder: {workdir}", flush=True)
    with timer.phase("data set"):
        dataset = datasets.load_dataset(_data_config())
    config = _train_config()
    print(
        f"{config.dataset}: {_describe_sizes(dataset)}; {config.mode} training on "
        f"{_DEVICES.value} CPU devices, seed {config.seed}",
        flush=True,
    )
    mesh = cpu_mesh(_DEVICES.value)

    def make_progress(done: int, end: int | None) -> tqdm:
        return tqdm(initial=done, total=end, unit="step", dynamic_ncols=True)

    report = Trainer(config, dataset, mesh, workdir, timer, make_progress).run(resume=_RESUME.value)
    print(describe_report(report, timer.report()))


def main(arguments: Sequence[str]) -> int:
    """Runs the program; the exit status is 1 for settings or data that cannot be used."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments: {list(arguments[1:])}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # at INFO the checkpoint library says a lot
    try:
        _run()
    except (ValueError, OSError) as error:
        print(f"train_recsys: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
