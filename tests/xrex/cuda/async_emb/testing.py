"""Contexts, meshes and arrays for the tests of the Python API."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xrex.cuda.async_emb import async_emb, native
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle, AsyncEmbOptions

BFLOAT16 = jnp.bfloat16
AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]

# Tests import the native module itself too: it finds its libraries only when loaded this way.
native.load()

# Whether meshes are made of GPUs, unless a test asks for another platform.
ON_GPU = jax.default_backend() == "gpu"
if ON_GPU:
    # Products of float32 are compared with those of a CPU.
    jax.config.update("jax_default_matmul_precision", "highest")


def needs_devices(count: int) -> pytest.MarkDecorator:
    """Skips a test where JAX has fewer devices."""
    return pytest.mark.skipif(jax.device_count() < count, reason=f"needs {count} devices")


def on_cpu_only(reason: str) -> pytest.MarkDecorator:
    """Skips a test where meshes are made of GPUs."""
    return pytest.mark.skipif(ON_GPU, reason=reason)


def make_mesh(
    axis_type: AxisType = AxisType.Auto,
    num_ranks: int | None = None,
    platform: str | None = None,
) -> Mesh:
    """A mesh of one axis "x".

    Args:
        axis_type: of the axis.
        num_ranks: how many devices it has, the first ones; None for all.
        platform: "cpu" or "gpu"; None for JAX's default.
    """
    devices = jax.devices(platform)[:num_ranks]
    return Mesh(np.array(devices), ("x",), axis_types=(axis_type,))


def make_handle(mesh: Mesh | None = None, **changes: Any) -> AsyncEmbContextHandle:
    """A handle with 8 tokens on each rank, 4 columns on each rank and 16 slots."""
    mesh = make_mesh() if mesh is None else mesh
    num_ranks = mesh.devices.size
    arguments = {
        "table_axis": "x",
        "data_axis": "x",
        "tokens_per_batch": 8 * num_ranks,
        "emb_width": 4 * num_ranks,
        "num_unique": 16,
        "num_devices_per_node": num_ranks,
        "options": AsyncEmbOptions(deterministic=True),
    }
    arguments |= changes
    return async_emb.make_context_handle(mesh, arguments.pop("table_axis"), **arguments)


@contextlib.contextmanager
def ready_context(mesh: Mesh | None = None, **changes: Any) -> Iterator[AsyncEmbContextHandle]:
    """A handle whose contexts are up inside the with block."""
    with async_emb.initialized(make_handle(mesh, **changes)) as ctx:
        yield ctx


def put(ctx: AsyncEmbContextHandle, x: Any, spec: PartitionSpec) -> jax.Array:
    """A global array on the mesh that shares no memory with `x`, so that it can be donated."""
    return _copy(jax.device_put(np.asarray(x), NamedSharding(ctx.mesh, spec)))


@jax.jit
def _copy(x: jax.Array) -> jax.Array:
    return x.copy()


def random_table(num_rows: int, width: int, seed: int = 0) -> np.ndarray:
    """A bfloat16 [V, W] table of normal values."""
    return np.random.default_rng(seed).normal(size=(num_rows, width)).astype(BFLOAT16)


def bits(x: Any) -> np.ndarray:
    """The bits of a bfloat16 or float32 array, so that NaN and -0.0 compare as they are."""
    values = np.array(x)
    return values.view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


def assert_same_product(found: Any, expected: Any) -> None:
    """Compares bfloat16 results of matrix products.

    Bit for bit on CPU devices. On GPUs two programs may sum in two orders: a last bit may differ.
    """
    if not ON_GPU:
        np.testing.assert_array_equal(bits(found), bits(expected))
        return
    rounding = 2.0**-7
    np.testing.assert_allclose(
        np.asarray(found, np.float32),
        np.asarray(expected, np.float32),
        rtol=rounding,
        atol=rounding * 1e-3,
    )


class EntryGraph:
    """The data dependencies between the instructions of a compiled program's entry computation.

    Attributes:
        lines: the text of each instruction by name, in scheduled order.
    """

    def __init__(self, hlo_text: str) -> None:
        entry = hlo_text[hlo_text.index("\nENTRY ") :]
        self.lines: dict[str, str] = {}
        for line in entry.splitlines():
            match = re.match(r"\s+(?:ROOT )?(%\S+) = (.*)", line)
            if match:
                self.lines[match[1]] = match[2]

    def calls(self, target: str) -> list[str]:
        """The instructions that call an FFI target."""
        quoted = f'custom_call_target="{target}"'
        return [name for name, line in self.lines.items() if quoted in line]

    def call(self, target: str) -> str:
        """The only instruction that calls an FFI target."""
        (name,) = self.calls(target)
        return name

    def needs(self, name: str) -> set[str]:
        """All instructions whose results `name` needs, directly or not."""
        found: set[str] = set()
        pending = [name]
        while pending:
            operands = re.findall(r"%[\w.\-]+", self.lines.get(pending.pop(), ""))
            new = [x for x in operands if x in self.lines and x not in found]
            found.update(new)
            pending.extend(new)
        return found - {name}
