"""The four calls of a pipeline as programs on global arrays, and what they must compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.testing import BFLOAT16, bits, put, random_table
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle
from xrex.cuda.async_emb.reference import Bf16Array, EagerDecay, TableState, exact_update
from xrex.optimizers.recsys import GradientUpdate, RowwiseAdagrad, UpdateInFlight, UpdateResult
from xrex.optimizers.recsys.rowwise_adagrad import RowwiseAdagradState
from xrex.utils import recsys_async_emb_lookup

VOCAB_ROWS = 23
LEARNING_RATE = 0.1
INITIAL_ACCUMULATOR = 0.5
OPTIMIZER = RowwiseAdagrad(
    initial_accumulator=INITIAL_ACCUMULATOR, eps=1e-6, decay_factor=0.9, weight_decay_factor=0.99
)
REPLICATED: Any = P()

# How long something that must happen is waited for.
PATIENCE_SECS = 60


class Pieces:
    """The calls on one context, each a jitted program that is given its arrays for good.

    Attributes:
        ctx: the context's handle.
        lookup_start: (ids, table) -> (table, pin).
        lookup_done: (table, pin) -> (embeddings, table).
        update_start: (update, table, state) -> UpdateInFlight.
        update_done: (in_flight) -> UpdateResult.
    """

    def __init__(self, ctx: AsyncEmbContextHandle) -> None:
        self.ctx = ctx
        self.lookup_start = jax.jit(self.start_lookup, donate_argnums=1)
        self.lookup_done = jax.jit(self.finish_lookup, donate_argnums=0)
        self.update_start = jax.jit(self.start_update, donate_argnums=(0, 1, 2))
        self.update_done = jax.jit(self.finish_update, donate_argnums=0)

    # The same without jit, to be combined in a program.

    def start_lookup(self, ids: Any, table: Any, gate: Any = np.float32(0)) -> Any:  # noqa: B008
        return recsys_async_emb_lookup.lookup_start(ids, table, gate, self.ctx)

    def finish_lookup(self, table: Any, pin: Any, gate: Any = ()) -> Any:
        return recsys_async_emb_lookup.lookup_done(table, pin, self.ctx, gate=gate)

    def start_update(
        self,
        update: GradientUpdate,
        table: Any,
        state: Any,
        gate: Any = np.float32(0),  # noqa: B008
    ) -> UpdateInFlight:
        return OPTIMIZER.update_start(
            update, table, state, gate, self.ctx, step=0, learning_rate=LEARNING_RATE
        )

    def finish_update(
        self,
        in_flight: UpdateInFlight,
        gate: Any = np.float32(0),  # noqa: B008
    ) -> UpdateResult:
        return OPTIMIZER.update_done(in_flight, gate, self.ctx)

    # Arrays on the mesh, in memory of their own.

    def ids(self, seed: int = 0) -> jax.Array:
        return put(self.ctx, random_ids(self.ctx, seed), self.ctx.tokens_spec)

    def table(self, seed: int = 0) -> jax.Array:
        return put(self.ctx, table_of(self.ctx, seed), self.ctx.table_spec)

    def state(self) -> RowwiseAdagradState:
        return OPTIMIZER.init_state(self.ctx, VOCAB_ROWS)

    def update(self, seed: int = 0) -> GradientUpdate:
        """Random gradients of random ids."""
        slots, segments = async_emb.make_segments(
            random_ids(self.ctx, seed), VOCAB_ROWS, self.ctx.num_unique
        )
        return GradientUpdate(
            put(self.ctx, random_grads(self.ctx, seed), self.ctx.tokens_spec),
            put(self.ctx, segments, self.ctx.tokens_spec),
            put(self.ctx, slots, REPLICATED),
            put(self.ctx, np.bool_(True), REPLICATED),
        )


def random_ids(ctx: AsyncEmbContextHandle, seed: int = 0) -> np.ndarray:
    """Ids [N] of few enough distinct rows."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(VOCAB_ROWS)[: ctx.num_unique]
    return rng.choice(rows, ctx.tokens_per_batch).astype(np.int32)


def random_grads(ctx: AsyncEmbContextHandle, seed: int = 0) -> Bf16Array:
    shape = (ctx.tokens_per_batch, ctx.emb_width)
    return np.random.default_rng(seed).normal(size=shape).astype(BFLOAT16)


def table_of(ctx: AsyncEmbContextHandle, seed: int = 0) -> Bf16Array:
    return random_table(VOCAB_ROWS, ctx.emb_width, seed)


def initial_state(ctx: AsyncEmbContextHandle, seed: int = 0) -> TableState:
    """What `Pieces.table` and `Pieces.state` hold, for the oracle."""
    accumulator = np.full(VOCAB_ROWS, INITIAL_ACCUMULATOR, np.float32)
    return TableState(table_of(ctx, seed), accumulator)


def expected_update(ctx: AsyncEmbContextHandle, state: TableState, seed: int = 0) -> Any:
    """What the update of `Pieces.update(seed)` makes of `state`."""
    slots, segments = async_emb.make_segments(random_ids(ctx, seed), VOCAB_ROWS, ctx.num_unique)
    return exact_update(
        state,
        random_grads(ctx, seed),
        segments,
        slots,
        learning_rate=LEARNING_RATE,
        eps=OPTIMIZER.eps,
        decay=EagerDecay(OPTIMIZER.decay_factor, OPTIMIZER.weight_decay_factor),
    )


def assert_rows(embeddings: Any, table: Bf16Array, ids: np.ndarray) -> None:
    np.testing.assert_array_equal(bits(embeddings), bits(table[ids]))


def assert_state(table: Any, state: RowwiseAdagradState, expected: TableState) -> None:
    """Checks the table, and every rank's copy of the state, bit for bit."""
    np.testing.assert_array_equal(bits(table), bits(expected.table))
    for shard in state.row_state.addressable_shards:
        np.testing.assert_array_equal(bits(shard.data), bits(expected.row_state))


def on_every_rank(call: Callable[[int], None], ctx: AsyncEmbContextHandle, *pins: Any) -> Any:
    """Calls `call(rank)` on the host, from each rank's program, once its pins are available.

    Returns:
        A global array, float32 [R], that is available on a rank once its call has returned.
    """

    def host(rank: np.ndarray, *pins: np.ndarray) -> np.ndarray:
        del pins
        call(int(rank))
        return np.zeros(1, np.float32)

    def per_rank(*pins: Any) -> Any:
        rank = jax.lax.axis_index(ctx.table_axis)
        return jax.pure_callback(host, jax.ShapeDtypeStruct((1,), jnp.float32), rank, *pins)

    specs = tuple(ctx.tokens_spec for _ in pins)
    return jax.shard_map(
        per_rank, mesh=ctx.mesh, in_specs=specs, out_specs=ctx.tokens_spec, check_vma=False
    )(*pins)


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns once something has happened that nobody announces."""
    never = threading.Event()
    for _ in range(PATIENCE_SECS * 1000):
        if condition():
            return
        never.wait(0.001)
    raise TimeoutError("what the test waits for did not happen")
