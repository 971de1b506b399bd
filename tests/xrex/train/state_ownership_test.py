"""What belongs to which state, and what an interrupted or refused call leaves of it."""

import itertools
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.xrex.train import helpers
from xrex.train.prefetch import Prefetcher
from xrex.train.shared_plan import SharedPlanner
from xrex.train.staleness import EXACT, MODES, ONE_STEP, SharedCapacity
from xrex.train.train_state import TrainState
from xrex.train.train_step import TrainStep, TrainStepError

BATCHES = [helpers.toy_batch(seed) for seed in range(6)]
DEFERRING = pytest.mark.parametrize("mode", [ONE_STEP, EXACT])


def fresh(step: TrainStep) -> TrainState:
    return step.init(helpers.toy_params(), helpers.toy_table())


@DEFERRING
def test_gradients_that_wait_are_not_applied_to_another_state(mode: str) -> None:
    with TrainStep(helpers.toy_setup(), mode) as step:
        state, _ = step.step(fresh(step), BATCHES[0])
        other = fresh(step)
        with pytest.raises(ValueError, match=r"gradients wait .* or call close\(\)"):
            step.flush(other)
        with pytest.raises(ValueError, match="gradients wait"):
            step.step(other, BATCHES[1])
        helpers.assert_same_bits(helpers.host_copy(other.table), helpers.toy_table())
        assert np.any(helpers.host_copy(step.flush(state).table) != helpers.toy_table())


@DEFERRING
def test_close_makes_way_for_another_state(mode: str) -> None:
    with TrainStep(helpers.toy_setup(), mode) as step:
        step.step(fresh(step), BATCHES[0], BATCHES[1])
        step.close()
        state = step.flush(fresh(step))
        helpers.assert_same_bits(helpers.host_copy(state.table), helpers.toy_table())


