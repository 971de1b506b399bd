"""Generated click data: Zipf-distributed ids and labels from a planted logistic model.

Nothing is downloaded. The same seed gives the same examples, bit for bit. Popularity falls off as
rank**-exponent over a permuted vocabulary, so that hot ids have nothing to do with small numbers.
Every value has a hidden effect; the label is drawn with the probability sigmoid(sum of effects), so
a model that learns the effects ranks well above chance.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from xrex.train.features import PADDING_ROW, ExampleSet, FeatureLayout, Field, hash_rows
from xrex.train.readers import Block

BAG_SLOTS = 10
LAYOUT = FeatureLayout(
    (*(Field(f"field_{index}") for index in range(6)), Field("bag", BAG_SLOTS)),
)


@dataclasses.dataclass(frozen=True)
class ZipfConfig:
    """What to generate.

    Attributes:
      seed: seed of NumPy's PCG64; stated in every report.
      num_examples: examples to generate.
      part: examples of two parts are drawn apart, with the same hidden effects; at least 0.
      vocabulary: distinct values of each field.
      exponent: of the popularity's power law, > 0.
      effect_scale: standard deviation of the hidden effects, in logits.
      block_examples: examples that are generated at once.
    """

    seed: int = 17
    num_examples: int = 100_000
    part: int = 0
    vocabulary: int = 5_000
    exponent: float = 1.2
    effect_scale: float = 1.0
    block_examples: int = 1024

    def __post_init__(self) -> None:
        for name in ("num_examples", "vocabulary", "exponent", "block_examples"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("seed", "part"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


class _FieldSampler:
    """Draws values of one field and knows their hidden effects and table rows."""

    def __init__(
        self, field: str, config: ZipfConfig, rng: np.random.Generator, num_rows: int
    ) -> None:
        weights = np.arange(1, config.vocabulary + 1, dtype=np.float64) ** -config.exponent
        self._cumulative = np.cumsum(weights) / np.sum(weights)
        self._value_of_rank = rng.permutation(config.vocabulary)
        self._effects = rng.normal(0.0, config.effect_scale, config.vocabulary)
        self.rows = hash_rows(field, [str(value) for value in range(config.vocabulary)], num_rows)

    def draw(
        self, rng: np.random.Generator, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Table rows (int32) and effects (float64) of freshly drawn values."""
        ranks = np.searchsorted(self._cumulative, rng.random(shape), side="right")
        values = self._value_of_rank[np.minimum(ranks, len(self._value_of_rank) - 1)]
        return self.rows[values], self._effects[values]


class ZipfReader:
    """Generates examples block by block, so that their number is not bounded by memory.

    Args:
      config: what to generate.
      num_rows: V, rows of the table that values are hashed into.
    """

    def __init__(self, config: ZipfConfig, num_rows: int) -> None:
        self._config = config
        rng = np.random.Generator(np.random.PCG64(config.seed))
        self._samplers = [_FieldSampler(f.name, config, rng, num_rows) for f in LAYOUT.fields]

    @property
    def layout(self) -> FeatureLayout:
        """See `ExampleReader`."""
        return LAYOUT

    @property
    def num_blocks(self) -> int:
        """See `ExampleReader`."""
        return -(-self._config.num_examples // self._config.block_examples)

    @property
    def num_examples(self) -> int:
        """See `ExampleReader`."""
        return self._config.num_examples

    def num_distinct_rows(self) -> int:
        """Distinct table rows that examples may use."""
        return len(np.unique(np.concatenate([sampler.rows for sampler in self._samplers])))

    def read(self, block: int) -> Block:
        """See `ExampleReader`."""
        config = self._config
        count = min(config.block_examples, config.num_examples - block * config.block_examples)
        rng = np.random.Generator(np.random.PCG64([config.seed, 1 + config.part, block]))
        rows = np.full((count, LAYOUT.num_slots), PADDING_ROW, np.int32)
        logits = np.zeros(count)
        for field, sampler in zip(LAYOUT.fields, self._samplers, strict=True):
            drawn, effects = sampler.draw(rng, (count, field.slots))
            used = np.arange(field.slots) < rng.integers(1, field.slots + 1, count)[:, None]
            rows[:, LAYOUT.slices()[field.name]] = np.where(used, drawn, PADDING_ROW)
            logits += np.sum(effects * used, axis=1) / np.sum(used, axis=1)
        labels = (rng.random(count) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        return Block(ExampleSet(LAYOUT, rows, rows != PADDING_ROW, labels))
