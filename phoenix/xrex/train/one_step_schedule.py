"""The staleness mode `one_step`: the whole exchange runs beside the dense computation.

The gradients of step t - 1 are applied during step t:

    take the rows looked up for t  |  start the update with the gradients of t - 1
    dense forward                  |  (the update runs beside it)
    end the update                 |  start the lookup for t + 1 in the updated table
    dense backward                 |  (the lookup runs beside it)
    keep the gradients of t for t + 1

So the rows of step t have seen the updates of the steps up to t - 2. The first step, also the first
after it came to rest, looks its own batch up before anything else, and its rows have seen every
update.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xrex.train.dense_pass import (
    DensePass,
    SparseState,
    finish_dense,
    has_failed,
    settle_gradients,
)
from xrex.train.engines import EmbeddingEngine
from xrex.train.prepared_batch import DeviceBatch, PreparedBatch
from xrex.train.schedule import Deferred, Schedule
from xrex.train.train_state import StepMetrics, TrainSetup, TrainState, shardings_of


class OneStepSchedule(Schedule):
    """Between two steps a lookup is armed and the gradients of the last step wait."""

    def __init__(self, setup: TrainSetup, engine: EmbeddingEngine) -> None:
        super().__init__(setup, [engine])
        self._pin: jax.Array | None = None
        self._prime: Any = None
        self._advance: Any = None
        self._discard: Any = None

    def _make_programs(self, like_state: Any) -> None:
        table, tokens = self.setup.table_sharding(), self.setup.token_sharding()
        self._prime = jax.jit(self._prime_program, donate_argnums=0, out_shardings=(table, tokens))
        self._advance = jax.jit(
            self.advance_program,
            donate_argnums=(0, 1),
            out_shardings=(like_state, shardings_of(self.deferred_like()), tokens, None),
        )
        self._discard = jax.jit(self._discard_program, donate_argnums=0, out_shardings=table)

    def _try_programs(
        self, state: TrainState, batch: DeviceBatch, following: PreparedBatch | None
    ) -> None:
        _, pin = jax.eval_shape(self._prime, state.table, batch.ids)
        next_ids = None if following is None else batch.ids
        jax.eval_shape(self._advance, state, self.deferred_like(), pin, batch, next_ids)

    def advance(
        self, state: TrainState, current: PreparedBatch, following: PreparedBatch | None
    ) -> tuple[TrainState, StepMetrics]:
        """See `Schedule`."""
        if self._pin is None:
            state = self._refill(state, current)
        state, self.deferred, pin, metrics = self._advance(
            state,
            self.take_deferred(),
            self._pin,
            current.arrays,
            None if following is None else following.arrays.ids,
        )
        self._arm(following, pin, state.table)
        self.started(metrics.norm)
        return self.stepped(state), metrics

    def _refill(self, state: TrainState, current: PreparedBatch) -> TrainState:
        """Looks the step's own batch up, in a table that has seen every update."""
        state = self.apply_deferred(state)
        table, pin = self._prime(state.table, current.arrays.ids)
        self.started(pin)
        self._arm(current, pin, table)
        return state._replace(table=table)

    def _arm(self, batch: PreparedBatch | None, pin: jax.Array | None, table: jax.Array) -> None:
        self.armed, self._pin, self.table = batch, pin, table if batch is not None else None

    def _drop_lookup(self, state: TrainState) -> TrainState:
        if self._pin is not None:
            table = self._discard(state.table, self._pin)
            self.finish(table)
            state = state._replace(table=table)
            self._arm(None, None, table)
        return state

    @property
    def _lookup_in_flight(self) -> bool:
        return self._pin is not None

    def _forget_lookup(self) -> None:
        super()._forget_lookup()
        self._pin = None

    def _prime_program(self, table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.engines[0].lookup_start(ids, table, ids)

    def _discard_program(self, table: jax.Array, pin: jax.Array) -> jax.Array:
        return self.engines[0].lookup_done(table, pin)[1]

    def advance_program(
        self,
        state: TrainState,
        deferred: Deferred,
        pin: jax.Array,
        batch: DeviceBatch,
        next_ids: jax.Array | None,
    ) -> tuple[TrainState, Deferred, jax.Array | None, StepMetrics]:
        """The program of a step; `next_ids` int32 [N] are looked up for the next one."""
        setup, (engine,) = self.setup, self.engines
        embeddings, table = engine.lookup_done(state.table, pin)
        in_flight = self.start_update(table, state.embedding_state, deferred, embeddings)
        dense = DensePass(setup, engine, state.dense_params, embeddings, batch, after=in_flight.pin)
        result = engine.update_done(setup.embedding_optimizer, in_flight, dense.loss)
        failed = has_failed(result.norm, result.valid)
        table, next_pin = result.table, None
        if next_ids is not None:
            table, next_pin = engine.lookup_start(next_ids, table, result.pin)
        params_grad, embeddings_grad = dense.backward(
            after=result.pin if next_pin is None else next_pin
        )
        step = state.step + 1
        gradients, sparse = settle_gradients(
            dense, params_grad, embeddings_grad, SparseState(table, result.state), step
        )
        dense_params, dense_opt_state, skipped = finish_dense(setup, state, gradients, failed)
        pending = jnp.where(failed, 0, gradients.update.pending)
        metrics = StepMetrics(dense.loss, dense.aux, result.norm, gradients.norm, skipped)
        return (
            TrainState(step, dense_params, dense_opt_state, sparse.table, sparse.embedding_state),
            Deferred(gradients.update._replace(pending=pending), step),
            next_pin,
            metrics,
        )
