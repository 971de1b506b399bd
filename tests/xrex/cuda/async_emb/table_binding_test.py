"""A table that XLA copies, or that somebody else reads, between a start and its done."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.xrex.cuda.async_emb.pipeline_pieces import (
    Pieces,
    assert_rows,
    assert_state,
    expected_update,
    initial_state,
    random_ids,
    table_of,
)
from tests.xrex.cuda.async_emb.testing import ON_GPU, bits, on_cpu_only, ready_context
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.reference import TableState
from xrex.optimizers.recsys import UpdateResult
from xrex.utils import recsys_async_emb_lookup


@pytest.fixture
def pieces(request):
    with ready_context(name=request.node.name) as ctx:
        yield Pieces(ctx)


def assert_moved(pieces, step, result):
    """Checks that the table's move was named, and that the update did not take place."""
    assert np.isnan(result.norm)
    assert result.valid == 0
    np.testing.assert_array_equal(bits(result.table), bits(table_of(pieces.ctx)))
    np.testing.assert_array_equal(bits(result.state.row_state), bits(pieces.state().row_state))
    with pytest.raises(RuntimeError) as caught:
        async_emb.check(pieces.ctx)
    message = str(caught.value)
    assert "async_emb communicator aborted: the table moved from 0x" in message
    assert f" before {step} on rank " in message
    assert "XLA put a copy in between" in message
    assert "donate the table, use the table that each call returns" in message


def tables_moved(pieces):
    return [stats.table_moved for stats in async_emb.stats(pieces.ctx).values()]


# --- Moves that would lose updates ------------------------------------------------------------


@on_cpu_only("XLA on a GPU reads the table before the update, and copies nothing")
def test_operation_that_reads_the_table_beside_the_update_is_named(pieces):
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def program(update, table, state, ids):
        table, pin = pieces.start_lookup(ids, table)
        doubled = table + table  # has to see the table before the update: XLA copies it for one
        in_flight = pieces.start_update(update, table, state, pin)
        embeddings, table = pieces.finish_lookup(in_flight.table, pin)
        return pieces.finish_update(in_flight._replace(table=table), embeddings), doubled

    result, _ = program(pieces.update(), pieces.table(), pieces.state(), pieces.ids())
    assert_moved(pieces, "update step 1", result)


def test_lookup_of_a_copy_during_an_update_is_named(pieces):
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def program(update, table, state, ids):
        in_flight = pieces.start_update(update, table, state)
        _, pin = pieces.start_lookup(ids, table, in_flight.pin)  # not the table it returned
        result = pieces.finish_update(in_flight, pin)
        return pieces.finish_lookup(result.table, pin)[0]

    embeddings = program(pieces.update(), pieces.table(), pieces.state(), pieces.ids())
    assert np.isnan(np.array(embeddings, np.float32)).all()
    with pytest.raises(RuntimeError, match=r"the table moved .* before lookup step 1 on rank "):
        async_emb.check(pieces.ctx)


def test_table_that_is_not_donated_between_lookup_and_update_is_named(pieces):
    update_start = jax.jit(pieces.start_update)
    table, pin = pieces.lookup_start(pieces.ids(), pieces.table())
    in_flight = update_start(pieces.update(), table, pieces.state())
    assert_moved(pieces, "update step 1", pieces.update_done(in_flight))
    del pin


@on_cpu_only("an array on a GPU has no views on the host")
def test_view_of_the_table_that_keeps_it_from_being_donated_is_named(pieces):
    table, _ = pieces.lookup_start(pieces.ids(), pieces.table())
    views = [np.asarray(shard.data) for shard in table.addressable_shards]
    in_flight = pieces.update_start(pieces.update(), table, pieces.state())
    assert_moved(pieces, "update step 1", pieces.update_done(in_flight))
    del views


def test_scan_that_gives_its_table_to_two_calls_is_named(pieces):
    update, ids = pieces.update(), pieces.ids()

    def body(carry, _):
        table, state = carry
        tied, pin = pieces.start_lookup(ids, table)
        in_flight = pieces.start_update(update, table, state, pin)  # not the table it returned
        embeddings, _ = pieces.finish_lookup(tied, pin)
        result = pieces.finish_update(in_flight, embeddings)
        return (result.table, result.state), (result.norm, result.valid)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def program(table, state):
        return jax.lax.scan(body, (table, state), length=3)

    (table, state), (norms, valids) = program(pieces.table(), pieces.state())
    assert_moved(pieces, "update step 1", UpdateResult(table, state, norms[0], valids[0], None))


