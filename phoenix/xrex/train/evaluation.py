"""The loss function on a batch, without training: for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from xrex.train.engines import EmbeddingEngine
from xrex.train.prepared_batch import DeviceBatch
from xrex.train.train_state import TrainSetup

EvaluationProgram = Callable[[jax.Array, Any, DeviceBatch], tuple[jax.Array, jax.Array, Any]]


def evaluation_program(setup: TrainSetup, engine: EmbeddingEngine) -> EvaluationProgram:
    """A jitted (table, dense_params, batch) -> (table, loss, aux). The table is donated."""

    def evaluate(
        table: jax.Array, dense_params: Any, batch: DeviceBatch
    ) -> tuple[jax.Array, jax.Array, Any]:
        table, pin = engine.lookup_start(batch.ids, table, batch.ids)
        embeddings, table = engine.lookup_done(table, pin)
        loss, aux = setup.loss(dense_params, embeddings, batch.batch)
        return table, loss, aux

    return jax.jit(evaluate, donate_argnums=0, out_shardings=(setup.table_sharding(), None, None))
