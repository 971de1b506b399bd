"""What a training run consists of: its ingredients, and the state that its steps carry on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle
from xrex.optimizers.recsys import EmbeddingOptimizer

LossFn = Callable[[Any, Any, Any], tuple[jax.Array, Any]]
TokensFn = Callable[[Any], tuple[Any, Any]]


class TrainState(NamedTuple):
    """State between two steps: a pytree of ordinary global arrays.

    Attributes:
      step: int32 [], steps done.
      dense_params: the loss function's parameters.
      dense_opt_state: state of the optax optimizer.
      table: bfloat16 [V, W].
      embedding_state: state of the embedding optimizer.
    """

    step: jax.Array
    dense_params: Any
    dense_opt_state: Any
    table: jax.Array
    embedding_state: Any


class StepMetrics(NamedTuple):
    """What a step reports, as arrays that may still be computed when the step returns.

    Attributes:
      loss: float32 [].
      aux: second result of the loss function.
      norm: float32 [], norm of the sparse gradients that were last applied to the table: those of
        this step if it is synchronous, else those of the step before.
      grad_norm: float32 [], norm of all gradients of this step, dense ones and summed sparse ones,
        before they were clipped; NaN where `TrainSetup.max_grad_norm` does not ask for it.
      skipped: bool [], the step's gradients change neither table nor dense parameters, because they
        are not finite or the engine failed.
    """

    loss: jax.Array
    aux: Any
    norm: jax.Array
    grad_norm: jax.Array
    skipped: jax.Array


def ids_and_mask(batch: Any) -> tuple[Any, Any]:
    """The tokens of a batch that keeps them in attributes `ids` and `mask`."""
    return batch.ids, batch.mask


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """What to train and how.

    Attributes:
      ctx: sizes and mesh. One batch has `ctx.tokens_per_batch` tokens.
      vocab_rows: V, rows of the table.
      loss_fn: (dense_params, embeddings, batch) -> (loss f32 [], aux). Pure JAX over global arrays.
        The embeddings are bf16 and of the ids' pytree: [B, F, W] for ids [B, F].
      dense_optimizer: for the parameters of `loss_fn`.
      embedding_optimizer: for the table.
      learning_rate: of the embedding optimizer; a float, or an optax schedule of the step number.
      tokens: batch -> (ids, mask). The ids are a pytree of integer arrays [B, ...], by default the
        attribute `ids` [B, F]; the mask is bool, of the same pytree and shapes, by default the
        attribute `mask`. Where it is False the token takes no part in the update; None: all do.
      max_grad_norm: gradients are scaled by min(1, max_grad_norm / norm), the norm being that of
        all dense gradients and of the sparse ones summed by row. None: they are left alone. The
        sparse norm is reduced before anything is updated, on the critical path.
      skip_nonfinite: whether a step with a loss or gradients that are not finite changes nothing at
        all. If not, only the embedding optimizer skips what is not finite.
      refuse_out_of_range: whether an id outside the table, after one wrap of negative ids, is a
        ValueError. If not it is counted, and treated as `ctx.options.out_of_range` says.
    """

    ctx: AsyncEmbContextHandle
    vocab_rows: int
    loss_fn: LossFn
    dense_optimizer: optax.GradientTransformation
    embedding_optimizer: EmbeddingOptimizer
    learning_rate: float | Callable[[jax.Array], Any]
    tokens: TokensFn = ids_and_mask
    max_grad_norm: float | None = None
    skip_nonfinite: bool = True
    refuse_out_of_range: bool = False

    def __post_init__(self) -> None:
        rate = self.learning_rate
        if not callable(rate) and not math.isfinite(rate):
            raise ValueError(f"learning_rate={rate!r}; it must be finite")
        limit = self.max_grad_norm
        if limit is not None and not (0 < limit < math.inf):
            raise ValueError(
                f"max_grad_norm={limit!r}; it must be positive and finite: None leaves the "
                "gradients alone"
            )

    def learning_rate_at(self, step: jax.Array) -> jax.Array:
        """The embedding optimizer's learning rate for the gradients of a step, float32 []."""
        rate = self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate
        return jnp.asarray(rate, jnp.float32)

    def replicated(self) -> NamedSharding:
        """One copy on every device of the mesh."""
        return NamedSharding(self.ctx.mesh, PartitionSpec())

    def token_sharding(self) -> NamedSharding:
        """Dimension 0 over the data axes."""
        return NamedSharding(self.ctx.mesh, self.ctx.tokens_spec)

    def table_sharding(self) -> NamedSharding:
        """Columns over the table axes."""
        return NamedSharding(self.ctx.mesh, self.ctx.table_spec)

    def apply_dense(
        self, state: TrainState, grads: Any, keep_old: jax.Array | None = None
    ) -> tuple[Any, Any]:
        """The dense parameters and optimizer state after a step; the old ones if `keep_old`."""
        updates, opt_state = self.dense_optimizer.update(
            grads, state.dense_opt_state, state.dense_params
        )
        new = optax.apply_updates(state.dense_params, updates), opt_state
        if keep_old is None:
            return new
        old = state.dense_params, state.dense_opt_state
        return jax.tree.map(lambda before, after: jnp.where(keep_old, before, after), old, new)


def init_state(setup: TrainSetup, dense_params: Any, table: Any) -> TrainState:
    """Makes the state of a new run. Copies its arguments, which stay the caller's.

    Args:
      setup: what to train.
      dense_params: pytree of arrays. Global arrays on the mesh keep their sharding, everything else
        is replicated.
      table: bfloat16 [V, W].

    Raises:
      ValueError: the table has another shape or type than the setup says.
    """
    shape = (setup.vocab_rows, setup.ctx.emb_width)
    if table.shape != shape or table.dtype != jnp.bfloat16:
        raise ValueError(
            f"the table is {table.dtype} {list(table.shape)}; the setup asks for bfloat16 "
            f"{list(shape)} (vocab_rows, emb_width)"
        )
    dense_params = jax.tree.map(lambda x: _on_mesh(x, setup), dense_params)
    state = TrainState(
        step=place(np.int32(0), setup.replicated()),
        dense_params=dense_params,
        dense_opt_state=jax.tree.map(
            lambda x: _on_mesh(x, setup), setup.dense_optimizer.init(dense_params)
        ),
        table=place(table, setup.table_sharding()),
        embedding_state=setup.embedding_optimizer.init_state(setup.ctx, setup.vocab_rows),
    )
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings_of(state))
    return copy(state)


def shardings_of(tree: Any) -> Any:
    """The sharding of every array of a pytree."""
    return jax.tree.map(lambda x: x.sharding, tree)


def array_like(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """What stands for an array where a program is made without data."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def place(array: Any, sharding: NamedSharding) -> jax.Array:
    """Puts an array that every process has onto the devices, each process its own devices' part."""
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _on_mesh(x: Any, setup: TrainSetup) -> jax.Array:
    """The array as it is if it lies on the mesh, else replicated over it."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == setup.ctx.mesh:
        return x
    return place(x, setup.replicated())
