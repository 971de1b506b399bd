"""The staleness mode `synchronous`: look up, compute, update, one after the other."""

from __future__ import annotations

from typing import Any

import jax

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
from xrex.train.train_state import StepMetrics, TrainSetup, TrainState


class SynchronousSchedule(Schedule):
    """The same calls as in the other modes, start and done back to back: nothing ever waits.

    The rows of a step have seen every update of the steps before it.
    """

    def __init__(self, setup: TrainSetup, engine: EmbeddingEngine) -> None:
        super().__init__(setup, [engine])
        self._advance: Any = None

    def _make_programs(self, like_state: Any) -> None:
        self._advance = jax.jit(
            self.advance_program, donate_argnums=0, out_shardings=(like_state, None)
        )

    def _try_programs(
        self, state: TrainState, batch: DeviceBatch, following: PreparedBatch | None
    ) -> None:
        del following
        jax.eval_shape(self._advance, state, batch)

    def advance(
        self, state: TrainState, current: PreparedBatch, following: PreparedBatch | None
    ) -> tuple[TrainState, StepMetrics]:
        """See `Schedule`. The next batch is not looked at."""
        del following
        state, metrics = self._advance(state, current.arrays)
        self.started(metrics.norm)
        return self.stepped(state), metrics

    def advance_program(
        self, state: TrainState, batch: DeviceBatch
    ) -> tuple[TrainState, StepMetrics]:
        """The program of a step."""
        setup, (engine,) = self.setup, self.engines
        table, pin = engine.lookup_start(batch.ids, state.table, batch.ids)
        embeddings, table = engine.lookup_done(table, pin)
        dense = DensePass(setup, engine, state.dense_params, embeddings, batch, after=state.step)
        params_grad, embeddings_grad = dense.backward(after=pin)
        step = state.step + 1
        gradients, sparse = settle_gradients(
            dense, params_grad, embeddings_grad, SparseState(table, state.embedding_state), step
        )
        update = Deferred(gradients.update, step)
        in_flight = self.start_update(*sparse, update, gradients.update.pending)
        result = engine.update_done(setup.embedding_optimizer, in_flight, step)
        failed = has_failed(result.norm, result.valid)
        dense_params, dense_opt_state, skipped = finish_dense(setup, state, gradients, failed)
        metrics = StepMetrics(dense.loss, dense.aux, result.norm, gradients.norm, skipped)
        new_state = TrainState(step, dense_params, dense_opt_state, result.table, result.state)
        return new_state, metrics
