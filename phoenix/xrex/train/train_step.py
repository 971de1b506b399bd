"""A training step whose embedding exchange is scheduled for you, with a staleness mode by name."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import jax

from xrex.cuda.async_emb.async_emb import RankStats
from xrex.train.engines import EmbeddingEngine, EngineFactory, select_engine
from xrex.train.evaluation import (
    EvaluationProgram,
    LookupProgram,
    evaluation_program,
    lookup_program,
)
from xrex.train.exact_schedule import ExactSchedule, SharedCounts
from xrex.train.one_step_schedule import OneStepSchedule
from xrex.train.prepared_batch import PreparedBatch, check_loss, prepare_batch
from xrex.train.schedule import Schedule, types_of
from xrex.train.staleness import EXACT, ONE_STEP, SharedCapacity, require_mode
from xrex.train.synchronous_schedule import SynchronousSchedule
from xrex.train.train_state import StepMetrics, TrainSetup, TrainState, init_state

# How long an interrupted call lets steps that were started before come to their end.
_PATIENCE_SECS = 5.0


class TrainStepError(RuntimeError):
    """The engine failed on its own: a time-out, an abort, a lost peer.

    Attributes:
      state: the state that the failed steps left behind. They changed neither dense parameters nor
        table, only the step counter; the gradients that the first of them was about to apply to
        the table are lost, in the mode EXACT perhaps after those of the same step for shared rows
        were applied. The run may go on from this state; or, after `TrainStep.close`, from a
        checkpoint.
    """

    def __init__(self, message: str, state: TrainState) -> None:
        super().__init__(message)
        self.state = state


class TrainStep:
    """Runs training steps and owns what is in flight between them.

    A state goes in and the next one comes out; the one that went in is used up (donated). While a
    batch is looked up ahead, the state that came out last is the only one that may go in.

    The object holds native contexts open. Use it in a `with` block, or call `close`. Its methods
    start compiled programs and are not to be traced themselves.

    Args:
      setup: what to train and how.
      staleness: which updates the rows of a step have seen. ONE_STEP: those up to the step before
        the last, with the whole exchange hidden; EXACT: all, with most of it hidden; SYNCHRONOUS:
        all, with nothing hidden. See docs/staleness.md.
      shared: for EXACT, what it is compiled for; by default half the rows that a batch may have and
        all tokens of a rank.
      make_engine: what exchanges for a context. By default the native engine, or plain JAX where
        that cannot reach all devices.

    Raises:
      ValueError: there is no such mode; `shared` exceeds the batch, or the mode has no use for it.
    """

    def __init__(
        self,
        setup: TrainSetup,
        staleness: str = ONE_STEP,
        *,
        shared: SharedCapacity | None = None,
        make_engine: EngineFactory = select_engine,
    ) -> None:
        self._setup = setup
        self.staleness = require_mode(staleness)
        if shared is not None and staleness != EXACT:
            raise ValueError(f"shared={shared} is of use in the mode {EXACT!r}, not {staleness!r}")
        self._schedule = _make_schedule(setup, staleness, shared, make_engine)
        self._lock = threading.RLock()
        self._busy_thread: int | None = None  # written with _lock, by the thread that holds it
        self._untold: RuntimeError | None = None  # guarded by _lock
        self._numbers = itertools.count()
        self._evaluation_secs = 0.0  # that the engine's open contexts waited for; with _lock
        self._evaluate: EvaluationProgram = evaluation_program(setup, self._schedule.engines[0])
        self._evaluated: set[Any] = set()
        self._look_up: LookupProgram = lookup_program(setup, self._schedule.engines[0])
        self._at_exit = weakref.finalize(self, self._schedule.end_at_exit)

    def init(self, dense_params: Any, table: Any) -> TrainState:
        """Makes the state of a new run; see `init_state`."""
        return init_state(self._setup, dense_params, table)

    def prepare(self, batch: Any) -> PreparedBatch:
        """Checks a batch, groups its tokens and starts its way to the devices.

        `step`, `lookup` and `evaluate` take the result in place of the batch, and then need not do
        it. Safe from any thread, beside a running step and each other. In the mode EXACT the rows
        that two batches share are found here, too, if they are prepared in the order of their
        steps.

        Raises:
          TypeError: the batch is malformed.
          ValueError: likewise.
        """
        if isinstance(batch, PreparedBatch):
            return batch
        number = next(self._numbers)
        prepared = prepare_batch(self._setup, batch)
        self._schedule.prepared(number, prepared)
        return prepared

    def step(
        self, state: TrainState, batch: Any, next_batch: Any = None
    ) -> tuple[TrainState, StepMetrics]:
        """Trains on `batch` and looks ahead to `next_batch`.

        Args:
          state: the state that came out last. It is used up.
          batch: the batch that was `next_batch` of the step before, if that step had one. Prepared
            or not, this is to be the same object.
          next_batch: the batch of the next step; None looks nothing up.

        Returns:
          The next state, and the step's metrics; both may still be computed when this returns.

        Raises:
          TypeError: a batch is malformed, or the call is being traced. Nothing has happened, the
            state is as good as before.
          ValueError: a batch is malformed, likewise; `batch` is not the one that was looked up, or
            `state` is not the one that came out last.
          TrainStepError: the engine failed; the error holds the state to go on with.
        """
        _refuse_tracing("step", (state, _arrays_of(batch), _arrays_of(next_batch)))
        with self._exclusively():
            self._raise_if_failed(state)
            current = self._claim(state, batch)
            following = None if next_batch is None else self.prepare(next_batch)
            self._schedule.make_ready(state, current, following)
            self._raise_if_failed(state, self._schedule.open)
            with self._ending_on_error(state):
                state, metrics = self._schedule.advance(state, current, following)
            self._raise_if_failed(state)
            return state, metrics

    def flush(self, state: TrainState) -> TrainState:
        """Brings the pipeline to rest: applies deferred gradients, drops what was looked up ahead.

        To be called after the last step, and before the state is saved or evaluated. The state is
        used up; in the one that comes out the table has seen every update.

        Raises:
          TypeError: the call is being traced.
          ValueError: `state` is not the one that came out last.
          TrainStepError: the engine failed; the error holds the state to go on with.
        """
        _refuse_tracing("flush", state)
        with self._exclusively():
            self._raise_if_failed(state)
            self._require_current(state)
            if not self._schedule.is_at_rest:
                self._raise_if_failed(state, self._schedule.open)
            with self._ending_on_error(state):
                state = self._schedule.come_to_rest(state)
            self._raise_if_failed(state, self._schedule.settle)
            return self._schedule.came_out(state)

    def lookup(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Looks a batch up without training. Leaves nothing in flight, however often.

        Returns:
          The state with the same values; and embeddings bf16 of the ids' pytree, [B, F, W] for ids
          [B, F].

        Raises:
          RuntimeError: the pipeline is not at rest; `flush` first.
          TypeError: the batch is malformed, or the call is being traced.
          ValueError: the batch is malformed.
          TrainStepError: the engine failed; the error holds the state to go on with.
        """
        _refuse_tracing("lookup", (state, _arrays_of(batch)))
        prepared = prepare_batch(self._setup, batch)
        with self._exclusively(), self._evaluating("lookup", state):
            with self._ending_on_error(state):
                table, embeddings = self._look_up(state.table, prepared.arrays)
                state = self._schedule.came_out(state._replace(table=table))
                self._schedule.finish(jax.tree.leaves(embeddings)[0])
            self._raise_if_failed(state)
            return state, embeddings

    def evaluate(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array, Any]:
        """Runs the loss function on a batch without training. Leaves nothing in flight.

        Returns:
          The state with the same values, the loss float32 [] and the loss function's aux.

        Raises:
          As `lookup`.
        """
        _refuse_tracing("evaluate", (state, _arrays_of(batch)))
        prepared = prepare_batch(self._setup, batch)
        with self._exclusively(), self._evaluating("evaluate", state):
            arguments = (state.table, state.dense_params, prepared.arrays)
            kind = types_of(arguments)
            if kind not in self._evaluated:
                check_loss(self._setup, state.dense_params, prepared.arrays)
                self._evaluated.add(kind)
            with self._ending_on_error(state):
                table, loss, aux = self._evaluate(*arguments)
                state = self._schedule.came_out(state._replace(table=table))
                self._schedule.finish(loss)
            self._raise_if_failed(state)
            return state, loss, aux

    def counters(self) -> Mapping[int, RankStats]:
        """Counters of whole batches by rank, since the engine was opened; empty on plain JAX."""
        return self._schedule.engines[0].counters()

    def exposed_secs(self) -> dict[str, float]:
        """Seconds that the dense computation stood still for the exchange, since it was opened.

        A mean over the local ranks, by "lookup" and "update" of whole batches and, in the mode
        EXACT, "shared" rows; evaluation does not count. Empty on plain JAX.
        """
        if not self.counters():
            return {}
        whole, *parts = map(_mean_wait_secs, self._schedule.engines)
        lookup, update = whole
        result = {"lookup": max(0.0, lookup - self._evaluation_secs), "update": update}
        if parts:
            result["shared"] = sum(map(sum, parts))
        return result

    def shared_counts(self) -> SharedCounts | None:
        """In the mode EXACT, how much its steps shared with the steps after them; else None."""
        schedule = self._schedule
        return schedule.counts if isinstance(schedule, ExactSchedule) else None

    def abort(self) -> None:
        """Ends the exchange at once. Safe from any thread, and twice.

        Whoever waits inside `step` or `flush` wakes up with a TrainStepError; so does that call
        when a signal handler calls this in the midst of it. Steps that were started and are still
        running are skipped, and their metrics say so. Gradients that no step has taken yet
        stay deferred; a later `step` or `flush` with the same state opens the engine again and
        applies them.
        """
        self._schedule.abort()
        if self._busy_thread == threading.get_ident():
            return  # the call that was interrupted ends what it began
        with self._exclusively():
            self._end()

    def close(self) -> None:
        """Ends the exchange and forgets deferred gradients; `flush` before it to keep them."""
        with self._exclusively():
            self._schedule.forget()
            self._end()
            self._untold = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Holds the lock, for a call that starts programs."""
        with self._lock:
            before, self._busy_thread = self._busy_thread, threading.get_ident()
            try:
                yield
            finally:
                self._busy_thread = before

    @contextlib.contextmanager
    def _evaluating(self, call: str, state: TrainState) -> Iterator[None]:
        """Requires rest, opens the engine, and keeps what it waits for apart."""
        if not self._schedule.is_at_rest:
            raise RuntimeError(
                f"{call} was called in the middle of the pipeline; call flush(state) first, "
                "so that the table has seen every update"
            )
        self._raise_if_failed(state)
        self._raise_if_failed(state, self._schedule.engines[0].open)
        self._schedule.wait()  # for steps whose own waiting is not that of the evaluation
        before, _ = _mean_wait_secs(self._schedule.engines[0])
        yield
        after, _ = _mean_wait_secs(self._schedule.engines[0])
        self._evaluation_secs += after - before

    def _give_up(self, error: BaseException) -> None:
        """Ends what runs after an interrupt, and keeps what the next call is to tell."""
        if not self._schedule.wait_at_most(_PATIENCE_SECS):
            self._schedule.abort()
            self._untold = RuntimeError(f"steps were running when {error!r} ended them")
            return
        try:
            self._schedule.check()
        except RuntimeError as failure:
            self._untold = failure

    def _end(self) -> None:
        self._schedule.end()
        self._evaluation_secs = 0.0

    def _claim(self, state: TrainState, batch: Any) -> PreparedBatch:
        """The prepared form of `batch`: the one looked up ahead, or a new one at rest."""
        self._require_current(state)
        armed = self._schedule.armed
        if armed is None:
            return self.prepare(batch)
        if armed is not batch and armed.source is not batch:
            raise ValueError(
                "a lookup is armed for the next_batch of the step before, and this is another "
                "batch; pass that one, or call flush(state) to drop the lookup"
            )
        return armed

    def _require_current(self, state: TrainState) -> None:
        if self._schedule.is_at_rest or self._schedule.is_latest(state):
            return
        what = (
            "gradients wait to be applied to"
            if self._schedule.armed is None
            else "a lookup is armed on the table of"
        )
        raise ValueError(
            f"{what} the state that came out last, and this is another state; pass that one, or "
            "call close() to drop lookup and updates in flight"
        )

    def _raise_if_failed(
        self, state: TrainState, host_call: Callable[[], None] | None = None
    ) -> None:
        """Makes a host call of the engines, by default their check; if it fails, ends all."""
        try:
            untold, self._untold = self._untold, None
            if untold is not None:
                raise untold
            (host_call or self._schedule.check)()
        except RuntimeError as error:
            self._end()
            raise TrainStepError(
                f"{error}; the failed step was skipped: go on from the state in this error, or "
                "call close() and go on from a checkpoint",
                state,
            ) from error

    @contextlib.contextmanager
    def _ending_on_error(self, state: TrainState) -> Iterator[None]:
        """Ends the exchange when anything goes wrong after the first program was started."""
        try:
            yield
        except BaseException as error:
            # An interrupt does not wait for a slow peer for long. Steps that it ends are not lost
            # silently: the next call tells.
            if not isinstance(error, Exception):
                self._give_up(error)
            self._end()
            self._schedule.forget_used_up(state)
            raise


def _make_schedule(
    setup: TrainSetup,
    staleness: str,
    shared: SharedCapacity | None,
    make_engine: EngineFactory,
) -> Schedule:
    if staleness == ONE_STEP:
        return OneStepSchedule(setup, make_engine(setup.ctx))
    if staleness == EXACT:
        default = SharedCapacity(
            rows=-(-setup.ctx.num_unique // 2), tokens_per_rank=setup.ctx.tokens_per_rank
        )
        return ExactSchedule(setup, make_engine, shared or default)
    return SynchronousSchedule(setup, make_engine(setup.ctx))


def _mean_wait_secs(engine: EmbeddingEngine) -> tuple[float, float]:
    """Seconds waited for lookups and for updates, each a mean over the local ranks."""
    ranks = engine.counters().values()
    count = max(1, len(ranks))
    lookup = sum(rank.lookup_wait_secs for rank in ranks)
    update = sum(rank.update_wait_secs for rank in ranks)
    return lookup / count, update / count


def _arrays_of(batch: Any) -> Any:
    return batch.arrays if isinstance(batch, PreparedBatch) else batch


def _refuse_tracing(call: str, arguments: Any) -> None:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        raise TypeError(
            f"TrainStep.{call} was traced by a JAX transformation (jit, grad, scan, cond, vmap, "
            "remat, ...); it starts compiled programs and keeps what is in flight between them, so "
            "call it from Python, step by step. Inside the loss function all of them work"
        )
