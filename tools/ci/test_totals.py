"""Adds up the test cases of one Bazel test run.

usage: test_totals BUILD_EVENTS

BUILD_EVENTS is the file that Bazel writes with --build_event_json_file. Prints a line
for each target that did not pass and, last, "N passed, N failed, N skipped". A target that
could not be built or left no test report counts as one failure. Exits with 1 if there
was a failure or if no test ran.
"""

import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from typing import Any, NamedTuple


class Totals(NamedTuple):
    """Numbers of test cases."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: object) -> "Totals":
        """Adds number by number."""
        if not isinstance(other, Totals):
            return NotImplemented
        return Totals(*(a + b for a, b in zip(self, other, strict=True)))


def count_cases(report: str) -> Totals:
    """Returns the totals of a JUnit report, as pytest and GoogleTest write it."""
    totals = Totals()
    for case in ElementTree.fromstring(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            totals += Totals(failed=1)
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            totals += Totals(skipped=1)
        else:
            totals += Totals(passed=1)
    return totals


def _report_totals(result: dict[str, Any]) -> Totals:
    """Returns the totals of one run of one target (a "testResult" event)."""
    totals = Totals()
    for output in result.get("testActionOutput", []):
        if output["name"] == "test.xml":
            path = pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path))
            totals = count_cases(path.read_text())
    if result["status"] not in ("PASSED", "FLAKY") and totals.failed == 0:
        totals += Totals(failed=1)  # it timed out, or died before it could report
    return totals


def add_up(events: Iterable[str]) -> tuple[Totals, list[str]]:
    """Returns the totals of a run, and a line for each target that did not pass.

    Args:
        events: the build events, one JSON object a line.
    """
    totals = Totals()
    not_passed: list[str] = []
    for line in events:
        event = json.loads(line)
        if "testResult" in event:
            totals += _report_totals(event["testResult"])
        elif "testSummary" in event:
            status = event["testSummary"]["overallStatus"]
            if status == "FAILED_TO_BUILD":
                totals += Totals(failed=1)
            if status != "PASSED":
                not_passed.append(f"{event['id']['testSummary']['label']}: {status}")
    return totals, not_passed


def main() -> int:
    """Prints the totals of the event file named on the command line."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} BUILD_EVENTS")
    totals, not_passed = add_up(pathlib.Path(sys.argv[1]).read_text().splitlines())
    for line in not_passed:
        print(line)
    print(f"{totals.passed} passed, {totals.failed} failed, {totals.skipped} skipped")
    return 1 if totals.failed or not (totals.passed or totals.skipped) else 0


if __name__ == "__main__":
    sys.exit(main())
