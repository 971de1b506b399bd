"""The training program from its command line, on a small generated data set."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import matplotlib.image
import pytest

from tests.xrex.train.recsys_program import SMALL, Outcome, records, run
from xrex.train import train_recsys
from xrex.train.batches import Batch
from xrex.train.train_log import TrainLog

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="the program trains on CPU devices"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run of 20 steps, in one go."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    return workdir, run(*SMALL, "--steps=20", f"--workdir={workdir}")


def test_run_reports_metrics_time_and_files_and_writes_them(
    whole_run: tuple[Path, Outcome],
) -> None:
    workdir, outcome = whole_run
    assert outcome.status == 0
    assert [record["step"] for record in records(workdir, "train")] == [5, 10, 15, 20]
    assert [record["step"] for record in records(workdir, "valid")] == [10, 20]
    (test,) = records(workdir, "test")
    assert test["auc"] > 0.55
    assert f"test {test['auc']:15.4f}{test['log_loss']:10.4f}" in outcome.output
    for words in ("Where the time went:", "2 ranks", "0 ids out of range", "0 skipped"):
        assert words in outcome.output
    for name in ("metrics.jsonl", "tensorboard", "training.png", "checkpoints"):
        assert str(workdir / name) in outcome.output
    assert matplotlib.image.imread(workdir / "training.png").ndim == 3
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["10", "20"]


def test_training_records_hold_the_metrics(whole_run: tuple[Path, Outcome]) -> None:
    last = records(whole_run[0], "train")[-1]
    assert set(last) == {
        "step",
        "split",
        "log_loss",
        "auc",
        "examples_per_sec",
        "sparse_grad_norm",
        "skipped_steps",
        "ids_out_of_range",
        "dropped_rows",
        "exposed_lookup_secs",
        "exposed_update_secs",
    }
    assert last["examples_per_sec"] > 0
    assert (last["skipped_steps"], last["ids_out_of_range"], last["dropped_rows"]) == (0, 0, 0)


def test_progress_is_shown_on_a_terminal_and_nowhere_else(
    whole_run: tuple[Path, Outcome], tmp_path: Path
) -> None:
    assert "step" not in whole_run[1].errors
    outcome = run(*SMALL, "--steps=10", f"--workdir={tmp_path / 'run'}", errors=Terminal())
    for words in ("10/10", "AUC=", "examples/s="):
        assert words in outcome.errors


def test_events_are_left_out_on_request(tmp_path: Path) -> None:
    outcome = run(*SMALL, "--steps=2", "--notensorboard", f"--workdir={tmp_path / 'run'}")
    assert outcome.status == 0
    assert not (tmp_path / "run/tensorboard").exists()


def test_resumed_run_ends_as_the_uninterrupted_one(
    whole_run: tuple[Path, Outcome], tmp_path: Path
) -> None:
    whole, resumed = whole_run[0], tmp_path / "resumed"
    run(*SMALL, "--steps=10", f"--workdir={resumed}")
    outcome = run(*SMALL, "--steps=20", f"--workdir={resumed}", "--resume")
    assert outcome.status == 0
    assert records(resumed, "test")[-1] == records(whole, "test")[-1]
    last, expected = records(resumed, "train")[-1], records(whole, "train")[-1]
    assert (last["step"], last["log_loss"]) == (expected["step"], expected["log_loss"])


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What each step was trained on, as the ids of a slot; SIGTERM comes during step 7."""
    batches: list[list[int]] = []
    add = TrainLog.add

    def note(log: TrainLog, step: int, batch: Batch, *rest: Any) -> None:
        batches.append(batch.ids[:, 0].tolist())
        if len(batches) == 7:
            signal.raise_signal(signal.SIGTERM)
        add(log, step, batch, *rest)

    monkeypatch.setattr(TrainLog, "add", note)
    return batches


def test_signal_saves_after_the_running_step_and_the_resumed_run_goes_on_with_the_next_batch(
    trained_on: list[list[int]], tmp_path: Path
) -> None:
    workdir = tmp_path / "stopped"
    outcome = run(*SMALL, "--steps=20", f"--workdir={workdir}")
    assert outcome.status == 0
    assert "Stopped after step 7, which is saved; go on with --resume" in outcome.output
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["7"]
    assert records(workdir, "test") == []
    assert len(trained_on) == 7

    outcome = run(*SMALL, "--steps=20", f"--workdir={workdir}", "--resume")
    assert outcome.status == 0
    assert records(workdir, "test")[0]["step"] == 20
    parts, trained_on[:] = list(trained_on), [[0]] * 7  # so that no signal comes
    run(*SMALL, "--steps=20", f"--workdir={tmp_path / 'whole'}")
    assert trained_on[7:] == parts


