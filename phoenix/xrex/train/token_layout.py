"""Id features of a batch as one array of tokens, and embeddings back as features."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np

_INT64_MAX = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class TokenLayout:
    """How the id features of an example, a pytree of arrays [B, ...], lie in its tokens [B, F].

    The features follow each other in the order of the pytree, each in row-major order.

    Attributes:
      tree: structure of the pytree.
      shapes: shape of each feature of one example, without B.
    """

    tree: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, features: Any) -> Self:
        """The layout of id features, a pytree of arrays of at least one dimension."""
        leaves, tree = jax.tree.flatten(features)
        return cls(tree, tuple(tuple(np.shape(leaf)[1:]) for leaf in leaves))

    @property
    def num_tokens(self) -> int:
        """F, tokens of one example."""
        return sum(math.prod(shape) for shape in self.shapes)

    def join(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """The features [B, ...], of integers or of bools, as one array [B, F].

        NumPy has no type for what uint64 and a signed type hold: there the result is int64, and
        what it cannot hold becomes its largest value, outside any table.
        """
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves]
        if len(flat) == 1:
            return flat[0]
        if np.issubdtype(np.result_type(*flat), np.floating):
            flat = [
                np.minimum(leaf, _INT64_MAX) if leaf.dtype == np.uint64 else leaf for leaf in flat
            ]
            return np.concatenate(flat, axis=1, dtype=np.int64, casting="unsafe")
        return np.concatenate(flat, axis=1)

    def split(self, embeddings: jax.Array) -> Any:
        """The embeddings [N, W] as the pytree of the features, each [B, ..., W]."""
        width = embeddings.shape[-1]
        if len(self.shapes) == 1:
            return jax.tree.unflatten(self.tree, [embeddings.reshape(-1, *self.shapes[0], width)])
        rows = embeddings.reshape(-1, self.num_tokens, width)
        leaves, start = [], 0
        for shape in self.shapes:
            end = start + math.prod(shape)
            leaves.append(rows[:, start:end].reshape(rows.shape[0], *shape, width))
            start = end
        return jax.tree.unflatten(self.tree, leaves)
