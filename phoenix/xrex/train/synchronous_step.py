"""The same training without a pipeline, in plain JAX: what the pipelined step is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp

from xrex.cuda.async_emb.async_emb import RankStats
from xrex.optimizers.recsys import GradientUpdate
from xrex.train.engines import PlainEngine
from xrex.train.evaluation import EvaluationProgram, evaluation_program
from xrex.train.plain_update import plain_update
from xrex.train.prepared_batch import DeviceBatch, PreparedBatch, check_loss, prepare_batch
from xrex.train.train_state import StepMetrics, TrainSetup, TrainState, init_state, shardings_of


class SynchronousTrainStep:
    """Looks up, computes and updates, one after the other: every step sees all earlier updates.

    The interface of `PipelinedTrainStep`, so that one training loop serves both.
    """

    def __init__(self, setup: TrainSetup) -> None:
        self._setup = setup
        self._engine = PlainEngine(setup.ctx)
        self._advance: Any = None
        self._evaluate: EvaluationProgram = evaluation_program(setup, self._engine)

    def init(self, dense_params: Any, table: Any) -> TrainState:
        """Makes the state of a new run; see `init_state`."""
        return init_state(self._setup, dense_params, table)

    def prepare(self, batch: Any) -> PreparedBatch:
        """Makes a batch ready ahead of its step; see `PipelinedTrainStep.prepare`."""
        return prepare_batch(self._setup, batch)

    def step(
        self, state: TrainState, batch: Any, next_batch: Any = None
    ) -> tuple[TrainState, StepMetrics]:
        """Trains on `batch`; `next_batch` is not used. The state is used up (donated).

        Raises:
          TypeError: the batch is malformed.
          ValueError: likewise.
        """
        del next_batch
        prepared = prepare_batch(self._setup, batch)
        if self._advance is None:
            check_loss(self._setup, state.dense_params, prepared.arrays)
            self._advance = jax.jit(
                self._program, donate_argnums=0, out_shardings=(shardings_of(state), None)
            )
        state, metrics = self._advance(state, prepared.arrays)
        metrics.norm.block_until_ready()
        return state, metrics

    def flush(self, state: TrainState) -> TrainState:
        """Returns the state: nothing is ever in flight."""
        return state

    def evaluate(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array, Any]:
        """Runs the loss function on a batch without training; as `PipelinedTrainStep.evaluate`."""
        prepared = prepare_batch(self._setup, batch)
        table, loss, aux = self._evaluate(state.table, state.dense_params, prepared.arrays)
        loss.block_until_ready()
        return state._replace(table=table), loss, aux

    def counters(self) -> Mapping[int, RankStats]:
        """No counters: see `PipelinedTrainStep.counters`."""
        return {}

    def close(self) -> None:
        """Does nothing: nothing is ever open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _program(self, state: TrainState, batch: DeviceBatch) -> tuple[TrainState, StepMetrics]:
        setup = self._setup
        table, embeddings = self._engine.lookup_start(batch.ids, state.table, batch.ids)
        loss, pullback, aux = jax.vjp(
            lambda params, rows: setup.loss(params, rows, batch.batch),
            state.dense_params,
            embeddings,
            has_aux=True,
        )
        params_grad, embeddings_grad = pullback(jnp.ones_like(loss))
        dense_params, dense_opt_state = setup.apply_dense(state, params_grad)
        step = state.step + 1
        result = plain_update(
            setup.embedding_optimizer,
            GradientUpdate(embeddings_grad, batch.segment_ids, batch.unique_tokens, jnp.int32(1)),
            table,
            state.embedding_state,
            setup.ctx,
            step=step,
            learning_rate=setup.learning_rate_at(step),
        )
        new_state = TrainState(step, dense_params, dense_opt_state, result.table, result.state)
        return new_state, StepMetrics(loss, aux, result.norm, jnp.bool_(False))
