"""What a training step needs of an embedding optimizer, and the records that pass between them.

N = R * T tokens of the global batch, W columns, V rows, U slots for distinct ids, R ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle


class GradientUpdate(NamedTuple):
    """The gradients of one batch, ready for an update. A pytree of global arrays.

    Attributes:
        grads: bfloat16 [N, W], gradient of the loss with respect to each token's embedding;
            dimension 0 over the data axes.
        segment_ids: int32 [N], each an index into `unique_tokens`, or -1 for a token to leave out;
            over the data axes. See `async_emb.make_segments`.
        unique_tokens: int32 [U], the distinct rows of the batch, unused slots >= V; replicated.
        pending: bool or int32 []; whether there is anything to update; replicated.
    """

    grads: jax.Array
    segment_ids: jax.Array
    unique_tokens: jax.Array
    pending: jax.Array

    @classmethod
    def empty(cls, ctx: AsyncEmbContextHandle, vocab_rows: int) -> Self:
        """Returns an update that changes nothing, for the first step of a pipeline.

        Args:
            ctx: the context's handle; the arrays are placed on its mesh.
            vocab_rows: V.
        """
        num_tokens = ctx.tokens_per_batch
        return cls(
            grads=_full(ctx, (num_tokens, ctx.emb_width), 0, jnp.bfloat16, ctx.tokens_spec),
            segment_ids=_full(ctx, (num_tokens,), -1, jnp.int32, ctx.tokens_spec),
            unique_tokens=replicated(ctx, (ctx.num_unique,), vocab_rows, jnp.int32),
            pending=replicated(ctx, (), False, jnp.bool_),
        )


class UpdateInFlight(NamedTuple):
    """What an optimizer's `update_start` returned; only its `update_done` may read it next.

    Attributes:
        update: the gradients being used.
        table: bfloat16 [V, W].
        state: the optimizer's state.
    """

    update: GradientUpdate
    table: jax.Array
    state: Any

    @property
    def pin(self) -> jax.Array:
        """A small replicated array, int32 [U], that is available once the update has started."""
        return self.update.unique_tokens


class UpdateResult(NamedTuple):
    """What an optimizer's `update_done` returned.

    Attributes:
        table: bfloat16 [V, W], updated; tied to the end of the update.
        state: the optimizer's state, likewise.
        norm: float32 [], the norm of all summed gradients, also if the update was skipped.
        valid: int32 [], 1 if the update was made, 0 if it was skipped.
        pin: float32 [R], available at the end of the update.
    """

    table: jax.Array
    state: Any
    norm: jax.Array
    valid: jax.Array
    pin: jax.Array


class EmbeddingOptimizer[State](Protocol):
    """An optimizer whose update runs beside the dense computation.

    A start and its done are two calls in one program, or in two, in the order of the pipeline.
    """

    def init_state(self, ctx: AsyncEmbContextHandle, vocab_rows: int) -> State:
        """Returns the state before the first update, replicated over the mesh.

        Args:
            ctx: the context's handle.
            vocab_rows: V.
        """

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
        """Starts an update and returns at once.

        Args:
            update: the gradients. They are copied unless they are donated to the program and it
                returns an array of the same shape and dtype, such as the next step's gradients.
            table: bfloat16 [V, W]. Donate it, or it is copied.
            state: the optimizer's state. Donate it, or it is copied.
            gate: pytree of arrays; the update starts after all are available.
            ctx: the context's handle.
            step: int32 [], number of the training step.
            learning_rate: finite float, or float32 [] (a new value never retraces).
            gate_specs: how `gate` lies on the mesh; see `mesh_specs.gate_arrays_and_specs`.
        """

    def update_done(
        self,
        in_flight: UpdateInFlight,
        gate: Any,
        ctx: AsyncEmbContextHandle,
        *,
        gate_specs: Any = None,
    ) -> UpdateResult:
        """Waits for the update that was started last.

        Args:
            in_flight: what `update_start` returned, all of it.
            gate: pytree of arrays; waiting begins after all are available.
            ctx: the context's handle.
            gate_specs: how `gate` lies on the mesh; see `mesh_specs.gate_arrays_and_specs`.
        """


def replicated(
    ctx: AsyncEmbContextHandle, shape: tuple[int, ...], value: float, dtype: Any
) -> jax.Array:
    """Returns an array of one value, replicated over the mesh of the context."""
    return _full(ctx, shape, value, dtype, PartitionSpec())


def _full(
    ctx: AsyncEmbContextHandle,
    shape: tuple[int, ...],
    value: float,
    dtype: Any,
    spec: PartitionSpec,
) -> jax.Array:
    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        parts = zip(index or (), shape, strict=True)
        sizes = [len(range(*part.indices(size))) for part, size in parts]
        return np.full(sizes, value, dtype)

    return jax.make_array_from_callback(shape, NamedSharding(ctx.mesh, spec), block)
