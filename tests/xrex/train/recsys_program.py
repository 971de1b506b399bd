"""The training program, called as from its command line, on a small generated data set."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from absl.testing import flagsaver

from xrex.train import train_recsys

SMALL = (
    "--dataset=zipf",
    "--zipf_examples=2000",
    "--devices=2",
    "--batch_size=64",
    "--emb_width=8",
    "--table_rows=4096",
    "--checkpoint_every=10",
    "--log_every=5",
)


class Outcome(NamedTuple):
    """Exit status, and what was written to standard output and error."""

    status: int
    output: str
    errors: str


def run(*arguments: str, errors: io.StringIO | None = None) -> Outcome:
    """Runs the program in this process."""
    environment = dict(os.environ)
    output, errors = io.StringIO(), errors or io.StringIO()
    with (
        flagsaver.flagsaver(),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        rest = flags.FLAGS(["train_recsys", *arguments])
        status = train_recsys.main(rest)
    os.environ.clear()
    os.environ.update(environment)
    return Outcome(status, output.getvalue(), errors.getvalue())


def records(workdir: Path, split: str) -> list[dict[str, Any]]:
    """What a run wrote about a part of the data, in the order of its steps."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == split]
