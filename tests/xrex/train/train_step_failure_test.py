import concurrent.futures
import contextlib
import gc
import threading
from typing import Any

import jax
import numpy as np
import pytest

from tests.xrex.train import helpers
from xrex.cuda.async_emb import async_emb
from xrex.train.batches import look_ahead
from xrex.train.engines import EngineFactory, NativeEngine, select_engine
from xrex.train.schedule import MAX_STEPS_IN_FLIGHT
from xrex.train.train_state import TrainSetup, TrainState
from xrex.train.train_step import TrainStep, TrainStepError

SETUP = helpers.toy_setup(helpers.LAZY)
BATCHES = [helpers.toy_batch(seed) for seed in range(6)]


class Run:
    """A run that has done `steps` steps with a lookup armed, and its oracle."""

    def __init__(self, steps: int, make_engine: EngineFactory = select_engine) -> None:
        self.oracle = helpers.make_oracle(SETUP, BATCHES, helpers.toy_table())
        self.step = TrainStep(SETUP, make_engine=make_engine)
        self.state: TrainState = self.step.init(helpers.toy_params(), helpers.toy_table())
        self.done = 0
        self.go_on(steps, arm_last=True)

    def go_on(self, steps: int, *, arm_last: bool = False) -> None:
        """Takes steps, the oracle beside them."""
        batches = BATCHES[self.done : self.done + steps + arm_last]
        for batch, next_batch in look_ahead(batches):
            if arm_last and next_batch is None:
                break
            self.state, _ = self.step.step(self.state, batch, next_batch)
            self.oracle.step(
                helpers.oracle_batch(SETUP, batch),
                None if next_batch is None else helpers.oracle_batch(SETUP, next_batch),
            )
            self.done += 1

    def finish(self) -> None:
        """Runs to the last batch and compares with the oracle."""
        self.go_on(len(BATCHES) - self.done)
        self.state = self.step.flush(self.state)
        self.oracle.flush()
        helpers.assert_same_table(self.state, self.oracle.state)


@pytest.fixture(autouse=True)
def _no_context_left() -> Any:
    yield
    async_emb.destroy(SETUP.ctx)


def test_malformed_next_batch_is_refused_and_nothing_is_lost() -> None:
    run = Run(2)
    bad = BATCHES[3]._replace(ids=BATCHES[3].ids.astype(np.float32))
    with pytest.raises(TypeError, match="token ids are float32; they must be integers"):
        run.step.step(run.state, BATCHES[2], bad)
    run.finish()


def test_another_batch_than_the_armed_one_is_refused_and_nothing_is_lost() -> None:
    run = Run(2)
    with pytest.raises(ValueError, match="armed for the next_batch of the step before"):
        run.step.step(run.state, BATCHES[3], BATCHES[4])
    run.finish()


@pytest.mark.parametrize("call", ["step", "flush"])
def test_another_state_than_the_last_one_is_refused_while_a_lookup_is_armed(call: str) -> None:
    run = Run(2)
    other = run.step.init(helpers.toy_params(), helpers.toy_table())
    with pytest.raises(ValueError, match="armed on the table of the state that came out last"):
        run.step.flush(other) if call == "flush" else run.step.step(other, BATCHES[2])
    run.finish()


def test_evaluation_in_the_middle_of_the_pipeline_is_refused_and_nothing_is_lost() -> None:
    run = Run(2)
    with pytest.raises(RuntimeError, match=r"call flush\(state\) first"):
        run.step.evaluate(run.state, BATCHES[0])
    run.finish()


def test_run_goes_on_after_the_data_source_failed() -> None:
    run = Run(0)

    def failing_source() -> Any:
        yield from BATCHES[:3]
        raise OSError("disk")

    def train() -> None:
        for batch, next_batch in look_ahead(failing_source()):
            run.state, _ = run.step.step(run.state, batch, next_batch)
            assert next_batch is not None
            run.oracle.step(
                helpers.oracle_batch(SETUP, batch), helpers.oracle_batch(SETUP, next_batch)
            )
            run.done += 1

    with pytest.raises(OSError, match="disk"):
        train()
    assert run.done == 2
    run.state = run.step.flush(run.state)
    run.oracle.flush()
    run.finish()