@DEFERRING
def test_flush_that_was_interrupted_may_be_made_again(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    for interrupted in (False, True):
        with TrainStep(helpers.toy_setup(), mode) as step:
            state, _ = step.step(fresh(step), BATCHES[0])
            if interrupted:

                def interrupt(*_: Any) -> Any:
                    raise KeyboardInterrupt

                with monkeypatch.context() as patch:
                    patch.setattr(step._schedule, "_apply", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        step.flush(state)
            tables.append(helpers.host_copy(step.flush(state).table))
    helpers.assert_same_bits(*tables)


@pytest.mark.parametrize("mode", MODES)
def test_schedule_that_cannot_be_traced_leaves_the_state(mode: str) -> None:
    def schedule(step: Any) -> Any:
        raise TypeError("no such rate")

    with TrainStep(helpers.toy_setup(learning_rate=schedule), mode) as step:
        state = fresh(step)
        with pytest.raises(TypeError, match="no such rate"):
            step.step(state, BATCHES[0], BATCHES[1])
        helpers.assert_same_bits(helpers.host_copy(state.table), helpers.toy_table())


@pytest.mark.parametrize("mode", MODES)
def test_state_may_be_sharded_in_another_way_than_the_one_before(mode: str) -> None:
    setup = helpers.toy_setup(loss_fn=helpers.mlp_loss)
    params = helpers.mlp_params()
    sharding = NamedSharding(setup.ctx.mesh, PartitionSpec("data", None))
    sharded = params | {"hidden": jax.device_put(params["hidden"], sharding)}
    with TrainStep(setup, mode) as step:
        for start in (params, sharded):
            state = step.init(start, helpers.toy_table())
            state, _ = step.step(state, BATCHES[0], BATCHES[1])
            state, _ = step.step(state, BATCHES[1])
            state = step.flush(state)
        assert state.dense_params["hidden"].sharding == sharding


@pytest.mark.parametrize("mode", MODES)
def test_state_that_was_evaluated_first_may_be_sharded_in_another_way(mode: str) -> None:
    setup = helpers.toy_setup(loss_fn=helpers.mlp_loss)
    params = helpers.mlp_params()
    sharding = NamedSharding(setup.ctx.mesh, PartitionSpec("data", None))
    sharded = params | {"hidden": jax.device_put(params["hidden"], sharding)}
    with TrainStep(setup, mode) as step:
        state, _ = step.step(step.init(params, helpers.toy_table()), BATCHES[0], BATCHES[1])
        step.flush(state)
        state, _, _ = step.evaluate(step.init(sharded, helpers.toy_table()), BATCHES[0])
        state, _ = step.step(state, BATCHES[0], BATCHES[1])
        assert step.flush(state).dense_params["hidden"].sharding == sharding


@pytest.mark.parametrize("mode", MODES)
def test_abort_while_the_same_thread_closes_returns(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = TrainStep(helpers.toy_setup(), mode)
    step.step(fresh(step), BATCHES[0])
    end = step._schedule.end
    ends: list[None] = []

    def end_and_abort() -> None:  # as a signal handler would
        ends.append(None)
        end()
        step.abort()

    monkeypatch.setattr(step._schedule, "end", end_and_abort)
    step.close()
    assert len(ends) == 1


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_learning_rate_that_is_not_finite_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="it must be finite"):
        helpers.toy_setup(learning_rate=rate)


@pytest.mark.parametrize("mode", MODES)
def test_step_with_a_learning_rate_that_is_not_finite_is_skipped_as_a_whole(mode: str) -> None:
    setup = helpers.toy_setup(learning_rate=lambda step: 1.0 / (step - 1))
    with TrainStep(setup, mode) as step:
        state, metrics = step.step(fresh(step), BATCHES[0])
        assert bool(metrics.skipped)
        state = step.flush(state)
        assert float(state.dense_params["bias"]) == 0
        helpers.assert_same_bits(helpers.host_copy(state.table), helpers.toy_table())


@pytest.mark.parametrize("mode", MODES)
def test_abort_in_the_midst_of_a_step_of_the_same_thread_ends_that_step(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrainStep(helpers.toy_setup(), mode) as step:
        state, _ = step.step(fresh(step), BATCHES[0], BATCHES[1])
        jax.block_until_ready(state)
        advance = step._schedule.advance

        def advance_and_abort(*arguments: Any) -> Any:  # as a signal handler would
            result = advance(*arguments)
            step.abort()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(step._schedule, "advance", advance_and_abort)
            with pytest.raises(TrainStepError, match="aborted") as caught:
                step.step(state, BATCHES[1], BATCHES[2])
        state, _ = step.step(caught.value.state, BATCHES[2])
        step.flush(state)


def test_evaluation_is_no_exposed_time_of_training() -> None:
    with TrainStep(helpers.toy_setup()) as step:
        state, _ = step.step(fresh(step), BATCHES[0])
        state = step.flush(state)
        before = step.exposed_secs()["lookup"]
        for _ in range(20):
            state, _, _ = step.evaluate(state, BATCHES[1])
        assert step.counters()[0].lookup_wait_secs > before
        assert step.exposed_secs()["lookup"] == pytest.approx(before, abs=1e-9)


def make_planner(made: list[tuple[int, int]]) -> tuple[TrainStep, SharedPlanner]:
    setup = helpers.toy_setup()
    planner = SharedPlanner(setup, SharedCapacity(rows=12, tokens_per_rank=6))
    make = planner._make

    def noting(current: Any, following: Any) -> Any:
        made.append((current.serial, following.serial))
        return make(current, following)

    planner._make = noting  # type: ignore[method-assign]
    return TrainStep(setup), planner


@pytest.mark.parametrize("ahead", [2, 40])
def test_plans_are_made_once_however_far_batches_are_prepared_ahead(ahead: int) -> None:
    made: list[tuple[int, int]] = []
    step, planner = make_planner(made)
    batches = [step.prepare(BATCHES[index % 6]) for index in range(50)]
    for number in range(ahead):
        planner.prepared(number, batches[number])
    for number in range(49):
        if number + ahead < 50:
            planner.prepared(number + ahead, batches[number + ahead])
        planner.plan(batches[number], batches[number + 1])
    serials = [batch.serial for batch in batches]
    assert sorted(made) == list(itertools.pairwise(serials))


def test_plan_is_made_whichever_of_its_batches_is_prepared_last() -> None:
    made: list[tuple[int, int]] = []
    step, planner = make_planner(made)
    first, second = step.prepare(BATCHES[0]), step.prepare(BATCHES[1])
    planner.prepared(1, second)
    assert made == []
    planner.prepared(0, first)
    assert made == [(first.serial, second.serial)]


def test_plan_outlives_one_of_a_batch_that_was_prepared_a_little_later() -> None:
    made: list[tuple[int, int]] = []
    step, planner = make_planner(made)
    second, first, third = (step.prepare(batch) for batch in BATCHES[:3])
    for number, batch in enumerate((first, second, third)):
        planner.prepared(number, batch)
    planner.plan(first, second)
    planner.plan(second, third)
    assert made == [(first.serial, second.serial), (second.serial, third.serial)]


def test_item_that_comes_after_an_error_is_not_given_out() -> None:
    asked, gate = threading.Event(), threading.Event()

    def source() -> Any:
        yield 0
        asked.set()
        assert gate.wait(timeout=30)
        yield 1

    with Prefetcher(source(), lambda item: 1 // item, depth=2) as results:
        assert asked.wait(timeout=30)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                next(results)
            gate.set()
