"""The two ways a training step can exchange embeddings: the native engine, and plain JAX.

Both have the same interface, on global arrays and inside `jax.jit`, so one step serves both:
`lookup_start` and `update_start` begin something that `lookup_done` and `update_done` end. With
plain JAX nothing is in flight: the start computes the result and its pin carries it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from xrex.cuda.async_emb import async_emb, plain_jax
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle, RankStats
from xrex.optimizers.recsys import EmbeddingOptimizer, GradientUpdate, UpdateResult
from xrex.train.plain_update import plain_update
from xrex.utils import recsys_async_emb_lookup as lookups

_logger = logging.getLogger(__name__)


class EmbeddingEngine(Protocol):
    """Lookups and updates in two halves, and the life of what runs them.

    Those up to `order_after` are used while a program is traced, the others on the host.
    """

    ctx: AsyncEmbContextHandle

    def lookup_start(
        self, ids: jax.Array, table: jax.Array, gate: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Starts the lookup of ids int32 [N] after `gate`: the table, and a pin for the end."""
        ...

    def lookup_done(self, table: jax.Array, pin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Ends a lookup: embeddings bf16 [N, W], and the table, now free to be written to."""
        ...

    def update_start(
        self,
        optimizer: EmbeddingOptimizer,
        update: GradientUpdate,
        table: jax.Array,
        state: Any,
        gate: jax.Array,
        *,
        step: jax.Array,
        learning_rate: jax.Array,
    ) -> Any:
        """Starts an update after `gate`: what `update_done` needs, with a `pin` for the order."""
        ...

    def update_done(
        self, optimizer: EmbeddingOptimizer, in_flight: Any, gate: jax.Array
    ) -> UpdateResult:
        """Ends an update, after `gate`."""
        ...

    def measure(
        self,
        optimizer: EmbeddingOptimizer,
        update: GradientUpdate,
        table: jax.Array,
        state: Any,
        *,
        step: jax.Array,
    ) -> tuple[jax.Array, GradientUpdate, jax.Array, Any]:
        """The norm float32 [] that an update would report; and all arguments, changed in nothing.

        What comes back of an update is to be used in place of what went in. Waits for its end.
        """
        ...

    def order_after(
        self, x: jax.Array, pin: jax.Array, x_spec: PartitionSpec, pin_spec: PartitionSpec
    ) -> jax.Array:
        """Returns `x`, available only after `pin`."""
        ...

    def open(self) -> None:
        """Makes the engine ready; collective, and nothing happens if it is ready already."""
        ...

    def settle(self) -> None:
        """Waits until nothing is in flight, and forgets where the table lies."""
        ...

    def check(self) -> None:
        """Raises the RuntimeError that the engine failed with, if it did."""
        ...

    def counters(self) -> Mapping[int, RankStats]:
        """Counters of the local ranks, by rank."""
        ...

    def abort(self) -> None:
        """Ends every exchange; whoever waits for one wakes up. Safe from any thread."""
        ...

    def close(self) -> None:
        """Ends what `open` began. Afterwards nothing reads or writes a table."""
        ...


class NativeEngine:
    """The native calls: what is started runs beside the program, on a stream of its own."""

    def __init__(self, ctx: AsyncEmbContextHandle) -> None:
        self.ctx = ctx

    def lookup_start(
        self, ids: jax.Array, table: jax.Array, gate: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """See `EmbeddingEngine`. The pin is float32 [R]."""
        return lookups.lookup_start(ids, table, gate, self.ctx)

    def lookup_done(self, table: jax.Array, pin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `EmbeddingEngine`."""
        return lookups.lookup_done(table, pin, self.ctx)

    def update_start(
        self,
        optimizer: EmbeddingOptimizer,
        update: GradientUpdate,
        table: jax.Array,
        state: Any,
        gate: jax.Array,
        *,
        step: jax.Array,
        learning_rate: jax.Array,
    ) -> Any:
        """See `EmbeddingEngine`."""
        return optimizer.update_start(
            update, table, state, gate, self.ctx, step=step, learning_rate=learning_rate
        )

    def update_done(
        self, optimizer: EmbeddingOptimizer, in_flight: Any, gate: jax.Array
    ) -> UpdateResult:
        """See `EmbeddingEngine`."""
        return optimizer.update_done(in_flight, gate, self.ctx)

    def measure(
        self,
        optimizer: EmbeddingOptimizer,
        update: GradientUpdate,
        table: jax.Array,
        state: Any,
        *,
        step: jax.Array,
    ) -> tuple[jax.Array, GradientUpdate, jax.Array, Any]:
        """See `EmbeddingEngine`."""
        nothing = update._replace(pending=jnp.int32(0))
        in_flight = optimizer.update_start(
            nothing, table, state, step, self.ctx, step=step, learning_rate=0.0
        )
        result = optimizer.update_done(in_flight, step, self.ctx)
        tokens, replicated = self.ctx.tokens_spec, PartitionSpec()
        used = lookups.order_after(
            in_flight.update,
            result.pin,
            self.ctx,
            x_specs=GradientUpdate(tokens, tokens, replicated, replicated),  # type: ignore[arg-type]
            pin_specs=tokens,
        )
        return result.norm, used, result.table, result.state

    def order_after(
        self, x: jax.Array, pin: jax.Array, x_spec: PartitionSpec, pin_spec: PartitionSpec
    ) -> jax.Array:
        """See `EmbeddingEngine`."""
        return lookups.order_after(x, pin, self.ctx, x_specs=x_spec, pin_specs=pin_spec)

    def open(self) -> None:
        """See `EmbeddingEngine`."""
        async_emb.initialize(self.ctx)

    def settle(self) -> None:
        """See `EmbeddingEngine`."""
        async_emb.drain(self.ctx)
        async_emb.reset_table_binding(self.ctx)

    def check(self) -> None:
        """See `EmbeddingEngine`."""
        async_emb.check(self.ctx)

    def counters(self) -> Mapping[int, RankStats]:
        """See `EmbeddingEngine`."""
        return async_emb.stats(self.ctx)

    def abort(self) -> None:
        """See `EmbeddingEngine`."""
        async_emb.abort(self.ctx)

    def close(self) -> None:
        """See `EmbeddingEngine`."""
        async_emb.destroy(self.ctx)


class _PlainInFlight(NamedTuple):
    result: UpdateResult
    pin: jax.Array


class PlainEngine:
    """Ordinary JAX operations and collectives; the same schedule, nothing hidden behind compute."""

    def __init__(self, ctx: AsyncEmbContextHandle) -> None:
        self.ctx = ctx

    def lookup_start(
        self, ids: jax.Array, table: jax.Array, gate: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """See `EmbeddingEngine`. The pin is the embeddings themselves."""
        del gate  # the data itself keeps the order
        embeddings = jax.shard_map(
            lambda ids, table: plain_jax.lookup(ids, table, self.ctx),
            mesh=self.ctx.mesh,
            in_specs=(self.ctx.tokens_spec, self.ctx.table_spec),
            out_specs=self.ctx.tokens_spec,
        )(ids, table)
        return table, embeddings

    def lookup_done(self, table: jax.Array, pin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `EmbeddingEngine`."""
        return pin, table

    def update_start(
        self,
        optimizer: EmbeddingOptimizer,
        update: GradientUpdate,
        table: jax.Array,
        state: Any,
        gate: jax.Array,
        *,
        step: jax.Array,
        learning_rate: jax.Array,
    ) -> _PlainInFlight:
        """See `EmbeddingEngine`."""
        del gate
        result = plain_update(
            optimizer, update, table, state, self.ctx, step=step, learning_rate=learning_rate
        )
        return _PlainInFlight(result, result.norm)

    def update_done(
        self, optimizer: EmbeddingOptimizer, in_flight: _PlainInFlight, gate: jax.Array
    ) -> UpdateResult:
        """See `EmbeddingEngine`."""
        del optimizer, gate
        return in_flight.result

    def measure(
        self,
        optimizer: EmbeddingOptimizer,
        update: GradientUpdate,
        table: jax.Array,
        state: Any,
        *,
        step: jax.Array,
    ) -> tuple[jax.Array, GradientUpdate, jax.Array, Any]:
        """See `EmbeddingEngine`."""
        result = plain_update(
            optimizer,
            update._replace(pending=jnp.int32(0)),
            table,
            state,
            self.ctx,
            step=step,
            learning_rate=jnp.float32(0),
        )
        return result.norm, update, result.table, result.state

    def order_after(
        self, x: jax.Array, pin: jax.Array, x_spec: PartitionSpec, pin_spec: PartitionSpec
    ) -> jax.Array:
        """See `EmbeddingEngine`. XLA may still not fuse across it."""
        del pin, x_spec, pin_spec
        return jax.lax.optimization_barrier(x)

    def open(self) -> None:
        """See `EmbeddingEngine`. There is nothing to open."""

    def settle(self) -> None:
        """See `EmbeddingEngine`. Nothing is ever in flight."""

    def check(self) -> None:
        """See `EmbeddingEngine`. Plain JAX reports its own failures."""

    def counters(self) -> Mapping[int, RankStats]:
        """See `EmbeddingEngine`. Nothing is counted."""
        return {}

    def abort(self) -> None:
        """See `EmbeddingEngine`. Nothing is ever in flight."""

    def close(self) -> None:
        """See `EmbeddingEngine`. There is nothing to close."""


def look_up(
    engine: EmbeddingEngine, ids: jax.Array, table: jax.Array, gate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A whole lookup of ids int32 [N] after `gate`: embeddings bf16 [N, W], and the table."""
    table, pin = engine.lookup_start(ids, table, gate)
    return engine.lookup_done(table, pin)


EngineFactory = Callable[[AsyncEmbContextHandle], EmbeddingEngine]


def select_engine(ctx: AsyncEmbContextHandle) -> EmbeddingEngine:
    """The native engine, or plain JAX where the native one cannot reach all devices."""
    try:
        async_emb.require_single_process_cpu(ctx)
    except ValueError as limit:
        _logger.warning("training on the plain JAX path, with the same schedule: %s", limit)
        return PlainEngine(ctx)
    return NativeEngine(ctx)
