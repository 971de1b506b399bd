import json
import pathlib

import pytest

from tools.ci import test_totals
from tools.ci.test_totals import Totals

GOOGLETEST = """<testsuites tests="3"><testsuite name="Core" tests="3">
  <testcase name="Add" status="run" result="completed"/>
  <testcase name="Off" status="notrun" result="suppressed"/>
  <testcase name="Sub" status="run" result="completed"><failure message="1 != 2"/></testcase>
</testsuite></testsuites>"""

PYTEST = """<testsuites><testsuite name="pytest" tests="4">
  <testcase classname="a" name="test_x"/>
  <testcase classname="a" name="test_y"/>
  <testcase classname="a" name="test_z"><skipped message="no GPU"/></testcase>
  <testcase classname="a" name="test_w"><error message="fixture failed"/></testcase>
</testsuite></testsuites>"""


def result(status: str, report: pathlib.Path | None = None) -> str:
    outputs = [{"name": "test.log", "uri": "file:///nowhere"}]
    if report:
        outputs.append({"name": "test.xml", "uri": report.as_uri()})
    return json.dumps({"testResult": {"status": status, "testActionOutput": outputs}})


def summary(label: str, status: str) -> str:
    return json.dumps(
        {"id": {"testSummary": {"label": label}}, "testSummary": {"overallStatus": status}}
    )


@pytest.mark.parametrize(
    ("report", "expected"), [(GOOGLETEST, Totals(1, 1, 1)), (PYTEST, Totals(2, 1, 1))]
)
def test_cases_of_a_report_are_counted(report: str, expected: Totals) -> None:
    assert test_totals.count_cases(report) == expected


def test_reports_of_a_run_are_added_up(tmp_path: pathlib.Path) -> None:
    report = tmp_path / "with space.xml"
    report.write_text(PYTEST)
    totals, not_passed = test_totals.add_up(
        [result("FAILED", report), summary("//a:a_test", "FAILED"), '{"other": 1}']
    )
    assert totals == Totals(2, 1, 1)
    assert not_passed == ["//a:a_test: FAILED"]


def test_target_without_a_report_counts_as_a_failure() -> None:
    totals, _ = test_totals.add_up([result("TIMEOUT")])
    assert totals == Totals(failed=1)


def test_report_without_failures_of_a_failed_target_counts_one(tmp_path: pathlib.Path) -> None:
    report = tmp_path / "test.xml"
    report.write_text('<testsuites><testsuite><testcase name="x"/></testsuite></testsuites>')
    totals, _ = test_totals.add_up([result("FAILED", report)])
    assert totals == Totals(passed=1, failed=1)


def test_target_that_was_not_built_counts_as_a_failure() -> None:
    totals, not_passed = test_totals.add_up([summary("//a:a_test", "FAILED_TO_BUILD")])
    assert totals == Totals(failed=1)
    assert not_passed == ["//a:a_test: FAILED_TO_BUILD"]


@pytest.mark.parametrize("events", [[], [summary("//a:a_test", "PASSED")]])
def test_run_without_any_case_is_a_failure(
    events: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "events.json"
    file.write_text("\n".join(events))
    monkeypatch.setattr("sys.argv", ["test_totals", str(file)])
    assert test_totals.main() == 1
