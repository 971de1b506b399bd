"""What is left when steps without staleness fail: in a context, in a call, in a program."""

import concurrent.futures
import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tests.xrex.train import helpers
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle
from xrex.train.batches import look_ahead
from xrex.train.engines import EngineFactory, NativeEngine, select_engine
from xrex.train.staleness import EXACT, MODES, SYNCHRONOUS
from xrex.train.train_state import TrainState
from xrex.train.train_step import TrainStep, TrainStepError

SETUP = helpers.toy_setup(helpers.LAZY)
BATCHES = [helpers.toy_batch(seed) for seed in range(8)]
BOTH_MODES = pytest.mark.parametrize("mode", [EXACT, SYNCHRONOUS])
# The contexts of the mode EXACT: whole batches, updates of shared rows, lookups of shared rows.
MAIN, SHARED_UPDATE, SHARED_ROWS = range(3)
EACH_CONTEXT = pytest.mark.parametrize(
    "context", [MAIN, SHARED_UPDATE, SHARED_ROWS], ids=["main", "update", "rows"]
)


class Run:
    """A run that has done `steps` steps with a next batch, and what it should have come to."""

    def __init__(
        self, mode: str, steps: int = 2, make_engine: EngineFactory = select_engine
    ) -> None:
        self.oracle = helpers.make_oracle(SETUP, BATCHES, helpers.toy_table())
        self.step = TrainStep(SETUP, mode, make_engine=make_engine)
        self.state: TrainState = self.step.init(helpers.toy_params(), helpers.toy_table())
        self.done = 0
        for _ in range(steps):
            self.take(BATCHES[self.done], BATCHES[self.done + 1])

    @property
    def contexts(self) -> list[AsyncEmbContextHandle]:
        return [engine.ctx for engine in self.step._schedule.engines]

    def take(self, batch: Any, next_batch: Any = None) -> None:
        """A step, and the oracle beside it."""
        self.state, _ = self.step.step(self.state, batch, next_batch)
        self.oracle.step(helpers.oracle_batch(SETUP, batch))
        self.oracle.flush()
        self.done += 1

    def finish(self) -> None:
        """Runs to the last batch and compares with the oracle."""
        for batch, next_batch in look_ahead(BATCHES[self.done :]):
            self.take(batch, next_batch)
        self.state = self.step.flush(self.state)
        self.assert_as_the_oracle()
        self.step.close()

    def assert_as_the_oracle(self) -> None:
        helpers.assert_same_table(self.state, self.oracle.state)
        assert float(self.state.dense_params["bias"]) == -0.25 * self.done

    def assert_closed(self) -> None:
        assert [async_emb.stats(ctx) for ctx in self.contexts] == [{} for _ in self.contexts]


@pytest.fixture(autouse=True)
def _no_context_left() -> Iterator[None]:
    yield
    gc.collect()
    async_emb.destroy(SETUP.ctx)


@BOTH_MODES
def test_malformed_next_batch_is_refused_and_nothing_is_lost(mode: str) -> None:
    run = Run(mode)
    bad = BATCHES[3]._replace(ids=BATCHES[3].ids.astype(np.float32))
    with pytest.raises(TypeError, match="token ids are float32; they must be integers"):
        run.step.step(run.state, BATCHES[2], bad)
    run.finish()


def test_another_batch_than_the_one_looked_up_is_refused_and_nothing_is_lost() -> None:
    run = Run(EXACT)
    with pytest.raises(ValueError, match="armed for the next_batch of the step before"):
        run.step.step(run.state, BATCHES[3], BATCHES[4])
    run.finish()


@pytest.mark.parametrize("call", ["step", "flush"])
def test_another_state_than_the_last_one_is_refused_and_nothing_is_lost(call: str) -> None:
    run = Run(EXACT)
    other = run.step.init(helpers.toy_params(), helpers.toy_table())
    with pytest.raises(ValueError, match="armed on the table of the state that came out last"):
        run.step.flush(other) if call == "flush" else run.step.step(other, BATCHES[2])
    run.finish()


@BOTH_MODES
@pytest.mark.parametrize("steps_before", [1, 2, 3])
def test_run_goes_on_after_abort_as_after_a_flush(mode: str, steps_before: int) -> None:
    run = Run(mode, steps_before)
    jax.block_until_ready(run.state)  # or the abort would fail the step that still runs
    run.step.abort()
    run.step.abort()
    run.assert_closed()
    run.finish()


@pytest.mark.parametrize(
    ("mode", "context"),
    [(EXACT, MAIN), (EXACT, SHARED_UPDATE), (EXACT, SHARED_ROWS), (SYNCHRONOUS, MAIN)],
)
@pytest.mark.parametrize("call", ["step", "flush"])
def test_failure_between_steps_ends_all_contexts_and_the_state_in_the_error_goes_on(
    mode: str, context: int, call: str
) -> None:
    run = Run(mode)
    jax.block_until_ready(run.state)
    async_emb.abort(run.contexts[context])
    with pytest.raises(TrainStepError, match="async_emb communicator aborted") as caught:
        run.step.flush(run.state) if call == "flush" else run.step.step(run.state, BATCHES[2])
    run.assert_closed()
    run.state = caught.value.state
    run.finish()


class LateEngine(NativeEngine):
    """Reports a failure only when told to, as if it came while the step was running."""

    silent = True

    def open(self) -> None:
        with contextlib.suppress(RuntimeError) if self.silent else contextlib.nullcontext():
            super().open()

    def check(self) -> None:
        if not self.silent:
            super().check()


