import pytest

from tools.lint import source_rules

CORE = "phoenix/xrex/cuda/async_emb/src"


def test_short_clean_file_breaks_no_rule() -> None:
    assert source_rules.violations(f"{CORE}/device.hpp", "class Device;\n") == []


@pytest.mark.parametrize(
    ("path", "limit"),
    [("a/b.py", 500), ("a/b.cc", 400), ("a/b.hpp", 400), ("a/b.cu", 500), ("a/b.cuh", 500)],
)
def test_file_at_its_limit_passes_and_one_line_more_does_not(path: str, limit: int) -> None:
    assert source_rules.violations(path, "\n" * limit) == []
    (message,) = source_rules.violations(path, "\n" * (limit + 1))
    assert f"{limit + 1} lines" in message
    assert f"{limit} at most" in message


@pytest.mark.parametrize("word", ["#include <cuda_runtime.h>", "#include <nccl.h>", "__CUDACC__"])
@pytest.mark.parametrize("name", ["async_emb_comm.cc", "async_emb_kernel_host.hpp"])
def test_core_file_that_knows_a_backend_is_named_with_its_line(name: str, word: str) -> None:
    (message,) = source_rules.violations(f"{CORE}/{name}", f"\n{word}\n")
    assert message.startswith(f"{CORE}/{name}:2: ")


@pytest.mark.parametrize(
    "name",
    [
        "async_emb_kernel.hpp",
        "async_emb_kernel_common.cuh",
        "async_emb_kernel_update.cu",
        "cuda_device.cc",
        "nccl_communicator.hpp",
    ],
)
def test_backend_file_may_know_its_backend(name: str) -> None:
    assert source_rules.violations(f"{CORE}/{name}", "#include <cuda_runtime.h>\n") == []


def test_file_outside_the_core_may_know_a_backend() -> None:
    assert source_rules.violations("benchmarks/copy.cc", "#include <nccl.h>\n") == []


def test_unfinished_work_is_named() -> None:
    (message,) = source_rules.violations("phoenix/a.py", "x = 1  # TODO: more\n")
    assert message.startswith("phoenix/a.py:1: 'TODO'")


def test_a_longer_word_is_not_unfinished_work() -> None:
    assert source_rules.violations("phoenix/a.py", "TODOS = 1\n") == []
