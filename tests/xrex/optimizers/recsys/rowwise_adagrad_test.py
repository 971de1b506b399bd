from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.testing import (
    AXIS_TYPES,
    EntryGraph,
    assert_same_product,
    bits,
    make_mesh,
    on_cpu_only,
    put,
    random_table,
    ready_context,
)
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.reference import EagerDecay, LazyDecay, TableState, exact_update
from xrex.optimizers.recsys import (
    EmbeddingOptimizer,
    GradientUpdate,
    RowwiseAdagrad,
    RowwiseAdagradLazy,
    RowwiseAdagradLazyState,
    RowwiseAdagradState,
)
from xrex.utils import recsys_async_emb_lookup as lookups

VOCAB_ROWS = 50
RATE = 0.3
EAGER = RowwiseAdagrad(
    initial_accumulator=0.1, eps=1e-6, decay_factor=0.9, weight_decay_factor=0.99
)
LAZY = RowwiseAdagradLazy(
    initial_accumulator=0.1, eps=1e-6, accum_decay_rate=0.05, weight_decay_rate=0.01
)
OPTIMIZERS = pytest.mark.parametrize("optimizer", [EAGER, LAZY], ids=["eager", "lazy"])


@pytest.fixture(params=AXIS_TYPES, ids=["auto", "explicit"])
def ctx(request):
    with ready_context(make_mesh(request.param), name=request.node.name) as handle:
        yield handle


def table_of(ctx):
    return random_table(VOCAB_ROWS, ctx.emb_width)


def random_batch(ctx, seed):
    """Gradients and ids of a batch on the host: (grads, segment_ids, unique_tokens)."""
    rng = np.random.default_rng(seed)
    ids = rng.choice(rng.permutation(VOCAB_ROWS)[: ctx.num_unique], ctx.tokens_per_batch)
    unique_tokens, segment_ids = async_emb.make_segments(ids, VOCAB_ROWS, ctx.num_unique)
    grads = rng.normal(size=(ctx.tokens_per_batch, ctx.emb_width)).astype(jnp.bfloat16)
    return grads, segment_ids, unique_tokens


def update_of(ctx, batch, pending=True):
    grads, segment_ids, unique_tokens = batch
    return GradientUpdate(
        put(ctx, grads, P("x")),
        put(ctx, segment_ids, P("x")),
        put(ctx, unique_tokens, P()),
        put(ctx, np.bool_(pending), P()),
    )


def program_of(optimizer, ctx):
    def program(update, table, state, step, rate):
        in_flight = optimizer.update_start(
            update, table, state, rate, ctx, step=step, learning_rate=rate
        )
        return optimizer.update_done(in_flight, in_flight.pin, ctx, gate_specs=P())

    return jax.jit(program, donate_argnums=(1, 2))


def run_steps(optimizer, ctx, batches, **kwargs):
    """Runs the steps of `batches` from fresh arrays; nothing is in flight when it returns."""
    program = program_of(optimizer, ctx)
    async_emb.reset_table_binding(ctx)
    table, state = put(ctx, table_of(ctx), P(None, "x")), optimizer.init_state(ctx, VOCAB_ROWS)
    results = []
    for step, batch in batches.items():
        result = program(
            update_of(ctx, batch, **kwargs), table, state, jnp.int32(step), jnp.float32(RATE)
        )
        table, state = result.table, result.state
        results.append(result)
    async_emb.drain(ctx)
    jax.block_until_ready(results[-1])
    return results


def decay_of(optimizer, step):
    if isinstance(optimizer, RowwiseAdagrad):
        return EagerDecay(optimizer.decay_factor, optimizer.weight_decay_factor)
    return LazyDecay(step, optimizer.accum_decay_rate, optimizer.weight_decay_rate)


