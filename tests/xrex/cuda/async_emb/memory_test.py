"""That XLA reuses nothing too early, and neither drops, merges nor repeats a call.

The side stream of a rank reads gradients, slots, table and state long after the start returned: not
before every other rank has started. So the last rank is held up until the others have allocated,
filled and freed a lot of memory between their start and their done.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.pipeline_pieces import (
    PATIENCE_SECS,
    VOCAB_ROWS,
    Pieces,
    assert_rows,
    assert_state,
    expected_update,
    initial_state,
    on_every_rank,
    random_ids,
    table_of,
)
from tests.xrex.cuda.async_emb.testing import ready_context
from xrex.cuda.async_emb import async_emb
from xrex.utils import recsys_async_emb_lookup

NUM_RANKS = jax.device_count()


@pytest.fixture
def pieces(request):
    with ready_context(name=request.node.name) as ctx:
        yield Pieces(ctx)


# --- Memory pressure between start and done -----------------------------------------------------


class HeldUpRank:
    """Lets the last rank pass only when all others have reported."""

    def __init__(self):
        self._lock = threading.Lock()
        self._num_missing = NUM_RANKS - 1
        self._all_reported = threading.Event()
        if self._num_missing == 0:
            self._all_reported.set()

    def hold_up(self, rank):
        if rank == NUM_RANKS - 1 and not self._all_reported.wait(PATIENCE_SECS):
            raise TimeoutError("a rank did not report")

    def report(self, rank):
        with self._lock:
            self._num_missing -= rank != NUM_RANKS - 1
            if self._num_missing == 0:
                self._all_reported.set()


def churn(ctx, blocks, pin, pin_spec):
    """Fills and frees memory on every rank, again and again, after `pin`.

    Args:
        ctx: the context's handle.
        blocks: shape and dtype of each array that a rank fills.
        pin: a global array.
        pin_spec: how it lies on the mesh.

    Returns:
        A global float32 [R] that is available on a rank at the end.
    """

    def per_rank(pin):
        start = async_emb.order_after(jnp.float32(7), pin, platform=ctx.platform)
        total = start
        for round_no in range(4):
            for shape, dtype in blocks:
                garbage = jnp.broadcast_to(start + round_no, shape).astype(dtype)
                # Sorting is one of the operations that XLA does not fuse away.
                filled = jax.lax.sort(garbage + jnp.arange(shape[-1]).astype(dtype))
                total = total + jnp.sum(filled[..., :1].astype(jnp.float32))
        return total[None]

    return jax.shard_map(
        per_rank, mesh=ctx.mesh, in_specs=pin_spec, out_specs=ctx.tokens_spec, check_vma=False
    )(pin)


def copied_inside(zero, arrays):
    """`arrays` as results of the program, in memory that XLA may use again for others."""

    def copy(x):
        if x.dtype == jnp.bool_:
            return x
        if jnp.issubdtype(x.dtype, jnp.integer):
            return x ^ zero
        return x * (1 + zero).astype(x.dtype)

    return jax.tree.map(copy, arrays)


def test_update_uses_its_inputs_though_memory_is_short(pieces):
    ctx, last_rank = pieces.ctx, HeldUpRank()
    num_tokens = ctx.tokens_per_rank
    blocks = [
        ((num_tokens, ctx.emb_width), jnp.bfloat16),
        ((num_tokens,), jnp.int32),
        ((ctx.num_unique,), jnp.int32),
        ((VOCAB_ROWS, ctx.shard_width), jnp.bfloat16),
        ((VOCAB_ROWS,), jnp.float32),
    ]

    @jax.jit
    def program(zero, update, table, state):
        update, table, state = copied_inside(zero, (update, table, state))
        gate = on_every_rank(last_rank.hold_up, ctx)
        in_flight = pieces.start_update(update, table, state, gate)
        end = churn(ctx, blocks, in_flight.pin, P())
        return pieces.finish_update(in_flight, on_every_rank(last_rank.report, ctx, end))

    result = program(jnp.int32(0), pieces.update(), pieces.table(), pieces.state())
    expected = expected_update(ctx, initial_state(ctx))
    assert (result.norm, result.valid) == (expected.norm, 1)
    assert_state(result.table, result.state, expected.state)


def test_lookup_uses_its_inputs_though_memory_is_short(pieces):
    ctx, last_rank = pieces.ctx, HeldUpRank()
    blocks = [
        ((ctx.tokens_per_rank,), jnp.int32),
        ((VOCAB_ROWS, ctx.shard_width), jnp.bfloat16),
    ]

    @jax.jit
    def program(zero, ids, table):
        ids, table = copied_inside(zero, (ids, table))
        gate = on_every_rank(last_rank.hold_up, ctx)
        table, pin = pieces.start_lookup(ids, table, gate)
        end = churn(ctx, blocks, pin, ctx.tokens_spec)
        # The table is not used any more, but by the lookup.
        return pieces.finish_lookup(table, pin, on_every_rank(last_rank.report, ctx, end))[0]

    embeddings = program(jnp.int32(0), pieces.ids(), pieces.table())
    assert_rows(embeddings, table_of(ctx), random_ids(ctx))


def fill_and_free(like):
    """Arrays of the shapes of `like`, full of other values, made and dropped by the caller."""
    for value in range(1, 9):
        jax.block_until_ready(
            jax.tree.map(lambda x: jnp.full_like(x, value), like)  # noqa: B023
        )


def test_steps_are_right_while_the_caller_allocates_and_frees(pieces):
    table, state = pieces.table(), pieces.state()
    expected = initial_state(pieces.ctx)
    for seed in range(5):
        in_flight = pieces.update_start(pieces.update(seed), table, state)
        fill_and_free(in_flight)
        result = pieces.update_done(in_flight)
        table, pin = pieces.lookup_start(pieces.ids(seed), result.table)
        fill_and_free(table)
        embeddings, table = pieces.lookup_done(table, pin)
        expected = expected_update(pieces.ctx, expected, seed).state
        assert_rows(embeddings, expected.table, random_ids(pieces.ctx, seed))
        state = result.state
    assert_state(table, state, expected)


# --- Each call happens, once ----------------------------------------------------------------


def steps_done(pieces):
    """(lookups, updates) that every rank finished."""
    (counts,) = {
        (stats.lookup_steps_done, stats.update_steps_done)
        for stats in async_emb.stats(pieces.ctx).values()
    }
    return counts


def test_update_whose_result_is_unused_happens_once_in_each_run(pieces):
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def program(update, table, state):
        pieces.finish_update(pieces.start_update(update, table, state))
        return jnp.float32(1)

    for _ in range(3):
        jax.block_until_ready(program(pieces.update(), pieces.table(), pieces.state()))
    async_emb.drain(pieces.ctx)
    assert steps_done(pieces) == (0, 3)


def test_lookup_whose_result_is_unused_happens_once_in_each_run(pieces):
    @functools.partial(jax.jit, donate_argnums=1)
    def program(ids, table):
        pieces.finish_lookup(*pieces.start_lookup(ids, table))
        return jnp.float32(1)

    for _ in range(3):
        jax.block_until_ready(program(pieces.ids(), pieces.table()))
    assert steps_done(pieces) == (3, 0)


def test_equal_lookups_are_not_merged(pieces):
    @functools.partial(jax.jit, donate_argnums=1)
    def program(ids, table):
        for _ in range(2):
            embeddings, table = pieces.finish_lookup(*pieces.start_lookup(ids, table))
        return embeddings, table

    embeddings, _ = program(pieces.ids(), pieces.table())
    assert_rows(embeddings, table_of(pieces.ctx), random_ids(pieces.ctx))
    assert steps_done(pieces) == (2, 0)


def test_lookup_in_a_loop_happens_in_each_turn(pieces):
    @functools.partial(jax.jit, donate_argnums=1)
    def program(ids, table):
        def turn(_, table):
            return pieces.finish_lookup(*pieces.start_lookup(ids, table))[1]

        return jax.lax.fori_loop(0, 5, turn, table)

    jax.block_until_ready(program(pieces.ids(), pieces.table()))
    assert steps_done(pieces) == (5, 0)


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_step_inside_checkpoint_happens_once_and_has_its_gradient(pieces, policy):
    @functools.partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
    def loss(weights, update, table, state, ids):
        table, pin = pieces.start_lookup(ids, table, weights)
        embeddings, table = pieces.finish_lookup(table, pin)
        in_flight = pieces.start_update(update, table, state, embeddings)
        tied = recsys_async_emb_lookup.order_after(
            weights, in_flight.pin, pieces.ctx, x_specs=P(), pin_specs=P()
        )
        dense = jnp.sin(embeddings.astype(jnp.float32) @ tied)
        pieces.finish_update(in_flight, dense)  # nobody uses its result
        return jnp.sum(dense**2)

    weights = np.random.default_rng(1).normal(size=pieces.ctx.emb_width).astype(np.float32)
    program = jax.jit(jax.grad(loss), donate_argnums=(1, 2, 3))
    gradient = program(weights, pieces.update(), pieces.table(), pieces.state(), pieces.ids())
    rows = table_of(pieces.ctx)[random_ids(pieces.ctx)].astype(np.float64)
    products = rows @ weights.astype(np.float64)
    expected = (2 * np.sin(products) * np.cos(products)) @ rows
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-3)
    assert steps_done(pieces) == (1, 1)


def test_dense_part_inside_checkpoint_leaves_the_calls_alone(pieces):
    def loss(weights, update, table, state):
        in_flight = pieces.start_update(update, table, state)
        weights = recsys_async_emb_lookup.order_after(
            weights, in_flight.pin, pieces.ctx, x_specs=P(), pin_specs=P()
        )
        dense = jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.sin(x))))(weights)
        result = pieces.finish_update(in_flight, dense)
        return dense, (result.table, result.state)

    program = jax.jit(jax.grad(loss, has_aux=True), donate_argnums=(1, 2, 3))
    weights = np.linspace(0, 1, VOCAB_ROWS, dtype=np.float32)
    _, (table, state) = program(weights, pieces.update(), pieces.table(), pieces.state())
    assert_state(table, state, expected_update(pieces.ctx, initial_state(pieces.ctx)).state)
    assert steps_done(pieces) == (0, 1)
