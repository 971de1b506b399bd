"""Rules for this project's sources that no other tool knows."""

import pathlib
import re
from collections.abc import Iterable

# Longer files hold more than one thing and are to be split.
MAX_LINES = {".cc": 400, ".cu": 500, ".cuh": 500, ".h": 400, ".hpp": 400, ".py": 500}

# The core is one for all backends: only these files of it may know CUDA or NCCL.
CORE_FOLDER = pathlib.PurePosixPath("phoenix/xrex/cuda/async_emb/src")
BACKEND_FILE = re.compile(r"^(cuda_|nccl_|async_emb_kernel\.).*|.*\.cuh?$")
BACKEND_WORDS = re.compile(r"\b(cuda_runtime|nccl\.h|__CUDACC__)")

UNFINISHED_WORDS = re.compile(r"\b(TODO|FIXME|XXX)\b")
SOURCE_SUFFIXES = frozenset([".bzl", ".cc", ".cu", ".cuh", ".h", ".hpp", ".py", ".sh"])
# This file and its test have to name the words they look for.
OWN_FOLDER = pathlib.PurePosixPath("tools/lint")


def _matching_lines(path: str, text: str, words: re.Pattern[str], rule: str) -> Iterable[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if match := words.search(line):
            yield f"{path}:{number}: '{match.group(0)}': {rule}"


def violations(path: str, text: str) -> list[str]:
    """Returns one message for each rule that a file breaks.

    Args:
        path: the file's path from the root of the workspace, with slashes.
        text: its contents.
    """
    pure_path = pathlib.PurePosixPath(path)
    found: list[str] = []
    num_lines = text.count("\n")
    max_lines = MAX_LINES.get(pure_path.suffix)
    if max_lines is not None and num_lines > max_lines:
        found.append(
            f"{path}: {num_lines} lines, but a {pure_path.suffix} file has {max_lines} at most:"
            " split it by what its parts do"
        )
    if pure_path.parent == CORE_FOLDER and not BACKEND_FILE.match(pure_path.name):
        rule = (
            "in the core, CUDA and NCCL are known to cuda_*, nccl_*, async_emb_kernel.* and .cu"
            " files alone"
        )
        found.extend(_matching_lines(path, text, BACKEND_WORDS, rule))
    if pure_path.suffix in SOURCE_SUFFIXES and pure_path.parent != OWN_FOLDER:
        rule = "finish it, or describe the limit in words"
        found.extend(_matching_lines(path, text, UNFINISHED_WORDS, rule))
    return found
