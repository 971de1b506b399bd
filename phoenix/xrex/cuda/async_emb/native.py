"""The native module: loaded at first need, its FFI handlers registered once with JAX.

Importing this module sets the two NCCL variables that have to be there before NCCL is first used in
the process, unless they are set already.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

import jax

_NCCL_ENVIRONMENT = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
_MODULE = "xrex.cuda.async_emb.async_emb_api"
_PLATFORMS = ("cpu", "CUDA")

for _name, _value in _NCCL_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

_lock = threading.Lock()
_registered_platforms: set[str] = set()


def load(platform: str | None = None) -> Any:
    """Returns the native module; its FFI handlers are registered with JAX when this returns.

    Args:
        platform: "cpu" or "CUDA" when handlers of that platform are needed; None when any build of
            the module will do.

    Raises:
        ImportError: the module was not built, or was built without `platform`.
    """
    try:
        api = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"async_emb: the native module {_MODULE} is not built ({error}); build it with "
            "`./bazelw build //phoenix/xrex/cuda/async_emb:async_emb_api`"
        ) from error
    with _lock:
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


def _register(handlers: dict[str, Any], platform: str) -> None:
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
    if handlers:
        _registered_platforms.add(platform)
