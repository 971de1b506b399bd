"""One table and the calls that exchange its rows, native and in plain JAX, for benchmarks.

As in a training step, the arrays of an update are donated. A program may do several calls, one
after the other, so that what is measured is not how JAX starts a program. N tokens in the global
batch, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xrex.cuda.async_emb import async_emb, plain_jax

# A lookup and an update.
_PerRank = tuple[Callable, Callable]

_PARAMETERS = {"learning_rate": 0.01, "eps": 1e-8, "decay_factor": 1.0}


class Exchange:
    """One table with its state, and jitted calls of one form that run on it in place."""

    def __init__(self, lookup: Callable, update: Callable, table: Any, row_state: Any) -> None:
        self._lookup = lookup
        self._update = update
        self._table = table
        self._row_state = row_state
        self._gradients: Any = None

    def set_gradients(self, grads: Any, segment_ids: Any, unique_tokens: Any) -> None:
        """Takes what the next updates apply: grads bf16 [N, W] and their segments."""
        self._gradients = grads, segment_ids, unique_tokens

    def lookup(self, batches: Sequence[Any]) -> Any:
        """Looks up as many batches as its program has calls, ids int32 [N]: embeddings bf16 [N, W].

        No two batches may be equal, or XLA looks them up once.
        """
        embeddings, self._table = self._lookup(tuple(batches), self._table)
        return embeddings

    def update(self) -> Any:
        """Updates the table with the gradients: the norm, float32 []."""
        *gradients, self._table, self._row_state, norm = self._update(
            *self._gradients, self._table, self._row_state
        )
        self._gradients = gradients
        return norm


def _native(ctx: Any) -> _PerRank:
    def lookup(ids: Any, table: Any) -> Any:
        table, pin = async_emb.lookup_start(ids, table, ids, ctx)
        embeddings = async_emb.lookup_done(pin, ctx, table)
        return embeddings, async_emb.order_after(table, embeddings, platform=ctx.platform)

    def update(grads: Any, segments: Any, unique: Any, table: Any, row_state: Any) -> Any:
        started = async_emb.rowwise_adagrad_update_start(
            grads, segments, unique, table, row_state, jnp.int32(1), grads, ctx, **_PARAMETERS
        )
        norm, _, pin = async_emb.rowwise_adagrad_update_done(started[0], ctx, *started)
        return *async_emb.order_after(started, pin, platform=ctx.platform), norm

    return lookup, update


def _plain(ctx: Any) -> _PerRank:
    def lookup(ids: Any, table: Any) -> Any:
        return plain_jax.lookup(ids, table, ctx), table

    def update(grads: Any, segments: Any, unique: Any, table: Any, row_state: Any) -> Any:
        table, row_state, norm, _ = plain_jax.rowwise_adagrad_update(
            grads, segments, unique, table, row_state, jnp.int32(1), ctx, **_PARAMETERS
        )
        return grads, segments, unique, table, row_state, norm

    return lookup, update


def _repeated(lookup: Callable, update: Callable, num_calls: int) -> _PerRank:
    """Returns programs of several calls; an update needs what the one before it returned."""

    def lookups(batches: Sequence[Any], table: Any) -> Any:
        embeddings = []
        for ids in batches:
            found, table = lookup(ids, table)
            embeddings.append(found)
        return tuple(embeddings), table

    def updates(*operands: Any) -> Any:
        *results, norm = update(*operands)
        for _ in range(num_calls - 1):
            *results, norm = update(*lax.optimization_barrier(tuple(results)))
        return *results, norm

    return lookups, updates


def _jit(ctx: Any, lookups: Callable, updates: Callable) -> _PerRank:
    tokens, table = ctx.tokens_spec, ctx.table_spec
    on_mesh = {"mesh": ctx.mesh, "check_vma": False}
    mapped_lookup = jax.shard_map(
        lookups, in_specs=(tokens, table), out_specs=(tokens, table), **on_mesh
    )
    mapped_update = jax.shard_map(
        updates,
        in_specs=(tokens, tokens, P(), table, P()),
        out_specs=(tokens, tokens, P(), table, P(), P()),
        **on_mesh,
    )
    return (
        jax.jit(mapped_lookup, donate_argnums=1),
        jax.jit(mapped_update, donate_argnums=(0, 1, 2, 3, 4)),
    )


_FORMS: Mapping[str, Callable[[Any], _PerRank]] = {"native": _native, "plain_jax": _plain}


def make_exchanges(ctx: Any, vocab_rows: int, num_calls: int = 1) -> dict[str, Exchange]:
    """Makes both forms, each on a table of its own: bf16 [V, W] of normal values, made in place.

    Args:
        ctx: the context's handle.
        vocab_rows: V.
        num_calls: updates in the program of an update. One of lookups has as many as it gets.
    """

    def make_table() -> jax.Array:
        return jax.random.normal(jax.random.key(0), (vocab_rows, ctx.emb_width), jnp.bfloat16)

    def make_row_state() -> jax.Array:
        return jnp.full(vocab_rows, 0.1, jnp.float32)

    on_columns, everywhere = NamedSharding(ctx.mesh, ctx.table_spec), NamedSharding(ctx.mesh, P())
    return {
        name: Exchange(
            *_jit(ctx, *_repeated(*form(ctx), num_calls)),
            jax.jit(make_table, out_shardings=on_columns)(),
            jax.jit(make_row_state, out_shardings=everywhere)(),
        )
        for name, form in _FORMS.items()
    }


def random_gradients(ctx: Any, num_tokens: int) -> jax.Array:
    """Draws the gradients of a batch, bf16 [N, W], in place."""

    def draw() -> jax.Array:
        return jax.random.normal(jax.random.key(1), (num_tokens, ctx.emb_width), jnp.bfloat16)

    return jax.jit(draw, out_shardings=NamedSharding(ctx.mesh, ctx.tokens_spec))()
