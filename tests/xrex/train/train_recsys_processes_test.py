"""The training program in two processes, on plain JAX."""

import contextlib
import importlib.util
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from absl import app

from tests.xrex import processes
from xrex.train import train_recsys
from xrex.train.train_log import TrainLog

NUM_PROCESSES = 2
FLAGS = (
    "--dataset=zipf",
    "--zipf_examples=2500",
    "--devices=2",
    "--batch_size=64",
    "--emb_width=8",
    "--table_rows=4096",
    "--log_every=4",
    # Not every machine that runs the bundle has the library.
    *([] if importlib.util.find_spec("tensorboardX") else ["--notensorboard"]),
)


def train(workdir: Path, *arguments: str, signal_at: int = 0, status: int = 0) -> list[str]:
    """Runs the program, which ends with `status`; what each process printed.

    SIGTERM reaches process 1 in step `signal_at`.
    """
    module = "tests.xrex.train.train_recsys_processes_test"
    program = f"from {module} import main; main({signal_at}, {status})"
    address = f"--coordinator_address=localhost:{processes.free_port()}"
    shared = (*FLAGS, "--distributed", address, f"--num_processes={NUM_PROCESSES}", *arguments)
    return processes.run_together(
        [
            ["-c", program, *shared, f"--workdir={workdir}", f"--process_id={process}"]
            for process in range(NUM_PROCESSES)
        ],
        devices_per_process=2,
    )


def main(signal_at: int, status: int) -> None:
    """What one of the processes does; it succeeds if the program ends with `status`."""
    add = TrainLog.add

    def add_and_signal(log: TrainLog, step: int, *rest: Any) -> None:
        add(log, step, *rest)
        if step == signal_at and "--process_id=1" in sys.argv:
            signal.raise_signal(signal.SIGTERM)

    def run(arguments: Sequence[str]) -> int:
        with contextlib.redirect_stderr(sys.stdout):
            return int(train_recsys.main(arguments) != status)

    with mock.patch.object(TrainLog, "add", add_and_signal):
        app.run(run)


def records(workdir: Path, split: str) -> list[dict[str, Any]]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == split]


def saved_steps(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def test_two_processes_train_by_shares_and_the_first_one_reports(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    first, second = train(workdir, "--epochs=1", "--checkpoint_every=8")
    # Of 2,000 training examples, one process has 976 and the other 1,024: 32 parts of 32.
    assert "training on 4 CPU devices" in first
    assert "AUC" not in second  # JAX prints there, the program does not
    assert "work folder" not in second
    assert [record["step"] for record in records(workdir, "train")] == list(range(4, 33, 4))
    assert [record["step"] for record in records(workdir, "valid")] == [8, 16, 24, 32]
    (test,) = records(workdir, "test")
    assert test["auc"] > 0.55
    assert f"test {test['auc']:15.4f}{test['log_loss']:10.4f}{250:10}" in first
    assert saved_steps(workdir) == [16, 24, 32]


def test_signal_to_one_process_stops_both_at_one_step_and_both_resume(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    first, _ = train(workdir, "--steps=1000", signal_at=5)
    (stopped,) = saved_steps(workdir)
    # The batches that were ready when the signal came are still trained on.
    assert 5 <= stopped <= 5 + 5
    assert f"Stopped after step {stopped}, which is saved" in first
    train(workdir, f"--steps={stopped + 3}", "--resume")
    assert saved_steps(workdir) == [stopped, stopped + 3]
    assert records(workdir, "test")[0]["step"] == stopped + 3


def test_malformed_data_of_one_process_end_both_with_the_place(tmp_path: Path) -> None:
    data = tmp_path / "day.tsv"
    data.write_text("1\t5\tff\n" * 2000 + "malformed\n")
    files = (f"--{part}_files={data}" for part in ("train", "valid", "test"))
    columns = ("--criteo_integers=1", "--criteo_categoricals=1")
    outputs = train(tmp_path / "run", "--dataset=criteo", *columns, *files, "--epochs=1", status=1)
    place = f"{data}:2001: 1 tab-separated cells"
    told = [f"train_recsys: {place}" in output for output in outputs]
    assert sorted(told) == [False, True]
    reader = told.index(True)
    assert f"process {reader} could not read its share of the data: {place}" in outputs[1 - reader]
