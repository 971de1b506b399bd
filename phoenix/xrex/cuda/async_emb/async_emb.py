"""Public API of async_emb: embedding lookup and sparse update beside the dense computation.

A context is described by a handle (`make_context_handle`), brought up once by all processes
(`initialize`) and then used by programs through pairs of calls: a `*_start`, which returns at once,
and a `*_done`, which waits. The calls take and return the arrays of one rank and are legal only
inside `jax.shard_map` over the handle's mesh; `xrex.utils.recsys_async_emb_lookup` and
`xrex.optimizers.recsys` wrap them for global arrays.

Shapes: T tokens on each of R ranks; a table of V rows and W columns, of which each rank holds
w = W / R; U slots for the distinct ids of a batch.

The calls are checked when a program is traced: a wrong dtype is a TypeError, a wrong shape, axis or
parameter a ValueError. The native module is loaded by the first call that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xrex.cuda.async_emb import native, operands
from xrex.cuda.async_emb.handle import AsyncEmbContextHandle, make_context_handle
from xrex.cuda.async_emb.lifecycle import (
    RankStats,
    abort,
    check,
    destroy,
    drain,
    initialize,
    initialized,
    reset_table_binding,
    stats,
    wait_step_ready,
)
from xrex.cuda.async_emb.operands import require_single_process_cpu
from xrex.cuda.async_emb.options import AsyncEmbOptions
from xrex.cuda.async_emb.ordering import order_after
from xrex.cuda.async_emb.segments import make_segments
from xrex.cuda.async_emb.varying import align_varying, mark_varying

__all__ = [
    "AsyncEmbContextHandle",
    "AsyncEmbOptions",
    "RankStats",
    "abort",
    "check",
    "destroy",
    "drain",
    "initialize",
    "initialized",
    "lookup_done",
    "lookup_start",
    "make_context_handle",
    "make_segments",
    "order_after",
    "require_single_process_cpu",
    "reset_table_binding",
    "rowwise_adagrad_lazy_update_start",
    "rowwise_adagrad_update_done",
    "rowwise_adagrad_update_start",
    "stats",
    "wait_step_ready",
]


def lookup_start(
    token_ids: Any, table: Any, gate: Any, ctx: AsyncEmbContextHandle
) -> tuple[jax.Array, jax.Array]:
    """Starts the lookup of this rank's tokens and returns at once.

    Ids count as in `table[ids]`: a negative id counts from the end once; what is still outside
    [0, V) is counted in `stats` and treated as the option `out_of_range` says.

    Args:
        token_ids: T integers of any integer dtype and any shape. Ids wider than int32 are clamped
            to its range, where they stay out of range. Varies over the data axes.
        table: bfloat16 [V, w], this rank's columns. Donate it to the program, or it is copied.
        gate: any array; the lookup starts after it is available.
        ctx: the context's handle.

    Returns:
        `table`, aliasing the input, and `pin`, float32 [1], to be given to `lookup_done`.

    Raises:
        TypeError: an operand has the wrong dtype.
        ValueError: an operand has the wrong shape, or the call is outside shard_map over the mesh.
        ImportError: the native module is not built.
    """
    call = "lookup_start"
    _require_callable(call, ctx)
    table = _table(call, table, ctx)
    table, pin = _ffi(
        call,
        ctx,
        [
            operands.token_ids(call, token_ids, ctx),
            table,
            operands.rank(ctx),
            operands.gate(call, gate),
        ],
        [_like(table), jax.ShapeDtypeStruct((1,), jnp.float32)],
        aliases={1: 0},
    )
    return mark_varying(table, ctx.table_axis), mark_varying(pin, ctx.data_axis)


def lookup_done(pin: Any, ctx: AsyncEmbContextHandle, *keep: Any) -> jax.Array:
    """Waits for the lookup that was started last and returns its rows.

    Args:
        pin: the pin of `lookup_start`, or any array that depends on it.
        ctx: the context's handle.
        *keep: arrays whose memory must not be reused before now, and results that must be ready
            before waiting; unused otherwise. The table that `lookup_start` returned belongs here.

    Returns:
        Embeddings, bfloat16 [T, W], bit for bit `table[ids]`; NaN if the context failed (`check`
        then raises why).

    Raises:
        TypeError: an operand is not an array.
        ValueError: the call is outside shard_map over the mesh.
        ImportError: the native module is not built.
    """
    call = "lookup_done"
    _require_callable(call, ctx)
    (embeddings,) = _ffi(
        call,
        ctx,
        [operands.gate(call, x) for x in (pin, *keep)],
        [jax.ShapeDtypeStruct((ctx.tokens_per_rank, ctx.emb_width), jnp.bfloat16)],
    )
    return mark_varying(embeddings, ctx.data_axis)


def rowwise_adagrad_update_start(
    grads: Any,
    segment_ids: Any,
    unique_tokens: Any,
    table: Any,
    row_state: Any,
    pending: Any,
    gate: Any,
    ctx: AsyncEmbContextHandle,
    *,
    learning_rate: Any,
    eps: float,
    decay_factor: float,
    weight_decay_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Starts a rowwise Adagrad update of the rows of a batch and returns at once.

    For each slot u with row k = unique_tokens[u], G the bfloat16 sum of the gradients of its
    tokens and S the sum of G's squares over all W columns:

        a           = row_state[k] * decay_factor + S / W
        table[k, :] = table[k, :] * f - learning_rate / (sqrt(a) + eps) * G
        row_state[k] = a

    where f is weight_decay_factor if S > 0 and 1 otherwise. Nothing changes if `pending` is 0 or
    the norm of all G or the learning rate is not finite.

    Args:
        grads: bfloat16 [T, W], gradients of this rank's tokens. Varies over the data axes.
        segment_ids: int32 [T], each an index into `unique_tokens`, or -1 for a token to leave out.
            Varies over the data axes.
        unique_tokens: int32 [U], distinct rows of the global batch, the same on all ranks; unused
            slots hold an id >= V.
        table: bfloat16 [V, w], this rank's columns.
        row_state: float32 [V], the accumulator, the same on all ranks.
        pending: bool or int32 []; 0 keeps the protocol and updates nothing. The same on all ranks.
        gate: any array; the update starts after it is available.
        ctx: the context's handle.
        learning_rate: a finite float, or a float32 scalar array (a new value never retraces).
        eps: added to the root; eps and 1/eps are finite and positive in float32.
        decay_factor: factor of the accumulator, in [0, 1].
        weight_decay_factor: factor of the rows, in (0, 1].

    Returns:
        grads, segment_ids, unique_tokens, table and row_state, each aliasing its input. Only
        `rowwise_adagrad_update_done` may read them before it is done: give it all as `keep`.

    Raises:
        TypeError: an operand has the wrong dtype or a parameter the wrong type.
        ValueError: an operand has the wrong shape, a parameter is out of range, or the call is
            outside shard_map over the mesh.
        ImportError: the native module is not built.
    """
    call = "rowwise_adagrad_update_start"
    parameters = {
        "eps": operands.eps(call, eps),
        "decay_factor": operands.fraction(call, "decay_factor", decay_factor, zero_allowed=True),
        "weight_decay_factor": operands.fraction(
            call, "weight_decay_factor", weight_decay_factor, zero_allowed=False
        ),
    }
    _require_callable(call, ctx)
    aliased = _update_operands(
        call, ctx, grads, segment_ids, unique_tokens, table, row_state=row_state
    )
    rest = [
        operands.pending(call, pending),
        operands.learning_rate(call, learning_rate),
        operands.rank(ctx),
        operands.gate(call, gate),
    ]
    outputs = _ffi(
        call,
        ctx,
        aliased + rest,
        [_like(x) for x in aliased],
        aliases={i: i for i in range(len(aliased))},
        **parameters,
    )
    grads, segment_ids, unique_tokens, table, row_state = _mark_update_outputs(ctx, outputs)
    return grads, segment_ids, unique_tokens, table, row_state


