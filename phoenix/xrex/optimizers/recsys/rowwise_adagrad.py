"""Rowwise Adagrad: one accumulator for each row of the table, with eager or with lazy decays."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from xrex.cuda.async_emb import async_emb, operands
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle
from xrex.optimizers.recsys.protocol import (
    GradientUpdate,
    UpdateInFlight,
    UpdateResult,
    replicated,
)
from xrex.utils import mesh_specs

_REPLICATED: Any = PartitionSpec()


class RowwiseAdagradState(NamedTuple):
    """State of RowwiseAdagrad: `row_state`, float32 [V], replicated."""

    row_state: jax.Array


class RowwiseAdagradLazyState(NamedTuple):
    """State of RowwiseAdagradLazy, replicated.

    Attributes:
        row_state: float32 [V], the accumulator.
        last_step: int32 [V], the step in which each row was last listed by an update.
    """

    row_state: jax.Array
    last_step: jax.Array


def _in_flight_specs(ctx: AsyncEmbContextHandle) -> UpdateInFlight:
    """Returns how an update in flight lies on the mesh."""
    tokens: Any = ctx.tokens_spec
    table: Any = ctx.table_spec
    gradients = GradientUpdate(
        grads=tokens, segment_ids=tokens, unique_tokens=_REPLICATED, pending=_REPLICATED
    )
    return UpdateInFlight(gradients, table, _REPLICATED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rowwise[State: tuple[jax.Array, ...]](abc.ABC):
    """What both forms share: one call for each rank that starts an update, one that waits for it.

    A form says which arrays are its state, which scalars a start takes, and how it starts.
    """

    initial_accumulator: float
    eps: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        operands.rate(name, "initial_accumulator", self.initial_accumulator)
        operands.eps(name, self.eps)

    def update_start(
        self,
        update: GradientUpdate,
        table: jax.Array,
        state: State,
        gate: Any,
        ctx: AsyncEmbContextHandle,
        *,
        step: Any,
        learning_rate: Any,
        gate_specs: Any = None,
    ) -> UpdateInFlight:
        """Starts an update; see EmbeddingOptimizer."""
        gate, gate_specs = mesh_specs.gate_arrays_and_specs(gate, gate_specs, ctx)
        scalars = self._scalars(step)
        scalars["learning_rate"] = operands.learning_rate("update_start", learning_rate)

        def per_rank(
            update: GradientUpdate,
            table: jax.Array,
            state: State,
            scalars: dict[str, jax.Array],
            gate: Any,
        ) -> UpdateInFlight:
            gate = mesh_specs.single_gate(gate, ctx)
            grads, segment_ids, unique_tokens, table, state = self._start(
                update, table, state, scalars, gate, ctx
            )
            used = GradientUpdate(grads, segment_ids, unique_tokens, update.pending)
            return UpdateInFlight(used, table, state)

        specs = _in_flight_specs(ctx)
        return jax.shard_map(
            per_rank,
            mesh=ctx.mesh,
            in_specs=(*specs, _REPLICATED, gate_specs),
            out_specs=specs,
        )(update, table, state, scalars, gate)

    def update_done(
        self,
        in_flight: UpdateInFlight,
        gate: Any,
        ctx: AsyncEmbContextHandle,
        *,
        gate_specs: Any = None,
    ) -> UpdateResult:
        """Waits for the update that was started last; see EmbeddingOptimizer.

        All that its start returned stays in use until then.
        """
        gate, gate_specs = mesh_specs.gate_arrays_and_specs(gate, gate_specs, ctx)

        def per_rank(in_flight: UpdateInFlight, gate: Any) -> UpdateResult:
            norm, valid, pin = async_emb.rowwise_adagrad_update_done(
                mesh_specs.single_gate(gate, ctx), ctx, *jax.tree.leaves(in_flight)
            )
            table, state = async_emb.order_after(
                (in_flight.table, in_flight.state), pin, platform=ctx.platform
            )
            return UpdateResult(table, state, norm, valid, pin)

        specs = _in_flight_specs(ctx)
        out_specs = UpdateResult(
            table=specs.table,
            state=_REPLICATED,
            norm=_REPLICATED,
            valid=_REPLICATED,
            pin=specs.update.grads,
        )
        return jax.shard_map(
            per_rank, mesh=ctx.mesh, in_specs=(specs, gate_specs), out_specs=out_specs
        )(in_flight, gate)

    @abc.abstractmethod
    def _scalars(self, step: Any) -> dict[str, jax.Array]:
        """Returns the scalars beside the learning rate that a start takes."""

    @abc.abstractmethod
    def _start(
        self,
        update: GradientUpdate,
        table: jax.Array,
        state: State,
        scalars: dict[str, jax.Array],
        gate: jax.Array,
        ctx: AsyncEmbContextHandle,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, State]:
        """Starts on one rank; returns grads, segment_ids, unique_tokens, table and state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(_Rowwise[RowwiseAdagradState]):
    """Rowwise Adagrad whose decays act on the rows of a batch only, once for each update.

    The formula stands at `async_emb.rowwise_adagrad_update_start`. `initial_accumulator`, `eps` and
    `decay_factor` have no defaults, as frameworks disagree about them and the values matter.

    Attributes:
        initial_accumulator: every row's accumulator before the first update; finite and >= 0. With
            0 the first update of a row has magnitude close to the learning rate, whatever the
            gradient.
        eps: added to the root of the accumulator, outside of it.
        decay_factor: factor of the accumulator in each update of the row; 1 keeps it.
        weight_decay_factor: factor of the row in each update with a gradient; 1 means no decay.

    Raises:
        TypeError: a parameter is not a Python number.
        ValueError: a parameter is out of range.
    """

    decay_factor: float
    weight_decay_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        operands.fraction(name, "decay_factor", self.decay_factor, zero_allowed=True)
        operands.fraction(name, "weight_decay_factor", self.weight_decay_factor, zero_allowed=False)

    def init_state(self, ctx: AsyncEmbContextHandle, vocab_rows: int) -> RowwiseAdagradState:
        """Returns the state before the first update; see EmbeddingOptimizer."""
        return RowwiseAdagradState(
            replicated(ctx, (vocab_rows,), self.initial_accumulator, jnp.float32)
        )

    def _scalars(self, step: Any) -> dict[str, jax.Array]:
        del step
        return {}

    def _start(
        self,
        update: GradientUpdate,
        table: jax.Array,
        state: RowwiseAdagradState,
        scalars: dict[str, jax.Array],
        gate: jax.Array,
        ctx: AsyncEmbContextHandle,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, RowwiseAdagradState]:
        *others, row_state = async_emb.rowwise_adagrad_update_start(
            update.grads,
            update.segment_ids,
            update.unique_tokens,
            table,
            state.row_state,
            update.pending,
            gate,
            ctx,
            learning_rate=scalars["learning_rate"],
            eps=self.eps,
            decay_factor=self.decay_factor,
            weight_decay_factor=self.weight_decay_factor,
        )
        grads, segment_ids, unique_tokens, table = others
        return grads, segment_ids, unique_tokens, table, RowwiseAdagradState(row_state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseAdagradLazy(_Rowwise[RowwiseAdagradLazyState]):
    """Rowwise Adagrad whose decays act on every row in every step, made up for when it is listed.

    The formula stands at `async_emb.rowwise_adagrad_lazy_update_start`.

    Attributes:
        initial_accumulator: every row's accumulator before the first update; finite and >= 0.
        eps: added to the root of the accumulator, outside of it.
        accum_decay_rate: the accumulator decays by exp(-rate) in each step; 0 keeps it.
        weight_decay_rate: a row decays by exp(-rate) in each step; 0 means no decay.

    Raises:
        TypeError: a parameter is not a Python number.
        ValueError: a parameter is out of range.
    """

    accum_decay_rate: float
    weight_decay_rate: float

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        operands.rate(name, "accum_decay_rate", self.accum_decay_rate)
        operands.rate(name, "weight_decay_rate", self.weight_decay_rate)

    def init_state(self, ctx: AsyncEmbContextHandle, vocab_rows: int) -> RowwiseAdagradLazyState:
        """Returns the state before the first update; see EmbeddingOptimizer."""
        return RowwiseAdagradLazyState(
            replicated(ctx, (vocab_rows,), self.initial_accumulator, jnp.float32),
            replicated(ctx, (vocab_rows,), 0, jnp.int32),
        )

    def _scalars(self, step: Any) -> dict[str, jax.Array]:
        return {"step": operands.step("update_start", step)}

    def _start(
        self,
        update: GradientUpdate,
        table: jax.Array,
        state: RowwiseAdagradLazyState,
        scalars: dict[str, jax.Array],
        gate: jax.Array,
        ctx: AsyncEmbContextHandle,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, RowwiseAdagradLazyState]:
        *others, row_state, last_step = async_emb.rowwise_adagrad_lazy_update_start(
            update.grads,
            update.segment_ids,
            update.unique_tokens,
            table,
            state.row_state,
            state.last_step,
            scalars["step"],
            update.pending,
            gate,
            ctx,
            learning_rate=scalars["learning_rate"],
            eps=self.eps,
            accum_decay_rate=self.accum_decay_rate,
            weight_decay_rate=self.weight_decay_rate,
        )
        grads, segment_ids, unique_tokens, table = others
        new_state = RowwiseAdagradLazyState(row_state, last_step)
        return grads, segment_ids, unique_tokens, table, new_state
