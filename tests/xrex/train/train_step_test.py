from typing import Any

import jax
import numpy as np
import pytest

from tests.xrex.train import helpers
from xrex.cuda.async_emb import async_emb
from xrex.train.batches import look_ahead
from xrex.train.train_state import TrainState
from xrex.train.train_step import TrainStep


def start(setup: Any) -> tuple[TrainStep, TrainState]:
    step = TrainStep(setup)
    return step, step.init(helpers.toy_params(), helpers.toy_table())


@pytest.mark.parametrize("optimizer", [helpers.EAGER, helpers.LAZY], ids=["eager", "lazy"])
def test_fifty_steps_equal_the_oracle_of_the_schedule(optimizer: Any) -> None:
    setup = helpers.toy_setup(optimizer)
    batches = [helpers.toy_batch(seed) for seed in range(50)]
    oracle = helpers.make_oracle(setup, batches, helpers.toy_table())
    step, state = start(setup)
    with step:
        for batch, next_batch in look_ahead(batches):
            state, metrics = step.step(state, batch, next_batch)
            expected, applied = oracle.step(
                helpers.oracle_batch(setup, batch),
                None if next_batch is None else helpers.oracle_batch(setup, next_batch),
            )
            rows = helpers.host_copy(metrics.aux).reshape(expected.shape)
            helpers.assert_same_bits(rows, expected)
            assert float(metrics.norm) == (0.0 if applied is None else applied.norm)
        state = step.flush(state)
    oracle.flush()
    helpers.assert_same_table(state, oracle.state)
    assert int(state.step) == 50


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_pipeline_refilled_after_a_flush_equals_the_oracle(steps_before: int) -> None:
    setup = helpers.toy_setup(helpers.LAZY)
    batches = [helpers.toy_batch(seed) for seed in range(steps_before + 4)]
    oracle = helpers.make_oracle(setup, batches, helpers.toy_table())
    step, state = start(setup)
    with step:
        for number, (batch, next_batch) in enumerate(look_ahead(batches)):
            if number == steps_before:
                state = step.flush(state)
                oracle.flush()
                helpers.assert_same_table(state, oracle.state)
            state, metrics = step.step(state, batch, next_batch)
            expected, _ = oracle.step(
                helpers.oracle_batch(setup, batch),
                None if next_batch is None else helpers.oracle_batch(setup, next_batch),
            )
            helpers.assert_same_bits(
                helpers.host_copy(metrics.aux).reshape(expected.shape), expected
            )
        state = step.flush(state)
    oracle.flush()
    helpers.assert_same_table(state, oracle.state)


def test_prepared_batches_train_as_the_batches_they_were_made_of() -> None:
    setup = helpers.toy_setup(helpers.LAZY)
    batches = [helpers.toy_batch(seed) for seed in range(5)]
    results = []
    for prepared in (False, True):
        step, state = start(setup)
        with step:
            inputs = [step.prepare(batch) for batch in batches] if prepared else batches
            for batch, next_batch in look_ahead(inputs):
                state, _ = step.step(state, batch, next_batch)
            state, loss, _ = step.evaluate(step.flush(state), inputs[0])
            results.append(helpers.host_copy((state, loss)))
    helpers.assert_same_states(*results)


def test_batch_may_be_passed_after_its_prepared_form_was_armed() -> None:
    first, second = helpers.toy_batch(0), helpers.toy_batch(1)
    step, state = start(helpers.toy_setup())
    with step:
        state, _ = step.step(state, first, step.prepare(second))
        state, _ = step.step(state, second)
        assert int(step.flush(state).step) == 2


def test_refill_makes_each_exchange_once() -> None:
    setup = helpers.toy_setup()
    first, second, third = (helpers.toy_batch(seed) for seed in range(3))
    step, state = start(setup)
    with step:
        state, _ = step.step(state, first, second)
        state = step.flush(state)
        state, _ = step.step(state, second, third)
        state, _ = step.step(state, third)
        state = step.flush(state)
        counters = step.counters()[0]
    # Lookups of: first, second (dropped by the flush), second again, third.
    assert counters.lookup_steps_armed == counters.lookup_steps_done == 4
    # Updates beside the three steps, and one in each flush.
    assert counters.update_steps_armed == counters.update_steps_done == 5
    assert counters.updates_skipped_pending == 2


def test_step_without_next_batch_arms_no_lookup() -> None:
    step, state = start(helpers.toy_setup())
    with step:
        state, metrics = step.step(state, helpers.toy_batch(0))
        metrics.norm.block_until_ready()
        assert step.counters()[0].lookup_steps_armed == 1


def test_flush_at_rest_changes_nothing() -> None:
    step, state = start(helpers.toy_setup())
    with step:
        before = helpers.host_copy(state)
        helpers.assert_same_states(step.flush(state), before)
        state, _ = step.step(state, helpers.toy_batch(0))
        state = step.flush(state)
        after = helpers.host_copy(state)
        helpers.assert_same_states(step.flush(state), after)


