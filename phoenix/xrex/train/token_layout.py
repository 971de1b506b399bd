"""Id features of a batch as one array of tokens, and embeddings back as features."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np


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
        """The features [B, ...] as one array [B, F]."""
        if len(leaves) == 1:
            return leaves[0].reshape(leaves[0].shape[0], -1)
        return np.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=1)

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
