"""Starts and dones as programs of their own, with gates that hold them up."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.numerics_cases import UpdateCase, assert_same_state, make_batch
from tests.xrex.cuda.async_emb.testing import put
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle
from xrex.cuda.async_emb.reference import (
    Bf16Array,
    LazyDecay,
    TableState,
    UpdateResult,
    exact_lookup,
    exact_update,
)

DECAY = LazyDecay(step=9, accum_decay_rate=0.02, weight_decay_rate=0.003)
LEARNING_RATE, EPS = 0.05, 1e-8


class InFlight(NamedTuple):
    """What an update start returned: everything that its done must keep."""

    grads: Any
    segment_ids: Any
    unique_tokens: Any
    table: Any
    row_state: Any
    last_step: Any


class Finished(NamedTuple):
    """What an update done returned; norms float32 [R] and valids int32 [R], of every rank."""

    state: TableState
    norms: Any
    valids: Any


class Steps:
    """The lazy update and the lookup of one context, each half a jitted program.

    Attributes:
        ctx: the context's handle.
        start_update: (TableState, grads, segment_ids, unique_tokens, gate [R]) -> InFlight.
        finish_update: (InFlight) -> Finished.
        start_lookup: (ids, table, gate [R]) -> (table, pin).
        finish_lookup: (table, pin) -> (embeddings, table).
    """

    def __init__(self, ctx: AsyncEmbContextHandle) -> None:
        self.ctx = ctx
        tokens, table, same = ctx.tokens_spec, ctx.table_spec, P()
        state: Any = TableState(table, same, same)
        in_flight: Any = InFlight(tokens, tokens, same, table, same, same)
        self.start_update = self._jit(
            self._start_update, (state, tokens, tokens, same, tokens), in_flight, (0, 1, 2, 3)
        )
        finished: Any = Finished(state, tokens, tokens)
        self.finish_update = self._jit(self._finish_update, (in_flight,), finished, 0)
        self.start_lookup = self._jit(
            self._start_lookup, (tokens, table, tokens), (table, tokens), 1
        )
        self.finish_lookup = self._jit(self._finish_lookup, (table, tokens), (tokens, table), 0)

    def _jit(self, function: Any, in_specs: Any, out_specs: Any, donate: Any) -> Any:
        mapped = jax.shard_map(
            function, mesh=self.ctx.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate)

    def _start_update(
        self, state: Any, grads: Any, segment_ids: Any, unique_tokens: Any, gate: Any
    ) -> InFlight:
        return InFlight(
            *async_emb.rowwise_adagrad_lazy_update_start(
                grads,
                segment_ids,
                unique_tokens,
                state.table,
                state.row_state,
                state.last_step,
                DECAY.step,
                True,
                gate,
                self.ctx,
                learning_rate=LEARNING_RATE,
                eps=EPS,
                accum_decay_rate=DECAY.accum_decay_rate,
                weight_decay_rate=DECAY.weight_decay_rate,
            )
        )

    def _finish_update(self, kept: InFlight) -> Finished:
        norm, valid, pin = async_emb.rowwise_adagrad_update_done(kept.table, self.ctx, *kept)
        state = TableState(kept.table, kept.row_state, kept.last_step)
        state = async_emb.order_after(state, pin, platform=self.ctx.platform)
        return Finished(state, jnp.stack([norm]), jnp.stack([valid]))

    def _start_lookup(self, ids: Any, table: Any, gate: Any) -> Any:
        return async_emb.lookup_start(ids, table, gate, self.ctx)

    def _finish_lookup(self, table: Any, pin: Any) -> Any:
        embeddings = async_emb.lookup_done(pin, self.ctx, table)
        return embeddings, async_emb.order_after(table, embeddings, platform=self.ctx.platform)

    # Arrays on the mesh, in memory of their own.

    def open_gate(self) -> jax.Array:
        return put(self.ctx, np.zeros(self.ctx.group_size, np.float32), self.ctx.tokens_spec)

    def put_state(self, state: TableState) -> TableState:
        specs = (self.ctx.table_spec, P(), P())
        return TableState(*(put(self.ctx, x, spec) for x, spec in zip(state, specs, strict=True)))

    def put_ids(self, ids: np.ndarray) -> jax.Array:
        return put(self.ctx, ids, self.ctx.tokens_spec)

    def put_update(self, case: UpdateCase) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The arguments of `start_update` between the state and the gate."""
        tokens = self.ctx.tokens_spec
        return (
            put(self.ctx, case.grads, tokens),
            put(self.ctx, case.segment_ids, tokens),
            put(self.ctx, case.unique_tokens, P()),
        )


def random_ids(ctx: AsyncEmbContextHandle, num_rows: int, seed: int) -> np.ndarray:
    """Ids [N], some of them negative and some out of range."""
    rng = np.random.default_rng(seed)
    return make_batch(rng, ctx.tokens_per_batch, num_rows, ctx.num_unique).ids


def expected_update(case: UpdateCase, state: TableState | None = None) -> UpdateResult:
    """What an update of `Steps` makes of `state`, by default of the case's own."""
    inputs = case if state is None else case._replace(state=state)
    return exact_update(*inputs, learning_rate=LEARNING_RATE, eps=EPS, decay=DECAY)


def on_host(state: TableState) -> TableState:
    return TableState(*(np.array(x) for x in state))


def same_state(found: TableState, expected: TableState) -> bool:
    try:
        assert_same_state(found, expected)
    except AssertionError:
        return False
    return True


def is_nan(embeddings: Any) -> bool:
    """Whether nothing but NaN was delivered."""
    return bool(np.isnan(np.asarray(embeddings, np.float32)).all())


def are_rows(embeddings: Any, ids: np.ndarray, table: Bf16Array) -> bool:
    """Whether the embeddings are the rows, bit for bit."""
    found = np.asarray(embeddings).view(np.uint16)
    return np.array_equal(found, exact_lookup(ids, table).view(np.uint16))
