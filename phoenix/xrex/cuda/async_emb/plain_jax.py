"""Lookup and rowwise Adagrad with ordinary JAX operations, nothing in flight.

The same mathematics as the native calls, on JAX's own collectives: the path for CPU devices of
several processes, and the peer that benchmarks compare with. Lookups are equal bit for bit; updates
lie within the rounding of float32 sums, whose order XLA chooses.

All functions take and return the arrays of one rank and are legal only inside `jax.shard_map` over
the handle's mesh. T tokens on each of R ranks, N = R * T; a table of V rows and W columns, of which
each rank holds w = W / R; U slots for the distinct ids of a batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrex.cuda.async_emb import operands
from xrex.cuda.async_emb.handle import AsyncEmbContextHandle


def lookup(token_ids: Any, table: Any, ctx: AsyncEmbContextHandle) -> jax.Array:
    """Looks this rank's tokens up.

    Args:
        token_ids: T integers of any integer dtype and any shape. Negative ids count from the end
            once; the option `out_of_range` says what ids outside the table read.
        table: bfloat16 [V, w], this rank's columns.
        ctx: the context's handle; the context need not be initialized.

    Returns:
        Embeddings, bfloat16 [T, W], bit for bit `table[ids]`.

    Raises:
        TypeError: an operand has the wrong dtype.
        ValueError: an operand has the wrong shape, or the call is outside shard_map over the mesh.
    """
    call = "plain_jax.lookup"
    operands.require_inside_shard_map(call, ctx)
    ids = _without_unit_axes(operands.token_ids(call, token_ids, ctx), ctx)
    table = _table(call, table, ctx)

    ids = lax.all_gather(ids, ctx.table_axis, tiled=True)
    rows, in_table = _wrap_ids(ids, table.shape[0])
    columns = _bits(_read_rows(table, rows))
    if ctx.options.out_of_range == "zero":
        columns = jnp.where(in_table[:, None], columns, 0)
    slices = _exchange(columns.reshape(ctx.group_size, -1, ctx.shard_width), ctx)
    embeddings = slices.transpose(1, 0, 2).reshape(ctx.tokens_per_rank, ctx.emb_width)
    return lax.bitcast_convert_type(embeddings, jnp.bfloat16)


def rowwise_adagrad_update(
    grads: Any,
    segment_ids: Any,
    unique_tokens: Any,
    table: Any,
    row_state: Any,
    pending: Any,
    ctx: AsyncEmbContextHandle,
    *,
    learning_rate: Any,
    eps: float,
    decay_factor: float,
    weight_decay_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Updates the rows of a batch by rowwise Adagrad.

    The formulas, operands and parameters of `async_emb.rowwise_adagrad_update_start`. Nothing
    changes if `pending` is 0, if norm or learning rate is not finite, if a segment index is neither
    -1 nor a slot, or if two slots name one row of the table (always checked on CPU, elsewhere with
    the option `check_inputs`).

    Args:
        grads: bfloat16 [T, W].
        segment_ids: int32 [T].
        unique_tokens: int32 [U].
        table: bfloat16 [V, w]; updated in place if it is donated and not read afterwards.
        row_state: float32 [V].
        pending: bool or int32 [].
        ctx: the context's handle; the context need not be initialized.
        learning_rate: a finite float, or a float32 scalar array (a new value never retraces).
        eps: added to the root.
        decay_factor: factor of the accumulator, in [0, 1].
        weight_decay_factor: factor of the rows, in (0, 1].

    Returns:
        table, row_state, norm (float32 []) and valid (int32 []).

    Raises:
        TypeError: an operand has the wrong dtype or a parameter the wrong type.
        ValueError: an operand has the wrong shape, a parameter is out of range, or the call is
            outside shard_map over the mesh.
    """
    call = "plain_jax.rowwise_adagrad_update"
    operands.require_inside_shard_map(call, ctx)
    root_offset = operands.eps(call, eps)
    accum_factor = operands.fraction(call, "decay_factor", decay_factor, zero_allowed=True)
    weight_factor = operands.fraction(
        call, "weight_decay_factor", weight_decay_factor, zero_allowed=False
    )
    table = _table(call, table, ctx)
    row_state = _state(call, "row_state", row_state, jnp.float32, table)
    step = _prepare(call, grads, segment_ids, unique_tokens, table, pending, learning_rate, ctx)
    table, row_state = _apply(step, table, row_state, accum_factor, weight_factor, root_offset, ctx)
    return table, row_state, step.norm, step.valid.astype(jnp.int32)


