"""Lookups without an update: for evaluation. They leave nothing in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from xrex.train.engines import EmbeddingEngine, look_up
from xrex.train.prepared_batch import DeviceBatch
from xrex.train.train_state import TrainSetup

LookupProgram = Callable[[jax.Array, DeviceBatch], tuple[jax.Array, Any]]
EvaluationProgram = Callable[[jax.Array, Any, DeviceBatch], tuple[jax.Array, jax.Array, Any]]


def lookup_program(setup: TrainSetup, engine: EmbeddingEngine) -> LookupProgram:
    """A jitted (table, batch) -> (table, embeddings of the features). The table is donated."""

    def lookup(table: jax.Array, batch: DeviceBatch) -> tuple[jax.Array, Any]:
        embeddings, table = look_up(engine, batch.ids, table, batch.ids)
        return table, batch.layout.split(embeddings)

    return jax.jit(lookup, donate_argnums=0, out_shardings=(setup.table_sharding(), None))


def evaluation_program(setup: TrainSetup, engine: EmbeddingEngine) -> EvaluationProgram:
    """A jitted (table, dense_params, batch) -> (table, loss, aux). The table is donated."""

    def evaluate(
        table: jax.Array, dense_params: Any, batch: DeviceBatch
    ) -> tuple[jax.Array, jax.Array, Any]:
        embeddings, table = look_up(engine, batch.ids, table, batch.ids)
        loss, aux = setup.loss_fn(dense_params, batch.layout.split(embeddings), batch.batch)
        return table, loss, aux

    return jax.jit(evaluate, donate_argnums=0, out_shardings=(setup.table_sharding(), None, None))
