"""Checks and conversions of what a program gives to a call, done when it is traced.

What is refused here is refused on every rank at once, before anything is exchanged: a handler that
fails on one device alone would leave the others waiting.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrex.cuda.async_emb import comm_utils
from xrex.cuda.async_emb.handle import AsyncEmbContextHandle
from xrex.cuda.async_emb.ordering import as_operand
from xrex.cuda.async_emb.varying import varying_axes

_INT32 = np.iinfo(np.int32)


def require_single_process_cpu(ctx: AsyncEmbContextHandle) -> None:
    """Checks that the context's backend reaches all its devices.

    Raises:
        ValueError: the mesh is made of CPU devices of several processes.
    """
    processes = comm_utils.process_indices(ctx.mesh)
    if ctx.platform == "cpu" and processes != [jax.process_index()]:
        raise ValueError(
            f"async_emb: the mesh is made of CPU devices of processes {processes}, and this is "
            f"process {jax.process_index()}; the host backend serves the CPU devices of its own "
            "process only: use a mesh of local devices, or the plain JAX path"
        )


def require_inside_shard_map(call: str, ctx: AsyncEmbContextHandle) -> None:
    """Checks that the program being traced is per rank, over the mesh of the context.

    Raises:
        ValueError: it is not inside jax.shard_map over `ctx.mesh`, or an axis is not manual there.
    """
    mesh = jax.sharding.get_abstract_mesh()
    way_out = (
        f"call it inside jax.shard_map(..., mesh=ctx.mesh), over all axes of "
        f"{dict(ctx.mesh.shape)}, or use the wrappers for global arrays in xrex.utils and "
        "xrex.optimizers.recsys"
    )
    # The order of the axes counts too: it says which device has which columns.
    if mesh.empty or tuple(mesh.shape.items()) != tuple(ctx.mesh.shape.items()):
        found = "no mesh" if mesh.empty else f"a mesh of {dict(mesh.shape)}"
        raise ValueError(f"async_emb: {call} was traced under {found}; {way_out}")
    needed = [
        name
        for name, size in ctx.mesh.shape.items()
        if size > 1 or name in ctx.table_axis or name in ctx.data_axis
    ]
    global_axes = [name for name in needed if name not in mesh.manual_axes]
    if global_axes:
        raise ValueError(
            f"async_emb: {call} was traced where mesh axes {global_axes} are not manual, that is, "
            f"outside shard_map; {way_out}"
        )


def array(
    call: str,
    name: str,
    x: Any,
    dtype: Any,
    shape: Sequence[int | None],
    shape_text: str,
    axes: Sequence[str],
) -> jax.Array:
    """Returns `x` after checking it.

    Args:
        call: the public function, for messages.
        name: the argument, for messages.
        x: the per-rank array.
        dtype: what its dtype must be.
        shape: its shape; None where any size from 1 to 2^31 - 1 will do.
        shape_text: the shape in terms of the contract, for messages.
        axes: the mesh axes it may vary over.

    Raises:
        TypeError: not an array, or of another dtype.
        ValueError: of another shape, or known to vary over other axes.
    """
    result = as_operand(call, x)
    dtype = jnp.dtype(dtype)
    if result.dtype != dtype:
        raise TypeError(
            f"async_emb: {call} got {name} of dtype {result.dtype}; the rule is {dtype}: convert "
            f"it with {_conversion(name, x, dtype.name)}"
        )
    fits = len(result.shape) == len(shape) and all(
        1 <= got <= _INT32.max if want is None else got == want
        for got, want in zip(result.shape, shape, strict=True)
    )
    if not fits:
        wanted = [f"1..{_INT32.max}" if size is None else size for size in shape]
        raise ValueError(
            f"async_emb: {call} got {name} of shape {list(result.shape)}; the rule is "
            f"{shape_text} = [{', '.join(map(str, wanted))}] on each rank: give the rank's own "
            "part (inside shard_map) of an array that fits the context, or make a context of "
            "other sizes"
        )
    require_varying_within(call, name, result, axes)
    return result


def require_varying_within(call: str, name: str, x: jax.Array, axes: Sequence[str]) -> None:
    """Checks that `x` is not known to vary over other mesh axes than `axes`.

    Raises:
        ValueError: it does.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    extra = sorted(a for a in varying_axes(x) if a not in axes and sizes.get(a, 1) > 1)
    if extra:
        raise ValueError(
            f"async_emb: {call} got {name}, which varies over mesh axes {extra}; it may vary over "
            f"{list(axes)} only and must be equal along all others: reduce or gather it first"
        )


def token_ids(call: str, ids: Any, ctx: AsyncEmbContextHandle) -> jax.Array:
    """Returns the ids as int32 [T]. Ids that int32 cannot hold become its ends, out of range still.

    Raises:
        TypeError: not an integer array.
        ValueError: it does not have T elements, or varies over other axes than the data axes.
    """
    flat = clamp_ids(call, ids).reshape(-1)
    return array(
        call, "token_ids", flat, jnp.int32, (ctx.tokens_per_rank,), "[T]", axes=ctx.data_axis
    )


