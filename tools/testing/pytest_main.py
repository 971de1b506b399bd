"""Runs pytest on the files named on the command line, as the main of every Python test.

Arguments are test files relative to the working directory; what starts with "-" goes to
pytest as it is. Bazel's --test_filter=EXPRESSION becomes pytest's -k EXPRESSION. After
--needs-gpu the run fails where JAX finds no GPU, since its tests only skip themselves there.
"""

import os
import sys
import tempfile

import pytest

# The settings of an interactive run hold here too.
CONFIG_FILE = "pyproject.toml"
NEEDS_GPU = "--needs-gpu"


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


def missing_gpu() -> str | None:
    """Returns why JAX has no GPU, or None if it has one."""
    # Not before the tests: they decide what is set before JAX looks for devices.
    import jax

    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"pytest_main: a test that needs a GPU ran without one: {error}"
    return None


def main() -> int:
    """Returns pytest's exit code; 5, for no test found, is a failure like any other."""
    # Hypothesis and matplotlib write into the home folder, which a test may not.
    scratch = os.environ.get("TEST_TMPDIR") or tempfile.mkdtemp()
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(scratch, "hypothesis"))
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(scratch, "matplotlib"))
    arguments = [argument for argument in sys.argv[1:] if argument != NEEDS_GPU]
    code = int(pytest.main(pytest_arguments(arguments, dict(os.environ))))
    if code == 0 and NEEDS_GPU in sys.argv and (message := missing_gpu()):
        print(message, file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
