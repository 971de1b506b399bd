"""Device memory: what others do with theirs, what contexts take, and that they give it back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.xrex.cuda.async_emb.gpu import devices
from tests.xrex.cuda.async_emb.gpu.devices import ON_GPUS, gpu_mesh
from tests.xrex.cuda.async_emb.gpu.steps import (
    Steps,
    are_rows,
    expected_update,
    on_host,
    random_ids,
)
from tests.xrex.cuda.async_emb.numerics_cases import (
    UpdateCase,
    assert_same_bits,
    assert_same_state,
    make_case,
)
from tests.xrex.cuda.async_emb.testing import EntryGraph, ready_context
from xrex.cuda.async_emb import async_emb

NUM_ROWS, NUM_SLOTS, TOKENS, SHARD_WIDTH = 5000, 2000, 4096, 192
MIB = 2**20


def context(num_ranks: int, name: str = "memory") -> Any:
    return ready_context(
        gpu_mesh(num_ranks),
        name=name,
        tokens_per_batch=num_ranks * TOKENS,
        emb_width=num_ranks * SHARD_WIDTH,
        num_unique=NUM_SLOTS,
    )


def case_of(num_ranks: int, seed: int = 0) -> UpdateCase:
    rng = np.random.default_rng(seed)
    return make_case(rng, num_ranks * TOKENS, NUM_ROWS, num_ranks * SHARD_WIDTH, NUM_SLOTS)


# --- Between a start and its done ---------------------------------------------------------------


def fill_and_free(like: Any) -> None:
    """Makes and drops arrays of the shapes of `like`, full of NaN or 0x7f bytes; waits for none."""

    def poison(x: jax.Array) -> jax.Array:
        value = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0x7F7F7F7F
        return jnp.full_like(x, value)

    for _ in range(8):
        jax.tree.map(poison, like)


@ON_GPUS
def test_steps_are_right_while_memory_is_filled_with_poison_and_freed(num_ranks: int) -> None:
    with context(num_ranks) as ctx:
        steps = Steps(ctx)
        case = case_of(num_ranks)
        state, expected = steps.put_state(case.state), case.state
        for seed in range(10):
            case = case_of(num_ranks, seed)._replace(state=expected)
            ids = random_ids(ctx, NUM_ROWS, seed)
            in_flight = steps.start_update(state, *steps.put_update(case), steps.open_gate())
            fill_and_free(in_flight)
            state = steps.finish_update(in_flight).state
            table, pin = steps.start_lookup(steps.put_ids(ids), state.table, steps.open_gate())
            fill_and_free((table, pin, steps.put_ids(ids)))
            embeddings, table = steps.finish_lookup(table, pin)
            fill_and_free((table, embeddings))
            state = state._replace(table=table)
            expected = expected_update(case).state
            assert are_rows(embeddings, ids, expected.table)
        assert_same_state(on_host(state), expected)
        assert {rank.table_moved for rank in async_emb.stats(ctx).values()} == {0}


# --- The table's memory -------------------------------------------------------------------------


def addresses(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@ON_GPUS
def test_donated_table_stays_where_it_is(num_ranks: int) -> None:
    case = case_of(num_ranks)
    with context(num_ranks) as ctx:
        steps = Steps(ctx)
        state = steps.put_state(case.state)
        before = addresses(state.table)
        for _ in range(5):
            in_flight = steps.start_update(state, *steps.put_update(case), steps.open_gate())
            finished = steps.finish_update(in_flight)
            ids = steps.put_ids(random_ids(ctx, NUM_ROWS, 1))
            table, pin = steps.start_lookup(ids, finished.state.table, steps.open_gate())
            _, table = steps.finish_lookup(table, pin)
            state = finished.state._replace(table=table)
            assert addresses(state.table) == before
        async_emb.check(ctx)
        assert {rank.table_moved for rank in async_emb.stats(ctx).values()} == {0}


@ON_GPUS
def test_compiled_programs_copy_no_table(num_ranks: int) -> None:
    with context(num_ranks) as ctx:
        steps, case = Steps(ctx), case_of(num_ranks)
        state, gate = steps.put_state(case.state), steps.open_gate()
        ids = steps.put_ids(random_ids(ctx, NUM_ROWS, 1))
        programs = [
            steps.start_update.lower(state, *steps.put_update(case), gate),
            steps.start_lookup.lower(ids, state.table, gate),
            steps.finish_lookup.lower(state.table, gate),
        ]
        shard = f"bf16[{NUM_ROWS},{ctx.shard_width}]"
        for program in programs:
            graph = EntryGraph(program.compile().as_text())
            lines = [line for line in graph.lines.values() if line.startswith(shard)]
            assert lines
            assert [line for line in lines if " copy(" in line] == []


# --- What contexts take and give back -----------------------------------------------------------


def run_step(steps: Steps, case: UpdateCase) -> Any:
    """A whole step; returns once it is over."""
    state, ids = steps.put_state(case.state), steps.put_ids(random_ids(steps.ctx, NUM_ROWS, 1))
    in_flight = steps.start_update(state, *steps.put_update(case), steps.open_gate())
    finished = steps.finish_update(in_flight)
    table, pin = steps.start_lookup(ids, finished.state.table, steps.open_gate())
    embeddings, table = steps.finish_lookup(table, pin)
    finished = finished._replace(state=finished.state._replace(table=table))
    return jax.block_until_ready((finished, embeddings))


def free_of_all(num_ranks: int) -> int:
    return sum(devices.free_bytes(device) for device in gpu_mesh(num_ranks).devices.flat)


@ON_GPUS
def test_first_step_after_initialize_allocates_nothing_outside_of_xla(num_ranks: int) -> None:
    case = case_of(num_ranks)
    with context(num_ranks) as ctx:
        steps = Steps(ctx)
        run_step(steps, case)  # compiles the programs, whose code takes memory too
    async_emb.initialize(ctx)
    try:
        before = free_of_all(num_ranks)
        run_step(steps, case)
        assert free_of_all(num_ranks) == before
    finally:
        async_emb.destroy(ctx)


@ON_GPUS
def test_hundred_lives_leak_neither_memory_nor_threads_nor_files(num_ranks: int) -> None:
    case = case_of(num_ranks)
    with context(num_ranks) as ctx:
        steps = Steps(ctx)
        arena_bytes = ctx.tokens_per_batch * ctx.shard_width * 2  # one region of several

    def live() -> None:
        async_emb.initialize(ctx)
        run_step(steps, case)
        async_emb.destroy(ctx)

    def held() -> tuple[int, int, int]:
        return free_of_all(num_ranks), devices.num_threads(), devices.num_open_files()

    for _ in range(10):
        live()
    free, threads, files = held()
    for _ in range(90):
        live()
    free_after, threads_after, files_after = held()
    lost = free - free_after
    assert lost < max(16 * MIB, 10 * arena_bytes), f"{lost / MIB} MiB were lost in 90 lives"
    assert threads_after - threads < 10
    assert files_after - files < 10
    async_emb.initialize(ctx)
    try:
        finished, _ = run_step(steps, case)
        assert_same_bits(finished.state.row_state, expected_update(case).state.row_state)
    finally:
        async_emb.destroy(ctx)


@ON_GPUS
def test_destroy_gives_the_arena_back(num_ranks: int) -> None:
    with context(num_ranks, "warm"):
        pass
    before = free_of_all(num_ranks)
    with context(num_ranks, "arena"):
        during = free_of_all(num_ranks)
    after = free_of_all(num_ranks)
    assert during < before
    assert abs(before - after) < 8 * MIB * num_ranks
