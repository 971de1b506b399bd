"""What became of the processes that run_all.py started, and the reports on it."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

PASSED, FAILED, TIMED_OUT, CRASHED, NOT_RUN = "passed", "failed", "timed out", "crashed", "not run"

# How the files with the records of benchmarks begin, in the folder of the report.
RECORDS = "records_"

# Lines of pytest -v and of GoogleTest.
STARTED = re.compile(r"\[ RUN      \] (\S+)|(\S+\.py::[^ \[]+(?:\[.*?\])?)")
ENDED = re.compile(r" (?:PASSED|SKIPPED|FAILED|ERROR)\b|^\[ +(?:OK|SKIPPED|FAILED) +\]")


@dataclasses.dataclass
class Outcome:
    """What became of a job; the names of failed and skipped cases, and the end of its output."""

    name: str
    status: str = NOT_RUN
    exit_status: int | None = None
    secs: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    reasons_to_skip: dict[str, int] = dataclasses.field(default_factory=dict)
    tail: str = ""


def count_cases(xml: Path, outcome: Outcome) -> bool:
    """Reads pytest's or GoogleTest's XML; returns whether there is one. A crash leaves none."""
    try:
        cases = list(ET.parse(xml).iter("testcase"))
    except (OSError, ET.ParseError):
        return False
    for case in cases:
        skipped = case.find("skipped")
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            outcome.failed += 1
            message = (problem.get("message") or "").strip().splitlines()[:1]
            outcome.failures.append(f"{case.get('name')}: {' '.join(message)[:300]}")
        elif skipped is not None or case.get("status") == "notrun":
            outcome.skipped += 1
            reason = (skipped.get("message") if skipped is not None else None) or "disabled"
            outcome.reasons_to_skip[reason] = outcome.reasons_to_skip.get(reason, 0) + 1
        else:
            outcome.passed += 1
    return True


def count_lines(log: str, outcome: Outcome) -> None:
    """Counts from the output of a job that left no XML, and names the case that was running."""
    running = ""
    for line in log.splitlines():
        if started := STARTED.match(line):
            running = started[1] or started[2]
        ended = ENDED.search(line)
        if not (running and ended):
            continue
        result = ended[0].strip(" []").split()[0]
        if result in ("PASSED", "OK"):
            outcome.passed += 1
        elif result == "SKIPPED":
            outcome.skipped += 1
        else:
            outcome.failed += 1
            outcome.failures.append(running)
        running = ""
    if running:
        outcome.failures.append(f"{running} was running")


def line_of(outcome: Outcome) -> str:
    counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
    status = outcome.status
    if status in (CRASHED, FAILED) and outcome.exit_status is not None:
        status += f" ({outcome.exit_status})"
    return f"{status:14} {outcome.secs:6.1f} s  {counts:40} {outcome.name}"


def summary(outcomes: list[Outcome]) -> str:
    """What failed, and how much there was of everything."""
    bad = [outcome for outcome in outcomes if outcome.status != PASSED]
    lines = ["", "=" * 100]
    for outcome in bad:
        lines.append(line_of(outcome))
        lines.extend(f"    {failure}" for failure in outcome.failures[:10])
    passed, failed, skipped = (
        sum(getattr(outcome, name) for outcome in outcomes)
        for name in ("passed", "failed", "skipped")
    )
    lines.append(
        f"{len(outcomes) - len(bad)} of {len(outcomes)} files passed; cases: {passed} passed, "
        f"{failed} failed, {skipped} skipped"
    )
    return "\n".join(lines)


def write_report(report: Path, versions: dict[str, str], outcomes: list[Outcome]) -> None:
    content: dict[str, Any] = {
        "machine": versions,
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    content["benchmark"] = [
        record
        for path in sorted(report.glob(f"{RECORDS}*.json"))
        for record in json.loads(path.read_text())
    ]
    (report / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [f"{name}: {value}" for name, value in versions.items()]
    lines += ["", *(line_of(outcome) for outcome in outcomes)]
    for outcome in outcomes:
        skips = [f"  skipped {n}: {reason}" for reason, n in outcome.reasons_to_skip.items()]
        if outcome.tail or skips:
            lines += ["", f"--- {outcome.name}: {outcome.status}", *skips]
            lines += [*outcome.failures, outcome.tail] if outcome.tail else []
    if content["benchmark"]:
        lines += ["", *(json.dumps(record) for record in content["benchmark"])]
    lines.append(summary(outcomes))
    (report / "report.txt").write_text("\n".join(lines) + "\n")