@OPTIMIZERS
def test_steps_equal_the_contract_bit_for_bit(ctx, optimizer):
    batches = {step: random_batch(ctx, step) for step in (1, 2, 5)}
    results = run_steps(optimizer, ctx, batches)
    lazy = isinstance(optimizer, RowwiseAdagradLazy)
    expected = TableState(
        table_of(ctx),
        np.full(VOCAB_ROWS, 0.1, np.float32),
        np.zeros(VOCAB_ROWS, np.int32) if lazy else None,
    )
    for (step, batch), result in zip(batches.items(), results, strict=True):
        update = exact_update(
            expected,
            *batch,
            learning_rate=RATE,
            eps=optimizer.eps,
            decay=decay_of(optimizer, step),
            num_ranks=ctx.group_size,
        )
        expected = update.state
        assert result.valid == 1
        assert bits(result.norm) == bits(update.norm)
    np.testing.assert_array_equal(bits(results[-1].table), bits(expected.table))
    np.testing.assert_array_equal(bits(results[-1].state.row_state), bits(expected.row_state))
    if lazy:
        np.testing.assert_array_equal(results[-1].state.last_step, expected.last_step)


@OPTIMIZERS
def test_state_starts_with_the_initial_accumulator(ctx, optimizer):
    state = dataclasses.replace(optimizer, initial_accumulator=0.25).init_state(ctx, 7)
    np.testing.assert_array_equal(state.row_state, np.full(7, 0.25, np.float32))
    assert state.row_state.dtype == jnp.float32
    assert state.row_state.sharding.is_fully_replicated
    if isinstance(state, RowwiseAdagradLazyState):
        np.testing.assert_array_equal(state.last_step, np.zeros(7, np.int32))
        assert state.last_step.dtype == jnp.int32


@OPTIMIZERS
def test_update_that_is_not_pending_changes_nothing(ctx, optimizer):
    (result,) = run_steps(optimizer, ctx, {4: random_batch(ctx, 0)}, pending=False)
    assert result.valid == 0
    assert np.isfinite(result.norm)
    np.testing.assert_array_equal(bits(result.table), bits(table_of(ctx)))
    before = optimizer.init_state(ctx, VOCAB_ROWS)
    jax.tree.map(np.testing.assert_array_equal, result.state, before)


@OPTIMIZERS
def test_empty_update_changes_nothing(ctx, optimizer):
    program = program_of(optimizer, ctx)
    result = program(
        GradientUpdate.empty(ctx, VOCAB_ROWS),
        put(ctx, table_of(ctx), P(None, "x")),
        optimizer.init_state(ctx, VOCAB_ROWS),
        jnp.int32(1),
        jnp.float32(RATE),
    )
    assert (result.valid, result.norm) == (0, 0.0)
    np.testing.assert_array_equal(bits(result.table), bits(table_of(ctx)))


