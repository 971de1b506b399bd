"""What the benchmarks share: a description of the machine, inputs, and timing in turn."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jaxlib
import numpy as np

ZIPF_EXPONENT = 1.2


def describe_machine() -> dict[str, Any]:
    """Returns what a figure means nothing without: processor, devices, versions."""
    return {
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
    }


def zipf_ids(rng: np.random.Generator, num_ids: int, vocab_rows: int) -> np.ndarray:
    """Draws int32 [num_ids] from Zipf(1.2) cut off at `vocab_rows`, over a permuted vocabulary."""
    weights = np.arange(1, vocab_rows + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    cumulative = np.cumsum(weights)
    ranks = np.searchsorted(cumulative, rng.random(num_ids) * cumulative[-1])
    return rng.permutation(vocab_rows)[ranks].astype(np.int32)


def uniform_ids(rng: np.random.Generator, num_ids: int, vocab_rows: int) -> np.ndarray:
    """Draws int32 [num_ids] uniformly."""
    return rng.integers(0, vocab_rows, num_ids, dtype=np.int32)


def time_in_turn(
    alternatives: Mapping[str, Callable[[], Any]], *, repetitions: int, warmup: int = 3
) -> dict[str, float]:
    """Runs the alternatives one after the other, again and again.

    Each is called until its result is ready, so that whatever the machine does meanwhile meets all
    of them alike.

    Returns:
        The median milliseconds of each alternative.
    """
    samples: dict[str, list[float]] = {name: [] for name in alternatives}
    for repetition in range(warmup + repetitions):
        for name, run in alternatives.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            elapsed = time.perf_counter() - begin
            if repetition >= warmup:
                samples[name].append(elapsed * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def print_json(record: Mapping[str, Any]) -> None:
    """Prints one record as one line of JSON."""
    print(json.dumps(record), flush=True)


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
