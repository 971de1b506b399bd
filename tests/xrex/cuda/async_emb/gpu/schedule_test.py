"""Fifty steps of training whose host runs ahead of the GPUs: the oracle's bits in every step."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.gpu.devices import (
    ON_GPUS,
    gpu_mesh,
    hold_of,
    is_open,
    wait_until_armed,
)
from tests.xrex.cuda.async_emb.native_program import native_program
from tests.xrex.cuda.async_emb.native_schedule import (
    EMB_WIDTH,
    EPS,
    FLUSH_AFTER,
    NUM_SLOTS,
    NUM_STEPS,
    NUM_TOKENS,
    NativeSchedule,
    expected_outcomes,
    make_oracle,
    make_setting,
)
from tests.xrex.cuda.async_emb.numerics_cases import (
    EAGER,
    LAZY,
    assert_same_bits,
    assert_same_state,
)
from tests.xrex.cuda.async_emb.pipeline_pieces import (
    LEARNING_RATE,
    OPTIMIZER,
    VOCAB_ROWS,
    Pieces,
    assert_state,
    initial_state,
    random_ids,
)
from tests.xrex.cuda.async_emb.testing import put, ready_context
from tests.xrex.train import helpers
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.reference import (
    Batch,
    EagerDecay,
    ScheduleOracle,
    TableState,
    exact_update,
)
from xrex.optimizers.recsys import GradientUpdate
from xrex.train.batches import look_ahead
from xrex.train.train_step import TrainStep
from xrex.utils import recsys_async_emb_lookup

DECAYS = pytest.mark.parametrize("decay", [EAGER, LAZY], ids=["eager", "lazy"])


@ON_GPUS
@DECAYS
def test_steps_that_the_host_does_not_wait_for_equal_the_oracle(num_ranks: int, decay: Any) -> None:
    setting = make_setting()
    outcomes: dict[int, str] = {}
    oracle = make_oracle(setting, decay, outcomes)
    shape = (num_ranks, NUM_TOKENS, EMB_WIDTH, NUM_SLOTS)
    results = []
    with native_program(*shape, decay, eps=EPS, platform="gpu") as program:
        native = NativeSchedule(program, setting.state)
        for step in range(NUM_STEPS):
            batch, next_batch = setting.batches[step : step + 2]
            results.append(native.step(step, batch, next_batch, setting.noises[step]))
            if step + 1 == FLUSH_AFTER:
                native.flush()
        native.flush()
        stats = async_emb.stats(program.ctx)
        async_emb.check(program.ctx)
    for step, (embeddings, norms) in enumerate(results):
        expected, applied = oracle.step(*setting.batches[step : step + 2])
        assert_same_bits(embeddings, expected)
        np.testing.assert_array_equal(norms, 0 if applied is None else applied.norm)
        if step + 1 in (FLUSH_AFTER, NUM_STEPS):
            oracle.flush()
    assert_same_state(TableState(*(np.array(x) for x in native.state)), oracle.state)
    assert outcomes == expected_outcomes()
    assert {rank.updates_skipped_non_finite for rank in stats.values()} == {1}
    assert {rank.updates_skipped_pending for rank in stats.values()} == {2}
    assert {rank.table_moved for rank in stats.values()} == {0}


@ON_GPUS
@pytest.mark.parametrize("optimizer", [helpers.EAGER, helpers.LAZY], ids=["eager", "lazy"])
def test_training_steps_that_the_host_does_not_wait_for_equal_the_oracle(
    num_ranks: int, optimizer: Any
) -> None:
    setup = helpers.toy_setup(optimizer, num_devices=num_ranks)
    batches = [helpers.toy_batch(seed) for seed in range(50)]
    oracle = helpers.make_oracle(setup, batches, helpers.toy_table())
    results = []
    with TrainStep(setup) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        for batch, next_batch in look_ahead(batches):
            state, metrics = step.step(state, batch, next_batch)
            results.append(metrics)
        state = step.flush(state)
    for (batch, next_batch), metrics in zip(look_ahead(batches), results, strict=True):
        expected, applied = oracle.step(
            helpers.oracle_batch(setup, batch),
            None if next_batch is None else helpers.oracle_batch(setup, next_batch),
        )
        rows = helpers.host_copy(metrics.aux).reshape(expected.shape)
        helpers.assert_same_bits(rows, expected)
        assert float(metrics.norm) == (0.0 if applied is None else applied.norm)
    oracle.flush()
    helpers.assert_same_table(state, oracle.state)
    assert int(state.step) == 50


# --- Beside XLA's own collectives ---------------------------------------------------------------

# More of them for a soak.
NUM_CROWDED_STEPS = int(os.environ.get("ASYNC_EMB_CROWDED_STEPS", "300"))
NUM_BATCHES = 7


def quarter(embeddings: Any) -> Any:
    """A gradient: exact, so that NumPy gives the same bits."""
    return embeddings * np.asarray(0.25, embeddings.dtype)


def collectives(embeddings: jax.Array, ctx: Any) -> tuple[jax.Array, jax.Array]:
    """A psum, an all-gather, an all-to-all and a reduce-scatter of XLA, of integers: exact.

    Returns:
        The sum over all ranks, and by how much the four differ, both int32 [R].
    """

    def per_rank(embeddings: jax.Array) -> tuple[jax.Array, jax.Array]:
        local = jnp.sum(jax.lax.bitcast_convert_type(embeddings, jnp.int16).astype(jnp.int32))
        axis = ctx.table_axis
        total = jax.lax.psum(local, axis)
        gathered = jnp.sum(jax.lax.all_gather(local, axis, tiled=False))
        copies = jnp.full((ctx.group_size,), local)
        exchanged = jnp.sum(jax.lax.all_to_all(copies, axis, 0, 0, tiled=True))
        scattered = jax.lax.psum_scatter(copies, axis, tiled=True)[0]
        deviation = abs(total - gathered) + abs(total - exchanged) + abs(total - scattered)
        return total[None], deviation[None]

    tokens = ctx.tokens_spec
    return jax.shard_map(
        per_rank, mesh=ctx.mesh, in_specs=tokens, out_specs=(tokens, tokens), check_vma=False
    )(embeddings)


def crowded_step(pieces: Pieces) -> Any:
    """A whole step of the schedule, with collectives beside both exchanges."""
    ctx = pieces.ctx

    def tie(x: Any, pins: Any, pin_specs: Any) -> Any:
        return recsys_async_emb_lookup.order_after(
            x, pins, ctx, x_specs=ctx.tokens_spec, pin_specs=pin_specs
        )

    def step(
        table: Any, state: Any, update: Any, deviation: Any, pin: Any, batch: Any, next_ids: Any
    ) -> Any:
        embeddings, table = pieces.finish_lookup(table, pin)
        in_flight = pieces.start_update(update, table, state, embeddings)
        forward, deviated = collectives(tie(embeddings, in_flight.pin, P()), ctx)
        result = pieces.finish_update(in_flight, forward)
        table, pin = pieces.start_lookup(next_ids, result.table, result.pin)
        backward, deviated_again = collectives(tie(embeddings, pin, ctx.tokens_spec), ctx)
        grads = quarter(tie(embeddings, backward, ctx.tokens_spec))
        update = GradientUpdate(grads, batch.segment_ids, batch.unique_tokens, jnp.bool_(True))
        deviation = deviation + deviated + deviated_again + jnp.abs(forward - backward)
        return table, result.state, update, deviation, pin

    return jax.jit(step, donate_argnums=(0, 1, 2, 3))


@ON_GPUS
def test_hundreds_of_steps_beside_collectives_of_xla(num_ranks: int) -> None:
    with ready_context(gpu_mesh(num_ranks), name="crowded") as ctx:
        pieces, step = Pieces(ctx), crowded_step(Pieces(ctx))
        batches = []
        for seed in range(NUM_BATCHES):
            ids = random_ids(ctx, seed)
            slots, segments = async_emb.make_segments(ids, VOCAB_ROWS, ctx.num_unique)
            batches.append(Batch(ids, segments, slots))
        tokens = ctx.tokens_spec
        placed = [
            Batch(put(ctx, x.ids, tokens), put(ctx, x.segment_ids, tokens), put(ctx, x[2], P()))
            for x in batches
        ]
        table, pin = pieces.lookup_start(placed[0].ids, pieces.table())
        carry: Any = (
            table,
            pieces.state(),
            GradientUpdate.empty(ctx, VOCAB_ROWS),
            put(ctx, np.zeros(num_ranks, np.int32), tokens),
            pin,
        )
        for number in range(NUM_CROWDED_STEPS):
            next_ids = placed[(number + 1) % NUM_BATCHES].ids
            carry = step(*carry, placed[number % NUM_BATCHES], next_ids)
        table, state, update, deviation, pin = carry
        _, table = pieces.lookup_done(table, pin)
        result = pieces.update_done(pieces.update_start(update, table, state))
        np.testing.assert_array_equal(deviation, 0)
        async_emb.check(ctx)

        def exact(state: Any, grads: Any, batch: Batch, _: int) -> Any:
            return exact_update(
                state,
                grads,
                batch.segment_ids,
                batch.unique_tokens,
                learning_rate=LEARNING_RATE,
                eps=OPTIMIZER.eps,
                decay=EagerDecay(OPTIMIZER.decay_factor, OPTIMIZER.weight_decay_factor),
            )

        oracle = ScheduleOracle(initial_state(ctx), lambda rows, *_: quarter(rows), exact)
        for number in range(NUM_CROWDED_STEPS):
            oracle.step(batches[number % NUM_BATCHES], batches[(number + 1) % NUM_BATCHES])
        oracle.flush()
        assert_state(result.table, result.state, oracle.state)


# --- The host runs ahead of a device that is busy -----------------------------------------------


@ON_GPUS
def test_host_that_runs_far_ahead_of_busy_devices_changes_nothing(num_ranks: int) -> None:
    setting = make_setting()
    oracle = make_oracle(setting, LAZY, {})
    hold = hold_of(num_ranks)
    shape = (num_ranks, NUM_TOKENS, EMB_WIDTH, NUM_SLOTS)
    num_warm, num_steps = 3, 12

    with native_program(*shape, LAZY, eps=EPS, platform="gpu") as program:
        native = NativeSchedule(program, setting.state)
        results: list[Any] = []
        batches, noises = jax.block_until_ready(
            jax.tree.map(
                lambda x: put(program.ctx, x, P() if len(x) == NUM_SLOTS else P("x")),
                (setting.batches[: num_steps + 1], setting.noises[:num_steps]),
            )
        )
        for step in range(num_steps):
            if step == num_warm:  # everything is compiled by now
                jax.block_until_ready(results)
                gate = hold.start(1.5)
            results.append(native.step(step, batches[step], batches[step + 1], noises[step]))
        wait_until_armed(program.ctx, updates=num_steps)
        was_held_up = not is_open(gate)
        native.flush()
    for step, (embeddings, _) in enumerate(results):
        expected, _ = oracle.step(*setting.batches[step : step + 2])
        assert_same_bits(embeddings, expected)
    oracle.flush()
    assert_same_state(TableState(*(np.array(x) for x in native.state)), oracle.state)
    assert was_held_up, "the host waited for the devices inside a call"
