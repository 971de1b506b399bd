"""Runs pytest on the files named on the command line, as the main of every Python test.

Arguments are test files relative to the working directory; what starts with "-" goes to
pytest as it is. Bazel's --test_filter=EXPRESSION becomes pytest's -k EXPRESSION.
"""

import os
import sys
import tempfile

import pytest

# The settings of an interactive run hold here too.
CONFIG_FILE = "pyproject.toml"


def pytest_arguments(arguments: list[str], environment: dict[str, str]) -> list[str]:
    """Returns pytest's command line for a test that Bazel runs.

    Args:
        arguments: the test's own command line.
        environment: Bazel's test environment (TESTBRIDGE_TEST_ONLY, XML_OUTPUT_FILE).
    """
    result = ["-c", CONFIG_FILE, "--rootdir", "."] if os.path.exists(CONFIG_FILE) else []
    result += ["-p", "no:cacheprovider", "--durations=5", "--durations-min=2"]
    if xml_file := environment.get("XML_OUTPUT_FILE"):
        result.append(f"--junitxml={xml_file}")
    if expression := environment.get("TESTBRIDGE_TEST_ONLY"):
        result += ["-k", expression]
    return result + arguments


def main() -> int:
    """Returns pytest's exit code; 5, for no test found, is a failure like any other."""
    # Hypothesis and matplotlib write into the home folder, which a test may not.
    scratch = os.environ.get("TEST_TMPDIR") or tempfile.mkdtemp()
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(scratch, "hypothesis"))
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(scratch, "matplotlib"))
    return int(pytest.main(pytest_arguments(sys.argv[1:], dict(os.environ))))


if __name__ == "__main__":
    sys.exit(main())
