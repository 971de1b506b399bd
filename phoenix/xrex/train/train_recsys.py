"""Trains a click model on MovieLens-100K, on files, or on generated data.

The embedding table is sharded over several devices, by default four virtual CPU devices. While the
dense model computes, the rows of the next batch are looked up and the gradients of the batch before
are applied. Progress is shown, and the run ends with test metrics, a plot, and where the time went.
SIGTERM and Ctrl-C save a checkpoint after the running step and end the program with status 0.
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
from xrex.train.config_file import apply_config_file
from xrex.train.criteo import CriteoFormat
from xrex.train.data_files import ERROR, POLICIES
from xrex.train.datasets import DataConfig, Dataset
from xrex.train.devices import CPU, PLATFORMS, training_mesh
from xrex.train.exact_schedule import SharedCounts
from xrex.train.phase_timer import PhaseTimer
from xrex.train.process_group import ProcessGroup, connect_processes
from xrex.train.share_exchange import ShareExchangeError
from xrex.train.staleness import EXACT, MODES, ONE_STEP, SharedCapacity
from xrex.train.stop_signal import StopSignal
from xrex.train.trainer import (
    AUTO_ENGINE,
    CONSTANT,
    ENGINES,
    LEARNING_RATE_SCHEDULES,
    TrainConfig,
    Trainer,
    TrainReport,
)

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "TOML or JSON file of settings, by the names of these flags. Flags on the command line win.",
)

_DATASET = flags.DEFINE_enum(
    "dataset",
    datasets.MOVIELENS_100K,
    datasets.NAMES,
    "Data to train on. zipf is generated; criteo (tab-separated) and parquet read --train_files, "
    "--valid_files and --test_files.",
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder of the files of --dataset=movielens_100k, if not those that Bazel fetched.",
)
_NUM_EXAMPLES = flags.DEFINE_integer(
    "zipf_examples", 100_000, "Examples that --dataset=zipf generates.", lower_bound=100
)
_TRAIN_FILES = flags.DEFINE_list(
    "train_files", [], "Paths or quoted glob patterns of the files to train on, by commas."
)
_VALID_FILES = flags.DEFINE_list(
    "valid_files", [], "As --train_files, but to evaluate on at every checkpoint."
)
_TEST_FILES = flags.DEFINE_list(
    "test_files", [], "As --train_files, but to evaluate on at the end."
)
_ON_MALFORMED = flags.DEFINE_enum(
    "on_malformed",
    ERROR,
    POLICIES,
    "What to do with a malformed row of a file. error: stop and say where it is. drop: leave it "
    "out and count it.",
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
_PREFETCH_WORKERS = flags.DEFINE_integer(
    "prefetch_workers",
    None,
    "Threads that make batches ready. By default one for every 4 processors, at most 4.",
    lower_bound=1,
)
_STALENESS = flags.DEFINE_enum(
    "staleness",
    ONE_STEP,
    MODES,
    "Which updates the rows of a step have seen. one_step: those up to the step before the last, "
    "the whole exchange hidden behind the model. exact: all, most of it hidden. synchronous: all, "
    "nothing hidden.",
)
_ENGINE = flags.DEFINE_enum(
    "engine",
    AUTO_ENGINE,
    ENGINES,
    "auto: the native engine where it reaches all devices. plain: the same training in plain JAX, "
    "to compare with.",
)
_SHARED_ROWS = flags.DEFINE_integer(
    "shared_rows",
    None,
    "With --staleness=exact: rows that a step updates and the next one reads, for which there is "
    "room; with more the step is as slow as a synchronous one. By default half of those that a "
    "batch may have.",
    lower_bound=1,
)
_SHARED_TOKENS = flags.DEFINE_integer(
    "shared_tokens",
    None,
    "As --shared_rows, for the tokens in such rows on one device. By default all tokens.",
    lower_bound=1,
)
_PLATFORM = flags.DEFINE_enum(
    "platform", CPU, PLATFORMS, "Train on virtual CPU devices, or on the GPUs of each process."
)
_DEVICES = flags.DEFINE_integer(
    "devices",
    None,
    "Devices of each process. By default 4 virtual CPU devices, or all GPUs.",
    lower_bound=1,
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed",
    False,
    "Train in several processes, started with the same flags but for --process_id, and sharing "
    "--workdir. They find each other by --coordinator_address, --num_processes and --process_id; "
    "in a SLURM job by themselves.",
)
_COORDINATOR_ADDRESS = flags.DEFINE_string(
    "coordinator_address", None, "With --distributed: HOST:PORT at which process 0 listens."
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "With --distributed: processes in all.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "With --distributed: number of this process, from 0.", lower_bound=0
)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Passes over the training data.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Steps to train in all; overrides --epochs.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 512, "Examples of a batch over all devices of all processes.", lower_bound=1
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
_LEARNING_RATE_SCHEDULE = flags.DEFINE_enum(
    "learning_rate_schedule",
    CONSTANT,
    LEARNING_RATE_SCHEDULES,
    "How both learning rates change with the step: not at all, or along a cosine to zero at "
    "--decay_steps.",
)
_WARMUP_STEPS = flags.DEFINE_integer(
    "warmup_steps", 0, "Steps over which both learning rates rise from zero.", lower_bound=0
)
_DECAY_STEPS = flags.DEFINE_integer(
    "decay_steps",
    None,
    "With --learning_rate_schedule=cosine: its steps, those of the warm-up included.",
    lower_bound=1,
)
_MAX_GRAD_NORM = flags.DEFINE_float(
    "max_grad_norm",
    None,
    "Scale gradients down to this norm, that of the MLP's and the table's together.",
    lower_bound=0.0,
)
_SKIP_NONFINITE = flags.DEFINE_bool(
    "skip_nonfinite", True, "Let a step with NaN or infinite gradients change nothing at all."
)
_DETERMINISTIC = flags.DEFINE_bool(
    "deterministic",
    False,
    "Sum in a fixed order: runs with the same settings then have the same bits, and "
    "--staleness=exact those of synchronous.",
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
_TENSORBOARD = flags.DEFINE_bool(
    "tensorboard", True, "Write the metrics as TensorBoard events, too."
)


def user_path(text: str) -> Path:
    """A path that the user gave, relative to where he called Bazel."""
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY", ".")).absolute() / text


def choose_workdir(given: str | None, *, resume: bool, distributed: bool = False) -> Path:
    """The run's folder, made if it is not there.

    Raises:
      ValueError: resuming and several processes need a folder, and a new run one without
        checkpoints of another.
    """
    if given is None:
        if resume:
            raise ValueError("--resume needs the --workdir of the run to go on with")
        if distributed:
            raise ValueError("--distributed needs a --workdir that all processes share")
        return Path(tempfile.mkdtemp(prefix="train_recsys-"))
    workdir = user_path(given)
    if not resume and (workdir / "checkpoints").exists():
        raise ValueError(
            f"{workdir} holds the checkpoints of another run; give --resume to go on with it, or "
            "another --workdir"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    return workdir


def describe_report(report: TrainReport, seconds: Mapping[str, float]) -> str:
    """The text that a run ends with."""
    lines = [""]
    if report.stopped:
        lines.append(
            f"Stopped after step {report.end_step}, which is saved; go on with --resume and the "
            "same --workdir."
        )
    else:
        lines.append(f"{'':12}{'AUC':>8}{'log loss':>10}{'examples':>10}")
    for name, part in (("validation", report.valid), ("test", report.test)):
        if part is not None:
            lines.append(f"{name:12}{part.auc:8.4f}{part.log_loss:10.4f}{part.num_examples:10}")
    if report.dropped_rows:
        lines += ["", f"{report.dropped_rows} malformed training rows were left out."]
    lines += ["", "Where the time went:"]
    for phase, spent in seconds.items():
        share = spent / seconds["total"]
        lines.append(f"  {phase:16}{spent:8.1f} s {share:7.1%}")
    if report.counters:
        lines += ["", "Embedding engine:", *_describe_counters(report.counters)]
    if report.shared is not None and report.shared.steps:
        lines += _describe_shared(report.shared)
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


def _describe_shared(shared: SharedCounts) -> list[str]:
    return [
        f"  {shared.rows / shared.steps:.0f} rows and {shared.tokens / shared.steps:.0f} tokens a "
        f"step shared with the next one, {shared.long_way_steps} of {shared.steps} steps without "
        "room for them",
    ]


def _data_config(num_processes: int) -> DataConfig:
    return DataConfig(
        name=_DATASET.value,
        table_rows=_TABLE_ROWS.value,
        seed=_SEED.value,
        zipf_examples=_NUM_EXAMPLES.value,
        data_dir=user_path(_DATA_DIR.value) if _DATA_DIR.value else None,
        train_files=tuple(str(user_path(text)) for text in _TRAIN_FILES.value),
        valid_files=tuple(str(user_path(text)) for text in _VALID_FILES.value),
        test_files=tuple(str(user_path(text)) for text in _TEST_FILES.value),
        on_malformed=_ON_MALFORMED.value,
        criteo=CriteoFormat(_CRITEO_INTEGERS.value, _CRITEO_CATEGORICALS.value),
        label_column=_LABEL_COLUMN.value,
        feature_columns=tuple(_FEATURE_COLUMNS.value),
        num_processes=num_processes,
    )


def _shared_capacity() -> SharedCapacity | None:
    rows, tokens = _SHARED_ROWS.value, _SHARED_TOKENS.value
    if rows is None and tokens is None:
        return None
    if _STALENESS.value != EXACT:
        raise ValueError("--shared_rows and --shared_tokens are of use with --staleness=exact")
    if rows is None or tokens is None:
        raise ValueError("--shared_rows and --shared_tokens belong together; give both")
    return SharedCapacity(rows=rows, tokens_per_rank=tokens)


def _train_config() -> TrainConfig:
    prefetch_workers = _PREFETCH_WORKERS.value or min(4, max(1, (os.cpu_count() or 1) // 4))
    return TrainConfig(
        dataset=_DATASET.value,
        staleness=_STALENESS.value,
        engine=_ENGINE.value,
        shared=_shared_capacity(),
        batch_size=_BATCH_SIZE.value,
        num_epochs=None if _STEPS.value else _EPOCHS.value,
        end_step=_STEPS.value,
        seed=_SEED.value,
        table_rows=_TABLE_ROWS.value,
        emb_width=_EMB_WIDTH.value,
        learning_rate=_LEARNING_RATE.value,
        dense_learning_rate=_DENSE_LEARNING_RATE.value,
        learning_rate_schedule=_LEARNING_RATE_SCHEDULE.value,
        warmup_steps=_WARMUP_STEPS.value,
        decay_steps=_DECAY_STEPS.value,
        max_grad_norm=_MAX_GRAD_NORM.value,
        skip_nonfinite=_SKIP_NONFINITE.value,
        deterministic=_DETERMINISTIC.value,
        shuffle_examples=_SHUFFLE_EXAMPLES.value,
        prefetch_batches=max(_PREFETCH_BATCHES.value, prefetch_workers),
        prefetch_workers=prefetch_workers,
        checkpoint_every=_CHECKPOINT_EVERY.value,
        keep_checkpoints=_KEEP_CHECKPOINTS.value,
        log_every=_LOG_EVERY.value,
        tensorboard=_TENSORBOARD.value,
    )


def _describe_sizes(dataset: Dataset) -> str:
    parts = {"training": dataset.train, "validation": dataset.valid, "test": dataset.test}
    return ", ".join(
        f"{purpose} part of {reader.num_blocks} blocks"
        if reader.num_examples is None
        else f"{reader.num_examples} {purpose} examples"
        for purpose, reader in parts.items()
    )


def _connect() -> ProcessGroup:
    given = (_COORDINATOR_ADDRESS.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    if _DISTRIBUTED.value:
        return connect_processes(*given)
    if given != (None, None, None):
        raise ValueError(
            "--coordinator_address, --num_processes and --process_id are for training in several "
            "processes; give --distributed, too"
        )
    return ProcessGroup()


def _run() -> None:
    timer = PhaseTimer()
    # Before the processes are connected: none can have written to the folder yet.
    workdir = choose_workdir(_WORKDIR.value, resume=_RESUME.value, distributed=_DISTRIBUTED.value)
    processes = _connect()

    def tell(text: str) -> None:
        if processes.is_first:
            print(text, flush=True)

    def make_progress(done: int, end: int | None) -> tqdm:
        return tqdm(
            initial=done,
            total=end,
            unit="step",
            dynamic_ncols=True,
            disable=not (processes.is_first and sys.stderr.isatty()),
        )

    tell(f"work folder: {workdir}")
    with timer.phase("data set"):
        dataset = datasets.load_dataset(_data_config(processes.num_processes))
    config = _train_config()
    mesh = training_mesh(_PLATFORM.value, _DEVICES.value, deterministic=_DETERMINISTIC.value)
    tell(
        f"{config.dataset}: {_describe_sizes(dataset)}; {config.staleness} training on {mesh.size} "
        f"{_PLATFORM.value.upper()} devices, seed {config.seed}"
    )
    with StopSignal() as stop:
        trainer = Trainer(
            config,
            dataset,
            mesh,
            workdir,
            timer,
            make_progress,
            processes=processes,
            stop_requested=stop.requested,
        )
        report = trainer.run(resume=_RESUME.value)
    tell(describe_report(report, timer.report()))


def main(arguments: Sequence[str]) -> int:
    """Runs the program; the exit status is 1 for settings or data that cannot be used."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments: {list(arguments[1:])}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # at INFO the checkpoint library says a lot
    try:
        if _CONFIG.value is not None:
            apply_config_file(user_path(_CONFIG.value), flags.FLAGS, _settings())
        _run()
    except (ValueError, OSError, ShareExchangeError) as error:
        print(f"train_recsys: {error}", file=sys.stderr)
        return 1
    return 0


def _settings() -> list[str]:
    """Names of the flags of this program that a file may set."""
    module = sys.modules[__name__]
    own = flags.FLAGS.get_key_flags_for_module(module)
    return [flag.name for flag in own if flag.name != _CONFIG.name]


if __name__ == "__main__":
    app.run(main)
