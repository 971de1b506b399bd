"""Optimizers of embedding tables whose updates run beside the dense computation."""

from xrex.optimizers.recsys.protocol import (
    EmbeddingOptimizer,
    GradientUpdate,
    UpdateInFlight,
    UpdateResult,
)
from xrex.optimizers.recsys.rowwise_adagrad import (
    RowwiseAdagrad,
    RowwiseAdagradLazy,
    RowwiseAdagradLazyState,
    RowwiseAdagradState,
)

__all__ = [
    "EmbeddingOptimizer",
    "GradientUpdate",
    "RowwiseAdagrad",
    "RowwiseAdagradLazy",
    "RowwiseAdagradLazyState",
    "RowwiseAdagradState",
    "UpdateInFlight",
    "UpdateResult",
]
