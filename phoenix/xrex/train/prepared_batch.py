"""From a batch in host memory to what a step needs on the devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrex.cuda.async_emb.async_emb import make_segments
from xrex.train.train_state import TrainSetup, place

_INT32 = np.iinfo(np.int32)


class DeviceBatch(NamedTuple):
    """A batch as global arrays. N = B * F tokens.

    Attributes:
      ids: int32 [N], over the data axes.
      segment_ids: int32 [N], likewise; -1 for padding and for ids outside the table.
      unique_tokens: int32 [U], replicated.
      batch: the caller's batch, every array over the data axes.
    """

    ids: jax.Array
    segment_ids: jax.Array
    unique_tokens: jax.Array
    batch: Any


class PreparedBatch(NamedTuple):
    """A batch on the devices, and the caller's object that it was made of."""

    source: Any
    arrays: DeviceBatch


def prepare_batch(setup: TrainSetup, batch: Any) -> PreparedBatch:
    """Checks a batch, groups its tokens by id and starts its way to the devices.

    Every process passes the same global batch and keeps the part of its own devices. A batch that
    is prepared already is returned as it is.

    Raises:
      TypeError: the ids are not integers or the mask is not bool.
      ValueError: a shape is wrong, or there are more distinct ids than `ctx.num_unique`.
    """
    if isinstance(batch, PreparedBatch):
        return batch
    ids, mask = (np.asarray(x) for x in setup.tokens(batch))
    _check_tokens(setup, ids, mask, batch)
    # An id of V is outside the table, so that padding gets segment -1.
    listed = np.where(mask, ids, setup.vocab_rows)
    unique_tokens, segment_ids = make_segments(listed, setup.vocab_rows, setup.ctx.num_unique)
    tokens, replicated = setup.token_sharding(), setup.replicated()
    arrays = DeviceBatch(
        # Ids that int32 cannot hold stay outside the table when they are clamped.
        ids=place(np.clip(ids, _INT32.min, _INT32.max).astype(np.int32).reshape(-1), tokens),
        segment_ids=place(segment_ids, tokens),
        unique_tokens=place(unique_tokens, replicated),
        batch=jax.tree.map(lambda x: place(np.asarray(x), tokens), batch),
    )
    return PreparedBatch(batch, arrays)


def check_loss(setup: TrainSetup, dense_params: Any, batch: DeviceBatch) -> None:
    """Checks what the loss function returns, before a program that would use the state up.

    Raises:
      TypeError: the loss is not a float32 scalar, or not a (loss, aux) pair.
    """
    rows = jax.ShapeDtypeStruct((setup.ctx.tokens_per_batch, setup.ctx.emb_width), jnp.bfloat16)
    result = jax.eval_shape(setup.loss, dense_params, rows, batch.batch)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"the loss function returned {result}; it must return (loss, aux)")
    loss = result[0]
    if getattr(loss, "shape", None) != () or loss.dtype != jnp.float32:
        raise TypeError(f"the loss is {loss}; it must be a float32 scalar")


def _check_tokens(setup: TrainSetup, ids: np.ndarray, mask: np.ndarray, batch: Any) -> None:
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"token ids are {ids.dtype}; they must be integers: cast them")
    if mask.dtype != np.bool_:
        raise TypeError(f"the token mask is {mask.dtype}; it must be bool: True marks a value")
    if ids.ndim != 2 or mask.shape != ids.shape:
        raise ValueError(
            f"token ids {list(ids.shape)} and mask {list(mask.shape)} must both be [batch, tokens]"
        )
    if ids.size != setup.ctx.tokens_per_batch:
        raise ValueError(
            f"the batch has {ids.size} tokens {list(ids.shape)}; the context was made for "
            f"tokens_per_batch={setup.ctx.tokens_per_batch}: fill short batches up with padding"
        )
    ranks = setup.ctx.group_size
    if ids.shape[0] % ranks:
        raise ValueError(
            f"{ids.shape[0]} examples do not divide by {ranks} ranks; fill the batch up to a "
            f"multiple of {ranks}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if np.shape(leaf)[:1] != ids.shape[:1]:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {list(np.shape(leaf))}; the first "
                f"dimension of every array must be the {ids.shape[0]} examples"
            )
