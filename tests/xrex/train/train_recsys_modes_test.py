"""The training program in its staleness modes, with clipped gradients and with schedules."""

import re
from pathlib import Path

import jax
import pytest

from tests.xrex.train.recsys_program import SMALL, Outcome, records, run

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="the program trains on CPU devices"
)


@pytest.fixture(scope="module")
def exact_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run of 20 steps in the mode exact, in one go."""
    workdir = tmp_path_factory.mktemp("exact") / "run"
    return workdir, run(*SMALL, "--steps=20", "--staleness=exact", f"--workdir={workdir}")


def test_exact_run_reports_what_its_steps_shared_and_waited_for(
    exact_run: tuple[Path, Outcome],
) -> None:
    workdir, outcome = exact_run
    assert outcome.status == 0, outcome.errors
    assert records(workdir, "test")[0]["auc"] > 0.55
    assert re.search(r"a step shared with the next one, 0 of \d+ steps without", outcome.output)
    waited = {name for name in records(workdir, "train")[-1] if name.startswith("exposed_")}
    assert waited == {"exposed_lookup_secs", "exposed_update_secs", "exposed_shared_secs"}


def test_resumed_exact_run_ends_as_the_uninterrupted_one(
    exact_run: tuple[Path, Outcome], tmp_path: Path
) -> None:
    whole, resumed = exact_run[0], tmp_path / "resumed"
    run(*SMALL, "--steps=10", "--staleness=exact", f"--workdir={resumed}")
    # The room for shared rows is no part of the values, so it may be another one.
    outcome = run(
        *SMALL,
        "--steps=20",
        "--staleness=exact",
        "--shared_rows=1",
        "--shared_tokens=1",
        f"--workdir={resumed}",
        "--resume",
    )
    assert outcome.status == 0, outcome.errors
    assert re.search(r" (\d+) of \1 steps without room for them", outcome.output)
    assert records(resumed, "test")[-1] == records(whole, "test")[-1]


def test_exact_and_synchronous_runs_have_the_same_test_metrics(
    exact_run: tuple[Path, Outcome], tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    outcome = run(*SMALL, "--steps=20", "--staleness=synchronous", f"--workdir={workdir}")
    assert outcome.status == 0, outcome.errors
    assert "2 ranks" in outcome.output
    assert "shared with the next one" not in outcome.output
    assert records(workdir, "test") == records(exact_run[0], "test")


def test_run_in_another_mode_is_not_resumed(
    exact_run: tuple[Path, Outcome],
) -> None:
    outcome = run(*SMALL, "--steps=30", f"--workdir={exact_run[0]}", "--resume")
    assert outcome.status == 1
    assert "staleness: 'exact' there, 'one_step' here" in outcome.errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max_grad_norm=1e-3"],
        ["--learning_rate_schedule=cosine", "--warmup_steps=5", "--decay_steps=20"],
    ],
    ids=["clipped", "scheduled"],
)
def test_gradients_are_clipped_and_learning_rates_scheduled_on_request(
    arguments: list[str], exact_run: tuple[Path, Outcome], tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    outcome = run(*SMALL, "--steps=10", "--staleness=exact", *arguments, f"--workdir={workdir}")
    assert outcome.status == 0, outcome.errors
    last, plain = records(workdir, "train")[-1], records(exact_run[0], "train")[1]
    assert (last["step"], last["skipped_steps"]) == (plain["step"], 0)
    assert last["log_loss"] != plain["log_loss"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shared_rows=8", "--shared_tokens=8"], "are of use with --staleness=exact"),
        (["--staleness=exact", "--shared_rows=8"], "belong together; give both"),
        (["--staleness=exact", "--shared_tokens=8"], "belong together; give both"),
        (
            ["--staleness=exact", "--shared_rows=1000000", "--shared_tokens=8"],
            "exceeds the batch: at most rows=",
        ),
        (["--max_grad_norm=0"], "max_grad_norm=0.0; it must be positive and finite"),
        (["--learning_rate_schedule=cosine"], "decay_steps=None and warmup_steps=0"),
        (
            ["--learning_rate_schedule=cosine", "--warmup_steps=9", "--decay_steps=9"],
            "decay_steps=9 and warmup_steps=9; a cosine schedule needs to know its steps",
        ),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    outcome = run(*SMALL, "--steps=2", *arguments, f"--workdir={tmp_path / 'run'}")
    assert outcome.status == 1
    assert message in outcome.errors
