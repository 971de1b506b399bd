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
from xrex.train.batches import steps_per_epoch
from xrex.train.cpu_devices import cpu_mesh
from xrex.train.phase_timer import PhaseTimer
from xrex.train.trainer import PIPELINED, SYNCHRONOUS, TrainConfig, Trainer, TrainReport

_DATASET = flags.DEFINE_enum(
    "dataset", datasets.MOVIELENS_100K, datasets.NAMES, "Data to train on; zipf is generated."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder of the MovieLens-100K files, if not those that Bazel fetched."
)
_NUM_EXAMPLES = flags.DEFINE_integer(
    "zipf_examples", 100_000, "Examples that --dataset=zipf generates.", lower_bound=100
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
    "checkpoint_every", None, "Steps between checkpoints; by default one epoch.", lower_bound=1
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


def _run() -> None:
    timer = PhaseTimer()
    workdir = choose_workdir(_WORKDIR.value, resume=_RESUME.value)
    print(f"work folder: {workdir}", flush=True)
    with timer.phase("data set"):
        dataset = datasets.load_dataset(
            _DATASET.value,
            data_dir=Path(_DATA_DIR.value) if _DATA_DIR.value else None,
            table_rows=_TABLE_ROWS.value,
            seed=_SEED.value,
            num_examples=_NUM_EXAMPLES.value,
        )
    splits = dataset.splits
    per_epoch = steps_per_epoch(splits.train, _BATCH_SIZE.value)
    config = TrainConfig(
        dataset=_DATASET.value,
        mode=_MODE.value,
        batch_size=_BATCH_SIZE.value,
        end_step=_STEPS.value or _EPOCHS.value * per_epoch,
        seed=_SEED.value,
        table_rows=_TABLE_ROWS.value,
        emb_width=_EMB_WIDTH.value,
        learning_rate=_LEARNING_RATE.value,
        dense_learning_rate=_DENSE_LEARNING_RATE.value,
        crosses=dataset.crosses,
        checkpoint_every=_CHECKPOINT_EVERY.value or per_epoch,
        keep_checkpoints=_KEEP_CHECKPOINTS.value,
        log_every=_LOG_EVERY.value,
    )
    print(
        f"{config.dataset}: {len(splits.train)} training, {len(splits.valid)} validation and "
        f"{len(splits.test)} test examples, split by time; {config.mode} training on "
        f"{_DEVICES.value} CPU devices, seed {config.seed}",
        flush=True,
    )
    mesh = cpu_mesh(_DEVICES.value)

    def make_progress(done: int, end: int) -> tqdm:
        return tqdm(initial=done, total=end, unit="step", dynamic_ncols=True)

    report = Trainer(config, splits, mesh, workdir, timer, make_progress).run(resume=_RESUME.value)
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
