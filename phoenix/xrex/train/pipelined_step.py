"""A training step whose embedding exchange runs beside the dense computation.

The schedule of step t, with a staleness of one step (t - 1's gradients are applied during t):

    take the rows looked up for t  |  start the update with the gradients of t - 1
    dense forward                  |  (the update runs beside it)
    end the update                 |  start the lookup for t + 1 in the updated table
    dense backward                 |  (the lookup runs beside it)
    keep the gradients of t for t + 1

So the rows of step t have seen the updates of the steps up to t - 2. The first step, also the first
after `flush`, looks its own batch up before anything else, and its rows have seen every update.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import jax

from xrex.cuda.async_emb.async_emb import RankStats
from xrex.train.engines import EmbeddingEngine, select_engine
from xrex.train.pipeline_programs import Deferred, PipelinePrograms, nothing_deferred
from xrex.train.prepared_batch import PreparedBatch, check_loss, prepare_batch
from xrex.train.train_state import StepMetrics, TrainSetup, TrainState, init_state

# XLA's CPU client stops for good when too many programs with collectives wait in its queue.
MAX_STEPS_IN_FLIGHT = 16


class TrainStepError(RuntimeError):
    """The engine failed on its own: a time-out, an abort, a lost peer.

    Attributes:
      state: the state that the failed steps left behind. They changed neither dense parameters nor
        table, only the step counter; the gradients that the first of them was about to apply to
        the table are lost. The run may go on from this state, or from a checkpoint.
    """

    def __init__(self, message: str, state: TrainState) -> None:
        super().__init__(message)
        self.state = state


@dataclasses.dataclass
class _Pipeline:
    """What is between two steps: the armed lookup, the table it reads, the deferred gradients.

    `running` holds a result of each program that nobody has waited for yet.
    """

    engine: EmbeddingEngine
    armed: PreparedBatch | None = None
    pin: jax.Array | None = None
    table: jax.Array | None = None
    deferred: Deferred | None = None
    running: collections.deque[jax.Array] = dataclasses.field(default_factory=collections.deque)

    def arm(self, batch: PreparedBatch | None, pin: jax.Array | None, table: jax.Array) -> None:
        """Notes a started lookup; the reference keeps the table while the lookup reads it."""
        self.armed, self.pin, self.table = batch, pin, table if batch is not None else None

    def started(self, result: jax.Array) -> None:
        """Notes a started program, and waits for an old one if too many are running."""
        self.running.append(result)
        if len(self.running) > MAX_STEPS_IN_FLIGHT:
            self.running.popleft().block_until_ready()

    def wait(self) -> None:
        """Waits for all programs, whether they fail or not."""
        while self.running:
            with contextlib.suppress(Exception):  # seen by whoever uses the result
                self.running.popleft().block_until_ready()

    def end(self) -> None:
        """Ends the exchange, and only then lets the table go. Leaves the deferred gradients.

        Programs end by themselves: the engine is there, if only to fail them.
        """
        self.wait()
        if self.pin is not None:
            self.engine.abort()  # a lookup that no program will take
        self.engine.close()
        self.armed = self.pin = self.table = None

    def end_at_exit(self) -> None:
        """Ends what a forgotten step object left in flight."""
        if self.pin is not None or self.running:
            self.end()


class PipelinedTrainStep:
    """Runs training steps and owns what is in flight between them.

    A state goes in and the next one comes out; the one that went in is used up (donated). While a
    lookup is armed, the state that came out last is the only one that may go in.

    The object holds a native context open. Use it in a `with` block, or call `close`.
    """

    def __init__(self, setup: TrainSetup, engine: EmbeddingEngine | None = None) -> None:
        self._setup = setup
        self._engine = engine or select_engine(setup.ctx)
        self._pipeline = _Pipeline(self._engine)
        self._lock = threading.RLock()
        self._programs: PipelinePrograms | None = None
        self._at_exit = weakref.finalize(self, self._pipeline.end_at_exit)

    def init(self, dense_params: Any, table: Any) -> TrainState:
        """Makes the state of a new run; see `init_state`."""
        return init_state(self._setup, dense_params, table)

    def prepare(self, batch: Any) -> PreparedBatch:
        """Checks a batch, groups its tokens and starts its way to the devices.

        `step` and `evaluate` take the result in place of the batch, and then need not do it. Safe
        from any thread, beside a running step.

        Raises:
          TypeError: the batch is malformed.
          ValueError: likewise.
        """
        return prepare_batch(self._setup, batch)

    def step(
        self, state: TrainState, batch: Any, next_batch: Any = None
    ) -> tuple[TrainState, StepMetrics]:
        """Trains on `batch` and starts the lookup of `next_batch`.

        Args:
          state: the state that came out last. It is used up.
          batch: the batch that was `next_batch` of the step before, if that step had one. Prepared
            or not, this is to be the same object.
          next_batch: the batch of the next step; None arms no lookup.

        Returns:
          The next state, and the step's metrics; both may still be computed when this returns.

        Raises:
          TypeError: a batch is malformed. Nothing has happened, the state is as good as before.
          ValueError: likewise; also when `batch` is not the one whose lookup is armed, or `state`
            is not the one that came out last.
          TrainStepError: the engine failed; the error holds the state to go on with.
        """
        with self._lock:
            self._raise_if_failed(state)
            current = self._claim(state, batch)
            following = None if next_batch is None else prepare_batch(self._setup, next_batch)
            programs = self._programs_for(state, current)
            with self._ending_on_error():
                if self._pipeline.pin is None:
                    state = self._refill(programs, state, current)
                deferred = self._pipeline.deferred or nothing_deferred(self._setup)
                next_ids = None if following is None else following.arrays.ids
                state, self._pipeline.deferred, pin, metrics = programs.advance(
                    state, deferred, self._pipeline.pin, current.arrays, next_ids
                )
                self._pipeline.arm(following, pin, state.table)
                self._pipeline.started(metrics.norm)
            self._raise_if_failed(state)
            return state, metrics

    def flush(self, state: TrainState) -> TrainState:
        """Brings the pipeline to rest: applies the deferred gradients, drops an armed lookup.

        To be called after the last step, and before the state is saved or evaluated. The state is
        used up; in the one that comes out the table has seen every update.

        Raises:
          ValueError: `state` is not the one that came out last.
          TrainStepError: the engine failed; the error holds the state to go on with.
        """
        with self._lock:
            self._raise_if_failed(state)
            self._require_current(state)
            if self._programs is None:
                return state  # no step was ever made
            with self._ending_on_error():
                if self._pipeline.pin is not None:
                    table = self._programs.discard(state.table, self._pipeline.pin)
                    state = state._replace(table=table.block_until_ready())
                    self._pipeline.arm(None, None, table)
                state = self._apply_deferred(self._programs, state)
                self._pipeline.wait()
            self._raise_if_failed(state, self._engine.settle)
            return state

    def evaluate(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array, Any]:
        """Runs the loss function on a batch without training. Leaves nothing in flight.

        Returns:
          The state with the same values, the loss float32 [] and the loss function's aux.

        Raises:
          RuntimeError: the pipeline is not at rest; `flush` first.
          TypeError: the batch is malformed.
          ValueError: likewise.
          TrainStepError: the engine failed; the error holds the state to go on with.
        """
        with self._lock:
            if self._pipeline.pin is not None or self._pipeline.deferred is not None:
                raise RuntimeError(
                    "evaluate was called in the middle of the pipeline; call flush(state) first, "
                    "so that the table has seen every update"
                )
            self._raise_if_failed(state)
            prepared = prepare_batch(self._setup, batch)
            programs = self._programs_for(state, prepared)
            with self._ending_on_error():
                self._engine.open()
                table, loss, aux = programs.evaluate(
                    state.table, state.dense_params, prepared.arrays
                )
                state = state._replace(table=table)
                loss.block_until_ready()
            self._raise_if_failed(state)
            return state, loss, aux

    def counters(self) -> Mapping[int, RankStats]:
        """The engine's counters by rank, since it was opened; empty on the plain JAX path."""
        return self._engine.counters()

    def abort(self) -> None:
        """Ends the exchange at once. Safe from any thread, and twice.

        Whoever waits inside `step` or `flush` wakes up with a TrainStepError. Gradients that no
        step has taken yet stay deferred; a later `step` or `flush` opens the engine again and
        applies them.
        """
        self._engine.abort()
        with self._lock:
            self._pipeline.end()

    def close(self) -> None:
        """Ends the exchange and forgets deferred gradients; `flush` before it to keep them."""
        with self._lock:
            self._pipeline.deferred = None
            self._pipeline.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _claim(self, state: TrainState, batch: Any) -> PreparedBatch:
        """The prepared form of `batch`: the armed one, or a new one if none is armed."""
        self._require_current(state)
        armed = self._pipeline.armed
        if armed is None:
            return prepare_batch(self._setup, batch)
        if armed is not batch and armed.source is not batch:
            raise ValueError(
                "a lookup is armed for the next_batch of the step before, and this is another "
                "batch; pass that one, or call flush(state) to drop the lookup"
            )
        return armed

    def _require_current(self, state: TrainState) -> None:
        if self._pipeline.table is not None and self._pipeline.table is not state.table:
            raise ValueError(
                "a lookup is armed on the table of the state that came out last, and this is "
                "another state; pass that one, or call abort() to drop lookup and updates in flight"
            )

    def _refill(
        self, programs: PipelinePrograms, state: TrainState, current: PreparedBatch
    ) -> TrainState:
        """Looks the step's own batch up, in a table that has seen every update."""
        self._engine.open()
        state = self._apply_deferred(programs, state)
        table, pin = programs.prime(state.table, current.arrays.ids)
        self._pipeline.started(pin)
        self._pipeline.arm(current, pin, table)
        return state._replace(table=table)

    def _apply_deferred(self, programs: PipelinePrograms, state: TrainState) -> TrainState:
        deferred = self._pipeline.deferred
        if deferred is None:
            return state
        self._engine.open()
        self._pipeline.deferred = None
        table, embedding_state = programs.apply(state.table, state.embedding_state, deferred)
        return state._replace(table=table.block_until_ready(), embedding_state=embedding_state)

    def _programs_for(self, state: TrainState, batch: PreparedBatch) -> PipelinePrograms:
        if self._programs is None:
            check_loss(self._setup, state.dense_params, batch.arrays)
            self._programs = PipelinePrograms(self._setup, self._engine, state)
        return self._programs

    def _raise_if_failed(
        self, state: TrainState, host_call: Callable[[], None] | None = None
    ) -> None:
        """Makes a host call of the engine, by default its check; failing, it ends the exchange."""
        try:
            (host_call or self._engine.check)()
        except RuntimeError as error:
            self._pipeline.end()
            raise TrainStepError(
                f"{error}; the failed step was skipped: go on from the state in this error, or "
                "from a checkpoint",
                state,
            ) from error

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Ends the exchange when anything goes wrong after the first program was started."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self._engine.abort()  # an interrupt does not wait for a slow peer
            self._pipeline.end()
            deferred = self._pipeline.deferred
            if deferred is not None and deferred.step.is_deleted():
                self._pipeline.deferred = None  # used up by the program that failed
            raise
