"""The lookup and the order helper on global arrays.

Each function is one `jax.shard_map` over the context's mesh and is legal inside `jax.jit`, on Auto
and Explicit meshes. N = R * T tokens; V rows; W columns. Tokens are sharded over the data axes, the
columns of the table over the table axes: `ctx.tokens_spec`, `ctx.table_spec`.

Differentiate a loss with respect to the embeddings that `lookup_done` returns; that gradient is
what the optimizers take. Gates and pins carry order only: no gradient flows through them.
"""

from __future__ import annotations

from typing import Any

import jax

from xrex.cuda.async_emb import async_emb, operands
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle
from xrex.utils import mesh_specs


def lookup_start(
    token_ids: Any,
    table: jax.Array,
    gate: Any,
    ctx: AsyncEmbContextHandle,
    *,
    gate_specs: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Starts the lookup of a batch and returns at once.

    Args:
        token_ids: N integers of any integer dtype and any shape; dimension 0 is sharded over the
            data axes. Ids wider than int32 are clamped to its range (NumPy arrays that are passed
            to `jax.jit` itself are cut to 32 bits by JAX before this function sees them).
        table: bfloat16 [V, W]. Donate it to the program, or it is copied.
        gate: pytree of arrays; the lookup starts after all are available.
        ctx: the context's handle.
        gate_specs: how `gate` lies on the mesh; see `mesh_specs.gate_arrays_and_specs`.

    Returns:
        `table`, which only `lookup_done` may read next, and `pin`, float32 [R].

    Raises:
        TypeError: an operand has the wrong dtype.
        ValueError: an operand has the wrong shape, or an array of `gate` needs a spec.
        ImportError: the native module is not built.
    """
    gate, gate_specs = mesh_specs.gate_arrays_and_specs(gate, gate_specs, ctx)
    token_ids = operands.clamp_ids("lookup_start", token_ids)

    def per_rank(token_ids: jax.Array, table: jax.Array, gate: Any) -> tuple[jax.Array, jax.Array]:
        gate = mesh_specs.single_gate(gate, ctx)
        return async_emb.lookup_start(token_ids, table, gate, ctx)

    return jax.shard_map(
        per_rank,
        mesh=ctx.mesh,
        in_specs=(ctx.tokens_spec, ctx.table_spec, gate_specs),
        out_specs=(ctx.table_spec, ctx.tokens_spec),
    )(mesh_specs.placed(token_ids, ctx.tokens_spec, ctx), table, gate)


def lookup_done(
    table: jax.Array,
    pin: jax.Array,
    ctx: AsyncEmbContextHandle,
    *,
    gate: Any = (),
    gate_specs: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Waits for the lookup that was started last.

    Args:
        table: bfloat16 [V, W], as `lookup_start` returned it.
        pin: float32 [R], as `lookup_start` returned it.
        ctx: the context's handle.
        gate: pytree of arrays; waiting begins after all are available.
        gate_specs: how `gate` lies on the mesh; see `mesh_specs.gate_arrays_and_specs`.

    Returns:
        Embeddings, bfloat16 [N, W], bit for bit `table[ids]`; and `table`, tied to the end of the
        lookup. The embeddings are NaN if the context failed (`check` then raises why).

    Raises:
        ValueError: an operand has the wrong shape, or an array of `gate` needs a spec.
        ImportError: the native module is not built.
    """
    gate, gate_specs = mesh_specs.gate_arrays_and_specs(gate, gate_specs, ctx)

    def per_rank(table: jax.Array, pin: jax.Array, gate: Any) -> tuple[jax.Array, jax.Array]:
        embeddings = async_emb.lookup_done(pin, ctx, table, *jax.tree.leaves(gate))
        return embeddings, async_emb.order_after(table, embeddings, platform=ctx.platform)

    return jax.shard_map(
        per_rank,
        mesh=ctx.mesh,
        in_specs=(ctx.table_spec, ctx.tokens_spec, gate_specs),
        out_specs=(ctx.tokens_spec, ctx.table_spec),
    )(table, pin, gate)


def order_after(
    x: Any, pins: Any, ctx: AsyncEmbContextHandle, *, x_specs: Any, pin_specs: Any = None
) -> Any:
    """Returns `x` unchanged, but available only once all `pins` are; see `async_emb.order_after`.

    The gradient of `x` passes through; none flows into `pins`.

    Args:
        x: pytree of arrays.
        pins: pytree of arrays.
        ctx: the context's handle.
        x_specs: pytree prefix of PartitionSpecs, how `x` lies on the mesh.
        pin_specs: how `pins` lie on the mesh; see `mesh_specs.gate_arrays_and_specs`.

    Raises:
        TypeError: a leaf is not an array that native code can take.
        ValueError: an array of `pins` needs a spec.
        ImportError: the mesh is of CPU devices and the native module is not built.
    """
    pins, pin_specs = mesh_specs.gate_arrays_and_specs(pins, pin_specs, ctx)

    def per_rank(x: Any, pins: Any) -> Any:
        return async_emb.order_after(x, pins, platform=ctx.platform)

    return jax.shard_map(per_rank, mesh=ctx.mesh, in_specs=(x_specs, pin_specs), out_specs=x_specs)(
        x, pins
    )
