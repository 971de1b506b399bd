"""The core's files include only what stands below them.

Bazel cannot say so inside one package, and compilers find the headers of whatever a dependency
depends on. So the includes themselves are read.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE_DIR = Path(__file__).absolute().parents[5] / "phoenix/xrex/cuda/async_emb/src"
OWN_INCLUDE = re.compile(r'#include "phoenix/xrex/cuda/async_emb/src/([^"]+)"')
OTHER_INCLUDE = re.compile(r'#include [<"]((?:xla|nanobind|cuda|nccl|cub)[^>"]*)[>"]')

# By the beginning of the file's name; the longest one that fits counts.
ROLE_OF_PREFIX = {
    "types": "base",
    "errors": "base",
    "clock": "base",
    "bfloat16": "base",
    "float_mode": "base",
    "log": "base",
    "str_cat": "base",
    "pipeline_spec": "sizes",
    "arena_layout": "sizes",
    "adagrad_params": "sizes",
    "id_groups": "ids",
    "shared_rows": "ids",
    "device": "interface",
    "communicator": "interface",
    "backend": "interface",
    "host_": "host",
    "async_emb_kernel_host": "host",
    "cuda_": "cuda",
    "nccl_": "cuda",
    "async_emb_kernel": "cuda",
    "platform_backends": "platforms",
    "pipeline_state": "core",
    "watchdog": "core",
    "async_emb_comm": "core",
    "comm_utils": "core",
    "async_emb_ffi": "ffi",
    "async_emb_api": "api",
}
BELOW = {
    "base": {"base"},
    "sizes": {"base", "sizes"},
    "ids": {"base", "ids"},
    "interface": {"base", "sizes", "interface"},
    "host": {"base", "sizes", "interface", "host"},
    "cuda": {"base", "sizes", "interface", "cuda"},
    "platforms": {"base", "interface", "host", "cuda", "platforms"},
    "core": {"base", "sizes", "interface", "core"},
    "ffi": {"base", "sizes", "interface", "core", "ffi"},
    # The module makes the backends known; it sees no more of them than that there are some.
    "api": {"base", "ids", "core", "ffi", "platforms", "api"},
}
OTHERS_OF_ROLE = {"ffi": ("xla",), "api": ("nanobind",), "cuda": ("cuda", "nccl", "cub")}
# Files of the CUDA backend that a build without CUDA compiles too.
WITHOUT_LIBRARIES = ("nccl_environment",)

SUFFIXES = {".cc", ".cu", ".cuh", ".hpp"}
FILES = sorted(path.name for path in SOURCE_DIR.iterdir() if path.suffix in SUFFIXES)


def role(name: str) -> str:
    prefixes = [prefix for prefix in ROLE_OF_PREFIX if name.startswith(prefix)]
    assert prefixes, f"{name} has no layer: give its role a line in ROLE_OF_PREFIX"
    return ROLE_OF_PREFIX[max(prefixes, key=len)]


def text(name: str) -> str:
    return (SOURCE_DIR / name).read_text(encoding="utf-8")


def test_the_sources_are_found():
    assert {"types.hpp", "async_emb_comm.cc", "async_emb_kernel.cu"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_includes_only_layers_below(name):
    included = OWN_INCLUDE.findall(text(name))
    wrong = [header for header in included if role(header) not in BELOW[role(name)]]
    assert not wrong


@pytest.mark.parametrize("name", FILES)
def test_libraries_are_seen_by_their_layer_alone(name):
    allowed = () if name.startswith(WITHOUT_LIBRARIES) else OTHERS_OF_ROLE.get(role(name), ())
    found = OTHER_INCLUDE.findall(text(name))
    wrong = [header for header in found if not header.startswith(allowed)]
    assert not wrong


@pytest.mark.parametrize("name", [name for name in FILES if role(name) not in ("host", "cuda")])
def test_the_core_compiles_no_platform_in_or_out(name):
    assert not re.search(r"#\s*if.*(CUDA|NCCL|__NVCC__)", text(name))
