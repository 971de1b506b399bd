"""A whole training step on virtual CPU devices, native against plain JAX, in one run.

One model, one stream of Zipf(1.2) batches, three ways to train on it: the native pipeline, the same
schedule on plain JAX, and plain JAX with nothing deferred. A step includes preparing the batch on
the host. Units: milliseconds a step, N tokens in the global batch, V rows, W columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from absl import app, flags

from benchmarks import measure
from xrex.cuda.async_emb import async_emb
from xrex.optimizers.recsys import RowwiseAdagrad
from xrex.train import cpu_devices
from xrex.train.engines import NativeEngine, PlainEngine
from xrex.train.pipelined_step import PipelinedTrainStep
from xrex.train.synchronous_step import SynchronousTrainStep
from xrex.train.train_state import TrainSetup

_DEVICES = flags.DEFINE_integer("devices", 4, "Virtual CPU devices, one rank each.")
_EXAMPLES = flags.DEFINE_integer("examples", 2_048, "Examples of the global batch.")
_FEATURES = flags.DEFINE_integer("features", 32, "Tokens of one example.")
_WIDTH = flags.DEFINE_integer("width", 64, "W, columns of the table.")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "V, rows of the table.")
_HIDDEN = flags.DEFINE_integer("hidden", 256, "Width of the model's hidden layer.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 15, "Timed windows of each way.")

_SEED = 0
_STEPS_PER_WINDOW = 4
_DISTINCT_BATCHES = 8


class Batch(NamedTuple):
    """ids int32 [B, F], mask bool [B, F], label float32 [B]."""

    ids: np.ndarray
    mask: np.ndarray
    label: np.ndarray


class Run:
    """One way to train, with its state and its place in the stream of batches."""

    def __init__(self, step: Any, batches: Sequence[Batch], params: Any, table: Any) -> None:
        self._step = step
        self._state = step.init(params, table)
        self._batches: Iterator[Batch] = itertools.cycle(batches)
        self._next = next(self._batches)

    def window(self) -> Any:
        """Trains a few steps; what comes back is ready when they are."""
        for _ in range(_STEPS_PER_WINDOW):
            batch, self._next = self._next, next(self._batches)
            self._state, metrics = self._step.step(self._state, batch, self._next)
        return self._state.dense_params, metrics.loss

    def close(self) -> None:
        """Ends what is in flight."""
        self._step.close()


def _loss(params: Any, embeddings: jax.Array, batch: Batch) -> tuple[jax.Array, None]:
    flat = embeddings.reshape(embeddings.shape[0], -1).astype(jnp.float32)
    hidden = jax.nn.relu(flat @ params["hidden"])
    logit = (hidden @ params["out"])[:, 0]
    return optax.sigmoid_binary_cross_entropy(logit, batch.label).mean(), None


def _batches(rng: np.random.Generator) -> list[Batch]:
    shape = (_EXAMPLES.value, _FEATURES.value)
    ids = measure.zipf_ids(rng, _DISTINCT_BATCHES * shape[0] * shape[1], _ROWS.value)
    return [
        Batch(part, np.ones(shape, bool), rng.integers(0, 2, shape[0]).astype(np.float32))
        for part in ids.reshape(_DISTINCT_BATCHES, *shape)
    ]


def _setup(name: str, mesh: jax.sharding.Mesh) -> TrainSetup:
    num_tokens = _EXAMPLES.value * _FEATURES.value
    ctx = async_emb.make_context_handle(
        mesh,
        "data",
        data_axis="data",
        tokens_per_batch=num_tokens,
        emb_width=_WIDTH.value,
        num_unique=num_tokens,
        num_devices_per_node=_DEVICES.value,
        name=name,
    )
    return TrainSetup(
        ctx=ctx,
        vocab_rows=_ROWS.value,
        loss_fn=_loss,
        dense_optimizer=optax.adam(1e-3),
        embedding_optimizer=RowwiseAdagrad(initial_accumulator=0.1, eps=1e-8, decay_factor=1.0),
        learning_rate=0.05,
    )


def main(argv: Sequence[str]) -> None:
    """Prints the machine, the sizes, and one record."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    mesh = cpu_devices.cpu_mesh(_DEVICES.value)
    rng = np.random.default_rng(_SEED)
    width = _FEATURES.value * _WIDTH.value
    params = {
        "hidden": rng.standard_normal((width, _HIDDEN.value), np.float32) / np.sqrt(width),
        "out": rng.standard_normal((_HIDDEN.value, 1), np.float32) / np.sqrt(_HIDDEN.value),
    }
    table = rng.standard_normal((_ROWS.value, _WIDTH.value), np.float32) * 0.05
    table = table.astype(ml_dtypes.bfloat16)
    batches = _batches(rng)

    native, plain, synchronous = (_setup(name, mesh) for name in ("native", "plain", "sync"))
    steps = {
        "native": PipelinedTrainStep(native, NativeEngine(native.ctx)),
        "plain_jax": PipelinedTrainStep(plain, PlainEngine(plain.ctx)),
        "plain_jax_synchronous": SynchronousTrainStep(synchronous),
    }
    runs = {name: Run(step, batches, params, table) for name, step in steps.items()}
    measure.print_json(measure.describe_machine())
    measure.print_json(
        {
            "N": _EXAMPLES.value * _FEATURES.value,
            "W": _WIDTH.value,
            "V": _ROWS.value,
            "R": _DEVICES.value,
            "hidden": _HIDDEN.value,
        }
    )
    windows = measure.time_in_turn(
        {name: run.window for name, run in runs.items()}, repetitions=_REPETITIONS.value
    )
    step_ms = {name: ms / _STEPS_PER_WINDOW for name, ms in windows.items()}
    measure.print_json(
        {
            "case": "training step, Zipf(1.2) ids",
            "step_ms": {name: round(ms, 1) for name, ms in step_ms.items()},
            "speedup": round(step_ms["plain_jax"] / step_ms["native"], 2),
            "speedup_synchronous": round(step_ms["plain_jax_synchronous"] / step_ms["native"], 2),
        }
    )
    for run in runs.values():
        run.close()


if __name__ == "__main__":
    app.run(main)
