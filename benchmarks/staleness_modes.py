"""What one step of staleness does to a model: MovieLens-100K in every mode, by several seeds.

Runs alternate between the modes, so that whatever the machine does meanwhile meets all alike.
Prints one line of JSON for each run and one for the whole, and draws both. AUC: area under the ROC
curve of the test part, the latest tenth of the ratings. Step time: milliseconds a step of one run,
its first step, evaluation and checkpoints left out.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks import measure
from xrex.train import datasets, devices
from xrex.train.phase_timer import PhaseTimer
from xrex.train.staleness import MODES
from xrex.train.trainer import AUTO_ENGINE, CONSTANT, TrainConfig, Trainer

_PLATFORM = flags.DEFINE_enum(
    "platform", devices.CPU, devices.PLATFORMS, "Virtual CPU devices or GPUs."
)
_DEVICES = flags.DEFINE_integer("devices", None, "How many; by default 4 CPU devices or all GPUs.")
_SEEDS = flags.DEFINE_integer("seeds", 5, "Runs of each mode.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of the files of MovieLens-100K.")
_PLOT = flags.DEFINE_string("plot", None, "PNG to write.")

_TABLE_ROWS = 65_536


def _config(mode: str, seed: int) -> TrainConfig:
    """The defaults of train_recsys, with sums in the fixed order."""
    return TrainConfig(
        dataset=datasets.MOVIELENS_100K,
        staleness=mode,
        engine=AUTO_ENGINE,
        shared=None,
        batch_size=512,
        num_epochs=4,
        end_step=None,
        seed=seed,
        table_rows=_TABLE_ROWS,
        emb_width=64,
        learning_rate=0.1,
        dense_learning_rate=1e-3,
        learning_rate_schedule=CONSTANT,
        warmup_steps=0,
        decay_steps=None,
        max_grad_norm=None,
        skip_nonfinite=True,
        deterministic=True,
        shuffle_examples=131_072,
        prefetch_batches=2,
        prefetch_workers=1,
        checkpoint_every=None,
        keep_checkpoints=1,
        log_every=10,
        tensorboard=False,
    )


def _run(mode: str, seed: int, dataset: datasets.Dataset, mesh: Any) -> dict[str, Any]:
    timer = PhaseTimer()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            _config(mode, seed),
            dataset,
            mesh,
            Path(folder),
            timer,
            lambda done, end: tqdm(initial=done, total=end, disable=True),
        )
        report = trainer.run(resume=False)
    assert report.test is not None  # nobody asked it to stop
    record = {
        "mode": mode,
        "seed": seed,
        "auc": round(report.test.auc, 5),
        "log_loss": round(report.test.log_loss, 5),
        "step_ms": round(timer.report()["steps"] * 1e3 / (report.end_step - 1), 3),
    }
    if report.shared is not None:
        record["shared_rows"] = round(report.shared.rows / report.shared.steps)
        record["shared_tokens"] = round(report.shared.tokens / report.shared.steps)
    return record


def _draw(path: str, title: str, records: Sequence[Mapping[str, Any]]) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for place, mode in enumerate(MODES):
        own = [record for record in records if record["mode"] == mode]
        left.plot([r["seed"] for r in own], [r["auc"] for r in own], "osx"[place], label=mode)
        right.bar(place, statistics.median(r["step_ms"] for r in own))
    left.set_xlabel("seed")
    left.set_xticks(range(_SEEDS.value))
    left.set_ylabel("test AUC")
    left.grid(alpha=0.3)
    left.legend()
    right.set_xticks(range(len(MODES)), MODES)
    right.set_ylabel("ms a step, median of the runs")
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=110)


def main(argv: Sequence[str]) -> None:
    """Prints the machine, the runs, and the modes side by side."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    mesh = devices.training_mesh(_PLATFORM.value, _DEVICES.value, deterministic=True)
    dataset = datasets.load_dataset(
        datasets.DataConfig(
            name=datasets.MOVIELENS_100K,
            table_rows=_TABLE_ROWS,
            data_dir=Path(_DATA_DIR.value) if _DATA_DIR.value else None,
        )
    )
    measure.print_json(measure.describe_machine())
    records = []
    for seed in range(_SEEDS.value):
        for mode in MODES:
            records.append(_run(mode, seed, dataset, mesh))
            measure.print_json(records[-1])
    measure.print_json(
        {
            "case": f"MovieLens-100K, {mesh.size} {_PLATFORM.value} devices",
            "mean_auc": {
                mode: round(statistics.mean(r["auc"] for r in records if r["mode"] == mode), 5)
                for mode in MODES
            },
            "median_step_ms": {
                mode: round(
                    statistics.median(r["step_ms"] for r in records if r["mode"] == mode), 2
                )
                for mode in MODES
            },
        }
    )
    if _PLOT.value:
        _draw(
            _PLOT.value,
            f"MovieLens-100K, batch 512, {mesh.size} {_PLATFORM.value.upper()} device(s)",
            records,
        )


if __name__ == "__main__":
    app.run(main)
