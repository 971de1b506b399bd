from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.testing import (
    AXIS_TYPES,
    ON_GPU,
    EntryGraph,
    assert_same_product,
    bits,
    make_handle,
    make_mesh,
    needs_devices,
    on_cpu_only,
    put,
    random_table,
    ready_context,
)
from xrex.cuda.async_emb import async_emb
from xrex.utils import recsys_async_emb_lookup as lookups

VOCAB_ROWS = 50
NO_GATE = np.float32(0)


@pytest.fixture(params=AXIS_TYPES, ids=["auto", "explicit"])
def ctx(request):
    with ready_context(make_mesh(request.param), name=request.node.name) as handle:
        yield handle


def random_ids(ctx):
    ids = np.random.default_rng(0).integers(0, VOCAB_ROWS, ctx.tokens_per_batch)
    return ids.astype(np.int32)


def table_of(ctx):
    return random_table(VOCAB_ROWS, ctx.emb_width)


def lookup(ids, table, ctx, gate=NO_GATE, **specs):
    table, pin = lookups.lookup_start(ids, table, gate, ctx, **specs)
    return lookups.lookup_done(table, pin, ctx)


def test_lookup_reads_the_rows_bit_for_bit(ctx):
    ids, table = random_ids(ctx), table_of(ctx)
    program = jax.jit(lambda ids, table: lookup(ids, table, ctx))
    found, same_table = program(put(ctx, ids, P("x")), put(ctx, table, P(None, "x")))
    np.testing.assert_array_equal(bits(found), bits(table[ids]))
    np.testing.assert_array_equal(bits(same_table), bits(table))
    assert found.sharding.is_equivalent_to(jax.NamedSharding(ctx.mesh, P("x")), 2)
    assert same_table.sharding.is_equivalent_to(jax.NamedSharding(ctx.mesh, P(None, "x")), 2)


def test_lookup_spans_two_programs(ctx):
    ids, table = random_ids(ctx), table_of(ctx)
    start = jax.jit(
        lambda ids, table: lookups.lookup_start(ids, table, NO_GATE, ctx), donate_argnums=1
    )
    done = jax.jit(lambda table, pin: lookups.lookup_done(table, pin, ctx), donate_argnums=0)
    started = start(put(ctx, ids, P("x")), put(ctx, table, P(None, "x")))
    found, same_table = done(*started)
    np.testing.assert_array_equal(bits(found), bits(table[ids]))
    np.testing.assert_array_equal(bits(same_table), bits(table))


def test_lookup_may_be_in_flight_from_one_trip_of_a_scan_to_the_next(ctx):
    ids = np.random.default_rng(2).integers(0, VOCAB_ROWS, (4, ctx.tokens_per_batch))
    table = table_of(ctx)

    def program(ids, table):
        started = lookups.lookup_start(ids[0], table, NO_GATE, ctx)

        def trip(started, next_ids):
            embeddings, table = lookups.lookup_done(*started, ctx)
            return lookups.lookup_start(next_ids, table, embeddings, ctx), embeddings

        started, all_but_last = jax.lax.scan(trip, started, ids[1:])
        last, table = lookups.lookup_done(*started, ctx)
        return all_but_last, last, table

    all_but_last, last, same_table = jax.jit(program, donate_argnums=1)(
        put(ctx, ids.astype(np.int32), P(None, "x")), put(ctx, table, P(None, "x"))
    )
    np.testing.assert_array_equal(bits(all_but_last), bits(table[ids[:-1]]))
    np.testing.assert_array_equal(bits(last), bits(table[ids[-1]]))
    np.testing.assert_array_equal(bits(same_table), bits(table))


