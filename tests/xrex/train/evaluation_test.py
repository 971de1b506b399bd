"""Lookups without training: values, what they leave behind, and when they are refused."""

import gc
import resource
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.xrex.train import helpers
from xrex.cuda.async_emb import async_emb
from xrex.train.batches import look_ahead
from xrex.train.staleness import EXACT, MODES, ONE_STEP
from xrex.train.train_state import TrainState
from xrex.train.train_step import TrainStep

ALL_MODES = pytest.mark.parametrize("mode", MODES)
CALLS = pytest.mark.parametrize("call", ["lookup", "evaluate"])
BATCHES = [helpers.toy_batch(seed) for seed in range(6)]
MANY = 10_000


def rows_of(step: TrainStep, call: str, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """The rows that a call reads; the loss function returns them as its aux."""
    if call == "lookup":
        return step.lookup(state, batch)
    state, _, rows = step.evaluate(state, batch)
    return state, rows


def counters_at_rest(step: TrainStep) -> list[tuple[int, int]]:
    """Lookups and updates of each rank, all of which have ended."""
    ranks = step.counters().values()
    assert all(rank.lookup_steps_armed == rank.lookup_steps_done for rank in ranks)
    assert all(rank.update_steps_armed == rank.update_steps_done for rank in ranks)
    return [(rank.lookup_steps_done, rank.update_steps_done) for rank in ranks]


@ALL_MODES
@CALLS
def test_rows_of_a_new_state_are_those_of_its_table(mode: str, call: str) -> None:
    with TrainStep(helpers.toy_setup(), mode) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        before = helpers.host_copy(state)
        state, rows = rows_of(step, call, state, BATCHES[0])
        helpers.assert_same_bits(rows, before.table[BATCHES[0].ids])
        helpers.assert_same_states(state, before)


@ALL_MODES
def test_evaluation_computes_the_loss_of_the_step_without_the_step(mode: str) -> None:
    setup = helpers.toy_setup(loss_fn=helpers.mlp_loss)
    with TrainStep(setup, mode) as step:
        state = step.init(helpers.mlp_params(), helpers.toy_table())
        state, loss, scores = step.evaluate(state, BATCHES[0])
        loss, scores = helpers.host_copy((loss, scores))
        _, metrics = step.step(state, BATCHES[0])
        assert float(loss) == pytest.approx(float(metrics.loss), rel=1e-3)
        np.testing.assert_allclose(scores, helpers.host_copy(metrics.aux), rtol=2e-3, atol=1e-3)


@ALL_MODES
@CALLS
def test_run_is_not_changed_by_lookups_between_its_parts(mode: str, call: str) -> None:
    states = []
    for num_lookups in (0, 3):
        with TrainStep(helpers.toy_setup(helpers.LAZY), mode) as step:
            state = step.init(helpers.toy_params(), helpers.toy_table())
            for part in (BATCHES[:3], BATCHES[3:]):
                for batch, next_batch in look_ahead(part):
                    state, _ = step.step(state, batch, next_batch)
                state = step.flush(state)
                before = counters_at_rest(step)
                for _ in range(num_lookups):
                    state, rows = rows_of(step, call, state, BATCHES[0])
                    expected = helpers.host_copy(state.table)[BATCHES[0].ids]
                    helpers.assert_same_bits(rows, expected)
                assert counters_at_rest(step) == [
                    (lookups + num_lookups, updates) for lookups, updates in before
                ]
            states.append(helpers.host_copy(state))
    helpers.assert_same_states(*states)


@CALLS
@pytest.mark.parametrize("mode", [ONE_STEP, EXACT])
@pytest.mark.parametrize("armed", [True, False], ids=["armed", "deferred"])
def test_lookup_in_the_middle_of_the_pipeline_is_refused_and_nothing_is_lost(
    mode: str, call: str, armed: bool
) -> None:
    states = []
    for refuse in (False, True):
        with TrainStep(helpers.toy_setup(helpers.LAZY), mode) as step:
            state = step.init(helpers.toy_params(), helpers.toy_table())
            state, _ = step.step(state, BATCHES[0], BATCHES[1] if armed else None)
            if refuse:
                with pytest.raises(RuntimeError, match=r"middle of the pipeline; call flush"):
                    rows_of(step, call, state, BATCHES[2])
            state, _ = step.step(state, BATCHES[1])
            states.append(helpers.host_copy(step.flush(state)))
    helpers.assert_same_states(*states)


@CALLS
def test_malformed_batch_is_refused_and_the_state_is_as_good_as_before(call: str) -> None:
    with TrainStep(helpers.toy_setup()) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        with pytest.raises(TypeError, match="token ids are float32"):
            rows_of(step, call, state, BATCHES[0]._replace(ids=BATCHES[0].ids.astype(np.float32)))
        _, rows = rows_of(step, call, state, BATCHES[0])
        helpers.assert_same_bits(rows, helpers.toy_table()[BATCHES[0].ids])


@CALLS
def test_table_is_donated_and_not_copied(call: str) -> None:
    with TrainStep(helpers.toy_setup()) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        batch = step.prepare(BATCHES[0])
        after, _ = rows_of(step, call, state, batch)
        assert state.table.is_deleted()
        program: Any = step._look_up if call == "lookup" else step._evaluate
        dense = () if call == "lookup" else (state.dense_params,)
        text = program.lower(after.table, *dense, batch.arrays).compile().as_text()
    assert helpers.copies_of_tables(text) == []
    assert "input_output_alias={ {0}: (0," in text


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_many_lookups_take_no_memory_and_leave_nothing_in_flight() -> None:
    setup = helpers.toy_setup(num_devices=1)
    with TrainStep(setup) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        batch = step.prepare(BATCHES[0])
        bytes_before = arrays_before = 0
        for number in range(MANY):
            state, _ = step.lookup(state, batch)
            if number == MANY // 10:
                gc.collect()
                bytes_before, arrays_before = resident_bytes(), len(jax.live_arrays())
        gc.collect()
        assert len(jax.live_arrays()) <= arrays_before
        assert resident_bytes() - bytes_before < 4 * 2**20
        assert counters_at_rest(step) == [(MANY, 0)]
        assert async_emb.drain(setup.ctx) == MANY
        helpers.assert_same_bits(state.table, helpers.toy_table())
        state, _ = step.step(state, batch)
        assert int(step.flush(state).step) == 1