def test_empty_update_lies_like_a_real_one(ctx):
    empty = GradientUpdate.empty(ctx, VOCAB_ROWS)
    real = update_of(ctx, random_batch(ctx, 0))
    for found, wanted in zip(empty, real, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert found.sharding.is_equivalent_to(wanted.sharding, found.ndim)
    assert empty.segment_ids.tolist() == [-1] * ctx.tokens_per_batch
    assert empty.unique_tokens.tolist() == [VOCAB_ROWS] * ctx.num_unique


@OPTIMIZERS
def test_start_and_done_may_stand_in_two_programs(ctx, optimizer):
    batch = random_batch(ctx, 1)
    start = jax.jit(
        lambda update, table, state: optimizer.update_start(
            update, table, state, (), ctx, step=1, learning_rate=RATE
        ),
        donate_argnums=(0, 1, 2),
    )
    done = jax.jit(lambda in_flight: optimizer.update_done(in_flight, (), ctx), donate_argnums=0)
    in_flight = start(
        update_of(ctx, batch),
        put(ctx, table_of(ctx), P(None, "x")),
        optimizer.init_state(ctx, VOCAB_ROWS),
    )
    found = done(in_flight)
    jax.block_until_ready(found)
    (expected,) = run_steps(optimizer, ctx, {1: batch})
    np.testing.assert_array_equal(bits(found.table), bits(expected.table))
    assert found.pin.shape == (ctx.group_size,)


def test_table_as_the_carry_of_a_scan_gives_what_single_steps_give(ctx):
    batches = {step: random_batch(ctx, step) for step in (1, 2, 3)}
    updates = jax.tree.map(
        lambda *parts: np.stack(parts),
        *(GradientUpdate(*batch, np.bool_(True)) for batch in batches.values()),
    )
    stacked_specs = GradientUpdate(P(None, "x"), P(None, "x"), P(), P())

    def program(table, state, updates):
        def step(carry, update):
            in_flight = EAGER.update_start(
                update, *carry, (), ctx, step=1, learning_rate=jnp.float32(RATE)
            )
            result = EAGER.update_done(in_flight, (), ctx)
            return (result.table, result.state), result.valid

        return jax.lax.scan(step, (table, state), updates)

    (table, state), valid = jax.jit(program, donate_argnums=(0, 1))(
        put(ctx, table_of(ctx), P(None, "x")),
        EAGER.init_state(ctx, VOCAB_ROWS),
        jax.tree.map(lambda x, spec: put(ctx, x, spec), updates, stacked_specs),
    )
    assert valid.tolist() == [1, 1, 1]
    async_emb.check(ctx)
    expected = run_steps(EAGER, ctx, batches)[-1]
    np.testing.assert_array_equal(bits(table), bits(expected.table))
    np.testing.assert_array_equal(bits(state.row_state), bits(expected.state.row_state))


def test_eager_optimizer_ignores_the_step(ctx):
    (first,) = run_steps(EAGER, ctx, {1: random_batch(ctx, 0)})
    (second,) = run_steps(EAGER, ctx, {900: random_batch(ctx, 0)})
    np.testing.assert_array_equal(bits(first.table), bits(second.table))


@OPTIMIZERS
def test_everything_a_start_returned_is_kept_until_done_and_table_and_state_not_copied(
    ctx, optimizer
):
    arguments = (
        update_of(ctx, random_batch(ctx, 0)),
        put(ctx, table_of(ctx), P(None, "x")),
        optimizer.init_state(ctx, VOCAB_ROWS),
        jnp.int32(1),
        jnp.float32(RATE),
    )
    graph = EntryGraph(program_of(optimizer, ctx).lower(*arguments).compile().as_text())
    (start,) = (
        n for n, line in graph.lines.items() if "adagrad" in line and "update_start" in line
    )
    done = graph.call("xrex_async_emb_rowwise_adagrad_update_done")
    outputs = {n for n, line in graph.lines.items() if f"get-tuple-element({start})" in line}
    num_outputs = 3 + 1 + len(arguments[2])
    assert sum(f"{output}" in graph.lines[done] for output in outputs) == num_outputs
    copies = [line for line in graph.lines.values() if " copy(" in line]
    large = (f"bf16[{VOCAB_ROWS},", f"f32[{VOCAB_ROWS}]", f"s32[{VOCAB_ROWS}]")
    assert not [line for line in copies if line.startswith(large)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(EAGER, initial_accumulator=-0.1), "initial_accumulator=-0.1"),
        (
            lambda: dataclasses.replace(EAGER, initial_accumulator=float("nan")),
            "initial_accumulator",
        ),
        (lambda: dataclasses.replace(EAGER, eps=0.0), "RowwiseAdagrad got eps=0.0"),
        (lambda: dataclasses.replace(EAGER, decay_factor=1.5), "decay_factor=1.5"),
        (lambda: dataclasses.replace(EAGER, weight_decay_factor=0.0), "weight_decay_factor=0.0"),
        (lambda: dataclasses.replace(LAZY, eps=1e-46), "RowwiseAdagradLazy got eps=1e-46"),
        (lambda: dataclasses.replace(LAZY, accum_decay_rate=-1.0), "accum_decay_rate=-1.0"),
        (
            lambda: dataclasses.replace(LAZY, weight_decay_rate=float("inf")),
            "weight_decay_rate=inf",
        ),
    ],
)
def test_parameter_out_of_range_is_refused_when_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("missing", ["initial_accumulator", "eps", "decay_factor"])
def test_values_that_frameworks_disagree_about_have_no_default(missing):
    given = dataclasses.asdict(EAGER)
    del given[missing]
    with pytest.raises(TypeError, match=missing):
        RowwiseAdagrad(**given)


@OPTIMIZERS
def test_optimizer_is_hashable_and_fits_the_protocol(optimizer):
    same: EmbeddingOptimizer = dataclasses.replace(optimizer)
    assert hash(same) == hash(optimizer)
    assert same == optimizer


def test_states_are_pytrees():
    eager = RowwiseAdagradState(np.float32(1))
    assert jax.tree.map(lambda x: x + 1, eager) == RowwiseAdagradState(np.float32(2))


# --- The schedule of a training step ----------------------------------------------------


