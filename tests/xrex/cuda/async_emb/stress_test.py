"""Thousands of steps beside XLA's own collectives: no dead lock, and the last bits are right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.xrex.cuda.async_emb.pipeline_pieces import (
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    OPTIMIZER,
    VOCAB_ROWS,
    Pieces,
    assert_rows,
    assert_state,
    random_ids,
    table_of,
)
from tests.xrex.cuda.async_emb.testing import put, ready_context
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.reference import (
    Batch,
    EagerDecay,
    ScheduleOracle,
    TableState,
    exact_update,
)
from xrex.optimizers.recsys import GradientUpdate
from xrex.utils import recsys_async_emb_lookup

NUM_STEPS = 2000
NUM_BATCHES = 12

# XLA's CPU collectives starve when more programs than that are in flight.
MAX_STEPS_IN_FLIGHT = 16


def gradients(embeddings):
    """A quarter of the embeddings: exact, so that NumPy gives the same bits."""
    return embeddings * np.asarray(0.25, embeddings.dtype)


def dense_part(embeddings, ctx):
    """A psum and an all-gather over the ranks, of integers, so that the sums are exact.

    Returns:
        The sum over all ranks, and by how much the two collectives differ, both int32 [R].
    """

    def per_rank(embeddings):
        local = jnp.sum(jax.lax.bitcast_convert_type(embeddings, jnp.int16).astype(jnp.int32))
        total = jax.lax.psum(local, ctx.table_axis)
        gathered = jax.lax.all_gather(local, ctx.table_axis, tiled=False)
        return total[None], jnp.abs(total - jnp.sum(gathered))[None]

    tokens = ctx.tokens_spec
    return jax.shard_map(
        per_rank, mesh=ctx.mesh, in_specs=tokens, out_specs=(tokens, tokens), check_vma=False
    )(embeddings)


def training_step(pieces):
    """The schedule of one step as a program; the dense part runs beside both exchanges."""
    ctx = pieces.ctx

    def tie(x, pins, pin_specs):
        return recsys_async_emb_lookup.order_after(
            x, pins, ctx, x_specs=ctx.tokens_spec, pin_specs=pin_specs
        )

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
    def step(table, state, update, deviation, pin, segments, slots, next_ids):
        embeddings, table = pieces.finish_lookup(table, pin)
        in_flight = pieces.start_update(update, table, state, embeddings)
        tied = tie(embeddings, in_flight.pin, jax.P())
        forward, deviated = dense_part(tied, ctx)
        result = pieces.finish_update(in_flight, forward)
        table, pin = pieces.start_lookup(next_ids, result.table, result.pin)
        backward, deviated_again = dense_part(tie(embeddings, pin, ctx.tokens_spec), ctx)
        grads = gradients(tie(embeddings, backward, ctx.tokens_spec))
        update = GradientUpdate(grads, segments, slots, jnp.bool_(True))
        deviation = deviation + deviated + deviated_again + jnp.abs(forward - backward)
        return table, result.state, update, deviation, pin

    return step


def make_batches(ctx):
    batches = []
    for seed in range(NUM_BATCHES):
        ids = random_ids(ctx, seed)
        slots, segments = async_emb.make_segments(ids, VOCAB_ROWS, ctx.num_unique)
        batches.append(Batch(ids, segments, slots))
    return batches


def expected_end(ctx, batches):
    """The oracle after all steps and a flush."""

    def update(state, grads, batch, step):
        del step
        return exact_update(
            state,
            grads,
            batch.segment_ids,
            batch.unique_tokens,
            learning_rate=LEARNING_RATE,
            eps=OPTIMIZER.eps,
            decay=EagerDecay(OPTIMIZER.decay_factor, OPTIMIZER.weight_decay_factor),
        )

    accumulator = np.full(VOCAB_ROWS, INITIAL_ACCUMULATOR, np.float32)
    start = TableState(table_of(ctx), accumulator)
    oracle = ScheduleOracle(start, lambda rows, *_: gradients(rows), update)
    for step in range(NUM_STEPS):
        oracle.step(batches[step % NUM_BATCHES], batches[(step + 1) % NUM_BATCHES])
    before_flush = oracle.state
    oracle.flush()
    return before_flush, oracle.state


def test_thousands_of_steps_beside_collectives():
    with ready_context(name="stress") as ctx:
        pieces = Pieces(ctx)
        step = training_step(pieces)
        batches = make_batches(ctx)
        placed = [
            Batch(
                put(ctx, batch.ids, ctx.tokens_spec),
                put(ctx, batch.segment_ids, ctx.tokens_spec),
                put(ctx, batch.unique_tokens, jax.P()),
            )
            for batch in batches
        ]
        table, pin = pieces.lookup_start(placed[0].ids, pieces.table())
        state, update = pieces.state(), GradientUpdate.empty(ctx, VOCAB_ROWS)
        deviation = put(ctx, np.zeros(ctx.group_size, np.int32), ctx.tokens_spec)
        for number in range(NUM_STEPS):
            batch, next_batch = placed[number % NUM_BATCHES], placed[(number + 1) % NUM_BATCHES]
            table, state, update, deviation, pin = step(
                table, state, update, deviation, pin, *batch[1:], next_batch.ids
            )
            if number % MAX_STEPS_IN_FLIGHT == 0:
                jax.block_until_ready(deviation)
        embeddings, table = pieces.lookup_done(table, pin)
        result = pieces.update_done(pieces.update_start(update, table, state))
        jax.block_until_ready(result)
        async_emb.check(ctx)

        before_flush, expected = expected_end(ctx, batches)
        np.testing.assert_array_equal(deviation, 0)
        assert_rows(embeddings, before_flush.table, batches[NUM_STEPS % NUM_BATCHES].ids)
        assert_state(result.table, result.state, expected)
        assert async_emb.stats(ctx)[0].table_moved == 0
