"""The GPUs of this process, what they hold, and how to keep one busy."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.testing import make_mesh
from xrex.cuda.async_emb import async_emb


def devices_of(platform: str) -> list[jax.Device]:
    """The devices of a platform; none where JAX has not got it."""
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


NUM_GPUS = len(devices_of("gpu"))
# As many ranks as there are GPUs, but a power of two.
MANY = max(2, 1 << max(NUM_GPUS, 1).bit_length() - 1)

ONE_GPU = (pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU"))
SEVERAL_GPUS = (
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_GPUS < MANY, reason=f"needs {MANY} GPUs"),
)
ON_GPUS = pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=ONE_GPU, id="one"), pytest.param(MANY, marks=SEVERAL_GPUS, id="all")],
)


def on_one_gpu(test: Any) -> Any:
    """Marks a test that takes one GPU, whatever it does with it."""
    for mark in ONE_GPU:
        test = mark(test)
    return test


def beside_a_host_of(num_ranks: int) -> None:
    """Skips a test where JAX has fewer CPU devices to compare with."""
    found = len(devices_of("cpu"))
    if found < num_ranks:
        pytest.skip(f"needs {num_ranks} CPU devices to compare with, and has {found}")


def gpu_mesh(num_ranks: int) -> Mesh:
    """A mesh of one axis "x" over the first GPUs."""
    return make_mesh(num_ranks=num_ranks, platform="gpu")


# --- Keeping a device busy ----------------------------------------------------------------------

_HOLD_ROWS = 8192
# XLA lets 32 launches wait for a device, no more.
_LAUNCH_SECS, _MAX_LAUNCHES = 0.2, 24


def is_open(gate: Any) -> bool:
    """Whether a hold is over."""
    return bool(gate.is_ready())


class Hold:
    """Keeps every device of a mesh busy for about as long as it is told.

    What is enqueued behind it on the caller's stream waits. The host does not: it launches a few
    programs of long matrix products.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._identity = jax.jit(
            lambda: jnp.eye(_HOLD_ROWS, dtype=jnp.float32),
            out_shardings=jax.NamedSharding(mesh, P()),
        )()
        probe = products_program(mesh, 4)
        secs_of_product = median_secs(lambda: probe(self._identity, self._identity), 3) / 4
        self._program = products_program(mesh, math.ceil(_LAUNCH_SECS / secs_of_product))
        self._secs_of_launch = median_secs(lambda: self._program(*[self._identity] * 2), 3)

    def start(self, secs: float) -> jax.Array:
        """Holds the devices up from now on; a gate, float32 [R], that opens at the end."""
        num_launches = math.ceil(secs / self._secs_of_launch)
        if num_launches > _MAX_LAUNCHES:
            raise ValueError(
                f"{secs} s take {num_launches} launches of {self._secs_of_launch} s each; at most "
                f"{_MAX_LAUNCHES} may wait"
            )
        y = self._identity
        for _ in range(num_launches):
            y, gate = self._program(y, self._identity)
        return gate


@functools.cache
def hold_of(num_ranks: int) -> Hold:
    """The hold of the first GPUs; there is one for all tests of a process."""
    return Hold(gpu_mesh(num_ranks))


def products_program(mesh: Mesh, num_products: int) -> Any:
    """(y, x) -> y times x again and again, and one element of it from each rank."""

    def per_rank(y: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(num_products):
            y = jnp.matmul(y, x, precision=jax.lax.Precision.HIGHEST)
        return y, y[0, :1]

    out_specs = (P(), P("x"))
    mapped = jax.shard_map(per_rank, mesh=mesh, in_specs=P(), out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)


def median_secs(run: Callable[[], Any], repetitions: int) -> float:
    """Median time of a run until its results are there, after a first one that is not counted."""
    jax.block_until_ready(run())
    spent = []
    for _ in range(repetitions):
        began = time.perf_counter()
        jax.block_until_ready(run())
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


# --- What a device and the process hold ---------------------------------------------------------


def free_bytes(device: jax.Device) -> int:
    """Bytes of a GPU that nobody has allocated, whoever asked for them.

    XLA takes its memory in advance, so what others allocate is seen.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    handle, context, previous = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _require(cuda.cuInit(0))
    _require(cuda.cuDeviceGet(ctypes.byref(handle), device.local_hardware_id))
    _require(cuda.cuCtxGetCurrent(ctypes.byref(previous)))
    _require(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    try:
        _require(cuda.cuCtxSetCurrent(context))
        _require(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    finally:
        _require(cuda.cuCtxSetCurrent(previous))
        _require(cuda.cuDevicePrimaryCtxRelease_v2(handle))
    return free.value


def _require(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"a call of the CUDA driver failed with status {status}")


def num_threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def num_open_files() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


# --- Waiting for what nobody announces ----------------------------------------------------------


def wait_until_armed(ctx: Any, *, lookups: int = 0, updates: int = 0) -> None:
    """Returns once every rank's program has come to its start, though the device has not."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ranks = async_emb.stats(ctx).values()
        if all(
            rank.lookup_steps_armed >= lookups and rank.update_steps_armed >= updates
            for rank in ranks
        ):
            return
        time.sleep(0.001)
    raise TimeoutError(f"{lookups} lookups and {updates} updates were not armed")