def test_synchronous_mode_trains_without_the_engine(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    outcome = run(
        *SMALL, "--steps=20", "--staleness=synchronous", "--engine=plain", f"--workdir={workdir}"
    )
    assert outcome.status == 0
    assert records(workdir, "test")[0]["auc"] > 0.55
    assert "Embedding engine" not in outcome.output


def write_click_log(folder: Path, num_lines: int) -> None:
    """A Criteo-style file in which the category decides the label, and one malformed line."""
    lines = [f"{index % 2}\t{index % 7}\ta{index % 2}\n" for index in range(num_lines)]
    (folder / "day.tsv").write_text("".join([*lines, "malformed\n"]))


def criteo_flags(folder: Path) -> list[str]:
    names = ("train_files", "valid_files", "test_files")
    columns = ("--criteo_integers=1", "--criteo_categoricals=1")
    return ["--dataset=criteo", *columns, *(f"--{name}={folder}/*.tsv" for name in names)]


def test_files_are_trained_on_by_epochs_and_malformed_rows_counted(tmp_path: Path) -> None:
    write_click_log(tmp_path, 320)
    workdir = tmp_path / "run"
    outcome = run(
        *SMALL,
        *criteo_flags(tmp_path),
        "--checkpoint_every=5",
        "--epochs=4",
        "--on_malformed=drop",
        f"--workdir={workdir}",
    )
    assert outcome.status == 0, outcome.errors
    assert [record["step"] for record in records(workdir, "valid")] == [5, 10, 15, 20]
    assert records(workdir, "test")[0]["auc"] == 1
    assert "4 malformed training rows were left out" in outcome.output


def test_malformed_row_ends_the_program_with_its_place(tmp_path: Path) -> None:
    write_click_log(tmp_path, 320)
    outcome = run(*SMALL, *criteo_flags(tmp_path), f"--workdir={tmp_path / 'run'}")
    assert outcome.status == 1
    assert f"{tmp_path}/day.tsv:321: 1 tab-separated cells" in outcome.errors


def test_settings_come_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    lines = (f'{name} = "{value}"' for name, value in (text[2:].split("=") for text in SMALL))
    (tmp_path / "run.toml").write_text("\n".join([*lines, "steps = 20", "epochs = 3"]))
    workdir = tmp_path / "run"
    outcome = run(f"--config={tmp_path}/run.toml", "--steps=5", f"--workdir={workdir}")
    assert outcome.status == 0, outcome.errors
    assert records(workdir, "test")[0]["step"] == 5


def test_unknown_setting_is_named_with_the_closest(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("epoch = 3")
    outcome = run(f"--config={tmp_path}/run.toml")
    assert outcome.status == 1
    assert "there is no setting 'epoch'; the closest is 'epochs'" in outcome.errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--distributed",), "--distributed needs a --workdir that all processes share"),
        (("--process_id=1",), "are for training in several processes; give --distributed, too"),
    ],
)
def test_half_of_the_flags_for_several_processes_is_refused(
    arguments: tuple[str, ...], message: str
) -> None:
    outcome = run(*SMALL, *arguments)
    assert outcome.status == 1
    assert message in outcome.errors


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    outcome = run(*SMALL, f"--workdir={tmp_path}")
    assert outcome.status == 1
    assert "holds the checkpoints of another run; give --resume" in outcome.errors


def test_resuming_without_a_folder_is_refused() -> None:
    outcome = run(*SMALL, "--resume")
    assert outcome.status == 1
    assert "--resume needs the --workdir" in outcome.errors


def test_missing_data_is_named(tmp_path: Path) -> None:
    outcome = run(f"--data_dir={tmp_path}", f"--workdir={tmp_path}")
    assert outcome.status == 1
    assert f"{tmp_path}/ml-100k.user: cannot be read" in outcome.errors


def test_default_folder_is_new_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run(f"--data_dir={tmp_path}")
    outcome = run(f"--data_dir={tmp_path}")
    assert len(list(tmp_path.glob("train_recsys-*"))) == 2
    assert f"work folder: {tmp_path}/train_recsys-" in outcome.output


def test_relative_folder_is_relative_to_where_bazel_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    assert train_recsys.choose_workdir("runs/a", resume=False) == tmp_path / "runs/a"


def test_program_makes_its_devices_itself(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "xrex.train.train_recsys", *SMALL, "--devices=4", "--steps=2"]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path / 'run'}"],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4 ranks, " in done.stdout
