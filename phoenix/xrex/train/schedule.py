"""What the staleness modes of a training step have in common.

A schedule owns what is between two steps of its mode: gradients that wait for the next step, and
what was looked up for it. It starts compiled programs and waits for them; the training step that
holds it decides when, and what to do with errors.
"""

from __future__ import annotations

import abc
import collections
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xrex.optimizers.recsys import GradientUpdate
from xrex.train.engines import EmbeddingEngine
from xrex.train.prepared_batch import PreparedBatch, check_loss
from xrex.train.train_state import StepMetrics, TrainSetup, TrainState, place, shardings_of

# XLA's CPU client stops for good when too many programs with collectives wait in its queue.
MAX_STEPS_IN_FLIGHT = 16


class Deferred(NamedTuple):
    """The gradients of a step, kept for the next one, and the number of their step (int32 [])."""

    update: GradientUpdate
    step: jax.Array


class Schedule(abc.ABC):
    """The programs of one staleness mode and what is between two of its steps.

    Attributes:
      engines: what the programs exchange by, the first one being for whole batches.
      armed: the batch whose rows were looked up ahead, or are being looked up; None at rest.
      table: the table that rows were looked up in ahead; the reference keeps it alive.
      deferred: gradients that no step has taken yet.
    """

    def __init__(self, setup: TrainSetup, engines: Sequence[EmbeddingEngine]) -> None:
        self.setup, self.engines = setup, tuple(engines)
        self.armed: PreparedBatch | None = None
        self.table: jax.Array | None = None
        self.deferred: Deferred | None = None
        self._running: collections.deque[jax.Array] = collections.deque()
        self._is_compiled = False
        self._apply: Any = None

    @property
    def is_at_rest(self) -> bool:
        """Whether the table has seen every update and nothing was looked up ahead."""
        return self.armed is None and self.deferred is None

    def compile(self, state: TrainState, batch: PreparedBatch) -> None:
        """Makes the programs, at the first call.

        Raises:
          TypeError: the loss function does not return what it should.
        """
        if self._is_compiled:
            return
        check_loss(self.setup, state.dense_params, batch.arrays)
        table, like_state = self.setup.table_sharding(), shardings_of(state)
        self._apply = jax.jit(
            self._apply_program,
            donate_argnums=(0, 1),
            out_shardings=(table, like_state.embedding_state),
        )
        self._make_programs(like_state)
        self._is_compiled = True

    @abc.abstractmethod
    def _make_programs(self, like_state: Any) -> None:
        """Makes the programs of the mode; the state is sharded like `like_state`."""

    def prepared(self, number: int, batch: PreparedBatch) -> None:
        """Told of every batch once it is prepared, in any thread.

        Args:
          number: its place in the order in which batches were begun to be prepared.
          batch: the prepared batch.
        """
        del number, batch  # of use to modes that compare neighbouring batches

    @abc.abstractmethod
    def advance(
        self, state: TrainState, current: PreparedBatch, following: PreparedBatch | None
    ) -> tuple[TrainState, StepMetrics]:
        """Runs a step on `current` and looks ahead to `following`. Uses the state up."""

    def come_to_rest(self, state: TrainState) -> TrainState:
        """Drops what was looked up ahead, applies deferred gradients, waits. Uses the state up."""
        state = self._drop_lookup(state)
        state = self.apply_deferred(state)
        self.wait()
        return state

    def _drop_lookup(self, state: TrainState) -> TrainState:
        """Ends a lookup that no step will take."""
        self.armed = self.table = None
        return state

    def apply_deferred(self, state: TrainState) -> TrainState:
        """Applies the deferred gradients, if there are any."""
        deferred = self.deferred
        if deferred is None or not self._is_compiled:
            return state
        self.open()
        self.deferred = None
        table, embedding_state = self._apply(state.table, state.embedding_state, deferred)
        return state._replace(table=table.block_until_ready(), embedding_state=embedding_state)

    def _apply_program(
        self, table: jax.Array, embedding_state: Any, deferred: Deferred
    ) -> tuple[jax.Array, Any]:
        in_flight = self.start_update(table, embedding_state, deferred, deferred.step)
        optimizer = self.setup.embedding_optimizer
        result = self.engines[0].update_done(optimizer, in_flight, deferred.step)
        return result.table, result.state

    def start_update(
        self, table: jax.Array, embedding_state: Any, deferred: Deferred, gate: jax.Array
    ) -> Any:
        """Starts the update of a step's gradients, after `gate`, inside a program."""
        return self.engines[0].update_start(
            self.setup.embedding_optimizer,
            deferred.update,
            table,
            embedding_state,
            gate,
            step=deferred.step,
            learning_rate=self.setup.learning_rate_at(deferred.step),
        )

    def take_deferred(self) -> Deferred:
        """The deferred gradients, or some that change nothing. To be donated."""
        return self.deferred or nothing_deferred(self.setup)

    def deferred_sharding(self) -> Any:
        """How deferred gradients lie on the mesh."""
        tokens: Any = self.setup.token_sharding()
        replicated: Any = self.setup.replicated()
        return Deferred(GradientUpdate(tokens, tokens, replicated, replicated), replicated)

    def started(self, result: jax.Array) -> None:
        """Notes a result of a started program, and waits for an old one if too many run."""
        self._running.append(result)
        if len(self._running) > MAX_STEPS_IN_FLIGHT:
            self._running.popleft().block_until_ready()

    def wait(self) -> None:
        """Waits for all programs, whether they fail or not."""
        while self._running:
            with contextlib.suppress(Exception):  # seen by whoever uses the result
                self._running.popleft().block_until_ready()

    def open(self) -> None:
        """Makes the engines ready; collective."""
        for engine in self.engines:
            engine.open()

    def check(self) -> None:
        """Raises the error that an engine failed with, if one did."""
        for engine in self.engines:
            engine.check()

    def settle(self) -> None:
        """Waits until nothing is in flight and forgets where the table lies."""
        for engine in self.engines:
            engine.settle()

    def abort(self) -> None:
        """Ends every exchange. Safe from any thread."""
        for engine in self.engines:
            engine.abort()

    def end(self) -> None:
        """Ends the exchange, and only then lets the table go. Leaves the deferred gradients.

        Programs end by themselves: the engines are there, if only to fail them.
        """
        self.wait()
        if self._lookup_in_flight:
            self.abort()  # no program will take it
        for engine in self.engines:
            engine.close()
        self._forget_lookup()

    @property
    def _lookup_in_flight(self) -> bool:
        """Whether a lookup was started that only the next program ends."""
        return False

    def _forget_lookup(self) -> None:
        self.armed = self.table = None

    def end_at_exit(self) -> None:
        """Ends what a forgotten training step left in flight."""
        if self.armed is not None or self._running:
            self.end()

    def forget_used_up(self) -> None:
        """Forgets deferred gradients that a program took and failed with."""
        if self.deferred is not None and self.deferred.step.is_deleted():
            self.deferred = None


def nothing_deferred(setup: TrainSetup) -> Deferred:
    """What a first step finds instead of gradients: the exchange runs and changes nothing."""
    empty = GradientUpdate.empty(setup.ctx, setup.vocab_rows)
    pending, step = (place(np.int32(0), setup.replicated()) for _ in range(2))
    return Deferred(empty._replace(pending=pending), step)
