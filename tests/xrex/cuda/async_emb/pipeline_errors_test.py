"""What programs get when a rule of the pipeline is broken, and when a context is aborted."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.pipeline_pieces import (
    OPTIMIZER,
    PATIENCE_SECS,
    Pieces,
    assert_rows,
    assert_state,
    expected_update,
    initial_state,
    on_every_rank,
    random_ids,
    table_of,
    wait_until,
)
from tests.xrex.cuda.async_emb.testing import (
    bits,
    make_handle,
    on_cpu_only,
    put,
    ready_context,
)
from xrex.cuda.async_emb import async_emb, async_emb_api
from xrex.optimizers.recsys import UpdateInFlight

NUM_RANKS = jax.device_count()
ABORTED = "async_emb communicator aborted: "
DONATED_LOST = "; arrays donated to this call are lost"


@pytest.fixture
def ctx(request):
    with ready_context(name=request.node.name) as handle:
        yield handle


@pytest.fixture
def pieces(ctx):
    return Pieces(ctx)


def run_whole_step(pieces, table, state):
    """An update of seed 0, then a lookup of seed 1, each by two programs."""
    result = pieces.update_done(pieces.update_start(pieces.update(), table, state))
    table, pin = pieces.lookup_start(pieces.ids(1), result.table)
    embeddings, table = pieces.lookup_done(table, pin)
    return result._replace(table=table), embeddings


def assert_works(pieces):
    """Checks that a step on a new table does what it must."""
    async_emb.reset_table_binding(pieces.ctx)
    result, embeddings = run_whole_step(pieces, pieces.table(), pieces.state())
    expected = expected_update(pieces.ctx, initial_state(pieces.ctx))
    assert_state(result.table, result.state, expected.state)
    assert_rows(embeddings, expected.state.table, random_ids(pieces.ctx, 1))


# --- Broken rules: the same error on all devices ----------------------------------------------


def errors_of_devices(program, *arguments):
    """Runs a program that must fail; what each device says.

    Its first result is sharded over all devices. Small programs of one device fail when called.
    """
    try:
        result = program(*arguments)[0]
    except jax.errors.JaxRuntimeError as error:
        return [str(error)]
    errors = []
    for shard in result.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(shard.data)
        errors.append(str(caught.value))
    return errors


def assert_refused(message, program, *arguments):
    errors = errors_of_devices(program, *arguments)
    assert len(errors) == NUM_RANKS
    for error in errors:
        assert error.startswith(f"INVALID_ARGUMENT: async_emb: {message}")
        assert DONATED_LOST in error


def refused_program(pieces, call, donated):
    """A program of `call` and a collective of XLA's behind it, which no device may miss."""
    sharding = jax.NamedSharding(pieces.ctx.mesh, pieces.ctx.tokens_spec)

    def program(*arguments):
        results = call(*arguments)
        total = sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(results))
        totals = jnp.broadcast_to(total, NUM_RANKS)
        return jax.lax.with_sharding_constraint(totals, sharding), results

    return jax.jit(program, donate_argnums=donated)


def test_second_lookup_start_is_refused(pieces):
    table, pin = pieces.lookup_start(pieces.ids(), pieces.table())
    assert_refused(
        "lookup_start came before the lookup_done of step 1: call lookup_done first",
        refused_program(pieces, pieces.start_lookup, 1),
        pieces.ids(1),
        pieces.table(1),
    )
    embeddings, _ = pieces.lookup_done(table, pin)
    assert_rows(embeddings, table_of(pieces.ctx), random_ids(pieces.ctx))


def test_lookup_done_with_nothing_armed_is_refused(pieces):
    pin = put(pieces.ctx, np.zeros(NUM_RANKS, np.float32), pieces.ctx.tokens_spec)
    message = "lookup_done came with no step armed (0 were armed and finished): call lookup_start"
    program = refused_program(pieces, pieces.finish_lookup, 0)
    assert_refused(message, program, pieces.table(), pin)
    assert_works(pieces)


def test_second_update_start_is_refused(pieces):
    in_flight = pieces.update_start(pieces.update(), pieces.table(), pieces.state())
    assert_refused(
        "update_start came before the update_done of step 1: call update_done first",
        refused_program(pieces, pieces.start_update, (0, 1, 2)),
        pieces.update(1),
        pieces.table(1),
        pieces.state(),
    )
    result = pieces.update_done(in_flight)
    expected = expected_update(pieces.ctx, initial_state(pieces.ctx))
    assert_state(result.table, result.state, expected.state)


def test_update_done_with_nothing_armed_is_refused(pieces):
    in_flight = UpdateInFlight(pieces.update(), pieces.table(), pieces.state())
    message = "update_done came with no step armed (0 were armed and finished): call update_start"
    assert_refused(message, refused_program(pieces, pieces.finish_update, 0), in_flight)
    assert_works(pieces)