def rowwise_adagrad_lazy_update_start(
    grads: Any,
    segment_ids: Any,
    unique_tokens: Any,
    table: Any,
    row_state: Any,
    last_step: Any,
    step: Any,
    pending: Any,
    gate: Any,
    ctx: AsyncEmbContextHandle,
    *,
    learning_rate: Any,
    eps: float,
    accum_decay_rate: float,
    weight_decay_rate: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Starts a rowwise Adagrad update whose decays catch up for the steps a row was not listed.

    As `rowwise_adagrad_update_start`, with delta = max(0, step - last_step[k]), the accumulator's
    factor exp(-accum_decay_rate * delta) and the rows' factor exp(-weight_decay_rate * delta), the
    latter only where S > 0. Then last_step[k] = step for every listed row, also where S = 0: the
    weight decay of those steps is dropped.

    Args:
        grads: as for `rowwise_adagrad_update_start`.
        segment_ids: likewise.
        unique_tokens: likewise.
        table: likewise.
        row_state: likewise.
        last_step: int32 [V], the step of each row's last update, the same on all ranks.
        step: int or int32 [], number of this step, the same on all ranks.
        pending: as for `rowwise_adagrad_update_start`.
        gate: likewise.
        ctx: likewise.
        learning_rate: likewise.
        eps: likewise.
        accum_decay_rate: decay of the accumulator per step, finite and >= 0.
        weight_decay_rate: decay of the rows per step, finite and >= 0.

    Returns:
        grads, segment_ids, unique_tokens, table, row_state and last_step, each aliasing its input;
        all belong into `keep` of `rowwise_adagrad_update_done`.

    Raises:
        TypeError: as for `rowwise_adagrad_update_start`.
        ValueError: likewise.
        ImportError: likewise.
    """
    call = "rowwise_adagrad_lazy_update_start"
    parameters = {
        "eps": operands.eps(call, eps),
        "accum_decay_rate": operands.rate(call, "accum_decay_rate", accum_decay_rate),
        "weight_decay_rate": operands.rate(call, "weight_decay_rate", weight_decay_rate),
    }
    _require_callable(call, ctx)
    aliased = _update_operands(
        call,
        ctx,
        grads,
        segment_ids,
        unique_tokens,
        table,
        row_state=row_state,
        last_step=last_step,
    )
    rest = [
        operands.step(call, step),
        operands.pending(call, pending),
        operands.learning_rate(call, learning_rate),
        operands.rank(ctx),
        operands.gate(call, gate),
    ]
    outputs = _ffi(
        call,
        ctx,
        aliased + rest,
        [_like(x) for x in aliased],
        aliases={i: i for i in range(len(aliased))},
        **parameters,
    )
    marked = _mark_update_outputs(ctx, outputs)
    grads, segment_ids, unique_tokens, table, row_state, last_step = marked
    return grads, segment_ids, unique_tokens, table, row_state, last_step


def rowwise_adagrad_update_done(
    gate: Any, ctx: AsyncEmbContextHandle, *keep: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Waits for the update that was started last, of either form.

    Args:
        gate: any array; waiting begins after it is available.
        ctx: the context's handle.
        *keep: arrays whose memory must not be reused before now; unused otherwise. All outputs of
            the update start belong here.

    Returns:
        `norm`, float32 [], the norm of all summed gradients, also for a skipped step; `valid`,
        int32 [], whether the update was made; `done_pin`, float32 [1]. The first two are the same
        on all ranks. If the context failed, norm is NaN and valid 0 (`check` then raises why).

    Raises:
        TypeError: an operand is not an array.
        ValueError: the call is outside shard_map over the mesh.
        ImportError: the native module is not built.
    """
    call = "rowwise_adagrad_update_done"
    _require_callable(call, ctx)
    norm, valid, done_pin = _ffi(
        call,
        ctx,
        [operands.gate(call, x) for x in (gate, *keep)],
        [
            jax.ShapeDtypeStruct((), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.float32),
        ],
    )
    return norm, valid, mark_varying(done_pin, ctx.data_axis)


def _require_callable(call: str, ctx: AsyncEmbContextHandle) -> None:
    require_single_process_cpu(ctx)
    operands.require_inside_shard_map(call, ctx)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _array(
    call: str,
    name: str,
    x: Any,
    dtype: Any,
    shape: tuple[int | None, ...],
    shape_text: str,
    axes: Sequence[str],
) -> jax.Array:
    checked = operands.array(call, name, x, dtype, shape, shape_text, axes)
    return operands.refuse_derivative(call, name, checked)


def _table(call: str, table: Any, ctx: AsyncEmbContextHandle) -> jax.Array:
    shape = (None, ctx.shard_width)
    return _array(call, "table", table, jnp.bfloat16, shape, "[V, w]", ctx.table_axis)


def _update_operands(
    call: str,
    ctx: AsyncEmbContextHandle,
    grads: Any,
    segment_ids: Any,
    unique_tokens: Any,
    table: Any,
    **state: Any,
) -> list[jax.Array]:
    num_tokens, width = ctx.tokens_per_rank, ctx.emb_width
    state_dtypes = {"row_state": jnp.float32, "last_step": jnp.int32}
    axes = ctx.data_axis
    table = _table(call, table, ctx)
    num_rows = table.shape[0]
    return [
        _array(call, "grads", grads, jnp.bfloat16, (num_tokens, width), "[T, W]", axes),
        _array(call, "segment_ids", segment_ids, jnp.int32, (num_tokens,), "[T]", axes),
        _array(call, "unique_tokens", unique_tokens, jnp.int32, (ctx.num_unique,), "[U]", ()),
        table,
        *(
            _array(call, name, x, state_dtypes[name], (num_rows,), "[V]", ())
            for name, x in state.items()
        ),
    ]


def _mark_update_outputs(
    ctx: AsyncEmbContextHandle, outputs: Sequence[jax.Array]
) -> list[jax.Array]:
    """Marks what an update start returned; unique_tokens and the state are replicated."""
    grads, segment_ids, unique_tokens, table, *state = outputs
    return [
        mark_varying(grads, ctx.data_axis),
        mark_varying(segment_ids, ctx.data_axis),
        unique_tokens,
        mark_varying(table, ctx.table_axis),
        *state,
    ]


def _ffi(
    call: str,
    ctx: AsyncEmbContextHandle,
    arrays: list[jax.Array],
    results: list[jax.ShapeDtypeStruct],
    aliases: dict[int, int] | None = None,
    **parameters: Any,
) -> Sequence[jax.Array]:
    """Binds one call. The side effect keeps XLA from dropping, merging or hoisting it."""
    native.load(ctx.platform)
    return jax.ffi.ffi_call(
        f"xrex_async_emb_{call}",
        results,
        has_side_effect=True,
        input_output_aliases=aliases,
    )(*align_varying(arrays), **ctx.attrs(), **parameters)