def clamp_ids(call: str, ids: Any) -> jax.Array:
    """Returns ids of any integer dtype as int32 of the same shape, clamped to its range.

    Arrays that are not JAX's are clamped before JAX sees them, which would drop high bits.

    Raises:
        TypeError: not an integer array.
    """
    values = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(
            f"async_emb: {call} got token_ids of dtype {values.dtype}; ids are integers: convert "
            f"them with {_conversion('token_ids', ids, 'int32')}"
        )
    bounds = jnp.iinfo(values.dtype)
    lowest, highest = max(int(bounds.min), _INT32.min), min(int(bounds.max), _INT32.max)
    if int(bounds.min) < lowest or int(bounds.max) > highest:
        values = values.clip(lowest, highest)
    return jnp.asarray(values.astype(np.int32))


def pending(call: str, value: Any) -> jax.Array:
    """Returns the pending flag as int32 [].

    Raises:
        TypeError: neither a bool nor an int32 scalar.
        ValueError: not a scalar, or not equal on all ranks.
    """
    if isinstance(value, bool | int):
        value = np.int32(bool(value))
    flag = as_operand(call, value)
    if flag.dtype == jnp.bool_:
        value = flag.astype(jnp.int32)
    return array(call, "pending", value, jnp.int32, (), "a scalar", axes=())


def step(call: str, value: Any) -> jax.Array:
    """Returns the step number as int32 [].

    Raises:
        TypeError: neither a Python int nor an int32 scalar.
        ValueError: not a scalar, outside int32, or not equal on all ranks.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not _INT32.min <= value <= _INT32.max:
            raise ValueError(
                f"async_emb: {call} got step={value}; steps are int32, at most {_INT32.max}"
            )
        value = np.int32(value)
    return array(call, "step", value, jnp.int32, (), "a scalar", axes=())


def learning_rate(call: str, value: Any) -> jax.Array:
    """Returns the learning rate as float32 [], an operand, so that a new value never retraces.

    Raises:
        TypeError: neither a number nor a float32 scalar array.
        ValueError: a number that is not finite in float32, or an array that is not a scalar.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        rounded = _float32(value)
        if not math.isfinite(rounded):
            raise ValueError(
                f"async_emb: {call} got learning_rate={value!r}; it must be finite in float32: "
                "give a finite number, or an array (a step whose array is not finite is skipped)"
            )
        value = rounded
    return array(call, "learning_rate", value, jnp.float32, (), "a scalar", axes=())


def eps(call: str, value: Any) -> np.float32:
    """Returns eps as float32, such that it and its inverse are finite and positive.

    Raises:
        TypeError: not a Python number.
        ValueError: outside that range.
    """
    rounded = _number(call, "eps", value)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / rounded
    if not (rounded > 0 and np.isfinite(rounded) and inverse > 0 and np.isfinite(inverse)):
        raise ValueError(
            f"async_emb: {call} got eps={value!r}; eps and 1/eps must be finite and positive in "
            "float32: choose it between 1e-38 and 1e38, for example 1e-8"
        )
    return rounded


def fraction(call: str, name: str, value: Any, *, zero_allowed: bool) -> np.float32:
    """Returns a factor of at most 1 as float32.

    Raises:
        TypeError: not a Python number.
        ValueError: outside [0, 1], or 0 where that is not allowed.
    """
    rounded = _number(call, name, value)
    low_enough = value <= 1
    high_enough = rounded >= 0 if zero_allowed else rounded > 0
    if not (low_enough and high_enough and value >= 0):
        rule = f"0 {'<=' if zero_allowed else '<'} {name} <= 1"
        raise ValueError(
            f"async_emb: {call} got {name}={value!r}; the rule, in float32, is {rule}: "
            "1 means no decay"
        )
    return rounded


def rate(call: str, name: str, value: Any) -> np.float32:
    """Returns a decay rate per step as float32.

    Raises:
        TypeError: not a Python number.
        ValueError: negative or not finite.
    """
    rounded = _number(call, name, value)
    if not (value >= 0 and np.isfinite(rounded)):
        raise ValueError(
            f"async_emb: {call} got {name}={value!r}; a rate is finite in float32 and at least 0: "
            "0 means no decay"
        )
    return rounded


def rank(ctx: AsyncEmbContextHandle) -> jax.Array:
    """Returns this rank as the program counts it, int32 [].

    A mesh with the same axes but the devices in another order looks the same while a program is
    traced; each native context compares this with its own rank.
    """
    return jnp.asarray(lax.axis_index(ctx.table_axis), jnp.int32)


def gate(call: str, x: Any) -> jax.Array:
    """Returns an operand of which only the availability counts; no gradient flows into it.

    Raises:
        TypeError: not an array that native code can take.
    """
    return jax.lax.stop_gradient(as_operand(call, x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def refuse_derivative(call: str, name: str, x: jax.Array) -> jax.Array:
    """Returns `x`; differentiating with respect to it is a ValueError that names the way out."""
    del call, name
    return x


@refuse_derivative.defjvp
def _refuse_derivative_jvp(
    call: str, name: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    del primals, tangents
    raise ValueError(
        f"async_emb: {call} has no derivative with respect to {name}; differentiate the loss with "
        "respect to the embeddings that lookup_done returns, and give that gradient to the next "
        "update start"
    )


def _conversion(name: str, x: Any, dtype: str) -> str:
    """Returns the expression that converts `x`, which may be a Python number or list."""
    if hasattr(x, "astype"):
        return f"{name}.astype({dtype!r})"
    return f"jnp.asarray({name}, {dtype!r})"


def _number(call: str, name: str, value: Any) -> np.float32:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"async_emb: {call} got {name} as a {type(value).__name__}; it is compiled into the "
            "program: give a Python number"
        )
    return _float32(value)


def _float32(value: Any) -> np.float32:
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(value)
