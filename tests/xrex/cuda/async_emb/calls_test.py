"""The calls at work, per rank inside shard_map."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.testing import (
    AXIS_TYPES,
    BFLOAT16,
    EntryGraph,
    assert_same_product,
    bits,
    make_mesh,
    put,
    random_table,
    ready_context,
)
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.async_emb import AsyncEmbOptions

VOCAB_ROWS = 50
TOKENS, TABLE, SAME = P("x"), P(None, "x"), P()
ADAGRAD = {"learning_rate": 0.1, "eps": 1e-8, "decay_factor": 1.0}
START = "xrex_async_emb_lookup_start"
DONE = "xrex_async_emb_lookup_done"
UPDATE_START = "xrex_async_emb_rowwise_adagrad_update_start"
UPDATE_DONE = "xrex_async_emb_rowwise_adagrad_update_done"


@pytest.fixture
def ctx(request):
    with ready_context(name=request.node.name) as handle:
        yield handle


def per_rank(ctx, in_specs, out_specs, check_vma=True):
    """Decorates a per-rank function to take and return global arrays, in a compiled program."""

    def decorate(function):
        mapped = jax.shard_map(
            function, mesh=ctx.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )
        return jax.jit(mapped)

    return decorate


def random_ids(ctx, seed=0, low=0, high=VOCAB_ROWS):
    return np.random.default_rng(seed).integers(low, high, ctx.tokens_per_batch, dtype=np.int32)


def table_of(ctx):
    return random_table(VOCAB_ROWS, ctx.emb_width)


def lookup_program(ctx):
    @per_rank(ctx, (TOKENS, TABLE), TOKENS)
    def lookup(ids, table):
        table, pin = async_emb.lookup_start(ids, table, np.float32(0), ctx)
        return async_emb.lookup_done(pin, ctx, table)

    return lookup


def lookup(ctx, ids, table):
    return lookup_program(ctx)(put(ctx, ids, TOKENS), put(ctx, table, TABLE))


def start_update(ctx, table, grads, ids, gate, pending=True):
    """A per-rank update start with one slot for each row up to the capacity."""
    slots = np.arange(ctx.num_unique, dtype=np.int32)
    return async_emb.rowwise_adagrad_update_start(
        grads, ids, slots, table, jnp.ones(table.shape[0]), pending, gate, ctx, **ADAGRAD
    )


def small_ids(ctx):
    return random_ids(ctx, high=ctx.num_unique)


def random_grads(ctx):
    return random_table(ctx.tokens_per_batch, ctx.emb_width, seed=5)


# --- Lookup -----------------------------------------------------------------------------


def test_lookup_reads_the_rows_bit_for_bit(ctx):
    table = table_of(ctx)
    table[3] = np.array([np.nan, -0.0, np.inf, 1e-40] * (ctx.emb_width // 4), BFLOAT16)
    ids = random_ids(ctx)
    ids[:2] = 3
    np.testing.assert_array_equal(bits(lookup(ctx, ids, table)), bits(table[ids]))


def test_ids_of_any_shape_are_taken_in_row_major_order(ctx):
    table, ids = table_of(ctx), random_ids(ctx).reshape(-1, 2, 2)
    found = lookup(ctx, ids, table)
    np.testing.assert_array_equal(bits(found), bits(table[ids.reshape(-1)]))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_ids_of_any_integer_dtype_are_taken(ctx, dtype):
    table, ids = table_of(ctx), random_ids(ctx)
    np.testing.assert_array_equal(bits(lookup(ctx, ids.astype(dtype), table)), bits(table[ids]))


def test_wide_ids_beyond_int32_stay_out_of_range(ctx):
    table, ids = table_of(ctx), random_ids(ctx).astype(np.uint32)
    ids[0] = 2**32 - 1
    ids[1] = 2**31
    expected = table[np.minimum(ids, VOCAB_ROWS - 1)]
    np.testing.assert_array_equal(bits(lookup(ctx, ids, table)), bits(expected))
    assert sum(s.ids_out_of_range for s in async_emb.stats(ctx).values()) == 2


def test_int64_ids_beyond_int32_stay_out_of_range(ctx):
    table, ids = table_of(ctx), random_ids(ctx).astype(np.int64)
    ids[0] = 2**32
    ids[1] = -(2**40)
    expected = table[np.clip(ids, 0, VOCAB_ROWS - 1)]
    with jax.enable_x64(True):
        found = lookup(ctx, ids, table)
    np.testing.assert_array_equal(bits(found), bits(expected))


def test_out_of_range_ids_read_what_jax_indexing_reads(ctx):
    table = table_of(ctx)
    ids = random_ids(ctx)
    ids[:6] = [-1, 0, VOCAB_ROWS - 1, VOCAB_ROWS, np.iinfo(np.int32).min, np.iinfo(np.int32).max]
    expected = jnp.asarray(table)[jnp.asarray(ids)]
    np.testing.assert_array_equal(bits(lookup(ctx, ids, table)), bits(expected))


def test_zero_policy_gives_rows_of_zeros(request):
    options = AsyncEmbOptions(out_of_range="zero")
    with ready_context(name=request.node.name, options=options) as ctx:
        table, ids = table_of(ctx), random_ids(ctx)
        ids[:3] = [VOCAB_ROWS, -VOCAB_ROWS - 1, -1]
        expected = table[np.clip(ids, -VOCAB_ROWS, VOCAB_ROWS - 1)]
        expected[:2] = 0
        np.testing.assert_array_equal(bits(lookup(ctx, ids, table)), bits(expected))


# --- Gradient ---------------------------------------------------------------------------


def dense_loss(weights, embeddings):
    return jnp.sum(jnp.tanh(embeddings.astype(jnp.float32) @ weights))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_gradient_equals_that_of_plain_indexing(request, axis_type, check_vma):
    with ready_context(make_mesh(axis_type), name=request.node.name) as ctx:
        table, ids = table_of(ctx), random_ids(ctx)
        weights = np.random.default_rng(1).normal(size=(ctx.emb_width, 3)).astype(np.float32)

        @per_rank(ctx, (SAME, TOKENS, TABLE), (SAME, TOKENS), check_vma)
        def gradients(weights, ids, table):
            table, pin = async_emb.lookup_start(ids, table, weights, ctx)
            embeddings = async_emb.lookup_done(pin, ctx, table)

            def loss(weights, embeddings):
                if not check_vma:
                    return dense_loss(weights, embeddings)
                return lax.psum(dense_loss(weights, embeddings), "x")

            d_weights, d_embeddings = jax.grad(loss, argnums=(0, 1))(weights, embeddings)
            if not check_vma:
                d_weights = lax.psum(d_weights, "x")
            return d_weights, d_embeddings

        found = gradients(put(ctx, weights, SAME), put(ctx, ids, TOKENS), put(ctx, table, TABLE))
        expected = jax.jit(jax.grad(dense_loss, argnums=(0, 1)))(weights, table[ids])
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
        assert_same_product(found[1], expected[1])


def test_no_gradient_flows_through_gates(ctx):
    @per_rank(ctx, (TOKENS, TABLE, SAME), SAME)
    def gradient(ids, table, x):
        def loss(x):
            tied, pin = async_emb.lookup_start(ids, table, 2 * x, ctx)
            embeddings = async_emb.lookup_done(pin, ctx, tied, 3 * x)
            return lax.psum(jnp.sum(embeddings.astype(jnp.float32)), "x") * 0 + x**2

        return jax.grad(loss)(x)

    found = gradient(
        put(ctx, random_ids(ctx), TOKENS), put(ctx, table_of(ctx), TABLE), jnp.float32(3)
    )
    assert found == 6.0


# --- Each call happens, once ------------------------------------------------------------


def count_steps(ctx):
    stats = async_emb.stats(ctx)[0]
    return stats.lookup_steps_done, stats.update_steps_done


def test_calls_with_unused_results_happen_once(ctx):
    @per_rank(ctx, (TOKENS, TABLE, TOKENS), SAME)
    def program(ids, table, grads):
        table, pin = async_emb.lookup_start(ids, table, np.float32(0), ctx)
        async_emb.lookup_done(pin, ctx, table)
        started = start_update(ctx, table, grads, ids, pin)
        async_emb.rowwise_adagrad_update_done(started[2], ctx, *started)
        return jnp.float32(1)

    arguments = (
        put(ctx, small_ids(ctx), TOKENS),
        put(ctx, table_of(ctx), TABLE),
        put(ctx, random_grads(ctx), TOKENS),
    )
    graph = program.lower(*arguments).compile().as_text()
    for target in (START, DONE, UPDATE_START, UPDATE_DONE):
        assert graph.count(f'custom_call_target="{target}"') == 1
    jax.block_until_ready(program(*arguments))
    assert count_steps(ctx) == (1, 1)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_calls_inside_checkpoint_happen_once(ctx, policy):
    @per_rank(ctx, (SAME, TOKENS, TABLE, TOKENS), SAME)
    def program(weights, ids, table, grads):
        @functools.partial(jax.checkpoint, policy=policy)
        def loss(weights):
            tied, pin = async_emb.lookup_start(ids, table, weights, ctx)
            embeddings = async_emb.lookup_done(pin, ctx, tied)
            started = start_update(ctx, tied, grads, ids, embeddings)
            async_emb.rowwise_adagrad_update_done(started[2], ctx, *started)
            return lax.psum(dense_loss(jnp.sin(weights), embeddings), "x")

        return jax.grad(loss)(weights)

    arguments = (
        put(ctx, np.ones((ctx.emb_width, 3), np.float32), SAME),
        put(ctx, small_ids(ctx), TOKENS),
        put(ctx, table_of(ctx), TABLE),
        put(ctx, random_grads(ctx), TOKENS),
    )
    jax.block_until_ready(program(*arguments))
    assert count_steps(ctx) == (1, 1)


def test_new_learning_rate_and_step_do_not_retrace(ctx):
    traces = []

    def update(table, grads, ids, state, last_step, step, rate):
        traces.append(rate)
        slots = np.arange(ctx.num_unique, dtype=np.int32)
        started = async_emb.rowwise_adagrad_lazy_update_start(
            grads,
            ids,
            slots,
            table,
            state,
            last_step,
            step,
            True,
            rate,
            ctx,
            learning_rate=rate,
            eps=1e-8,
            accum_decay_rate=0.0,
            weight_decay_rate=0.0,
        )
        norm, _, pin = async_emb.rowwise_adagrad_update_done(rate, ctx, *started)
        return async_emb.order_after(started[3], pin, platform=ctx.platform), norm

    program = per_rank(ctx, (TABLE, TOKENS, TOKENS, SAME, SAME, SAME, SAME), (TABLE, SAME))(update)
    tables = []
    for step, rate in enumerate([0.1, 0.2, 0.4], start=1):
        table, _ = program(
            put(ctx, np.zeros((VOCAB_ROWS, ctx.emb_width), BFLOAT16), TABLE),
            put(ctx, random_grads(ctx), TOKENS),
            put(ctx, small_ids(ctx), TOKENS),
            put(ctx, np.zeros(VOCAB_ROWS, np.float32), SAME),
            put(ctx, np.zeros(VOCAB_ROWS, np.int32), SAME),
            jnp.int32(step),
            jnp.float32(rate),
        )
        tables.append(np.array(table, np.float32))
        async_emb.reset_table_binding(ctx)
    assert len(traces) == 1
    np.testing.assert_array_equal(tables[1], 2 * tables[0])
    np.testing.assert_array_equal(tables[2], 4 * tables[0])


# --- Order and copies -------------------------------------------------------------------


def test_donated_table_passes_through_lookup_and_update_without_a_copy(ctx):
    def program(ids, table, grads):
        table, pin = async_emb.lookup_start(ids, table, np.float32(0), ctx)
        embeddings = async_emb.lookup_done(pin, ctx, table)
        table = async_emb.order_after(table, embeddings, platform=ctx.platform)
        started = start_update(ctx, table, grads, ids, embeddings)
        _, _, pin = async_emb.rowwise_adagrad_update_done(embeddings, ctx, *started)
        return async_emb.order_after(started[3], pin, platform=ctx.platform)

    mapped = jax.shard_map(
        program, mesh=ctx.mesh, in_specs=(TOKENS, TABLE, TOKENS), out_specs=TABLE
    )
    compiled = (
        jax.jit(mapped, donate_argnums=1)
        .lower(
            put(ctx, small_ids(ctx), TOKENS),
            put(ctx, table_of(ctx), TABLE),
            put(ctx, random_grads(ctx), TOKENS),
        )
        .compile()
    )
    graph = EntryGraph(compiled.as_text())
    shard = f"bf16[{VOCAB_ROWS},{ctx.shard_width}]"
    copies = [line for line in graph.lines.values() if " copy(" in line and line.startswith(shard)]
    assert copies == []
    chain = [START, DONE, UPDATE_START, UPDATE_DONE]
    for earlier, later in itertools.pairwise(chain):
        assert graph.call(earlier) in graph.needs(graph.call(later))


# --- Broken pipeline rules --------------------------------------------------------------


def run_and_expect(message, program, *arguments):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*{message}"):
        jax.block_until_ready(program(*arguments))


def test_second_lookup_start_before_done_is_refused(ctx):
    @per_rank(ctx, (TOKENS, TABLE), TOKENS)
    def start(ids, table):
        return async_emb.lookup_start(ids, table, np.float32(0), ctx)[1]

    arguments = (put(ctx, random_ids(ctx), TOKENS), put(ctx, table_of(ctx), TABLE))
    jax.block_until_ready(start(*arguments))
    run_and_expect("lookup_start", start, *arguments)


def test_lookup_done_without_start_is_refused(ctx):
    @per_rank(ctx, (TOKENS,), TOKENS)
    def done(pin):
        return async_emb.lookup_done(pin, ctx)

    pins = put(ctx, np.zeros(ctx.group_size, np.float32), TOKENS)
    run_and_expect("lookup_done", done, pins)


def test_update_done_without_start_is_refused(ctx):
    @per_rank(ctx, (TOKENS,), SAME)
    def done(pin):
        return async_emb.rowwise_adagrad_update_done(pin, ctx)[0]

    pins = put(ctx, np.zeros(ctx.group_size, np.float32), TOKENS)
    run_and_expect("update_done", done, pins)


def test_second_update_start_before_done_is_refused(ctx):
    @per_rank(ctx, (TABLE, TOKENS, TOKENS), SAME)
    def start(table, grads, ids):
        return start_update(ctx, table, grads, ids, np.float32(0))[2]

    arguments = (
        put(ctx, table_of(ctx), TABLE),
        put(ctx, random_grads(ctx), TOKENS),
        put(ctx, small_ids(ctx), TOKENS),
    )
    jax.block_until_ready(start(*arguments))
    run_and_expect("update_start", start, *arguments)


def test_call_without_contexts_says_how_to_make_them(request):
    with ready_context(name=request.node.name) as ctx:
        program = lookup_program(ctx)
        arguments = (put(ctx, random_ids(ctx), TOKENS), put(ctx, table_of(ctx), TABLE))
    run_and_expect("initialize", program, *arguments)


def test_compiled_program_stays_valid_when_contexts_are_made_again(request):
    with ready_context(name=request.node.name) as ctx:
        program = lookup_program(ctx)
        ids, table = random_ids(ctx), table_of(ctx)
        arguments = (put(ctx, ids, TOKENS), put(ctx, table, TABLE))
        jax.block_until_ready(program(*arguments))
        async_emb.destroy(ctx)
        async_emb.initialize(ctx)
        np.testing.assert_array_equal(bits(program(*arguments)), bits(table[ids]))


# --- What a device finds alone ----------------------------------------------------------


def test_copy_of_the_table_between_lookup_and_update_is_named(ctx):
    @per_rank(ctx, (TOKENS, TABLE, TOKENS), (TOKENS, SAME, SAME, TABLE))
    def program(ids, table, grads):
        tied, pin = async_emb.lookup_start(ids, table, np.float32(0), ctx)
        # Not `tied`: XLA must copy the table for one of the two calls.
        started = start_update(ctx, table, grads, ids, pin)
        embeddings = async_emb.lookup_done(pin, ctx, tied, *started)
        norm, valid, _ = async_emb.rowwise_adagrad_update_done(embeddings, ctx, *started)
        return embeddings, norm, valid, started[3]

    table = table_of(ctx)
    _, norm, valid, found = program(
        put(ctx, small_ids(ctx), TOKENS),
        put(ctx, table, TABLE),
        put(ctx, random_grads(ctx), TOKENS),
    )
    assert np.isnan(norm)
    assert valid == 0
    np.testing.assert_array_equal(bits(found), bits(table))
    with pytest.raises(RuntimeError, match="table"):
        async_emb.check(ctx)


def test_steps_after_an_abort_fail_without_an_exception_in_the_program(ctx):
    program = lookup_program(ctx)
    arguments = (put(ctx, random_ids(ctx), TOKENS), put(ctx, table_of(ctx), TABLE))
    jax.block_until_ready(program(*arguments))
    async_emb.abort(ctx)
    assert np.isnan(np.array(program(*arguments), np.float32)).all()
    for call in (async_emb.check, async_emb.drain, async_emb.wait_step_ready):
        with pytest.raises(
            RuntimeError, match=r"async_emb communicator aborted: abort\(\) was called"
        ):
            call(ctx)
    assert async_emb.stats(ctx)[0].lookup_steps_done >= 1


# --- Other meshes -----------------------------------------------------------------------


def on_reversed_devices(ctx, in_specs, out_specs):
    """Makes a per-rank function a program over the devices of the context in reverse order."""
    mesh = jax.sharding.Mesh(ctx.mesh.devices[::-1], ctx.mesh.axis_names)
    return lambda body: jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    )


@pytest.mark.skipif(jax.device_count() == 1, reason="one device has one order")
def test_lookup_over_permuted_devices_fails_rather_than_mix_columns(ctx):
    @on_reversed_devices(ctx, (TOKENS, TABLE), TOKENS)
    def program(ids, table):
        table, pin = async_emb.lookup_start(ids, table, np.float32(0), ctx)
        return async_emb.lookup_done(pin, ctx, table)

    found = program(random_ids(ctx), table_of(ctx))
    assert np.isnan(np.array(found, np.float32)).all()
    with pytest.raises(RuntimeError, match=r"shard_map over another mesh than ctx\.mesh"):
        async_emb.check(ctx)


@pytest.mark.skipif(jax.device_count() == 1, reason="one device has one order")
def test_update_over_permuted_devices_changes_nothing(ctx):
    @on_reversed_devices(ctx, (TOKENS, TABLE, TOKENS), (SAME, SAME, TABLE))
    def program(ids, table, grads):
        started = start_update(ctx, table, grads, ids, np.float32(0))
        norm, valid, _ = async_emb.rowwise_adagrad_update_done(np.float32(0), ctx, *started)
        return norm, valid, started[3]

    table = table_of(ctx)
    norm, valid, found = program(small_ids(ctx), table, random_grads(ctx))
    assert np.isnan(norm)
    assert valid == 0
    np.testing.assert_array_equal(bits(found), bits(table))
    with pytest.raises(RuntimeError, match=r"shard_map over another mesh than ctx\.mesh"):
        async_emb.check(ctx)


# --- Replica groups ---------------------------------------------------------------------


def test_replica_groups_look_up_the_same_batch_independently(request):
    num_groups = min(2, jax.device_count())
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(num_groups, -1), ("replica", "x"))
    num_ranks = mesh.shape["x"]
    sizes = {"tokens_per_batch": 8 * num_ranks, "emb_width": 4 * num_ranks}
    with ready_context(mesh, name=request.node.name, **sizes) as ctx:
        table, ids = table_of(ctx), random_ids(ctx)
        np.testing.assert_array_equal(bits(lookup(ctx, ids, table)), bits(table[ids]))
        assert [s.lookup_steps_done for s in async_emb.stats(ctx).values()] == [1] * mesh.size
