"""Prints, as JSON, the packages that pip has installed into a folder.

usage: describe_packages.py FOLDER

For each package: its top-level folders and modules, and those of its requirements that
are installed beside it. Files with a name that Bazel would read are deleted, since a
BUILD file inside a wheel would cut the globs of pip_env.bzl short.
"""

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterable
from typing import TypedDict

BAZEL_FILES = frozenset(["BUILD", "BUILD.bazel", "MODULE.bazel", "WORKSPACE", "WORKSPACE.bazel"])
NOT_IMPORTABLE = frozenset(["bin", "share", "__pycache__"])


class Package(TypedDict):
    """What pip_env.bzl makes a py_library of."""

    folders: list[str]
    modules: list[str]
    deps: list[str]


def target_name(name: str) -> str:
    """Returns the Bazel name of a distribution: lower case, joined by underscores."""
    return re.sub(r"[-_.]+", "_", name).lower()


def required_names(requirements: Iterable[str]) -> set[str]:
    """Returns the target names of a distribution's requirements, less those of extras."""
    return {
        target_name(re.split(r"[^A-Za-z0-9._-]", requirement)[0])
        for requirement in requirements
        if not re.search(r";.*\bextra\s*==", requirement)
    }


def delete_bazel_files(folder: str) -> None:
    """Deletes the files below folder that would make Bazel packages of its folders."""
    for parent, _, names in os.walk(folder):
        for name in BAZEL_FILES.intersection(names):
            os.unlink(os.path.join(parent, name))


def describe(site: str) -> dict[str, Package]:
    """Returns the packages installed in the folder site, by target name."""
    found = {target_name(d.name): d for d in importlib.metadata.distributions(path=[site])}
    packages: dict[str, Package] = {}
    for name, distribution in sorted(found.items()):
        tops = {str(file).split("/")[0] for file in distribution.files or []}
        tops -= NOT_IMPORTABLE | {".."}
        deps = required_names(distribution.requires or []) - {name}
        packages[name] = {
            "folders": sorted(t for t in tops if os.path.isdir(os.path.join(site, t))),
            "modules": sorted(t for t in tops if os.path.isfile(os.path.join(site, t))),
            "deps": sorted(deps.intersection(found)),
        }
    return packages


def main() -> None:
    """Cleans and describes the folder named on the command line."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    delete_bazel_files(sys.argv[1])
    print(json.dumps(describe(sys.argv[1])))


if __name__ == "__main__":
    main()