def test_call_before_initialize_is_refused(request):
    pieces = Pieces(make_handle(name=request.node.name))
    assert_refused(
        f"xrex_async_emb_lookup_start found no context {pieces.ctx.context_id} on device ",
        refused_program(pieces, pieces.start_lookup, 1),
        pieces.ids(),
        pieces.table(),
    )


def test_call_after_destroy_is_refused_until_the_next_initialize(pieces):
    assert_works(pieces)
    async_emb.destroy(pieces.ctx)
    assert_refused(
        f"xrex_async_emb_rowwise_adagrad_update_start found no context {pieces.ctx.context_id}",
        refused_program(pieces, pieces.start_update, (0, 1, 2)),
        pieces.update(),
        pieces.table(),
        pieces.state(),
    )
    async_emb.initialize(pieces.ctx)
    assert_works(pieces)


def test_handle_of_other_sizes_under_the_same_id_is_refused(pieces):
    stranger = Pieces(pieces.ctx._replace(num_unique=pieces.ctx.num_unique + 1))
    assert_refused(
        "xrex_async_emb_lookup_start: attribute num_unique is 17, but the context was made with 16",
        refused_program(stranger, stranger.start_lookup, 1),
        pieces.ids(),
        pieces.table(),
    )
    assert_works(pieces)


def test_array_donated_to_a_refused_call_is_lost(pieces):
    pieces.lookup_start(pieces.ids(), pieces.table())
    table = pieces.table(1)
    errors_of_devices(refused_program(pieces, pieces.start_lookup, 1), pieces.ids(1), table)
    assert table.is_deleted()


# --- abort --------------------------------------------------------------------------------


def assert_fails_softly(pieces, result, embeddings, table_before, state_before):
    """Checks the results of a step that did not take place."""
    assert np.isnan(np.array(embeddings, np.float32)).all()
    for shard in result.norm.addressable_shards:
        assert np.isnan(shard.data)
    for shard in result.valid.addressable_shards:
        assert shard.data == 0
    np.testing.assert_array_equal(bits(result.table), table_before)
    for shard in result.state.row_state.addressable_shards:
        np.testing.assert_array_equal(bits(shard.data), state_before)


def test_step_after_an_abort_changes_nothing_and_delivers_nan(pieces):
    table, state = pieces.table(), pieces.state()
    before = bits(table), bits(state.row_state)
    async_emb.abort(pieces.ctx)
    result, embeddings = run_whole_step(pieces, table, state)
    assert_fails_softly(pieces, result, embeddings, *before)
    with pytest.raises(RuntimeError, match=ABORTED + r"abort\(\) was called"):
        async_emb.check(pieces.ctx)


def abort_before_the_last_rank_starts(pieces, armed):
    """What rank R - 1 does on the host before its start: the others have started by then."""

    def call(rank):
        if rank != NUM_RANKS - 1:
            return
        by_rank = async_emb.stats(pieces.ctx)
        others = [other for other in by_rank if other != rank]
        wait_until(lambda: all(armed(async_emb.stats(pieces.ctx)[other]) for other in others))
        async_emb.abort(pieces.ctx)

    return call


def test_abort_inside_a_lookup_fails_it_on_all_ranks(pieces):
    call = abort_before_the_last_rank_starts(pieces, lambda stats: stats.lookup_steps_armed == 1)

    @functools.partial(jax.jit, donate_argnums=1)
    def program(ids, table, pin):
        table, pin = pieces.start_lookup(ids, table, on_every_rank(call, pieces.ctx, pin))
        embeddings, table = pieces.finish_lookup(table, pin)
        return embeddings, table, jnp.sum(pin)

    pin = put(pieces.ctx, np.zeros(NUM_RANKS, np.float32), pieces.ctx.tokens_spec)
    embeddings, table, _ = program(pieces.ids(), pieces.table(), pin)
    assert np.isnan(np.array(embeddings, np.float32)).all()
    np.testing.assert_array_equal(bits(table), bits(table_of(pieces.ctx)))


def test_abort_inside_an_update_fails_it_on_all_ranks(pieces):
    call = abort_before_the_last_rank_starts(pieces, lambda stats: stats.update_steps_armed == 1)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def program(update, table, state, ids, pin):
        gate = on_every_rank(call, pieces.ctx, pin)
        result = pieces.finish_update(pieces.start_update(update, table, state, gate))
        table, pin = pieces.start_lookup(ids, result.table, result.pin)
        embeddings, table = pieces.finish_lookup(table, pin)
        return result._replace(table=table), embeddings

    table, state = pieces.table(), pieces.state()
    before = bits(table), bits(state.row_state)
    pin = put(pieces.ctx, np.zeros(NUM_RANKS, np.float32), pieces.ctx.tokens_spec)
    result, embeddings = program(pieces.update(), table, state, pieces.ids(), pin)
    assert_fails_softly(pieces, result, embeddings, *before)


