"""An MLP ranker over pooled id embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xrex.train.batches import Batch
from xrex.train.features import FeatureLayout

Params = Mapping[str, Mapping[str, jax.Array | np.ndarray]]


def masked_mean(embeddings: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the slots that hold a value; zero where none does.

    Args:
      embeddings: [B, S, W].
      mask: bool [B, S].

    Returns:
      [B, W], in the type of `embeddings`.
    """
    weights = mask.astype(embeddings.dtype)
    count = jnp.maximum(weights.sum(axis=1, keepdims=True), 1)
    return jnp.einsum("bsw,bs->bw", embeddings, weights) / count


class MlpRanker:
    """Every field is mean-pooled over its slots; an MLP turns the fields into one logit.

    Beside the fields themselves the MLP sees the elementwise products of the pairs of fields in
    `crosses`, which spares it from learning what a product is.
    """

    def __init__(
        self,
        layout: FeatureLayout,
        emb_width: int,
        *,
        hidden: Sequence[int] = (128, 64),
        crosses: Sequence[tuple[str, str]] = (),
    ) -> None:
        unknown = {name for pair in crosses for name in pair} - set(layout.slices())
        if unknown:
            raise ValueError(f"crosses name {sorted(unknown)}; fields are {list(layout.slices())}")
        self._slices = layout.slices()
        self._crosses = tuple(crosses)
        width = (len(layout.fields) + len(self._crosses)) * emb_width
        self._widths = (width, *hidden, 1)

    def init(self, seed: int) -> Params:
        """He-initialised float32 parameters as NumPy arrays: layer_i -> kernel [in, out], bias."""
        rng = np.random.Generator(np.random.PCG64(seed))
        params: dict[str, dict[str, jax.Array | np.ndarray]] = {}
        for index, (fan_in, fan_out) in enumerate(itertools.pairwise(self._widths)):
            kernel = rng.normal(0.0, np.sqrt(2 / fan_in), (fan_in, fan_out)).astype(np.float32)
            params[f"layer_{index}"] = {"kernel": kernel, "bias": np.zeros(fan_out, np.float32)}
        return params

    def logits(self, params: Params, embeddings: jax.Array, batch: Batch) -> jax.Array:
        """Logits float32 [B] of embeddings bf16 [B, F, W]."""
        values = embeddings.astype(jnp.float32)
        pooled = {
            name: masked_mean(values[:, slots], jnp.asarray(batch.mask)[:, slots])
            for name, slots in self._slices.items()
        }
        products = [pooled[left] * pooled[right] for left, right in self._crosses]
        hidden = jnp.concatenate([*pooled.values(), *products], axis=1)
        last = len(self._widths) - 2
        for index in range(last + 1):
            layer = params[f"layer_{index}"]
            hidden = hidden @ layer["kernel"] + layer["bias"]
            if index < last:
                hidden = jax.nn.relu(hidden)
        return hidden[:, 0]

    def loss(
        self, params: Params, embeddings: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Weighted mean binary cross entropy in nats, and the logits [B]."""
        logits = self.logits(params, embeddings, batch)
        weights = jnp.asarray(batch.weights)
        losses = jax.nn.softplus(logits) - logits * batch.labels
        return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1), logits
