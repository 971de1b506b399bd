"""Which mesh axes a per-rank array varies over, and how to mark it.

With check_vma=True shard_map types every array with the axes it varies over, and turns a cotangent
of a value that does not vary into a sum over ranks. Outputs of FFI calls count as not varying, and
all operands of a call must vary over the same axes. With check_vma=False nothing varies and marking
does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
from jax import lax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the mesh axes that `x` is known to vary over."""
    return jax.typeof(x).manual_axis_type.varying


def mark_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Returns `x`, varying over `axes` beside those it varies over already."""
    known = varying_axes(x)
    return lax.pcast(x, tuple(axis for axis in axes if axis not in known), to="varying")


def align_varying(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns `arrays`, each varying over every axis that one of them varies over."""
    union = sorted(frozenset().union(*map(varying_axes, arrays)))
    return [mark_varying(x, union) for x in arrays]