def test_update_that_was_complete_before_the_abort_counts(pieces):
    in_flight = pieces.update_start(pieces.update(), pieces.table(), pieces.state())
    jax.block_until_ready(in_flight.pin)  # by then the step is armed
    async_emb.drain(pieces.ctx)
    async_emb.abort(pieces.ctx)
    result = pieces.update_done(in_flight)
    expected = expected_update(pieces.ctx, initial_state(pieces.ctx))
    assert_state(result.table, result.state, expected.state)
    assert (result.norm, result.valid) == (expected.norm, 1)


@pytest.mark.parametrize(
    "call",
    [
        async_emb.check,
        async_emb.drain,
        async_emb.wait_step_ready,
        async_emb.reset_table_binding,
        async_emb.initialize,
    ],
)
def test_host_calls_raise_after_an_abort(ctx, call):
    async_emb.abort(ctx)
    with pytest.raises(RuntimeError, match=ABORTED + r"abort\(\) was called"):
        call(ctx)


def test_abort_may_be_called_again(ctx):
    async_emb.abort(ctx)
    async_emb.abort(ctx)


def test_after_an_abort_destroy_and_initialize_give_a_working_context(pieces):
    assert_works(pieces)
    async_emb.abort(pieces.ctx)
    run_whole_step(pieces, pieces.table(), pieces.state())
    async_emb.destroy(pieces.ctx)
    async_emb.initialize(pieces.ctx)
    assert_works(pieces)


def test_table_survives_an_abort_into_the_next_context(pieces):
    async_emb.abort(pieces.ctx)
    result, _ = run_whole_step(pieces, pieces.table(), pieces.state())
    async_emb.destroy(pieces.ctx)
    async_emb.initialize(pieces.ctx)
    result, _ = run_whole_step(pieces, result.table, result.state)
    expected = expected_update(pieces.ctx, initial_state(pieces.ctx))
    assert_state(result.table, result.state, expected.state)


def test_equal_handle_serves_a_program_that_was_compiled_with_another(request):
    first = Pieces(make_handle(name=request.node.name))
    with ready_context(name=request.node.name):
        assert_works(first)
        num_programs = first.lookup_start._cache_size()
    with ready_context(name=request.node.name):
        assert_works(first)
    assert first.lookup_start._cache_size() == num_programs


def test_destroy_waits_for_a_program_that_runs(pieces):
    entered, destroyed = threading.Event(), threading.Event()

    def call(rank):
        entered.set()
        # Without the wait in destroy it ends now, and the done below finds no context.
        if rank == 0:
            destroyed.wait(0.5)

    @functools.partial(jax.jit, donate_argnums=1)
    def program(ids, table):
        table, pin = pieces.start_lookup(ids, table)
        return pieces.finish_lookup(table, pin, on_every_rank(call, pieces.ctx, pin))

    embeddings, _ = program(pieces.ids(), pieces.table())
    assert entered.wait(PATIENCE_SECS)
    async_emb.destroy(pieces.ctx)
    destroyed.set()
    assert not async_emb_api.has_contexts(pieces.ctx.context_id)
    assert_rows(embeddings, table_of(pieces.ctx), random_ids(pieces.ctx))


@on_cpu_only("NCCL does not compare what its ranks ask for")
def test_ranks_that_start_in_different_orders_are_told_apart(pieces):
    ctx = pieces.ctx
    if NUM_RANKS == 1:
        pytest.skip("one rank has one order")

    def per_rank(ids, update, table, state):
        def start_lookup(table, gate):
            return async_emb.lookup_start(ids, table, gate, ctx)

        def start_update(table, gate):
            return async_emb.rowwise_adagrad_update_start(
                *update[:3],
                table,
                state.row_state,
                update.pending,
                gate,
                ctx,
                learning_rate=0.1,
                eps=OPTIMIZER.eps,
                decay_factor=1.0,
            )

        def lookup_first(table):
            table, pin = start_lookup(table, ids)
            return start_update(table, pin)

        def update_first(table):
            started = start_update(table, ids)
            table, _ = start_lookup(started[3], started[2])
            return (*started[:3], table, started[4])

        rank = jax.lax.axis_index("x")
        started = jax.lax.cond(rank == 0, lookup_first, update_first, table)
        embeddings = async_emb.lookup_done(started[2], ctx, *started)
        norm, _, _ = async_emb.rowwise_adagrad_update_done(embeddings, ctx, *started)
        return embeddings, norm[None]

    tokens, update_specs = ctx.tokens_spec, (P("x"), P("x"), P(), P())
    program = jax.shard_map(
        per_rank,
        mesh=ctx.mesh,
        in_specs=(tokens, type(pieces.update())(*update_specs), ctx.table_spec, P()),
        out_specs=(tokens, tokens),
        check_vma=False,
    )
    embeddings, norms = jax.jit(program, donate_argnums=(1, 2, 3))(
        pieces.ids(), pieces.update(), pieces.table(), pieces.state()
    )
    assert np.isnan(np.array(embeddings, np.float32)).all()
    assert np.isnan(norms).all()
    with pytest.raises(RuntimeError, match="every rank must run the same steps in the same order"):
        async_emb.check(ctx)