def rowwise_adagrad_lazy_update(
    grads: Any,
    segment_ids: Any,
    unique_tokens: Any,
    table: Any,
    row_state: Any,
    last_step: Any,
    step: Any,
    pending: Any,
    ctx: AsyncEmbContextHandle,
    *,
    learning_rate: Any,
    eps: float,
    accum_decay_rate: float,
    weight_decay_rate: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Updates the rows of a batch by rowwise Adagrad with decays that catch up.

    The formulas, operands and parameters of `async_emb.rowwise_adagrad_lazy_update_start`; else as
    `rowwise_adagrad_update`.

    Args:
        grads: as for `rowwise_adagrad_update`.
        segment_ids: likewise.
        unique_tokens: likewise.
        table: likewise.
        row_state: likewise.
        last_step: int32 [V], the step of each row's last update.
        step: int or int32 [], number of this step.
        pending: as for `rowwise_adagrad_update`.
        ctx: likewise.
        learning_rate: likewise.
        eps: likewise.
        accum_decay_rate: decay of the accumulator per step, finite and >= 0.
        weight_decay_rate: decay of the rows per step, finite and >= 0.

    Returns:
        table, row_state, last_step, norm (float32 []) and valid (int32 []).

    Raises:
        TypeError: as for `rowwise_adagrad_update`.
        ValueError: likewise.
    """
    call = "plain_jax.rowwise_adagrad_lazy_update"
    operands.require_inside_shard_map(call, ctx)
    root_offset = operands.eps(call, eps)
    accum_rate = operands.rate(call, "accum_decay_rate", accum_decay_rate)
    weight_rate = operands.rate(call, "weight_decay_rate", weight_decay_rate)
    table = _table(call, table, ctx)
    row_state = _state(call, "row_state", row_state, jnp.float32, table)
    last_step = _state(call, "last_step", last_step, jnp.int32, table)
    now = operands.step(call, step)
    prepared = _prepare(call, grads, segment_ids, unique_tokens, table, pending, learning_rate, ctx)

    last = _read_rows(last_step, prepared.read_rows)
    # Unsigned, because the signed difference may overflow.
    missed = jnp.where(now > last, now.astype(jnp.uint32) - last.astype(jnp.uint32), 0)
    elapsed = missed.astype(jnp.float32)
    accum_factor, weight_factor = jnp.exp(-accum_rate * elapsed), jnp.exp(-weight_rate * elapsed)
    table, row_state = _apply(
        prepared, table, row_state, accum_factor, weight_factor, root_offset, ctx
    )
    last_step = _set_rows(last_step, prepared.write_rows, now)
    return table, row_state, last_step, prepared.norm, prepared.valid.astype(jnp.int32)


class _PreparedStep(NamedTuple):
    """What both forms of the update start from. All but row_grads is the same on all ranks."""

    row_grads: jax.Array  # float32 [U, w], summed gradients of own columns, rounded to bfloat16
    stats: jax.Array  # float32 [U], their squares summed over all W columns
    norm: jax.Array  # float32 []
    valid: jax.Array  # bool []
    learning_rate: jax.Array  # float32 []
    read_rows: jax.Array  # int32 [U], any row for slots that update none
    write_rows: jax.Array  # uint32 [U], distinct, beyond the table for rows to leave alone


def _prepare(
    call: str,
    grads: Any,
    segment_ids: Any,
    unique_tokens: Any,
    table: jax.Array,
    pending: Any,
    learning_rate: Any,
    ctx: AsyncEmbContextHandle,
) -> _PreparedStep:
    """Sums the gradients of all ranks by slot and decides whether the step is applied."""
    num_tokens, num_slots, width = ctx.tokens_per_rank, ctx.num_unique, ctx.emb_width
    grads = operands.array(
        call, "grads", grads, jnp.bfloat16, (num_tokens, width), "[T, W]", ctx.data_axis
    )
    segment_ids = operands.array(
        call, "segment_ids", segment_ids, jnp.int32, (num_tokens,), "[T]", ctx.data_axis
    )
    unique_tokens = operands.array(
        call, "unique_tokens", unique_tokens, jnp.int32, (num_slots,), "[U]", ()
    )
    is_pending = operands.pending(call, pending) != 0
    rate = operands.learning_rate(call, learning_rate)

    slices = _bits(_without_unit_axes(grads, ctx)).reshape(num_tokens, -1, ctx.shard_width)
    slices = _exchange(slices.transpose(1, 0, 2), ctx)
    columns = lax.bitcast_convert_type(slices.reshape(-1, ctx.shard_width), jnp.bfloat16)
    own_segments = _without_unit_axes(segment_ids, ctx)
    segments = lax.all_gather(own_segments, ctx.table_axis, tiled=True)
    # Tokens outside the slots are dropped.
    sums = jax.ops.segment_sum(columns.astype(jnp.float32), segments, num_slots)
    row_grads = _round_to_bf16(sums)
    own_stats = jnp.sum(row_grads * row_grads, axis=1)
    own_bad = jnp.sum((own_segments < -1) | (own_segments >= num_slots), dtype=jnp.float32)
    shared = lax.psum(jnp.append(own_stats, own_bad), ctx.table_axis)
    stats, num_bad = shared[:-1], shared[-1]
    norm = jnp.sqrt(jnp.sum(stats))
    valid = is_pending & (num_bad == 0) & jnp.isfinite(norm) & jnp.isfinite(rate)

    rows, in_table = _wrap_ids(unique_tokens, table.shape[0])
    if ctx.options.check_inputs or ctx.platform == "cpu":
        valid &= ~_has_duplicates(rows, in_table, table.shape[0])
    beyond = _rows_beyond(table.shape[0], num_slots)
    write_rows = jnp.where(in_table & valid, rows.astype(jnp.uint32), beyond)
    return _PreparedStep(row_grads, stats, norm, valid, rate, rows, write_rows)


def _apply(
    step: _PreparedStep,
    table: jax.Array,
    row_state: jax.Array,
    accum_factor: jax.typing.ArrayLike,
    weight_factor: jax.typing.ArrayLike,
    eps: np.float32,
    ctx: AsyncEmbContextHandle,
) -> tuple[jax.Array, jax.Array]:
    """Returns table and row_state with the rows of a valid step updated."""
    mean_square = step.stats * (np.float32(1) / np.float32(ctx.emb_width))
    accum = _read_rows(row_state, step.read_rows) * accum_factor + mean_square
    scale = -step.learning_rate * (1 / (jnp.sqrt(accum) + eps))
    change = _round_to_bf16(scale[:, None] * step.row_grads)
    factor = jnp.where(step.stats > 0, weight_factor, 1)
    weights = _read_rows(table, step.read_rows).astype(jnp.float32)
    decayed = _round_to_bf16(weights * factor[:, None])
    new_rows = (decayed + change).astype(jnp.bfloat16)
    return _set_rows(table, step.write_rows, new_rows), _set_rows(row_state, step.write_rows, accum)


def _read_rows(array: jax.Array, rows: jax.Array) -> jax.Array:
    return array.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _set_rows(array: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[rows].set(values, mode="drop", unique_indices=True)


def _rows_beyond(num_rows: int, num_slots: int) -> jax.Array:
    """Returns distinct row numbers outside the table, unsigned, as int32 may not have as many."""
    return np.uint32(num_rows) + jnp.arange(num_slots, dtype=jnp.uint32)


def _wrap_ids(ids: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the rows that ids read, the nearest one for ids outside, and which ids lie inside."""
    rows = jnp.where(ids < 0, ids + num_rows, ids)
    nearest = jnp.clip(rows, 0, num_rows - 1)
    return nearest, nearest == rows


def _has_duplicates(rows: jax.Array, in_table: jax.Array, num_rows: int) -> jax.Array:
    """Returns whether two slots name one row: one of them then misses its own mark there."""
    slots = jnp.arange(rows.shape[0], dtype=jnp.int32)
    marked = jnp.where(in_table, rows, num_rows)
    marks = jnp.zeros(num_rows, jnp.int32).at[marked].set(slots, mode="drop")
    return jnp.any(in_table & (_read_rows(marks, rows) != slots))


def _exchange(slices: jax.Array, ctx: AsyncEmbContextHandle) -> jax.Array:
    """Sends slice r of [R, T, w] to rank r; slice r of the result is what rank r sent."""
    return lax.all_to_all(slices, ctx.table_axis, split_axis=0, concat_axis=0, tiled=True)


def _round_to_bf16(values: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16's precision; XLA may skip a conversion there and back."""
    return lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)


def _bits(values: jax.Array) -> jax.Array:
    """Returns bfloat16 as uint16, which XLA's CPU collectives take without conversions."""
    return lax.bitcast_convert_type(values, jnp.uint16)


def _without_unit_axes(values: jax.Array, ctx: AsyncEmbContextHandle) -> jax.Array:
    """Returns values that count as varying over table axes only.

    Data axes beside them have size 1, and yet would make the replicated results count as varying.
    """
    axes = tuple(axis for axis in ctx.data_axis if axis not in ctx.table_axis)
    return lax.psum(values, axes) if axes else values


def _table(call: str, table: Any, ctx: AsyncEmbContextHandle) -> jax.Array:
    shape = (None, ctx.shard_width)
    checked = operands.array(call, "table", table, jnp.bfloat16, shape, "[V, w]", ctx.table_axis)
    return operands.refuse_derivative(call, "table", checked)


def _state(call: str, name: str, state: Any, dtype: Any, table: jax.Array) -> jax.Array:
    return operands.array(call, name, state, dtype, (table.shape[0],), "[V]", ())
