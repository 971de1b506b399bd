"""The native module: loaded at first need, its FFI handlers registered once with JAX.

Importing this module sets the two NCCL variables that have to be there before NCCL is first used in
the process, unless they are set already, and notes whether that came too late.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import mmap
import os
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax

_NCCL_ENVIRONMENT = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_NCCL_LIBRARY = "libnccl.so.2"
_MODULE = "xrex.cuda.async_emb.async_emb_api"
_PLATFORMS = ("cpu", "CUDA")


def _gpu_backend_is_up() -> bool:
    """Returns whether JAX has made a GPU backend in this process; makes none itself.

    JAX has no public way to ask, hence the private module.
    """
    from jax._src import xla_bridge

    return any(name in xla_bridge._backends for name in ("cuda", "gpu"))


def _set_nccl_environment() -> frozenset[str]:
    """Sets the NCCL variables that are unset; returns those for which that came too late."""
    unset = [name for name in _NCCL_ENVIRONMENT if name not in os.environ]
    for name in unset:
        os.environ[name] = _NCCL_ENVIRONMENT[name]
    return frozenset(unset if _gpu_backend_is_up() else ())


_set_too_late = _set_nccl_environment()

_lock = threading.Lock()
_registered_platforms: set[str] = set()


def require_gpu_environment(
    environment: Mapping[str, str] | None = None, set_too_late: Collection[str] | None = None
) -> None:
    """Checks the environment variables that the CUDA backend depends on.

    NCCL reads its variables once, when it is first used, so they cannot be mended later.

    Args:
        environment: the variables; None for those of this process.
        set_too_late: those that were not set when JAX made a GPU backend; None for what importing
            this module found.

    Raises:
        RuntimeError: a variable breaks its rule; the message names it, its value, and the rule.
    """
    variables = os.environ if environment is None else environment
    late = _set_too_late if set_too_late is None else set_too_late
    for name, required in _NCCL_ENVIRONMENT.items():
        way_out = f"set {name}={required} before Python starts"
        value = variables.get(name)
        if value != required:
            found = "is not set" if value is None else f"is {value!r}"
            raise RuntimeError(
                f"async_emb: {name} {found}; the rule is {name}={required} from the start of the "
                f"process, or steps can hang: {way_out}"
            )
        if name in late:
            raise RuntimeError(
                f"async_emb: {name} was not set when JAX made its GPU backend (it is {value!r} "
                f"only since async_emb was imported); the rule is {name}={required} from the start "
                f"of the process, or steps can hang: {way_out}, or import async_emb before JAX is "
                "first used"
            )
    if variables.get(_CONNECTIONS) == "1":
        raise RuntimeError(
            f"async_emb: {_CONNECTIONS} is '1', which puts all streams of a device into one queue; "
            f"the rule is {_CONNECTIONS} >= 2, or steps wait for the work they should run beside: "
            "unset it before Python starts, or set it to 8"
        )


def load(platform: str | None = None) -> Any:
    """Returns the native module; its FFI handlers are registered with JAX when this returns.

    A module that needs NCCL is given the library of the package nvidia-nccl, where that is
    installed, which is the one that XLA uses.

    Args:
        platform: "cpu" or "CUDA" when handlers of that platform are needed; None when any build of
            the module will do.

    Raises:
        ImportError: the module was not built, or was built without `platform`, or a library that
            it needs is not installed.
    """
    with _lock:
        api = _import_module()
        for name in _PLATFORMS:
            if name not in _registered_platforms:
                _register(api.ffi_handlers(name), name)
    if platform is not None and platform not in _registered_platforms:
        raise ImportError(
            f"async_emb: the native module {_MODULE} has no handlers for platform {platform}; "
            "build it with "
            "`./bazelw build --config=cuda //phoenix/xrex/cuda/async_emb:async_emb_api`"
        )
    return api


def _import_module() -> Any:
    try:
        if _MODULE not in sys.modules:
            _load_nccl_of_xla(_module_file())
        return importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"async_emb: the native module {_MODULE} is not built ({error}); build it with "
            "`./bazelw build //phoenix/xrex/cuda/async_emb:async_emb_api`"
        ) from error
    except (ImportError, OSError) as error:
        if _NCCL_LIBRARY not in str(error):
            raise
        raise ImportError(
            f"async_emb: the native module {_MODULE} needs {_NCCL_LIBRARY} ({error}); install the "
            "NCCL that JAX uses with `pip install 'jax[cuda13]'` (package nvidia-nccl-cu13), or "
            "name the library's folder in LD_LIBRARY_PATH before Python starts"
        ) from error


def _module_file() -> Path | None:
    """Returns where the native module lies; None if it is not built."""
    spec = importlib.util.find_spec(_MODULE)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _load_nccl_of_xla(module_file: Path | None) -> None:
    """Loads the NCCL that XLA uses, if the native module needs NCCL, so that both share it.

    XLA finds NCCL in the package nvidia-nccl. A library that is loaded already satisfies all later
    demands for its name, so it must be that one, and not another that the linker would find.
    """
    if module_file is None or not _names(module_file, _NCCL_LIBRARY):
        return
    library = _nccl_of_package()
    if library is not None:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _names(file: Path, library: str) -> bool:
    """Returns whether a shared object has `library` among its strings, as it must to need it."""
    if file.stat().st_size == 0:
        return False
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(b"\0" + library.encode() + b"\0") >= 0


def _nccl_of_package() -> Path | None:
    """Returns the NCCL library of the package nvidia-nccl; None if that is not installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        library = Path(folder, "lib", _NCCL_LIBRARY)
        if library.exists():
            return library
    return None


def _register(handlers: dict[str, Any], platform: str) -> None:
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
    if handlers:
        _registered_platforms.add(platform)
