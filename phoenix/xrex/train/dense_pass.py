"""The dense half of a training step, the same in every staleness mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from xrex.optimizers.recsys import GradientUpdate
from xrex.train.engines import EmbeddingEngine
from xrex.train.prepared_batch import DeviceBatch
from xrex.train.train_state import TrainSetup, TrainState

# Squared norms up to here leave room for the rounding of sums before float32 ends, at 2^128.
_LARGEST_SQUARED_NORM = 2.0**126


class Gradients(NamedTuple):
    """The gradients of a step, after the setup's rules for large and non-finite ones.

    Attributes:
      params: like the dense parameters.
      update: the sparse ones; `pending` int32 [] is 0 where they must not be applied.
      skip_dense: bool [], whether the dense ones must not be applied.
      norm: float32 [], of all of them before they were clipped; NaN without clipping.
    """

    params: Any
    update: GradientUpdate
    skip_dense: jax.Array
    norm: jax.Array


class SparseState(NamedTuple):
    """What the sparse half of a step carries on: the table, and its optimizer's state."""

    table: jax.Array
    embedding_state: Any


class DensePass:
    """The forward pass of a step, and its backward pass when asked for.

    On the side of the embeddings both are fenced off from what surrounds them, which is what
    differs between the modes, so that XLA has no reason to compile them in different ways: with the
    same inputs they give the same bits, as far as tests see.

    Attributes:
      setup: what is trained, and by which rules.
      engine: what orders both passes among its calls.
      batch: what they run on.
      loss: float32 [].
      aux: second result of the loss function.
    """

    def __init__(
        self,
        setup: TrainSetup,
        engine: EmbeddingEngine,
        dense_params: Any,
        embeddings: jax.Array,
        batch: DeviceBatch,
        *,
        after: jax.Array,
    ) -> None:
        self.setup, self.engine, self.batch = setup, engine, batch
        replicated: Any = PartitionSpec()
        embeddings = engine.order_after(embeddings, after, setup.ctx.tokens_spec, replicated)
        pullback: Callable[[jax.Array], tuple[Any, jax.Array]]
        self.loss, pullback, self.aux = jax.vjp(
            lambda params, rows: setup.loss_fn(params, batch.layout.split(rows), batch.batch),
            dense_params,
            embeddings,
            has_aux=True,
        )
        self._pullback = pullback

    def backward(self, after: jax.Array) -> tuple[Any, jax.Array]:
        """The gradients of the dense parameters and of the embeddings, bf16 [N, W].

        Args:
          after: a pin, float32 [R]; the backward pass begins once it is available.
        """
        tokens, replicated = self.setup.ctx.tokens_spec, PartitionSpec()
        cotangent = self.engine.order_after(jnp.ones_like(self.loss), after, replicated, tokens)
        params_grad, embeddings_grad = self._pullback(cotangent)
        return params_grad, self.engine.order_after(embeddings_grad, self.loss, tokens, replicated)