def training_step(ctx, optimizer):
    """lookup_done, update_start, forward, update_done, lookup_start, backward, in this order."""

    def step(weights, table, state, pin, update, next_ids):
        embeddings, table = lookups.lookup_done(table, pin, ctx)
        in_flight = optimizer.update_start(
            update, table, state, embeddings, ctx, step=1, learning_rate=RATE
        )
        embeddings = lookups.order_after(
            embeddings, in_flight.pin, ctx, x_specs=ctx.tokens_spec, pin_specs=P()
        )
        loss, backward = jax.vjp(
            lambda w, e: jnp.sum(jnp.tanh(e.astype(jnp.float32) @ w)), weights, embeddings
        )
        result = optimizer.update_done(in_flight, loss, ctx)
        table, pin = lookups.lookup_start(next_ids, result.table, result.pin, ctx)
        one = lookups.order_after(jnp.float32(1), pin, ctx, x_specs=P())
        return loss, backward(one), table, result.state, pin

    return jax.jit(step, donate_argnums=(1, 2))


def step_arguments(ctx, optimizer):
    ids = np.random.default_rng(3).integers(0, VOCAB_ROWS, ctx.tokens_per_batch, dtype=np.int32)
    weights = np.random.default_rng(4).normal(size=(ctx.emb_width, 3)).astype(np.float32)
    start = jax.jit(lambda ids, table: lookups.lookup_start(ids, table, (), ctx), donate_argnums=1)
    table, pin = start(put(ctx, ids, P("x")), put(ctx, table_of(ctx), P(None, "x")))
    return ids, (
        put(ctx, weights, P()),
        table,
        optimizer.init_state(ctx, VOCAB_ROWS),
        pin,
        update_of(ctx, random_batch(ctx, 5)),
        put(ctx, ids, P("x")),
    )


@on_cpu_only("on GPUs the schedule keeps the order, and no operand")
def test_compiled_step_keeps_the_order_and_copies_no_table(ctx):
    _, arguments = step_arguments(ctx, EAGER)
    graph = EntryGraph(training_step(ctx, EAGER).lower(*arguments).compile().as_text())
    lookup_start = graph.call("xrex_async_emb_lookup_start")
    lookup_done = graph.call("xrex_async_emb_lookup_done")
    update_start = graph.call("xrex_async_emb_rowwise_adagrad_update_start")
    update_done = graph.call("xrex_async_emb_rowwise_adagrad_update_done")
    assert lookup_done in graph.needs(update_start)
    assert update_start in graph.needs(update_done)
    assert update_done in graph.needs(lookup_start)

    dense = [name for name, line in graph.lines.items() if "tanh" in line and "custom" not in line]
    assert dense, graph.lines
    assert all(update_start in graph.needs(name) for name in dense)
    assert any(name in graph.needs(update_done) for name in dense)
    products = [n for n, line in graph.lines.items() if "transpose(jvp" in line and "dot" in line]
    assert products, graph.lines
    assert all(lookup_start in graph.needs(name) for name in products)

    shard = f"bf16[{VOCAB_ROWS},{ctx.shard_width}]"
    assert not [x for x in graph.lines.values() if " copy(" in x and x.startswith(shard)]


def test_steps_in_flight_give_what_separate_operations_give(ctx):
    ids, arguments = step_arguments(ctx, EAGER)
    weights = np.array(arguments[0])
    loss, (d_weights, d_embeddings), table, state, pin = training_step(ctx, EAGER)(*arguments)
    expected = jax.value_and_grad(
        lambda w, e: jnp.sum(jnp.tanh(e.astype(jnp.float32) @ w)), argnums=(0, 1)
    )(weights, table_of(ctx)[ids])
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_allclose(d_weights, expected[1][0], rtol=1e-4, atol=1e-5)
    assert_same_product(d_embeddings, expected[1][1])

    found, table = jax.jit(lambda t, p: lookups.lookup_done(t, p, ctx), donate_argnums=0)(
        table, pin
    )
    async_emb.drain(ctx)
    np.testing.assert_array_equal(bits(found), bits(np.array(table)[ids]))
    (updated,) = run_steps(EAGER, ctx, {1: random_batch(ctx, 5)})
    np.testing.assert_array_equal(bits(table), bits(updated.table))
    np.testing.assert_array_equal(bits(state.row_state), bits(updated.state.row_state))
