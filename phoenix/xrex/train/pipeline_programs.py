"""The compiled programs of the pipelined training step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from xrex.optimizers.recsys import GradientUpdate
from xrex.train.engines import EmbeddingEngine
from xrex.train.evaluation import evaluation_program
from xrex.train.prepared_batch import DeviceBatch
from xrex.train.train_state import StepMetrics, TrainSetup, TrainState, place, shardings_of


class Deferred(NamedTuple):
    """The gradients of a step, kept for the next one, and the number of their step (int32 [])."""

    update: GradientUpdate
    step: jax.Array


class PipelinePrograms:
    """The compiled parts of the pipeline. All give back the shardings that they took."""

    def __init__(self, setup: TrainSetup, engine: EmbeddingEngine, state: TrainState) -> None:
        self._setup, self._engine = setup, engine
        like_state = shardings_of(state)
        tokens: Any = setup.token_sharding()
        table: Any = setup.table_sharding()
        replicated: Any = setup.replicated()
        deferred = Deferred(GradientUpdate(tokens, tokens, replicated, replicated), replicated)
        self.prime = jax.jit(self._prime, donate_argnums=0, out_shardings=(table, tokens))
        self.advance = jax.jit(
            self._advance,
            donate_argnums=(0, 1),
            out_shardings=(like_state, deferred, tokens, None),
        )
        self.discard = jax.jit(self._discard, donate_argnums=0, out_shardings=table)
        self.apply = jax.jit(
            self._apply,
            donate_argnums=(0, 1),
            out_shardings=(table, like_state.embedding_state),
        )
        self.evaluate = evaluation_program(setup, engine)

    def _prime(self, table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._engine.lookup_start(ids, table, ids)

    def _discard(self, table: jax.Array, pin: jax.Array) -> jax.Array:
        return self._engine.lookup_done(table, pin)[1]

    def _apply(
        self, table: jax.Array, embedding_state: Any, deferred: Deferred
    ) -> tuple[jax.Array, Any]:
        in_flight = self._start_update(table, embedding_state, deferred, deferred.step)
        result = self._engine.update_done(self._setup.embedding_optimizer, in_flight, deferred.step)
        return result.table, result.state

    def _start_update(
        self, table: jax.Array, embedding_state: Any, deferred: Deferred, gate: jax.Array
    ) -> Any:
        return self._engine.update_start(
            self._setup.embedding_optimizer,
            deferred.update,
            table,
            embedding_state,
            gate,
            step=deferred.step,
            learning_rate=self._setup.learning_rate_at(deferred.step),
        )

    def _advance(
        self,
        state: TrainState,
        deferred: Deferred,
        pin: jax.Array,
        batch: DeviceBatch,
        next_ids: jax.Array | None,
    ) -> tuple[TrainState, Deferred, jax.Array | None, StepMetrics]:
        setup, engine = self._setup, self._engine
        tokens, replicated = setup.ctx.tokens_spec, PartitionSpec()

        embeddings, table = engine.lookup_done(state.table, pin)
        in_flight = self._start_update(table, state.embedding_state, deferred, embeddings)
        embeddings = engine.order_after(embeddings, in_flight.pin, tokens, replicated)

        loss, pullback, aux = jax.vjp(
            lambda params, rows: setup.loss(params, rows, batch.batch),
            state.dense_params,
            embeddings,
            has_aux=True,
        )
        result = engine.update_done(setup.embedding_optimizer, in_flight, loss)
        table, next_pin = result.table, None
        cotangent = jnp.ones_like(loss)
        if next_ids is not None:
            table, next_pin = engine.lookup_start(next_ids, table, result.pin)
            cotangent = engine.order_after(cotangent, next_pin, replicated, tokens)
        params_grad, embeddings_grad = pullback(cotangent)

        failed = jnp.isnan(result.norm) & (result.valid == 0)
        dense_params, dense_opt_state = setup.apply_dense(state, params_grad, keep_old=failed)
        step = state.step + 1
        pending = jnp.where(failed, 0, 1).astype(jnp.int32)
        update = GradientUpdate(embeddings_grad, batch.segment_ids, batch.unique_tokens, pending)
        new_state = TrainState(step, dense_params, dense_opt_state, table, result.state)
        metrics = StepMetrics(loss, aux, result.norm, failed)
        return new_state, Deferred(update, step), next_pin, metrics


def nothing_deferred(setup: TrainSetup) -> Deferred:
    """What the first step finds instead of gradients: the exchange runs and changes nothing."""
    empty = GradientUpdate.empty(setup.ctx, setup.vocab_rows)
    pending, step = (place(np.int32(0), setup.replicated()) for _ in range(2))
    return Deferred(empty._replace(pending=pending), step)
