"""Contexts, meshes and arrays for the tests of the Python API."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle, AsyncEmbOptions

BFLOAT16 = jnp.bfloat16
AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]


def make_mesh(axis_type: AxisType = AxisType.Auto, num_ranks: int | None = None) -> Mesh:
    """A mesh of one axis "x" over the first `num_ranks` devices, by default over all."""
    devices = jax.devices()[:num_ranks]
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
    placed = jax.device_put(np.asarray(x), NamedSharding(ctx.mesh, spec))
    return jax.jit(lambda x: x.copy())(placed)


def random_table(num_rows: int, width: int, seed: int = 0) -> np.ndarray:
    """A bfloat16 [V, W] table of normal values."""
    return np.random.default_rng(seed).normal(size=(num_rows, width)).astype(BFLOAT16)


def bits(x: Any) -> np.ndarray:
    """The bits of a bfloat16 or float32 array, so that NaN and -0.0 compare as they are."""
    values = np.array(x)
    return values.view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


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
