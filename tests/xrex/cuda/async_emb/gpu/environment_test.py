"""The environment variables and the NCCL library that the CUDA backend depends on."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.xrex.cuda.async_emb.testing import make_handle
from xrex.cuda.async_emb import async_emb, native
from xrex.cuda.async_emb.handle import AsyncEmbContextHandle

ROOT = Path(__file__).parents[5]
GOOD = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
NAMES = pytest.mark.parametrize(("name", "required"), list(GOOD.items()))


def refusal(environment: dict[str, str], late: frozenset[str] = frozenset()) -> str:
    with pytest.raises(RuntimeError) as caught:
        native.require_gpu_environment(environment, late)
    return str(caught.value)


# --- The rules ----------------------------------------------------------------------------------


def test_required_values_are_accepted() -> None:
    native.require_gpu_environment(GOOD, frozenset())


@NAMES
@pytest.mark.parametrize("value", ["2", "", "true"])
def test_other_value_is_refused_with_name_value_rule_and_way_out(
    name: str, required: str, value: str
) -> None:
    message = refusal(GOOD | {name: value})
    assert message.startswith(f"async_emb: {name} is {value!r}; the rule is {name}={required}")
    assert message.endswith(f"set {name}={required} before Python starts")


@NAMES
def test_value_that_was_taken_away_is_refused(name: str, required: str) -> None:
    message = refusal({key: value for key, value in GOOD.items() if key != name})
    assert message.startswith(f"async_emb: {name} is not set; the rule is {name}={required}")


@NAMES
def test_value_that_was_set_after_the_gpu_backend_was_made_is_refused(
    name: str, required: str
) -> None:
    message = refusal(GOOD, frozenset([name]))
    assert message.startswith(f"async_emb: {name} was not set when JAX made its GPU backend")
    assert f"set {name}={required} before Python starts" in message
    assert "or import async_emb before JAX is first used" in message


def test_single_queue_for_all_streams_is_refused() -> None:
    message = refusal(GOOD | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert message.startswith("async_emb: CUDA_DEVICE_MAX_CONNECTIONS is '1'")
    assert "before Python starts" in message


@pytest.mark.parametrize("value", ["2", "8", "32"])
def test_several_queues_are_accepted(value: str) -> None:
    native.require_gpu_environment(GOOD | {"CUDA_DEVICE_MAX_CONNECTIONS": value}, frozenset())


def test_initialize_on_gpus_checks_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = make_handle(name="environment")

    def load(platform: str | None = None) -> Any:
        raise AssertionError(f"the native module for {platform} was loaded before the check")

    monkeypatch.setattr(AsyncEmbContextHandle, "platform", "CUDA")
    monkeypatch.setattr(native, "load", load)
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
    with pytest.raises(RuntimeError, match="NCCL_RUNTIME_CONNECT is '1'"):
        async_emb.initialize(ctx)


# --- What importing finds -----------------------------------------------------------------------


def run_python(script: str, **env: str) -> str:
    """Runs a script in a new process without NCCL's variables; returns what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    path = os.pathsep.join([str(ROOT / "phoenix"), *sys.path])
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=clean | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip()


# A backend under the name that JAX gives to its GPU backend; its type does not matter.
WITH_GPU_BACKEND = "from jax._src import xla_bridge; xla_bridge._backends['cuda'] = object()\n"
CHECK = (
    "from xrex.cuda.async_emb import native\n"
    "try:\n"
    "    native.require_gpu_environment()\n"
    "    print('accepted')\n"
    "except RuntimeError as error:\n"
    "    print(error)\n"
)


def test_import_before_jax_is_used_is_in_time() -> None:
    assert run_python(CHECK) == "accepted"


def test_import_after_the_cpu_backend_was_made_is_in_time() -> None:
    assert run_python("import jax; jax.devices()\n" + CHECK) == "accepted"


def test_import_after_the_gpu_backend_was_made_is_too_late() -> None:
    found = run_python(WITH_GPU_BACKEND + CHECK)
    assert found.startswith("async_emb: NCCL_RUNTIME_CONNECT was not set when JAX made its GPU")


def test_variables_set_before_python_starts_are_in_time() -> None:
    assert run_python(WITH_GPU_BACKEND + CHECK, **GOOD) == "accepted"


def test_only_the_variable_that_was_unset_is_too_late() -> None:
    found = run_python(WITH_GPU_BACKEND + CHECK, NCCL_RUNTIME_CONNECT="0")
    assert found.startswith("async_emb: NCCL_LAUNCH_ORDER_IMPLICIT was not set")


def test_backends_are_kept_where_the_check_looks_for_them() -> None:
    assert run_python(
        "import jax\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
        "jax.devices()\n"
        "print(sorted(xla_bridge._backends))"
    ) == str(["cpu"])


# --- The NCCL library ---------------------------------------------------------------------------


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The libraries that were loaded, with their modes."""
    libraries: list[tuple[str, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: libraries.append((path, mode)))
    return libraries


@pytest.fixture
def nccl_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package nvidia.nccl; the path of its library."""
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    for package in library.parents[1:3]:
        (package / "__init__.py").touch()  # hides an installed one
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield library
    sys.modules.pop("nvidia", None)


def module_file(tmp_path: Path, *strings: bytes) -> Path:
    file = tmp_path / "module.so"
    file.write_bytes(b"\x7fELF\0" + b"\0".join(strings) + b"\0")
    return file


def test_module_that_needs_nccl_gets_the_one_of_the_package(
    tmp_path: Path, loaded: list[tuple[str, int]], nccl_package: Path
) -> None:
    native._load_nccl_of_xla(module_file(tmp_path, b"libc.so.6", b"libnccl.so.2"))
    assert loaded == [(str(nccl_package), ctypes.RTLD_GLOBAL)]


@pytest.mark.usefixtures("nccl_package")
@pytest.mark.parametrize("strings", [[], [b"libc.so.6"], [b"see libnccl.so.2"]])
def test_module_that_does_not_need_nccl_loads_none(
    tmp_path: Path, loaded: list[tuple[str, int]], strings: list[bytes]
) -> None:
    native._load_nccl_of_xla(module_file(tmp_path, *strings))
    assert loaded == []


def test_without_the_package_the_linker_looks_for_nccl(
    tmp_path: Path, loaded: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_nccl_of_package", lambda: None)
    native._load_nccl_of_xla(module_file(tmp_path, b"libnccl.so.2"))
    assert loaded == []


def test_missing_nccl_is_an_import_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> Any:
        raise ImportError("libnccl.so.2: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(native.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"needs libnccl\.so\.2 .*pip install 'jax\[cuda13\]'"):
        native.load("cpu")


def test_other_import_errors_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("libother.so.1: cannot open shared object file")

    monkeypatch.setattr(native.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"^libother\.so\.1"):
        native.load("cpu")