# --- Moves that lose nothing ------------------------------------------------------------------


@pytest.mark.parametrize("read_late", [False, True])
def test_scan_that_carries_a_lookup_in_flight_loses_nothing(pieces, read_late):
    update, ids = pieces.update(), pieces.ids()

    def body(carry, _):
        before, state, pin = carry
        in_flight = pieces.start_update(update, before, state, pin)
        _, table = pieces.finish_lookup(in_flight.table, pin)
        result = pieces.finish_update(in_flight._replace(table=table), pin)
        if read_late:
            before = recsys_async_emb_lookup.order_after(
                before, result.pin, pieces.ctx, x_specs=pieces.ctx.table_spec
            )
        table, pin = pieces.start_lookup(ids, result.table, result.pin)
        return (table, result.state, pin), (result.norm, before[3])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def program(table, state):
        table, pin = pieces.start_lookup(ids, table)
        (table, state, pin), outputs = jax.lax.scan(body, (table, state, pin), length=4)
        embeddings, table = pieces.finish_lookup(table, pin)
        return table, state, embeddings, outputs

    table, state, embeddings, outputs = program(pieces.table(), pieces.state())
    if ON_GPU:  # where XLA copies what such a loop carries
        jax.block_until_ready(outputs)
        with pytest.raises(RuntimeError, match=r"the table moved .* before update step \d"):
            async_emb.check(pieces.ctx)
        return
    expected = initial_state(pieces.ctx)
    for norm, row in zip(*outputs, strict=True):
        result = expected_update(pieces.ctx, expected)
        assert norm == result.norm
        np.testing.assert_array_equal(bits(row), bits(expected.table[3]))
        expected = result.state
    assert_state(table, state, expected)
    assert_rows(embeddings, expected.table, random_ids(pieces.ctx))


def test_scan_of_whole_steps_loses_nothing(pieces):
    update, ids = pieces.update(), pieces.ids()

    def body(carry, _):
        table, state = carry
        result = pieces.finish_update(pieces.start_update(update, table, state))
        table, pin = pieces.start_lookup(ids, result.table, result.pin)
        embeddings, table = pieces.finish_lookup(table, pin)
        return (table, result.state), embeddings

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def program(table, state):
        return jax.lax.scan(body, (table, state), length=3)

    (table, state), embeddings = program(pieces.table(), pieces.state())
    expected = initial_state(pieces.ctx)
    for step in range(3):
        expected = expected_update(pieces.ctx, expected).state
        assert_rows(embeddings[step], expected.table, random_ids(pieces.ctx))
    assert_state(table, state, expected)


def test_table_read_between_whole_steps_is_not_a_move(pieces):
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def program(update, table, state):
        result = pieces.finish_update(pieces.start_update(update, table, state))
        return result, jnp.sum(result.table.astype(jnp.float32))

    result, _ = program(pieces.update(), pieces.table(), pieces.state())
    result, _ = program(pieces.update(1), result.table, result.state)
    once = expected_update(pieces.ctx, initial_state(pieces.ctx)).state
    assert_state(result.table, result.state, expected_update(pieces.ctx, once, 1).state)
    assert tables_moved(pieces) == [0] * pieces.ctx.group_size


def test_another_table_between_steps_is_taken_over_and_counted(pieces):
    for seed in (0, 1):
        table, pin = pieces.lookup_start(pieces.ids(), pieces.table(seed))
        embeddings, table = pieces.lookup_done(table, pin)
        assert_rows(embeddings, table_of(pieces.ctx, seed), random_ids(pieces.ctx))
        kept = table if seed == 0 else None  # its memory is not used for the other table
    assert tables_moved(pieces) == [1] * pieces.ctx.group_size
    del kept


def test_table_that_is_never_donated_keeps_its_values(pieces):
    lookup_start, lookup_done = jax.jit(pieces.start_lookup), jax.jit(pieces.finish_lookup)
    table = pieces.table()
    for seed in range(3):
        tied, pin = lookup_start(pieces.ids(seed), table)
        embeddings, _ = lookup_done(tied, pin)
        assert_rows(embeddings, table_of(pieces.ctx), random_ids(pieces.ctx, seed))
    expected = TableState(table_of(pieces.ctx), np.asarray(pieces.state().row_state))
    assert_state(table, pieces.state(), expected)