@needs_devices(4)
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_table_may_lie_on_two_axes_in_either_order_and_devices_in_any(request, axes):
    devices = np.array(jax.devices())[[2, 0, 3, 1]].reshape(2, 2)
    changes = {"table_axis": axes, "data_axis": axes, "name": request.node.name}
    with ready_context(Mesh(devices, ("a", "b")), **changes) as ctx:
        ids, table = random_ids(ctx), table_of(ctx)
        found, _ = jax.jit(lambda ids, table: lookup(ids, table, ctx))(
            put(ctx, ids, P(axes)), put(ctx, table, P(None, axes))
        )
        np.testing.assert_array_equal(bits(found), bits(table[ids]))


def test_functions_work_outside_jit(ctx):
    ids, table = random_ids(ctx), table_of(ctx)
    found, _ = lookup(put(ctx, ids, P("x")), put(ctx, table, P(None, "x")), ctx)
    np.testing.assert_array_equal(bits(found), bits(table[ids]))


def test_numpy_ids_beyond_int32_stay_out_of_range(ctx):
    table = table_of(ctx)
    ids = random_ids(ctx).astype(np.int64)
    ids[:2] = [2**32 + 1, -(2**32) + 1]
    program = jax.jit(lambda table: lookup(ids, table, ctx)[0])
    expected = table[np.clip(ids, 0, VOCAB_ROWS - 1)]
    np.testing.assert_array_equal(bits(program(put(ctx, table, P(None, "x")))), bits(expected))


@pytest.mark.parametrize(
    "gate",
    [(), {"a": NO_GATE, "b": np.ones((32, 3), np.float32)}, [np.int32(1), np.float32(2)]],
    ids=["none", "mapping", "scalars"],
)
def test_gate_may_be_any_pytree(ctx, gate):
    ids, table = random_ids(ctx), table_of(ctx)
    program = jax.jit(lambda ids, table, gate: lookup(ids, table, ctx, gate)[0])
    found = program(put(ctx, ids, P("x")), put(ctx, table, P(None, "x")), gate)
    np.testing.assert_array_equal(bits(found), bits(table[ids]))


@needs_devices(2)
def test_gate_that_cannot_be_sharded_like_a_pin_needs_a_spec():
    ctx = make_handle()
    ids, table = random_ids(ctx), table_of(ctx)
    odd = np.ones(ctx.group_size + 1, np.float32)
    with pytest.raises(ValueError, match=r"a gate of shape .*gate_specs=PartitionSpec\(\)"):
        jax.eval_shape(lambda: lookup(ids, table, ctx, odd))
    jax.eval_shape(lambda: lookup(ids, table, ctx, odd, gate_specs=P()))


@on_cpu_only("the instructions that are looked for are parts of fusions on a GPU")
def test_start_waits_for_every_leaf_of_its_gate(ctx):
    def program(ids, table, a, b):
        return lookups.lookup_start(ids, table, (jnp.sin(a), b @ b), ctx, gate_specs=P())

    arguments = (
        put(ctx, random_ids(ctx), P("x")),
        put(ctx, table_of(ctx), P(None, "x")),
        put(ctx, np.ones(7, np.float32), P()),
        put(ctx, np.ones((5, 5), np.float32), P()),
    )
    compiled = jax.jit(program, donate_argnums=1).lower(*arguments).compile()
    graph = EntryGraph(compiled.as_text())
    needed = [graph.lines[x] for x in graph.needs(graph.call("xrex_async_emb_lookup_start"))]
    assert any(line.startswith("f32[7]") and "parameter" not in line for line in needed)
    assert any(line.startswith("f32[5,5]") and "parameter" not in line for line in needed)


def test_table_is_tied_to_the_end_of_the_lookup_without_a_copy(ctx):
    program = jax.jit(lambda ids, table: lookup(ids, table, ctx), donate_argnums=1)
    arguments = (put(ctx, random_ids(ctx), P("x")), put(ctx, table_of(ctx), P(None, "x")))
    graph = EntryGraph(program.lower(*arguments).compile().as_text())
    shard = f"bf16[{VOCAB_ROWS},{ctx.shard_width}]"
    copies = [line for line in graph.lines.values() if " copy(" in line and line.startswith(shard)]
    assert copies == []
    if not ON_GPU:  # where the schedule keeps the order
        assert graph.call("xrex_async_emb_lookup_done") in graph.needs(
            graph.call("xrex_async_emb_order")
        )


