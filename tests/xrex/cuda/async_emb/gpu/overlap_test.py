"""That an exchange runs beside what the program does next, and costs nothing more than itself.

On one GPU both share the multiprocessors, and a large exchange fills them: what it does beside a
dense part takes its time all the same. So the tests of one GPU ask whether the program goes on
while the exchange runs; those of several whether it waits for a rank that is late.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.gpu.devices import (
    MANY,
    ON_GPUS,
    SEVERAL_GPUS,
    Hold,
    gpu_mesh,
    is_open,
    median_secs,
)
from tests.xrex.cuda.async_emb.gpu.steps import Steps, are_rows, random_ids
from tests.xrex.cuda.async_emb.numerics_cases import make_case
from tests.xrex.cuda.async_emb.testing import put, ready_context
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle, AsyncEmbOptions
from xrex.cuda.async_emb.reference import TableState

# An exchange of milliseconds.
NUM_ROWS, NUM_SLOTS, TOKENS, SHARD_WIDTH = 200_000, 100_000, 2_000_000, 256
DENSE_ROWS, NUM_PRODUCTS = 4096, 12


def context(num_ranks: int) -> Any:
    return ready_context(
        gpu_mesh(num_ranks),
        name="overlap",
        tokens_per_batch=num_ranks * TOKENS,
        emb_width=num_ranks * SHARD_WIDTH,
        num_unique=NUM_SLOTS,
        options=AsyncEmbOptions(deterministic=True),
    )


def large_update(ctx: AsyncEmbContextHandle) -> tuple[TableState, tuple[Any, Any, Any]]:
    """A state made on the devices, and an update of it."""

    def normal(shape: tuple[int, int], spec: P) -> jax.Array:
        make = jax.jit(
            lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16),
            out_shardings=jax.NamedSharding(ctx.mesh, spec),
        )
        return make()

    rng = np.random.default_rng(0)
    segments = rng.integers(0, NUM_SLOTS, ctx.tokens_per_batch).astype(np.int32)
    rows = rng.permutation(NUM_ROWS)[:NUM_SLOTS].astype(np.int32)
    state: Any = TableState(
        normal((NUM_ROWS, ctx.emb_width), ctx.table_spec),
        put(ctx, np.ones(NUM_ROWS, np.float32), P()),
        put(ctx, np.zeros(NUM_ROWS, np.int32), P()),
    )
    update = (
        normal((ctx.tokens_per_batch, ctx.emb_width), ctx.tokens_spec),
        put(ctx, segments, ctx.tokens_spec),
        put(ctx, rows, P()),
    )
    return state, update


@ON_GPUS
def test_program_goes_on_while_the_exchange_runs(num_ranks: int) -> None:
    with context(num_ranks) as ctx:
        steps = Steps(ctx)
        state, update = large_update(ctx)
        copy = jax.jit(lambda xs: [x.copy() for x in xs])
        small = put(ctx, np.ones(8, np.float32), P())
        goes_on = jax.jit(jnp.sin)
        gate = steps.open_gate()
        shares = []
        for _ in range(9):
            inputs = copy(update)
            jax.block_until_ready((state, inputs, gate, goes_on(small)))
            began = time.perf_counter()
            in_flight = steps.start_update(state, *inputs, gate)
            jax.block_until_ready(goes_on(small))
            went_on = time.perf_counter()
            finished = jax.block_until_ready(steps.finish_update(in_flight))
            ended = time.perf_counter()
            shares.append((went_on - began) / (ended - began))
            state = finished.state
        async_emb.check(ctx)
    share = statistics.median(shares[1:])  # the first one compiles
    print(f"the program went on after {share:.0%} of the exchange")
    assert share < 0.7, shares


@ON_GPUS
def test_time_that_nothing_hides_of_an_exchange_is_counted(num_ranks: int) -> None:
    with context(num_ranks) as ctx:
        steps = Steps(ctx)
        state, update = large_update(ctx)
        copy = jax.jit(lambda xs: [x.copy() for x in xs])
        gate = steps.open_gate()
        hidden = copy(update)
        # Drained before the done call comes: nothing is left to wait for.
        in_flight = jax.block_until_ready(steps.start_update(state, *hidden, gate))
        async_emb.drain(ctx)
        state = jax.block_until_ready(steps.finish_update(in_flight)).state
        after_hidden = async_emb.stats(ctx)
        began = time.perf_counter()
        in_flight = steps.start_update(state, *update, gate)
        jax.block_until_ready(steps.finish_update(in_flight))
        spent = time.perf_counter() - began
        after_exposed = async_emb.stats(ctx)
        async_emb.check(ctx)
    print(f"{after_exposed[0].update_wait_secs * 1e3:.2f} ms exposed of {spent * 1e3:.2f} ms")
    assert [rank.wait_secs for rank in after_hidden.values()] == [0.0] * num_ranks
    for rank in after_exposed.values():
        assert rank.lookup_wait_secs == 0.0
        assert 0.0 < rank.update_wait_secs < spent


class Times(NamedTuple):
    """Median seconds of the exchange alone, the dense part alone, and both in one program."""

    exchange: float
    dense: float
    together: float


def lookup_program(ctx: AsyncEmbContextHandle, num_products: int) -> Any:
    """(ids, table, x) -> (table, y), with products of x beside the lookup."""

    def per_rank(ids: Any, table: Any, x: Any) -> Any:
        table, pin = async_emb.lookup_start(ids, table, x, ctx)
        y = async_emb.order_after(x, pin, platform=ctx.platform)
        for _ in range(num_products):
            y = y @ x
        embeddings = async_emb.lookup_done(pin, ctx, table, y)
        return async_emb.order_after(table, embeddings, platform=ctx.platform), y

    mapped = jax.shard_map(
        per_rank,
        mesh=ctx.mesh,
        in_specs=(ctx.tokens_spec, ctx.table_spec, P()),
        out_specs=(ctx.table_spec, P()),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=1)


@ON_GPUS
def test_exchange_beside_a_dense_part_takes_no_longer_than_one_after_the_other(
    num_ranks: int,
) -> None:
    with context(num_ranks) as ctx:
        state, _ = large_update(ctx)
        table = state.table
        ids = np.random.default_rng(1).integers(0, NUM_ROWS, ctx.tokens_per_batch, np.int32)
        ids = put(ctx, ids, ctx.tokens_spec)
        x = put(ctx, np.eye(DENSE_ROWS, dtype=jnp.bfloat16), P())

        def secs_of(num_products: int) -> float:
            program = lookup_program(ctx, num_products)

            def run() -> Any:
                nonlocal table
                table, y = program(ids, table, x)
                return table, y

            return median_secs(run, 9)

        def products(x: Any) -> Any:
            y = x
            for _ in range(NUM_PRODUCTS):
                y = y @ x
            return y

        dense = jax.jit(products)
        times = Times(secs_of(0), median_secs(lambda: dense(x), 9), secs_of(NUM_PRODUCTS))
        async_emb.check(ctx)
    print(times)
    assert times.together < 1.15 * (times.exchange + times.dense), times


@pytest.mark.multi_gpu
@SEVERAL_GPUS[1]
def test_rank_that_is_late_holds_up_the_done_of_the_others_and_nothing_before() -> None:
    mesh = gpu_mesh(MANY)
    last = Hold(Mesh(mesh.devices[-1:], ("x",)))
    num_rows = 1000
    with ready_context(
        mesh, name="late rank", tokens_per_batch=256 * MANY, emb_width=64 * MANY, num_unique=128
    ) as ctx:
        steps = Steps(ctx)
        rng = np.random.default_rng(1)
        case = make_case(rng, ctx.tokens_per_batch, num_rows, ctx.emb_width, ctx.num_unique)
        per_rank = jax.jit(lambda x: x @ x)
        sharding = jax.NamedSharding(mesh, P("x"))
        x = jax.device_put(np.ones((MANY, 64, 64), np.float32), sharding)
        table, ids = steps.put_state(case.state).table, random_ids(ctx, num_rows, 2)
        for held_up in (False, True):  # the first round compiles
            jax.block_until_ready((table, per_rank(x)))
            gate = last.start(1.0) if held_up else None
            table, pin = steps.start_lookup(steps.put_ids(ids), table, steps.open_gate())
            dense = per_rank(x)
            embeddings, table = steps.finish_lookup(table, pin)
            if gate is not None:
                first_dense = dense.addressable_shards[0].data
                first_rows = embeddings.addressable_shards[0].data
                jax.block_until_ready(first_dense)
                assert not is_open(gate), "the dense part waited for the late rank"
                assert not first_rows.is_ready(), "the rows came before the late rank"
        assert are_rows(embeddings, ids, case.state.table)