def test_dense_parameters_follow_their_optimizer() -> None:
    step, state = start(helpers.toy_setup())
    with step:
        for batch, next_batch in look_ahead([helpers.toy_batch(seed) for seed in range(4)]):
            state, _ = step.step(state, batch, next_batch)
        assert float(state.dense_params["bias"]) == -4 * 0.25


def test_learning_rate_schedule_uses_the_step_of_the_gradients() -> None:
    def schedule(step: Any) -> Any:
        return 0.01 * step

    setup = helpers.toy_setup(learning_rate=schedule)
    batches = [helpers.toy_batch(seed) for seed in range(6)]
    oracle = helpers.make_oracle(setup, batches, helpers.toy_table())
    step, state = start(setup)
    with step:
        for batch, next_batch in look_ahead(batches):
            state, _ = step.step(state, batch, next_batch)
            oracle.step(
                helpers.oracle_batch(setup, batch),
                None if next_batch is None else helpers.oracle_batch(setup, next_batch),
            )
        state = step.flush(state)
    oracle.flush()
    helpers.assert_same_table(state, oracle.state)


def test_batches_of_padding_change_nothing() -> None:
    batch = helpers.toy_batch(0)
    padding = batch._replace(mask=np.zeros_like(batch.mask))
    step, state = start(helpers.toy_setup(helpers.LAZY))
    with step:
        before = helpers.host_copy((state.table, state.embedding_state))
        state, _ = step.step(state, padding, padding)
        state, _ = step.step(state, padding)
        state = step.flush(state)
        helpers.assert_same_states((state.table, state.embedding_state), before)


def test_ranks_with_nothing_but_padding_take_part() -> None:
    setup = helpers.toy_setup()
    full = helpers.toy_batch(0)
    mask = full.mask.copy()
    mask[1:] = False
    batches = [full, full._replace(mask=mask), full]
    oracle = helpers.make_oracle(setup, batches, helpers.toy_table())
    step, state = start(setup)
    with step:
        for batch, next_batch in look_ahead(batches):
            state, _ = step.step(state, batch, next_batch)
            oracle.step(
                helpers.oracle_batch(setup, batch),
                None if next_batch is None else helpers.oracle_batch(setup, next_batch),
            )
        state = step.flush(state)
    oracle.flush()
    helpers.assert_same_table(state, oracle.state)


def test_ids_that_int32_cannot_hold_stay_out_of_range() -> None:
    batch = helpers.toy_batch(0)
    ids = batch.ids.astype(np.int64)
    ids[0, 0] = 2**32 + 1
    mask = np.ones_like(batch.mask)
    step, state = start(helpers.toy_setup())
    with step:
        state, metrics = step.step(state, batch._replace(ids=ids, mask=mask))
        last_row = helpers.toy_table()[helpers.VOCAB_ROWS - 1]
        helpers.assert_same_bits(helpers.host_copy(metrics.aux)[0, 0], last_row)
        assert sum(rank.ids_out_of_range for rank in step.counters().values()) == 1


def test_evaluation_uses_the_flushed_table_and_leaves_nothing_in_flight() -> None:
    step, state = start(helpers.toy_setup())
    with step:
        state, _ = step.step(state, helpers.toy_batch(0))
        state = step.flush(state)
        before = helpers.host_copy(state)
        batch = helpers.toy_batch(1)
        for _ in range(20):
            state, loss, rows = step.evaluate(state, batch)
        table = before.table[batch.ids.reshape(-1)].reshape(rows.shape)
        helpers.assert_same_bits(helpers.host_copy(rows), table)
        expected, _ = helpers.toy_loss(before.dense_params, jax.numpy.asarray(table), batch)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        helpers.assert_same_states(state, before)
        assert async_emb.drain(helpers.toy_setup().ctx) > 0


def test_state_is_a_pytree_of_global_arrays() -> None:
    step, state = start(helpers.toy_setup(helpers.LAZY))
    with step:
        shardings = jax.tree.map(lambda x: x.sharding, state)
        state, _ = step.step(state, helpers.toy_batch(0))
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
        assert jax.tree.map(lambda x: x.sharding, state) == shardings


def test_init_leaves_the_callers_arrays_alone() -> None:
    setup = helpers.toy_setup()
    table = jax.device_put(helpers.toy_table(), setup.table_sharding())
    params = {"bias": jax.device_put(np.float32(0), setup.replicated())}
    with TrainStep(setup) as step:
        state, _ = step.step(step.init(params, table), helpers.toy_batch(0))
        step.flush(state)
        helpers.assert_same_bits(helpers.host_copy(table), helpers.toy_table())
        assert float(params["bias"]) == 0
