"""Checks the format, style and types of all sources of this workspace.

usage: ./bazelw run //tools/lint             names what is wrong, exit code 1
       ./bazelw run //tools/lint -- --fix    corrects what a tool can correct
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from tools.lint import source_rules

CC_SUFFIXES = frozenset([".cc", ".cu", ".cuh", ".h", ".hpp"])
BAZEL_NAMES = frozenset(["BUILD", "BUILD.bazel", "MODULE.bazel"])
BAZEL_SUFFIXES = frozenset([".BUILD", ".bzl"])
PYTHON_FOLDERS = ("benchmarks", "examples", "phoenix", "tests", "third_party", "tools")

# A tool that is not there on this machine exits with this code.
SKIPPED = 77


class Tools(NamedTuple):
    """Paths of the programs."""

    buildifier: pathlib.Path
    clang_format: pathlib.Path
    ruff: pathlib.Path


class Sources(NamedTuple):
    """The files of the workspace, as paths from its root."""

    bazel: list[str]
    cc: list[str]
    python: list[str]
    all: list[str]


def find_sources(root: pathlib.Path) -> Sources:
    """Returns the files that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    names = sorted({name for name in listing.stdout.split("\0") if (root / name).is_file()})
    paths = [pathlib.PurePosixPath(name) for name in names]
    return Sources(
        bazel=[str(p) for p in paths if p.name in BAZEL_NAMES or p.suffix in BAZEL_SUFFIXES],
        cc=[str(p) for p in paths if p.suffix in CC_SUFFIXES],
        python=[str(p) for p in paths if p.suffix == ".py" and p.parts[0] in PYTHON_FOLDERS],
        all=names,
    )


def run(root: pathlib.Path, *command: str | pathlib.Path) -> int:
    """Runs a tool in the root of the workspace and returns its exit code."""
    # mypy looks for the types of the libraries where this program finds the libraries.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    sys.stdout.flush()
    return subprocess.run(
        [str(part) for part in command], cwd=root, env=environment, check=False
    ).returncode


def check_source_rules(root: pathlib.Path, sources: Sources) -> int:
    """Applies the rules that no other tool knows; returns 1 if one is broken."""
    num_violations = 0
    for name in sources.all:
        if pathlib.PurePosixPath(name).suffix not in source_rules.SOURCE_SUFFIXES:
            continue
        for message in source_rules.violations(name, (root / name).read_text()):
            print(message)
            num_violations += 1
    return 1 if num_violations else 0


def steps(
    root: pathlib.Path, tools: Tools, sources: Sources, fix: bool
) -> dict[str, Callable[[], int]]:
    """Returns the checks in their order; each returns an exit code."""
    buildifier_mode = ["-mode=fix", "-lint=fix"] if fix else ["-mode=check", "-lint=warn"]
    clang_format_mode = ["-i"] if fix else ["--dry-run", "--Werror", "--ferror-limit=1"]
    result: dict[str, Callable[[], int]] = {
        "ruff format": lambda: run(root, tools.ruff, "format", *([] if fix else ["--diff"])),
        "ruff check": lambda: run(
            root, tools.ruff, "check", "--output-format=concise", *(["--fix"] if fix else [])
        ),
        "buildifier": lambda: run(root, tools.buildifier, *buildifier_mode, *sources.bazel),
        "source rules": lambda: check_source_rules(root, sources),
        "mypy": lambda: run(root, sys.executable, "-m", "mypy", *sources.python),
    }
    if sources.cc:
        result["clang-format"] = lambda: run(
            root, tools.clang_format, *clang_format_mode, *sources.cc
        )
    return result


def parse_arguments() -> tuple[Tools, bool]:
    """Returns the tools' paths and whether to correct files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buildifier", type=pathlib.Path, required=True)
    parser.add_argument("--clang-format", type=pathlib.Path, required=True)
    parser.add_argument("--ruff", type=pathlib.Path, required=True)
    parser.add_argument("--fix", action="store_true", help="correct what can be corrected")
    arguments = parser.parse_args()
    tools = Tools(
        buildifier=arguments.buildifier.absolute(),
        clang_format=arguments.clang_format.absolute(),
        ruff=arguments.ruff.absolute(),
    )
    return tools, arguments.fix


def main() -> int:
    """Runs every check, whatever the others found; returns 1 if one failed."""
    tools, fix = parse_arguments()
    if "BUILD_WORKSPACE_DIRECTORY" not in os.environ:
        sys.exit("lint: run it as './bazelw run //tools/lint', which says where the sources are")
    root = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    sources = find_sources(root)
    failed = []
    for name, step in steps(root, tools, sources, fix).items():
        start_secs = time.monotonic()
        code = step()
        result = {0: "ok", SKIPPED: "skipped"}.get(code, "FAILED")
        print(f"lint: {name}: {result} ({time.monotonic() - start_secs:.1f} s)", flush=True)
        if result == "FAILED":
            failed.append(name)
    if failed:
        hint = "" if fix else "; './bazelw run //tools/lint -- --fix' corrects what a tool can"
        print(f"lint: {len(failed)} failed: {', '.join(failed)}{hint}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
