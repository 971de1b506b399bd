import logging
from typing import Any

import numpy as np
import pytest

from tests.xrex.train import helpers
from xrex.cuda.async_emb import async_emb
from xrex.train.batches import look_ahead
from xrex.train.engines import NativeEngine, PlainEngine, select_engine
from xrex.train.staleness import MODES, SYNCHRONOUS
from xrex.train.train_state import TrainState
from xrex.train.train_step import TrainStep

BATCHES = [helpers.toy_batch(seed) for seed in range(8)]
# Sums in another order move a row, of values below 4, by a bfloat16 step of 2**-8 in each update.
ROUNDING = len(BATCHES) * 2.0**-8 * 4
# So large that one step of staleness moves rows much further.
LEARNING_RATE = 1.0


def train(step: Any, batches: list[helpers.ToyBatch]) -> TrainState:
    with step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        for batch, next_batch in look_ahead(batches):
            state, _ = step.step(state, batch, next_batch)
        return step.flush(state)


def assert_close(actual: TrainState, expected: TrainState) -> None:
    for left, right in (
        (actual.table, expected.table),
        (actual.embedding_state.row_state, expected.embedding_state.row_state),
    ):
        left, right = helpers.host_copy(left).astype(np.float32), helpers.host_copy(right)
        np.testing.assert_allclose(left, right.astype(np.float32), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("optimizer", [helpers.EAGER, helpers.LAZY], ids=["eager", "lazy"])
def test_plain_path_follows_the_same_schedule(optimizer: Any) -> None:
    setup = helpers.toy_setup(optimizer, learning_rate=LEARNING_RATE)
    plain = train(TrainStep(setup, make_engine=PlainEngine), BATCHES)
    assert_close(plain, train(TrainStep(setup, make_engine=NativeEngine), BATCHES))


@pytest.mark.parametrize("mode", MODES)
def test_plain_path_clips_and_skips_as_the_native_one(mode: str) -> None:
    push = BATCHES[3].push.copy()
    push[0, 0] = np.nan
    mask = np.ones_like(BATCHES[3].mask)
    batches = [*BATCHES[:3], BATCHES[3]._replace(push=push, mask=mask), *BATCHES[4:]]
    setup = helpers.toy_setup(helpers.LAZY, max_grad_norm=10.0)
    results = []
    for engine in (PlainEngine, NativeEngine):
        norms, skipped = [], []
        with TrainStep(setup, mode, make_engine=engine) as step:
            state = step.init(helpers.toy_params(), helpers.toy_table())
            for batch, next_batch in look_ahead(batches):
                state, metrics = step.step(state, batch, next_batch)
                norms.append(float(metrics.grad_norm))
                skipped.append(bool(metrics.skipped))
            results.append((helpers.host_copy(step.flush(state)), norms, skipped))
    (plain, plain_norms, plain_skipped), (native, native_norms, native_skipped) = results
    assert_close(plain, native)
    np.testing.assert_allclose(plain_norms, native_norms, rtol=1e-2)
    assert plain_skipped == native_skipped == [number == 3 for number in range(8)]


def test_plain_path_opens_no_context() -> None:
    setup = helpers.toy_setup()
    with TrainStep(setup, make_engine=PlainEngine) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        step.step(state, BATCHES[0], BATCHES[1])
        assert step.counters() == {}
        assert async_emb.stats(setup.ctx) == {}


def test_synchronous_steps_equal_pipelined_ones_that_are_flushed_after_each() -> None:
    setup = helpers.toy_setup(helpers.LAZY, learning_rate=LEARNING_RATE)
    synchronous = train(TrainStep(setup, SYNCHRONOUS, make_engine=PlainEngine), BATCHES)
    with TrainStep(setup) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        for batch in BATCHES:
            state, _ = step.step(state, batch)
            state = step.flush(state)
        assert_close(state, synchronous)


def test_staleness_makes_a_difference() -> None:
    setup = helpers.toy_setup(learning_rate=LEARNING_RATE)
    pipelined = helpers.host_copy(train(TrainStep(setup), BATCHES).table)
    synchronous = helpers.host_copy(
        train(TrainStep(setup, SYNCHRONOUS, make_engine=PlainEngine), BATCHES).table
    )
    difference = np.abs(pipelined.astype(np.float32) - synchronous.astype(np.float32))
    assert difference.max() > 4 * ROUNDING


def test_synchronous_evaluation_equals_the_pipelined_one() -> None:
    setup = helpers.toy_setup()
    losses = []
    for step in (TrainStep(setup, SYNCHRONOUS, make_engine=PlainEngine), TrainStep(setup)):
        with step:
            state = step.init(helpers.toy_params(), helpers.toy_table())
            _, loss, rows = step.evaluate(state, BATCHES[0])
            losses.append(float(loss))
            expected = helpers.toy_table()[BATCHES[0].ids]
            helpers.assert_same_bits(helpers.host_copy(rows), expected)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_native_engine_is_chosen_for_devices_of_one_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(select_engine(helpers.toy_setup().ctx), NativeEngine)
    assert caplog.records == []


def test_optimizer_without_a_plain_form_is_refused() -> None:
    class Unknown:
        def init_state(self, ctx: Any, vocab_rows: int) -> Any:
            return helpers.EAGER.init_state(ctx, vocab_rows)

    step = TrainStep(helpers.toy_setup(Unknown()), SYNCHRONOUS, make_engine=PlainEngine)
    state = step.init(helpers.toy_params(), helpers.toy_table())
    with pytest.raises(TypeError, match="no plain JAX form of Unknown"):
        step.step(state, BATCHES[0])