def fail_in_two_steps(run: Run, context: int) -> tuple[list[bool], TrainState]:
    """Takes two steps while a context fails: whether they were skipped, and the final state."""
    jax.block_until_ready(run.state)
    async_emb.abort(run.contexts[context])
    skipped, state = [], run.state
    for number in (2, 3):
        state, metrics = run.step.step(state, BATCHES[number], BATCHES[number + 1])
        skipped.append(bool(metrics.skipped))
    for engine in run.step._schedule.engines:
        assert isinstance(engine, LateEngine)
        engine.silent = False
    with pytest.raises(TrainStepError, match="async_emb communicator aborted") as caught:
        run.step.step(state, BATCHES[4])
    state = run.step.flush(caught.value.state)
    assert int(state.step) == 4
    return skipped, state


def without_step(state: TrainState) -> TrainState:
    return helpers.host_copy(state)._replace(step=None)


@BOTH_MODES
def test_steps_that_fail_in_the_main_context_change_neither_table_nor_dense_parameters(
    mode: str,
) -> None:
    run = Run(mode, make_engine=LateEngine)
    jax.block_until_ready(run.state)
    before = without_step(run.state)
    skipped, state = fail_in_two_steps(run, MAIN)
    assert skipped == [True, True]
    helpers.assert_same_states(without_step(state), before)
    run.step.close()


def test_steps_that_fail_in_the_update_of_shared_rows_are_skipped_as_a_whole() -> None:
    run = Run(EXACT, make_engine=LateEngine)
    skipped, run.state = fail_in_two_steps(run, SHARED_UPDATE)
    assert skipped == [True, True]
    run.assert_as_the_oracle()
    run.step.close()


def test_step_before_a_failed_lookup_of_shared_rows_is_made_as_a_whole() -> None:
    run = Run(EXACT, make_engine=LateEngine)
    run.oracle.step(helpers.oracle_batch(SETUP, BATCHES[2]))
    run.oracle.flush()
    run.done += 1
    skipped, run.state = fail_in_two_steps(run, SHARED_ROWS)
    assert skipped == [False, True]
    run.assert_as_the_oracle()
    run.step.close()


class NoNormEngine(NativeEngine):
    """Fails while it measures the gradients of a step, and in nothing before."""

    def measure(self, *arguments: Any, **named: Any) -> Any:
        norm, *rest = super().measure(*arguments, **named)
        return norm * np.nan, *rest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_step_that_fails_while_its_gradients_are_measured_changes_nothing(
    mode: str, skip_nonfinite: bool
) -> None:
    setup = helpers.toy_setup(helpers.LAZY, max_grad_norm=1.0, skip_nonfinite=skip_nonfinite)
    with TrainStep(setup, mode, make_engine=NoNormEngine) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        before = without_step(state)
        for batch, next_batch in look_ahead(BATCHES[:3]):
            state, metrics = step.step(state, batch, next_batch)
            assert bool(metrics.skipped)
        helpers.assert_same_states(without_step(step.flush(state)), before)


class GatedEngine(NativeEngine):
    """Comes to rest only when it is aborted, like an engine whose peer is lost."""

    def __init__(self, ctx: AsyncEmbContextHandle) -> None:
        super().__init__(ctx)
        self.waiting, self.aborted = threading.Event(), threading.Event()

    def settle(self) -> None:
        self.waiting.set()
        assert self.aborted.wait(timeout=20)
        super().settle()

    def abort(self) -> None:
        super().abort()
        self.aborted.set()


@EACH_CONTEXT
def test_abort_from_another_thread_wakes_a_flush_that_waits_for_any_context(context: int) -> None:
    made: list[NativeEngine] = []
    order = [SHARED_UPDATE, SHARED_ROWS, MAIN]  # in which they are made

    def make_engine(ctx: AsyncEmbContextHandle) -> NativeEngine:
        gated = order[len(made)] == context
        made.append(GatedEngine(ctx) if gated else NativeEngine(ctx))
        return made[-1]

    run = Run(EXACT, make_engine=make_engine)
    engine = run.step._schedule.engines[context]
    assert isinstance(engine, GatedEngine)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(run.step.flush, run.state)
        assert engine.waiting.wait(timeout=20)
        run.step.abort()
        with pytest.raises(TrainStepError, match="async_emb communicator aborted") as caught:
            flushing.result()
    run.state = caught.value.state
    run.assert_as_the_oracle()


@BOTH_MODES
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exception_in_the_program_ends_all_contexts_and_keeps_what_was_deferred(
    mode: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(mode)

    def fail(*_: Any) -> Any:
        raise error("in the program")

    with monkeypatch.context() as patch:
        if mode == EXACT:
            schedule: Any = run.step._schedule
            patch.setattr(schedule, "_ways", dict.fromkeys(schedule._ways, (fail, fail)))
        else:
            patch.setattr(run.step._schedule, "_advance", fail)
        with pytest.raises(error, match="in the program"):
            run.step.step(run.state, BATCHES[2], BATCHES[3])
    run.assert_closed()
    run.finish()


@BOTH_MODES
def test_closed_step_leaves_no_context_and_may_be_followed_by_another(mode: str) -> None:
    run = Run(mode)
    run.step.close()
    run.assert_closed()
    Run(mode, 1).finish()


def test_forgotten_step_ends_all_its_contexts() -> None:
    run = Run(EXACT)
    contexts = run.contexts
    del run
    gc.collect()
    assert [async_emb.stats(ctx) for ctx in contexts] == [{}, {}, {}]
    Run(EXACT, 1).finish()
