"""Thousands of steps beside XLA's own collectives: no dead lock, and the last bits are right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.xrex.cuda.async_emb.pipeline_pieces import (
    LEARNING_RATE,
    OPTIMIZER,
    VOCAB_ROWS,
    Pieces,
    assert_rows,
    assert_state,
    initial_state,
    random_ids,
)
from tests.xrex.cuda.async_emb.testing import bits, put, ready_context
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.reference import (
    Batch,
    EagerDecay,
    ScheduleOracle,
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


class Run:
    """A run from the initial state; steps are dispatched and not waited for."""

    def __init__(self, pieces, batches):
        ctx = pieces.ctx
        self._pieces = pieces
        self._step = training_step(pieces)
        self._batches = [
            Batch(
                put(ctx, batch.ids, ctx.tokens_spec),
                put(ctx, batch.segment_ids, ctx.tokens_spec),
                put(ctx, batch.unique_tokens, jax.P()),
            )
            for batch in batches
        ]
        self._num_steps = 0
        self.table, self._pin = pieces.lookup_start(self._batches[0].ids, pieces.table())
        self.state = pieces.state()
        self._update = GradientUpdate.empty(ctx, VOCAB_ROWS)
        self.deviation = put(ctx, np.zeros(ctx.group_size, np.int32), ctx.tokens_spec)

    def step(self):
        batch = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        next_ids = self._batches[self._num_steps % NUM_BATCHES].ids
        self.table, self.state, self._update, self.deviation, self._pin = self._step(
            self.table,
            self.state,
            self._update,
            self.deviation,
            self._pin,
            *batch[1:],
            next_ids,
        )
        if self._num_steps % MAX_STEPS_IN_FLIGHT == 0:
            jax.block_until_ready(self.deviation)

    def flush(self):
        """Finishes what is in flight; the rows of the lookup."""
        embeddings, table = self._pieces.lookup_done(self.table, self._pin)
        in_flight = self._pieces.update_start(self._update, table, self.state)
        result = self._pieces.update_done(in_flight)
        self.table, self.state = result.table, result.state
        return embeddings


def make_oracle(ctx):
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

    return ScheduleOracle(initial_state(ctx), lambda rows, *_: gradients(rows), update)


def oracle_step(oracle, batches):
    number = oracle.next_step
    oracle.step(batches[number % NUM_BATCHES], batches[(number + 1) % NUM_BATCHES])


def test_thousands_of_steps_beside_collectives():
    with ready_context(name="stress") as ctx:
        batches = make_batches(ctx)
        run = Run(Pieces(ctx), batches)
        for _ in range(NUM_STEPS):
            run.step()
        embeddings = run.flush()
        jax.block_until_ready(run.state)
        async_emb.check(ctx)

        oracle = make_oracle(ctx)
        for _ in range(NUM_STEPS):
            oracle_step(oracle, batches)
        np.testing.assert_array_equal(run.deviation, 0)
        last_ids = batches[NUM_STEPS % NUM_BATCHES].ids
        assert_rows(embeddings, oracle.state.table, last_ids)
        oracle.flush()
        assert_state(run.table, run.state, oracle.state)
        assert async_emb.stats(ctx)[0].table_moved == 0


def states_that_fit(run, ctx, states):
    """For each rank, the indices of those states that its columns and its row_state are."""
    table = bits(run.table)
    fitting = []
    for rank, shard in enumerate(run.state.row_state.addressable_shards):
        columns = slice(rank * ctx.shard_width, (rank + 1) * ctx.shard_width)
        fitting.append(
            {
                index
                for index, state in enumerate(states)
                if np.array_equal(table[:, columns], bits(state.table)[:, columns])
                and np.array_equal(bits(shard.data), bits(state.row_state))
            }
        )
    return fitting


@pytest.mark.parametrize("num_steps_before", range(1, MAX_STEPS_IN_FLIGHT, 3))
def test_abort_of_a_run_leaves_all_ranks_at_the_same_step(num_steps_before):
    with ready_context(name="aborted") as ctx:
        batches = make_batches(ctx)
        run = Run(Pieces(ctx), batches)
        for _ in range(num_steps_before):
            run.step()
        async_emb.abort(ctx)  # wherever the devices are by now
        for _ in range(3):
            run.step()
        run.flush()

        oracle = make_oracle(ctx)
        states = [oracle.state]
        for _ in range(num_steps_before):
            oracle_step(oracle, batches)
            states.append(oracle.state)
        assert set.intersection(*states_that_fit(run, ctx, states))