def test_table_is_kept_until_the_lookup_is_done(ctx):
    program = jax.jit(lambda ids, table: lookup(ids, table, ctx)[0], donate_argnums=1)
    arguments = (put(ctx, random_ids(ctx), P("x")), put(ctx, table_of(ctx), P(None, "x")))
    graph = EntryGraph(program.lower(*arguments).compile().as_text())
    start = graph.call("xrex_async_emb_lookup_start")
    (table,) = (
        name
        for name, line in graph.lines.items()
        if f"get-tuple-element({start})" in line and line.startswith("bf16")
    )
    assert table in re.findall(r"%[\w.\-]+", graph.lines[graph.call("xrex_async_emb_lookup_done")])


def dense_loss(weights, embeddings):
    return jnp.sum(jnp.tanh(embeddings.astype(jnp.float32) @ weights))


def test_gradient_equals_that_of_plain_indexing(ctx):
    ids, table = random_ids(ctx), table_of(ctx)
    weights = np.random.default_rng(1).normal(size=(ctx.emb_width, 3)).astype(np.float32)

    @jax.jit
    def gradients(weights, ids, table):
        def loss(weights, shift):
            tied, pin = lookups.lookup_start(ids, table, weights[0, 0], ctx)
            embeddings, _ = lookups.lookup_done(tied, pin, ctx, gate=weights[0, 0])
            shifted = embeddings + shift
            ordered = lookups.order_after(shifted, pin, ctx, x_specs=ctx.tokens_spec)
            return dense_loss(weights, ordered)

        shift = jnp.zeros((ctx.tokens_per_batch, ctx.emb_width), jnp.bfloat16)
        if jax.sharding.AxisType.Explicit in ctx.mesh.axis_types:
            shift = jax.reshard(shift, jax.NamedSharding(ctx.mesh, P("x")))
        return jax.grad(loss, argnums=(0, 1))(weights, shift)

    found = gradients(put(ctx, weights, P()), put(ctx, ids, P("x")), put(ctx, table, P(None, "x")))
    expected = jax.jit(jax.grad(dense_loss, argnums=(0, 1)))(weights, table[ids])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert_same_product(found[1], expected[1])


def test_gradient_of_the_table_is_refused_with_the_way_out(ctx):
    ids = random_ids(ctx)

    def loss(table):
        return jnp.sum(lookup(ids, table, ctx)[0].astype(jnp.float32))

    with pytest.raises(ValueError, match="no derivative with respect to table; differentiate"):
        jax.grad(loss)(put(ctx, table_of(ctx), P(None, "x")))


def test_ordered_values_keep_their_bits_and_place(ctx):
    x = {"rows": np.full((8, 2), -0.0, np.float32), "count": np.int32(3)}
    x_specs = {"rows": P("x"), "count": P()}
    placed = jax.tree.map(lambda a, spec: put(ctx, a, spec), x, x_specs)
    pin = put(ctx, np.full(ctx.group_size, np.nan, np.float32), P("x"))
    program = jax.jit(lambda x, pin: lookups.order_after(x, pin, ctx, x_specs=x_specs))
    found = program(placed, pin)
    np.testing.assert_array_equal(bits(found["rows"]), bits(x["rows"]))
    assert found["count"] == 3
    assert found["rows"].sharding.is_equivalent_to(placed["rows"].sharding, 2)


def test_lookup_of_a_failed_context_is_nan(ctx):
    program = jax.jit(lambda ids, table: lookup(ids, table, ctx)[0])
    arguments = (put(ctx, random_ids(ctx), P("x")), put(ctx, table_of(ctx), P(None, "x")))
    jax.block_until_ready(program(*arguments))
    async_emb.abort(ctx)
    assert np.isnan(np.array(program(*arguments), np.float32)).all()