def test_loss_that_is_no_scalar_is_refused_before_anything_is_lost() -> None:
    def vector_loss(params: Any, embeddings: Any, batch: Any) -> Any:
        del params, batch
        return embeddings.sum(axis=(1, 2)).astype(np.float32), None

    with TrainStep(helpers.toy_setup(loss_fn=vector_loss)) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        with pytest.raises(TypeError, match="it must be a float32 scalar"):
            step.step(state, BATCHES[0])
        helpers.assert_same_bits(helpers.host_copy(state.table), helpers.toy_table())


@pytest.mark.parametrize("steps_before", [1, 2, 3])
def test_run_goes_on_after_abort_as_after_a_flush(steps_before: int) -> None:
    run = Run(steps_before)
    jax.block_until_ready(run.state)  # or the abort would fail the step that still runs
    run.step.abort()
    run.step.abort()
    run.oracle.flush()
    run.finish()


def test_failure_between_steps_raises_and_the_state_in_the_error_goes_on() -> None:
    run = Run(2)
    jax.block_until_ready(run.state)
    async_emb.abort(SETUP.ctx)
    with pytest.raises(TrainStepError, match="async_emb communicator aborted") as caught:
        run.step.step(run.state, BATCHES[2], BATCHES[3])
    run.state = caught.value.state
    run.oracle.flush()
    run.finish()


class LateEngine(NativeEngine):
    """Reports a failure only when told to, as if it came while the step was running."""

    silent = True

    def check(self) -> None:
        if not self.silent:
            super().check()

    def open(self) -> None:
        with contextlib.suppress(RuntimeError) if self.silent else contextlib.nullcontext():
            super().open()


def test_failed_step_changes_neither_table_nor_dense_parameters() -> None:
    engine = LateEngine(SETUP.ctx)
    run = Run(2, lambda _: engine)
    jax.block_until_ready(run.state)
    async_emb.abort(SETUP.ctx)
    before = helpers.host_copy(run.state)
    state, metrics = run.step.step(run.state, BATCHES[2], BATCHES[3])
    assert bool(metrics.skipped)
    assert np.isnan(float(metrics.norm))
    helpers.assert_same_states(host_without_step(state), host_without_step(before))
    assert int(state.step) == 3
    engine.silent = False
    with pytest.raises(TrainStepError) as caught:
        run.step.step(state, BATCHES[3])
    state = run.step.flush(caught.value.state)
    helpers.assert_same_states(host_without_step(state), host_without_step(before))
    run.step.close()


def host_without_step(state: TrainState) -> TrainState:
    return helpers.host_copy(state)._replace(step=None)


class GatedEngine(NativeEngine):
    """Comes to rest only when it is aborted, like an engine whose peer is lost."""

    def __init__(self) -> None:
        super().__init__(SETUP.ctx)
        self.waiting, self.aborted = threading.Event(), threading.Event()

    def settle(self) -> None:
        self.waiting.set()
        assert self.aborted.wait(timeout=20)
        super().settle()

    def abort(self) -> None:
        super().abort()
        self.aborted.set()


def test_abort_from_another_thread_wakes_a_flush_that_waits() -> None:
    engine = GatedEngine()
    run = Run(2, lambda _: engine)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(run.step.flush, run.state)
        assert engine.waiting.wait(timeout=20)
        run.step.abort()
        with pytest.raises(TrainStepError, match="async_emb communicator aborted") as caught:
            flushing.result()
    run.oracle.flush()
    helpers.assert_same_table(caught.value.state, run.oracle.state)


def test_exception_in_the_program_ends_the_exchange_and_keeps_deferred_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(2)

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(run.step._schedule, "_advance", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            run.step.step(run.state, BATCHES[2], BATCHES[3])
    assert async_emb.stats(SETUP.ctx) == {}
    run.oracle.flush()
    run.finish()


def test_closed_step_leaves_no_context_and_may_be_followed_by_another() -> None:
    run = Run(2)
    run.step.close()
    assert async_emb.stats(SETUP.ctx) == {}
    Run(1).finish()


def test_forgotten_step_ends_its_exchange() -> None:
    run = Run(2)
    del run
    gc.collect()
    assert async_emb.stats(SETUP.ctx) == {}
    Run(1).finish()


def test_steps_that_nobody_waits_for_are_bounded() -> None:
    setup: TrainSetup = SETUP
    norms: list[Any] = []
    with TrainStep(setup) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        for batch, next_batch in look_ahead([BATCHES[0]] * 60):
            state, metrics = step.step(state, batch, next_batch)
            norms.append(metrics.norm)
            assert all(norm.is_ready() for norm in norms[:-MAX_STEPS_IN_FLIGHT])
