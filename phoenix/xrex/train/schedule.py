"""What the staleness modes of a training step have in common.

A schedule owns what is between two steps of its mode: gradients that wait for the next step, and
what was looked up for it. It starts compiled programs and waits for them; the training step that
holds it decides when, and what to do with errors.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrex.optimizers.recsys import GradientUpdate
from xrex.train.engines import EmbeddingEngine
from xrex.train.prepared_batch import DeviceBatch, PreparedBatch, check_loss
from xrex.train.train_state import (
    StepMetrics,
    TrainSetup,
    TrainState,
    array_like,
    place,
    shardings_of,
)

# XLA's CPU client stops for good when too many programs with collectives wait in its queue.
MAX_STEPS_IN_FLIGHT = 16
_POLL_SECS = 0.005


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
      deferred: gradients that no step has taken yet. They belong to the state that came out last.
    """

    def __init__(self, setup: TrainSetup, engines: Sequence[EmbeddingEngine]) -> None:
        self.setup, self.engines = setup, tuple(engines)
        self.armed: PreparedBatch | None = None
        self.table: jax.Array | None = None
        self.deferred: Deferred | None = None
        self._running: collections.deque[jax.Array] = collections.deque()
        self._latest: weakref.ref[jax.Array] | None = None
        self._stepped: weakref.ref[jax.Array] | None = None  # the table that a step gave back
        self._like_state: Any = None
        self._tried: set[Any] = set()
        self._apply: Any = None

    @property
    def is_at_rest(self) -> bool:
        """Whether the table has seen every update and nothing was looked up ahead."""
        return self.armed is None and self.deferred is None

    def is_latest(self, state: TrainState) -> bool:
        """Whether this is the state that came out last."""
        return self._latest is not None and self._latest() is state.table

    def stepped(self, state: TrainState) -> TrainState:
        """Notes and returns the state that comes out of a step, and fits the programs."""
        self._stepped = weakref.ref(state.table)
        return self.came_out(state)

    def came_out(self, state: TrainState) -> TrainState:
        """Notes and returns the state that comes out."""
        self._latest = weakref.ref(state.table)
        return state

    def make_ready(
        self, state: TrainState, current: PreparedBatch, following: PreparedBatch | None
    ) -> None:
        """Makes the programs for such a state, and tries such batches on them, all without data.

        What cannot be traced is thus found before the state is used up.

        Raises:
          TypeError: the loss function does not return what it should.
          Exception: what the loss function, a schedule or an optimizer raises when it is traced.
        """
        is_known = self._stepped is not None and self._stepped() is state.table
        like = self._like_state if is_known else (shardings_of(state), types_of(state))
        if like != self._like_state:
            check_loss(self.setup, state.dense_params, current.arrays)
            shardings, _ = like
            self._apply = jax.jit(
                self._apply_program,
                donate_argnums=(0, 1),
                out_shardings=(self.setup.table_sharding(), shardings.embedding_state),
            )
            self._make_programs(shardings)
            self._tried.clear()
            self._like_state = like
        kind = (types_of(current.arrays), following is None)
        if kind not in self._tried:
            self._try_programs(state, current.arrays, following)
            self._tried.add(kind)

    @abc.abstractmethod
    def _try_programs(
        self, state: TrainState, batch: DeviceBatch, following: PreparedBatch | None
    ) -> None:
        """Traces or compiles the programs of a step, without running one."""

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
        if self.deferred is None:
            return state
        table, embedding_state = self._apply(state.table, state.embedding_state, self.deferred)
        self.deferred = None
        self.finish(table)
        return state._replace(table=table, embedding_state=embedding_state)

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

    def deferred_like(self) -> Deferred:
        """Shapes, types and shardings of deferred gradients."""
        ctx, tokens = self.setup.ctx, self.setup.token_sharding()
        num_tokens, replicated = ctx.tokens_per_batch, self.setup.replicated()
        update = GradientUpdate(
            grads=array_like((num_tokens, ctx.emb_width), jnp.bfloat16, tokens),
            segment_ids=array_like((num_tokens,), jnp.int32, tokens),
            unique_tokens=array_like((ctx.num_unique,), jnp.int32, replicated),
            pending=array_like((), jnp.int32, replicated),
        )
        return Deferred(update, array_like((), jnp.int32, replicated))

    def started(self, result: jax.Array) -> None:
        """Notes a result of a started program, and waits for an old one if too many run."""
        self._running.append(result)
        if len(self._running) > MAX_STEPS_IN_FLIGHT:
            self._running.popleft().block_until_ready()

    def finish(self, result: jax.Array) -> None:
        """Waits for a result of a started program; interrupted, it stays one to be waited for."""
        self._running.append(result)
        result.block_until_ready()
        self._running.pop()

    def wait_at_most(self, secs: float) -> bool:
        """Waits for all programs, but no longer than this; says whether all have ended."""
        limit = time.monotonic() + secs
        while self._running:
            oldest: Any = self._running[0]  # whose type does not tell that it can be asked
            if oldest.is_ready():
                self._running.popleft()
            elif time.monotonic() < limit:
                time.sleep(_POLL_SECS)
            else:
                return False
        return True

    def wait(self) -> None:
        """Waits for all programs, whether they fail or not."""
        while self._running:
            with contextlib.suppress(Exception):  # seen by whoever uses the result
                self._running.popleft().block_until_ready()

    def open(self) -> None:
        """Makes the engines ready where they are not; collective.

        Raises:
          RuntimeError: one of them has failed, or cannot be made ready.
        """
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

    def forget(self) -> None:
        """Forgets deferred gradients and what is known of batches to come."""
        self.deferred = None

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

    def forget_used_up(self, state: TrainState) -> None:
        """Forgets deferred gradients if a program that failed took them, or took their state."""
        if self.deferred is None:
            return
        if self.deferred.step.is_deleted() or state.table.is_deleted():
            self.deferred = None


def types_of(tree: Any) -> Any:
    """What tells programs that take this pytree from those that take another."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def nothing_deferred(setup: TrainSetup) -> Deferred:
    """What a first step finds instead of gradients: the exchange runs and changes nothing."""
    empty = GradientUpdate.empty(setup.ctx, setup.vocab_rows)
    pending, step = (place(np.int32(0), setup.replicated()) for _ in range(2))
    return Deferred(empty._replace(pending=pending), step)
