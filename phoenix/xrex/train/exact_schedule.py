"""The staleness mode `exact`: the values of synchronous training, most of its exchange hidden.

The ids of a step and of the next one are known before the step runs. The rows that the step updates
and the next one reads are shared; all others have time:

    start the update of what the step before left  |
    dense forward                                   |  (the update runs beside it)
    end the update                                  |  start the lookup for t + 1, all its tokens
    dense backward                                  |  (the lookup runs beside it)
    end the lookup
    update the shared rows with the gradients of t  |  (the dense optimizer runs beside it)
    look the shared rows up, and put them over what was looked up for t + 1
    keep the gradients of t for the other rows for t + 1

What a row's update computes depends on its own tokens and on nothing else, so that two updates, one
for the shared rows and one for the rest, write the bits of one for all. That both are made, or
neither, takes gradients that are known to be finite beforehand; `settle_gradients` sees to it.

A pair of batches with more shared rows, or tokens in them, than there is room for takes the long
way: the whole update first, then the lookup, as in a synchronous step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle
from xrex.optimizers.recsys import GradientUpdate
from xrex.train.dense_pass import (
    DensePass,
    Gradients,
    SparseState,
    finish_dense,
    has_failed,
    settle_gradients,
)
from xrex.train.engines import EngineFactory, look_up
from xrex.train.prepared_batch import DeviceBatch, PreparedBatch
from xrex.train.schedule import Deferred, Schedule, types_of
from xrex.train.shared_plan import SharedArrays, SharedPlan, SharedPlanner
from xrex.train.staleness import SharedCapacity
from xrex.train.train_state import (
    StepMetrics,
    TrainSetup,
    TrainState,
    array_like,
    place,
    shardings_of,
)


class _Ahead(NamedTuple):
    """What is known of the next step before it begins.

    Attributes:
      embeddings: bf16 [N, W], rows of its tokens that have seen every update.
      norm: float32 [], of the gradients that were applied to shared rows already.
      failed: bool [], whether the engine failed while looking them up.
    """

    embeddings: jax.Array
    norm: jax.Array
    failed: jax.Array


@dataclasses.dataclass
class SharedCounts:
    """What a run's steps shared with the steps after them.

    Attributes:
      steps: steps that had a next batch.
      long_way_steps: those of them that took the long way.
      rows: shared rows, summed over the steps.
      tokens: tokens in shared rows, summed over the steps.
    """

    steps: int = 0
    long_way_steps: int = 0
    rows: int = 0
    tokens: int = 0


class _Begun(NamedTuple):
    """A step up to its gradients; `embeddings` were looked up for the next one, if asked for."""

    loss: jax.Array
    aux: Any
    gradients: Gradients
    sparse: SparseState
    embeddings: Any
    step: jax.Array
    failed: jax.Array
    norm: jax.Array


class ExactSchedule(Schedule):
    """Between two steps nothing is in flight: the next step's rows are there, updates may wait."""

    def __init__(
        self, setup: TrainSetup, make_engine: EngineFactory, capacity: SharedCapacity
    ) -> None:
        ctx = setup.ctx
        if capacity.tokens_per_rank > ctx.tokens_per_rank or capacity.rows > ctx.num_unique:
            raise ValueError(
                f"{capacity} exceeds the batch: at most rows={ctx.num_unique} (num_unique) and "
                f"tokens_per_rank={ctx.tokens_per_rank} can be shared"
            )
        update_engine = make_engine(
            _context_like(ctx, "update", capacity.tokens_per_rank, capacity.rows)
        )
        # Ids outside the table give rows of zeros here, and NaN if the lookup failed.
        rows_engine = make_engine(
            _context_like(ctx, "rows", capacity.rows + 1, 1, out_of_range="zero")
        )
        super().__init__(setup, [make_engine(ctx), update_engine, rows_engine])
        self.counts = SharedCounts()
        self._planner = SharedPlanner(setup, capacity)
        self._ahead: _Ahead | None = None
        self._look_up: Any = None
        self._short_way: Any = None
        self._long_way: Any = None
        self._last: Any = None
        self._ways: dict[Any, tuple[Any, Any]] = {}  # compiled, by the types of the batch

    def _make_programs(self, like_state: Any) -> None:
        tokens, table = self.setup.token_sharding(), self.setup.table_sharding()
        deferred, ahead = shardings_of(self.deferred_like()), shardings_of(self._ahead_like())
        self._ways.clear()
        self._look_up = jax.jit(
            self._look_up_program, donate_argnums=0, out_shardings=(table, tokens)
        )
        self._last = jax.jit(
            self.last_program,
            donate_argnums=(0, 1),
            out_shardings=(like_state, deferred, None),
        )
        self._short_way, self._long_way = (
            jax.jit(
                program,
                donate_argnums=(0, 1, 2),
                out_shardings=(like_state, deferred, ahead, None),
            )
            for program in (self.short_way_program, self.long_way_program)
        )

    def forget(self) -> None:
        """See `Schedule`."""
        super().forget()
        self._planner.clear()

    def _try_programs(
        self, state: TrainState, batch: DeviceBatch, following: PreparedBatch | None
    ) -> None:
        inputs = (state, self.deferred_like(), self._ahead_like(), batch)
        if following is None:
            jax.eval_shape(self._last, *inputs)
            return
        # Both at once, so that no later step of such a batch stops to compile.
        self._ways[types_of(batch)] = (
            self._short_way.lower(*inputs, batch.ids, self._planner.empty()).compile(),
            self._long_way.lower(*inputs, batch.ids).compile(),
        )

    def _ahead_like(self) -> _Ahead:
        """Shapes, types and shardings of what is known of the next step."""
        ctx, replicated = self.setup.ctx, self.setup.replicated()
        shape = (ctx.tokens_per_batch, ctx.emb_width)
        return _Ahead(
            array_like(shape, jnp.bfloat16, self.setup.token_sharding()),
            array_like((), jnp.float32, replicated),
            array_like((), jnp.bool_, replicated),
        )

    def prepared(self, number: int, batch: PreparedBatch) -> None:
        """See `Schedule`."""
        self._planner.prepared(number, batch)

    def advance(
        self, state: TrainState, current: PreparedBatch, following: PreparedBatch | None
    ) -> tuple[TrainState, StepMetrics]:
        """See `Schedule`."""
        shared = None if following is None else self._planner.plan(current, following)
        if self._ahead is None:
            state = self._refill(state, current)
        inputs = (state, self.take_deferred(), self._ahead, current.arrays)
        if shared is None or following is None:
            state, self.deferred, metrics = self._last(*inputs)
            self._ahead = None
        else:
            short_way, long_way = self._ways[types_of(current.arrays)]
            if shared.arrays is None:
                outputs = long_way(*inputs, following.arrays.ids)
            else:
                outputs = short_way(*inputs, following.arrays.ids, shared.arrays)
            state, self.deferred, self._ahead, metrics = outputs
            if following is not current:  # which would share all its rows with itself
                self._count(shared)
        self.armed, self.table = following, None if following is None else state.table
        self.started(metrics.norm)
        return self.stepped(state), metrics

    def _count(self, shared: SharedPlan) -> None:
        self.counts.steps += 1
        self.counts.long_way_steps += shared.arrays is None
        self.counts.rows += shared.num_rows
        self.counts.tokens += shared.num_tokens

    def _refill(self, state: TrainState, current: PreparedBatch) -> TrainState:
        """Looks the step's own batch up, in a table that has seen every update."""
        state = self.apply_deferred(state)
        table, embeddings = self._look_up(state.table, current.arrays.ids)
        replicated = self.setup.replicated()
        self._ahead = _Ahead(
            embeddings, place(np.float32(0), replicated), place(np.bool_(False), replicated)
        )
        self.armed, self.table = current, table
        return state._replace(table=table)

    def _drop_lookup(self, state: TrainState) -> TrainState:
        self._forget_lookup()
        return state

    def _forget_lookup(self) -> None:
        super()._forget_lookup()
        self._ahead = None

    def _look_up_program(self, table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        embeddings, table = look_up(self.engines[0], ids, table, ids)
        return table, embeddings

    def short_way_program(
        self,
        state: TrainState,
        deferred: Deferred,
        ahead: _Ahead,
        batch: DeviceBatch,
        next_ids: jax.Array,
        shared: SharedArrays,
    ) -> tuple[TrainState, Deferred, _Ahead, StepMetrics]:
        """The program of a step that has room for what it shares with the next one."""
        setup, update_engine = self.setup, self.engines[1]
        begun = self._begin(state, deferred, ahead, batch, next_ids)
        gradients, step = begun.gradients, begun.step
        pending = jnp.where(begun.failed, 0, gradients.update.pending)
        picked = GradientUpdate(
            self._pick(gradients.update.grads, shared.tokens),
            jnp.where(pending != 0, shared.segments, -1),
            shared.rows,
            pending,
        )
        in_flight = update_engine.update_start(
            setup.embedding_optimizer,
            picked,
            *begun.sparse,
            begun.embeddings,
            step=step,
            learning_rate=setup.learning_rate_at(step),
        )
        result = update_engine.update_done(setup.embedding_optimizer, in_flight, step)
        failed = begun.failed | has_failed(result.norm, result.valid)
        table, rows, rows_failed = self._look_up_rows(shared.row_ids, result.table, result.pin)
        pending = jnp.where(failed, 0, pending)
        rest = GradientUpdate(
            gradients.update.grads,
            jnp.where(pending != 0, shared.rest_segments, -1),
            shared.rest_unique,
            pending,
        )
        return self._finish(
            state,
            begun,
            SparseState(table, result.state),
            Deferred(rest, step),
            _Ahead(
                self._put_over(begun.embeddings, rows, shared.next_index),
                result.norm,
                rows_failed,
            ),
            failed,
        )

    def long_way_program(
        self,
        state: TrainState,
        deferred: Deferred,
        ahead: _Ahead,
        batch: DeviceBatch,
        next_ids: jax.Array,
    ) -> tuple[TrainState, Deferred, _Ahead, StepMetrics]:
        """The program of a step that makes its whole update before the next lookup."""
        setup, engine = self.setup, self.engines[0]
        begun = self._begin(state, deferred, ahead, batch, None)
        step = begun.step
        pending = jnp.where(begun.failed, 0, begun.gradients.update.pending)
        update = begun.gradients.update._replace(pending=pending)
        in_flight = self.start_update(*begun.sparse, Deferred(update, step), pending)
        result = engine.update_done(setup.embedding_optimizer, in_flight, step)
        embeddings, table = look_up(engine, next_ids, result.table, result.pin)
        nothing = GradientUpdate(
            jnp.zeros_like(update.grads),
            jnp.full_like(update.segment_ids, -1),
            jnp.full_like(update.unique_tokens, setup.vocab_rows),
            jnp.int32(0),
        )
        return self._finish(
            state,
            begun,
            SparseState(table, result.state),
            Deferred(nothing, step),
            _Ahead(embeddings, result.norm, jnp.bool_(False)),
            begun.failed | has_failed(result.norm, result.valid),
        )

    def last_program(
        self, state: TrainState, deferred: Deferred, ahead: _Ahead, batch: DeviceBatch
    ) -> tuple[TrainState, Deferred, StepMetrics]:
        """The program of a step without a next batch: its update may wait as a whole."""
        begun = self._begin(state, deferred, ahead, batch, None)
        pending = jnp.where(begun.failed, 0, begun.gradients.update.pending)
        update = begun.gradients.update._replace(pending=pending)
        nothing_ahead = _Ahead(update.grads, jnp.float32(0), jnp.bool_(False))
        state, kept, _, metrics = self._finish(
            state, begun, begun.sparse, Deferred(update, begun.step), nothing_ahead, begun.failed
        )
        return state, kept, metrics

    def _begin(
        self,
        state: TrainState,
        deferred: Deferred,
        ahead: _Ahead,
        batch: DeviceBatch,
        next_ids: jax.Array | None,
    ) -> _Begun:
        """A step up to its gradients, with the rest of the update before, and a lookup of ids."""
        setup, engine = self.setup, self.engines[0]
        in_flight = self.start_update(
            state.table, state.embedding_state, deferred, ahead.embeddings
        )
        dense = DensePass(
            setup, engine, state.dense_params, ahead.embeddings, batch, after=in_flight.pin
        )
        result = engine.update_done(setup.embedding_optimizer, in_flight, dense.loss)
        table, pin = result.table, result.pin
        if next_ids is not None:
            table, pin = engine.lookup_start(next_ids, table, pin)
        params_grad, embeddings_grad = dense.backward(after=pin)
        embeddings = None
        if next_ids is not None:
            pin = engine.order_after(
                pin, embeddings_grad, setup.ctx.tokens_spec, setup.ctx.tokens_spec
            )
            embeddings, table = engine.lookup_done(table, pin)
        step = state.step + 1
        gradients, sparse = settle_gradients(
            dense, params_grad, embeddings_grad, SparseState(table, result.state), step
        )
        failed = ahead.failed | has_failed(result.norm, result.valid)
        norm = jnp.hypot(ahead.norm, result.norm)
        return _Begun(dense.loss, dense.aux, gradients, sparse, embeddings, step, failed, norm)

    def _finish(
        self,
        state: TrainState,
        begun: _Begun,
        sparse: SparseState,
        deferred: Deferred,
        ahead: _Ahead,
        failed: jax.Array,
    ) -> tuple[TrainState, Deferred, _Ahead, StepMetrics]:
        dense_params, dense_opt_state, skipped = finish_dense(
            self.setup, state, begun.gradients, failed
        )
        metrics = StepMetrics(begun.loss, begun.aux, begun.norm, begun.gradients.norm, skipped)
        new_state = TrainState(
            begun.step, dense_params, dense_opt_state, sparse.table, sparse.embedding_state
        )
        return new_state, deferred, ahead, metrics

    def _pick(self, grads: jax.Array, tokens: jax.Array) -> jax.Array:
        """The gradients bf16 [R * S, W] of the tokens at the given places of each rank."""
        spec = self.setup.ctx.tokens_spec
        return jax.shard_map(
            lambda grads, tokens: grads.at[tokens].get(mode="promise_in_bounds"),
            mesh=self.setup.ctx.mesh,
            in_specs=(spec, spec),
            out_specs=spec,
        )(grads, tokens)

    def _look_up_rows(
        self, row_ids: jax.Array, table: jax.Array, gate: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The table, the rows bf16 [R * (C + 1), W], all of them on each rank, and if it failed."""
        rows, table = look_up(self.engines[2], row_ids, table, gate)
        # The last one is outside the table: zeros, unless the lookup failed.
        canaries = rows.reshape(self.setup.ctx.group_size, -1, rows.shape[1])[:, -1]
        return table, rows, jnp.any(jnp.isnan(canaries))

    def _put_over(self, embeddings: jax.Array, rows: jax.Array, index: jax.Array) -> jax.Array:
        """Embeddings bf16 [N, W], with row `index[t]` in place of token t's where it is >= 0."""
        spec = self.setup.ctx.tokens_spec

        def per_rank(embeddings: jax.Array, rows: jax.Array, index: jax.Array) -> jax.Array:
            fresh = rows.at[jnp.maximum(index, 0)].get(mode="promise_in_bounds")
            # On bits: an arithmetic unit may change the payload of a NaN.
            chosen = jnp.where(index[:, None] >= 0, _bits(fresh), _bits(embeddings))
            return jax.lax.bitcast_convert_type(chosen, jnp.bfloat16)

        return jax.shard_map(
            per_rank, mesh=self.setup.ctx.mesh, in_specs=(spec, spec, spec), out_specs=spec
        )(embeddings, rows, index)


def _bits(rows: jax.Array) -> Any:
    return jax.lax.bitcast_convert_type(rows, jnp.uint16)


def _context_like(
    ctx: AsyncEmbContextHandle,
    purpose: str,
    tokens_per_rank: int,
    num_unique: int,
    **options: Any,
) -> AsyncEmbContextHandle:
    """A context for a part of the batches of `ctx`, on the same devices."""
    return async_emb.make_context_handle(
        ctx.mesh,
        ctx.table_axis,
        data_axis=ctx.data_axis,
        tokens_per_batch=tokens_per_rank * ctx.group_size,
        emb_width=ctx.emb_width,
        num_unique=num_unique,
        num_devices_per_node=ctx.num_devices_per_node,
        options=dataclasses.replace(ctx.options, **options),
        name=f"shared {purpose} of context {ctx.context_id}",
    )