def settle_gradients(
    dense: DensePass,
    params_grad: Any,
    embeddings_grad: jax.Array,
    sparse: SparseState,
    step: jax.Array,
) -> tuple[Gradients, SparseState]:
    """Applies the setup's rules for large and for non-finite gradients.

    Sparse gradients that an update might find not finite never get through: an update whose norm is
    NaN has then failed for another reason.

    Args:
      dense: the pass that they come from; nothing but a lookup may be in flight at its engine.
      params_grad: gradients of the dense parameters.
      embeddings_grad: bf16 [N, W].
      sparse: passed through, changed in nothing.
      step: int32 [], its number.

    Returns:
      The gradients; and `sparse`, to be used in place of the argument.
    """
    setup, engine, batch = dense.setup, dense.engine, dense.batch
    update = GradientUpdate(embeddings_grad, batch.segment_ids, batch.unique_tokens, jnp.int32(1))
    sparse_ok = _surely_finite(update.grads, update.segment_ids)
    norm, skip_dense = jnp.float32(jnp.nan), jnp.bool_(False)
    if setup.max_grad_norm is not None:
        sparse_norm, update, sparse = _measure(setup, engine, update, sparse, step)
        skip_dense = sparse_ok & jnp.isnan(sparse_norm)  # the engine failed
        sparse_ok = jnp.isfinite(sparse_norm)
        dense_square = _squared_norm(params_grad)
        norm = jnp.sqrt(dense_square + sparse_norm * sparse_norm)
        params_grad, update = _clip(
            setup.max_grad_norm,
            jnp.where(sparse_ok, norm, jnp.sqrt(dense_square)),
            params_grad,
            update,
        )
    if setup.skip_nonfinite:
        sparse_ok = sparse_ok & jnp.isfinite(dense.loss) & _all_finite(params_grad)
        sparse_ok = sparse_ok & jnp.isfinite(setup.learning_rate_at(step))
        if setup.max_grad_norm is not None:
            sparse_ok = sparse_ok & jnp.isfinite(norm)
        skip_dense = ~sparse_ok
    # Left out token by token, too: the update then reports a norm of 0, not that of the gradients.
    update = update._replace(
        segment_ids=jnp.where(sparse_ok, update.segment_ids, -1),
        pending=sparse_ok.astype(jnp.int32),
    )
    return Gradients(params_grad, update, skip_dense, norm), sparse


def finish_dense(
    setup: TrainSetup, state: TrainState, gradients: Gradients, failed: jax.Array
) -> tuple[Any, Any, jax.Array]:
    """The dense parameters and optimizer state after a step, and whether they are the old ones.

    Args:
      setup: holds the dense optimizer.
      state: before the step.
      gradients: of the step.
      failed: bool [], whether the engine failed, so that the gradients mean nothing.
    """
    skip = failed | gradients.skip_dense
    return (*setup.apply_dense(state, gradients.params, keep_old=skip), skip)


def has_failed(norm: jax.Array, valid: jax.Array) -> jax.Array:
    """Whether the engine failed during an update whose gradients, applied, were all finite."""
    return jnp.isnan(norm) & (valid == 0)


def _measure(
    setup: TrainSetup,
    engine: EmbeddingEngine,
    update: GradientUpdate,
    sparse: SparseState,
    step: jax.Array,
) -> tuple[jax.Array, GradientUpdate, SparseState]:
    """The norm of the gradients summed by row, by an update that applies nothing."""
    norm, update, table, embedding_state = engine.measure(
        setup.embedding_optimizer, update, sparse.table, sparse.embedding_state, step=step
    )
    return norm, update._replace(pending=jnp.int32(1)), SparseState(table, embedding_state)


def _clip(
    limit: float, norm: jax.Array, params_grad: Any, update: GradientUpdate
) -> tuple[Any, GradientUpdate]:
    """Gradients scaled down to a norm of `limit`."""
    scale = jnp.where(norm > limit, limit / norm, 1.0)
    grads = (update.grads.astype(jnp.float32) * scale).astype(jnp.bfloat16)
    params_grad = jax.tree.map(lambda g: (g * scale).astype(g.dtype), params_grad)
    return params_grad, update._replace(grads=grads)


def _squared_norm(tree: Any) -> jax.Array:
    leaves = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return sum(leaves, start=jnp.float32(0))


def _all_finite(tree: Any) -> jax.Array:
    result = jnp.bool_(True)
    for leaf in jax.tree.leaves(tree):
        result = result & jnp.all(jnp.isfinite(leaf))
    return result


def _surely_finite(grads: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Whether the norm of the gradients summed by row must be finite, without summing them by row.

    By the Cauchy-Schwarz inequality the square of a sum of n gradients is at most n times the sum
    of their squares, so that N times the sum over all tokens bounds the squared norm.
    """
    squares = jnp.sum(jnp.square(grads.astype(jnp.float32)), axis=1)
    total = jnp.sum(jnp.where(segment_ids >= 0, squares, 0.0))
    return total * grads.shape[0] <= _LARGEST_SQUARED_NORM
