"""The embedding optimizers' update with ordinary JAX operations, on global arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from xrex.cuda.async_emb import plain_jax
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle
from xrex.optimizers.recsys import (
    EmbeddingOptimizer,
    GradientUpdate,
    RowwiseAdagrad,
    RowwiseAdagradLazy,
    UpdateResult,
)


def plain_update(
    optimizer: EmbeddingOptimizer,
    update: GradientUpdate,
    table: jax.Array,
    state: Any,
    ctx: AsyncEmbContextHandle,
    *,
    step: jax.Array,
    learning_rate: jax.Array,
) -> UpdateResult:
    """Applies an update; the formulas of the native calls, within the rounding of float32 sums.

    Args:
      optimizer: which formulas, with which parameters.
      update: gradients of a step.
      table: bfloat16 [V, W].
      state: the optimizer's state.
      ctx: sizes and mesh; the context need not be initialized.
      step: int32 [], number of the step that the gradients come from.
      learning_rate: float32 [].

    Raises:
      TypeError: there is no plain form of this optimizer.
    """
    tokens: Any = ctx.tokens_spec
    replicated: Any = PartitionSpec()
    table, *new_state, norm, valid = jax.shard_map(
        _per_rank(optimizer, ctx),
        mesh=ctx.mesh,
        in_specs=(
            GradientUpdate(tokens, tokens, replicated, replicated),
            ctx.table_spec,
            replicated,
            replicated,
            replicated,
        ),
        out_specs=(ctx.table_spec, *(replicated for _ in state), replicated, replicated),
    )(update, table, state, step, learning_rate)
    return UpdateResult(table, type(state)(*new_state), norm, valid, norm)


def _per_rank(optimizer: EmbeddingOptimizer, ctx: AsyncEmbContextHandle) -> Callable[..., Any]:
    if isinstance(optimizer, RowwiseAdagrad):
        return functools.partial(_eager, optimizer, ctx)
    if isinstance(optimizer, RowwiseAdagradLazy):
        return functools.partial(_lazy, optimizer, ctx)
    raise TypeError(
        f"there is no plain JAX form of {type(optimizer).__name__}; use RowwiseAdagrad or "
        "RowwiseAdagradLazy on this mesh"
    )


def _eager(
    optimizer: RowwiseAdagrad,
    ctx: AsyncEmbContextHandle,
    update: GradientUpdate,
    table: jax.Array,
    state: Any,
    step: jax.Array,
    learning_rate: jax.Array,
) -> tuple[jax.Array, ...]:
    del step
    return plain_jax.rowwise_adagrad_update(
        update.grads,
        update.segment_ids,
        update.unique_tokens,
        table,
        state.row_state,
        update.pending,
        ctx,
        learning_rate=learning_rate,
        eps=optimizer.eps,
        decay_factor=optimizer.decay_factor,
        weight_decay_factor=optimizer.weight_decay_factor,
    )


def _lazy(
    optimizer: RowwiseAdagradLazy,
    ctx: AsyncEmbContextHandle,
    update: GradientUpdate,
    table: jax.Array,
    state: Any,
    step: jax.Array,
    learning_rate: jax.Array,
) -> tuple[jax.Array, ...]:
    return plain_jax.rowwise_adagrad_lazy_update(
        update.grads,
        update.segment_ids,
        update.unique_tokens,
        table,
        state.row_state,
        state.last_step,
        step,
        update.pending,
        ctx,
        learning_rate=learning_rate,
        eps=optimizer.eps,
        accum_decay_rate=optimizer.accum_decay_rate,
        weight_decay_rate=optimizer.weight_decay_rate,
    )
