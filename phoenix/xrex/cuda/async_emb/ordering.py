"""The one way to keep XLA from moving work across a start or a done."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrex.cuda.async_emb import native
from xrex.cuda.async_emb.varying import align_varying, mark_varying, varying_axes

ORDER_TARGET = "xrex_async_emb_order"


def order_after(x: Any, *pins: Any, platform: str) -> Any:
    """Returns `x` unchanged, but available only once all `pins` are.

    A start overlaps with the dense computation only when both ends are tied: the computation must
    wait until the start has been enqueued, and the done must wait for the computation. XLA keeps
    `lax.optimization_barrier` on CUDA and drops it on CPU, where only operands order; so on CPU
    the arrays also pass through an identity call that takes the pins as operands. Nothing is
    computed, so bits stay as they are.

    Legal inside shard_map (with check_vma on or off) and in programs of one device. The gradient
    of `x` passes through; none flows into `pins`.

    Args:
        x: pytree of arrays of any shape and dtype.
        *pins: pytrees of arrays of any shape and dtype.
        platform: "cpu" or "CUDA", where the program runs.

    Raises:
        TypeError: a leaf is not an array that an FFI call takes.
        ValueError: `platform` is neither "cpu" nor "CUDA".
        ImportError: `platform` is "cpu" and the native module is not built.
    """
    if platform not in ("cpu", "CUDA"):
        raise ValueError(f"async_emb: order_after got platform={platform!r}; give 'cpu' or 'CUDA'")
    leaves, tree = jax.tree.flatten(x)
    leaves = [as_operand("order_after", leaf) for leaf in leaves]
    pin_leaves = [as_operand("order_after", leaf) for leaf in jax.tree.leaves(pins)]
    if not leaves or not pin_leaves:
        return x
    return jax.tree.unflatten(tree, _order(platform, tuple(leaves), tuple(pin_leaves)))


def as_operand(call: str, x: Any) -> jax.Array:
    """Returns `x` as an array that an FFI call takes.

    Raises:
        TypeError: `x` is not an array, or one of an extended dtype such as a random key.
    """
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"async_emb: {call} got a {type(x).__name__} where it takes an array; "
            "give an array or a scalar"
        ) from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(
            f"async_emb: {call} got an array of dtype {array.dtype}, which native code cannot "
            "read; for random keys give jax.random.key_data(key)"
        )
    return array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _order(
    platform: str, leaves: tuple[jax.Array, ...], pins: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    tied_leaves, tied_pins = lax.optimization_barrier((leaves, pins))
    if platform != "cpu":
        return tied_leaves
    native.load(platform)
    tied = jax.ffi.ffi_call(
        ORDER_TARGET,
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        input_output_aliases={i: i for i in range(len(leaves))},
    )(*align_varying([*tied_leaves, *tied_pins]), num_values=np.int64(len(leaves)))
    return tuple(mark_varying(x, varying_axes(leaf)) for x, leaf in zip(tied, leaves, strict=True))


def _order_fwd(
    platform: str, leaves: tuple[jax.Array, ...], pins: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], None]:
    return _order(platform, leaves, pins), None


def _order_bwd(platform: str, residuals: None, cotangents: tuple) -> tuple[tuple, None]:
    del platform, residuals
    return cotangents, None


_order.defvjp(_order_fwd, _order_bwd)
