"""How global arrays that only carry order lie on the mesh of a context."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle


def gate_arrays_and_specs(gate: Any, specs: Any, ctx: AsyncEmbContextHandle) -> tuple[Any, Any]:
    """Returns the leaves of `gate` as arrays, and the specs shard_map should take them with.

    Args:
        gate: pytree of global arrays.
        specs: pytree prefix of PartitionSpecs for `gate`, or None: arrays on an Explicit mesh keep
            their own spec, scalars are replicated, others are sharded like pins (dimension 0 over
            the data axes).
        ctx: the context's handle.

    Raises:
        ValueError: `specs` is None and an array cannot be sharded like a pin.
    """
    arrays = jax.tree.map(jnp.asarray, gate)
    if specs is None:
        specs = jax.tree.map(lambda x: _default_spec(x, ctx), arrays)
        arrays = jax.tree.map(lambda x, spec: placed(x, spec, ctx), arrays, specs)
    return arrays, specs


def placed(x: jax.Array, spec: PartitionSpec, ctx: AsyncEmbContextHandle) -> jax.Array:
    """Returns `x`, put on the context's mesh if that is Explicit and `x` is on no mesh yet.

    On an Explicit mesh shard_map wants its arguments where its specs say; constants and arrays from
    the host lie nowhere.
    """
    if _is_explicit(ctx.mesh) and jax.typeof(x).sharding.mesh.empty:
        return jax.device_put(x, NamedSharding(ctx.mesh, spec))
    return x


def single_gate(gate: Any, ctx: AsyncEmbContextHandle) -> jax.Array:
    """Returns one per-rank array that is available once all leaves of `gate` are."""
    leaves = jax.tree.leaves(gate)
    if len(leaves) == 1:
        return leaves[0]
    return async_emb.order_after(jnp.asarray(np.int32(0)), *leaves, platform=ctx.platform)


def _default_spec(x: jax.Array, ctx: AsyncEmbContextHandle) -> PartitionSpec:
    sharding = jax.typeof(x).sharding
    if _is_explicit(sharding.mesh):
        return sharding.spec
    if x.ndim == 0:
        return PartitionSpec()
    if x.shape[0] % ctx.group_size:
        raise ValueError(
            f"async_emb: a gate of shape {list(x.shape)} cannot be sharded like a pin over "
            f"{ctx.group_size} ranks; say how it lies on the mesh: give its PartitionSpec, for "
            "example gate_specs=PartitionSpec() if it is replicated"
        )
    return ctx.tokens_spec


def _is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    return bool(mesh.axis_types) and all(kind == AxisType.Explicit for kind in mesh.axis_types)
