"""From a batch in host memory to what a step needs on the devices."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrex.cuda.async_emb.id_groups import IdGroups, group_ids
from xrex.train.token_layout import TokenLayout
from xrex.train.train_state import TrainSetup, place

_INT32 = np.iinfo(np.int32)
_serials = itertools.count()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DeviceBatch:
    """A batch as global arrays. N = B * F tokens.

    Attributes:
      ids: int32 [N], over the data axes.
      segment_ids: int32 [N], likewise; -1 for padding and for ids outside the table.
      unique_tokens: int32 [U], replicated.
      batch: the caller's batch, every array over the data axes.
      layout: how the tokens of an example are made of its features.
    """

    ids: jax.Array
    segment_ids: jax.Array
    unique_tokens: jax.Array
    batch: Any
    layout: TokenLayout = dataclasses.field(metadata={"static": True})


class PreparedBatch(NamedTuple):
    """A batch on the devices.

    Attributes:
      source: the caller's object that it was made of.
      arrays: what programs take of it.
      ids: int32 [N] in host memory, what every token reads.
      groups: its distinct rows, in host memory.
      serial: tells prepared batches of this process apart.
    """

    source: Any
    arrays: DeviceBatch
    ids: np.ndarray
    groups: IdGroups
    serial: int


def prepare_batch(setup: TrainSetup, batch: Any) -> PreparedBatch:
    """Checks a batch, groups its tokens by id and starts its way to the devices.

    Every process passes the same global batch and keeps the part of its own devices. A batch that
    is prepared already is returned as it is.

    Raises:
      TypeError: the ids are not integers or the mask is not bool.
      ValueError: a shape is wrong, there are more distinct ids than `ctx.num_unique`, or an id is
        outside the table and the setup refuses that.
    """
    if isinstance(batch, PreparedBatch):
        return batch
    features, mask_features = setup.tokens(batch)
    layout = TokenLayout.of(features)
    ids = layout.join(_id_leaves(features))
    mask = _mask(mask_features, features, layout)
    _check_tokens(setup, ids, batch)
    groups = group_ids(ids, setup.vocab_rows, setup.ctx.num_unique, mask=mask)
    if setup.refuse_out_of_range and groups.num_out_of_range:
        position = groups.first_out_of_range
        example, token = divmod(position, layout.num_tokens)
        raise ValueError(
            f"{groups.num_out_of_range} ids of the batch are outside the table of "
            f"{setup.vocab_rows} rows, the first at example {example}, token {token}: "
            f"{ids.reshape(-1)[position]}; mend the data, mask such tokens, or give "
            "refuse_out_of_range=False to have them counted"
        )
    # Ids that int32 cannot hold stay outside the table when they are clamped.
    flat = np.clip(ids, _INT32.min, _INT32.max).astype(np.int32).reshape(-1)
    tokens, replicated = setup.token_sharding(), setup.replicated()
    arrays = DeviceBatch(
        ids=place(flat, tokens),
        segment_ids=place(groups.segment_ids, tokens),
        unique_tokens=place(groups.unique_tokens, replicated),
        # Copies: JAX may use host memory where it lies, and the caller may use it again.
        batch=jax.tree.map(lambda x: place(np.array(x), tokens), batch),
        layout=layout,
    )
    return PreparedBatch(batch, arrays, flat, groups, next(_serials))


def check_loss(setup: TrainSetup, dense_params: Any, batch: DeviceBatch) -> None:
    """Checks what the loss function returns, before a program that would use the state up.

    Raises:
      TypeError: the loss is not a float32 scalar, or not a (loss, aux) pair.
    """
    rows = jax.ShapeDtypeStruct((setup.ctx.tokens_per_batch, setup.ctx.emb_width), jnp.bfloat16)
    result = jax.eval_shape(
        lambda params, rows, arrays: setup.loss_fn(params, batch.layout.split(rows), arrays),
        dense_params,
        rows,
        batch.batch,
    )
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"the loss function returned {result}; it must return (loss, aux)")
    loss = result[0]
    if getattr(loss, "shape", None) != () or loss.dtype != jnp.float32:
        raise TypeError(f"the loss is {loss}; it must be a float32 scalar")


def _id_leaves(features: Any) -> list[np.ndarray]:
    """The features as NumPy arrays of integers, checked one by one and against each other."""
    named = jax.tree_util.tree_leaves_with_path(features)
    if not named:
        raise ValueError("the batch has no id features; setup.tokens must return at least one")
    leaves = []
    for path, leaf in named:
        array, name = np.asarray(leaf), jax.tree_util.keystr(path)
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"token ids{name} are {array.dtype}; they must be integers: cast them")
        if array.ndim < 1:
            raise ValueError(
                f"token ids{name} have shape []; give arrays [B, ...]: lists and tuples are pytrees"
            )
        if array.shape[0] == 0:
            raise ValueError(f"token ids{name} have shape {list(array.shape)}: no examples")
        if array.shape[0] != np.shape(named[0][1])[0]:
            raise ValueError(
                f"token ids{name} have shape {list(array.shape)}; the first dimension of every id "
                "feature must be the examples"
            )
        leaves.append(array)
    return leaves


def _mask(mask_features: Any, features: Any, layout: TokenLayout) -> np.ndarray | None:
    """The mask as one array [B, F]; None if every token counts."""
    if mask_features is None:
        return None
    leaves, tree = jax.tree.flatten(mask_features)
    if tree != layout.tree:
        raise ValueError(
            f"the token mask is {tree} and the ids are {layout.tree}; both must have one structure"
        )
    arrays = [np.asarray(leaf) for leaf in leaves]
    for array, ids in zip(arrays, jax.tree.leaves(features), strict=True):
        if array.dtype != np.bool_:
            raise TypeError(f"the token mask is {array.dtype}; it must be bool: True marks a value")
        if array.shape != np.shape(ids):
            raise ValueError(
                f"token ids {list(np.shape(ids))} and mask {list(array.shape)} must have one shape"
            )
    return layout.join(arrays)


def _check_tokens(setup: TrainSetup, ids: np.ndarray, batch: Any) -> None:
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
