"""A whole training step in every staleness mode, native against plain JAX, in one run.

One model, one stream of batches, and several ways to train on it. Batches are prepared in
a thread ahead of the step, as in training. `dense_only` is the same model on embeddings that are
there: what a step takes longer is the exposed time of its exchange. Units: milliseconds a step, N
tokens in the global batch, V rows, W columns.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
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
from xrex.train import devices
from xrex.train.engines import PlainEngine
from xrex.train.prefetch import Prefetcher
from xrex.train.staleness import EXACT, MODES, SharedCapacity
from xrex.train.train_state import TrainSetup
from xrex.train.train_step import TrainStep

_PLATFORM = flags.DEFINE_enum(
    "platform", devices.CPU, devices.PLATFORMS, "Virtual CPU devices or GPUs, one rank each."
)
_DEVICES = flags.DEFINE_integer("devices", None, "How many; by default 4 CPU devices or all GPUs.")
_EXAMPLES = flags.DEFINE_integer("examples", 2_048, "Examples of the global batch.")
_FEATURES = flags.DEFINE_integer("features", 32, "Tokens of one example.")
_IDS = flags.DEFINE_enum(
    "ids", "zipf", ["zipf", "uniform"], "Zipf(1.2) over a permuted vocabulary, or uniform."
)
_WIDTH = flags.DEFINE_integer("width", 64, "W, columns of the table.")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "V, rows of the table.")
_HIDDEN = flags.DEFINE_integer("hidden", 256, "Width of the model's hidden layers.")
_LAYERS = flags.DEFINE_integer("layers", 1, "Hidden layers.", lower_bound=1)
_UNIQUE = flags.DEFINE_integer("unique", None, "U, distinct rows of a batch; by default N.")
_SHARED_ROWS = flags.DEFINE_integer("shared_rows", None, "Capacity of the mode exact.")
_SHARED_TOKENS = flags.DEFINE_integer("shared_tokens", None, "Likewise, on each rank.")
_PLAIN = flags.DEFINE_bool("plain", True, "Time the plain JAX path, too.")
_MAX_CTAS = flags.DEFINE_list(
    "max_ctas", ["4"], "Blocks that the communicator may take on a GPU; one run for each."
)
_OUT = flags.DEFINE_string("out", "", "File that the records are written to as well.")
_PREFETCH_WORKERS = flags.DEFINE_integer("prefetch_workers", 1, "Threads that prepare batches.")
_STEPS_PER_WINDOW = flags.DEFINE_integer(
    "steps_per_window",
    4,
    "Steps that are timed together; the host waits after them.",
    lower_bound=1,
)
_REPETITIONS = flags.DEFINE_integer("repetitions", 15, "Timed windows of each way.")

_SEED = 0
_DISTINCT_BATCHES = 8
_PLAIN_MODES = ("one_step", "synchronous")
_DENSE_ONLY = "dense_only"


class Batch(NamedTuple):
    """ids int32 [B, F], mask bool [B, F], label float32 [B]."""

    ids: np.ndarray
    mask: np.ndarray
    label: np.ndarray


class Run:
    """One way to train, with its state and its place in the stream of batches."""

    def __init__(self, step: TrainStep, batches: Sequence[Batch], params: Any, table: Any) -> None:
        self.step = step
        self._state = step.init(params, table)
        workers = _PREFETCH_WORKERS.value
        self._batches = Prefetcher(
            itertools.cycle(batches), step.prepare, depth=2 + workers, workers=workers
        )
        self._next = next(self._batches)
        self.num_steps = 0

    def window(self) -> Any:
        """Trains a few steps; what comes back is ready when they are."""
        for _ in range(_STEPS_PER_WINDOW.value):
            batch, self._next = self._next, next(self._batches)
            self._state, metrics = self.step.step(self._state, batch, self._next)
        self.num_steps += _STEPS_PER_WINDOW.value
        return self._state.dense_params, metrics.loss

    def describe(self) -> dict[str, Any]:
        """What the engine says of all its steps, by the step."""
        record: dict[str, Any] = {
            "waited_ms": {
                purpose: round(secs * 1e3 / self.num_steps, 3)
                for purpose, secs in self.step.exposed_secs().items()
            }
        }
        counts = self.step.shared_counts()
        if counts is not None and counts.steps:
            record["shared_rows"] = round(counts.rows / counts.steps)
            record["shared_tokens"] = round(counts.tokens / counts.steps)
            record["long_way_steps"] = f"{counts.long_way_steps} of {counts.steps}"
        return record

    def close(self) -> None:
        """Ends what is in flight."""
        self._batches.close()
        self.step.close()


class DenseOnly:
    """The model alone, on rows that are there."""

    def __init__(self, setup: TrainSetup, batch: Batch, params: Any) -> None:
        rows = np.zeros((_EXAMPLES.value, _FEATURES.value, _WIDTH.value), ml_dtypes.bfloat16)
        self._rows = jax.device_put(rows, setup.token_sharding())
        self._batch = jax.device_put(batch, setup.token_sharding())
        optimizer = setup.dense_optimizer
        self._state = jax.device_put((params, optimizer.init(params)), setup.replicated())

        def advance(state: Any, rows: jax.Array, batch: Batch) -> Any:
            params, opt_state = state

            def loss_of(params: Any, rows: jax.Array) -> jax.Array:
                return setup.loss_fn(params, rows, batch)[0]

            grads, rows_grad = jax.grad(loss_of, (0, 1))(params, rows)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), rows_grad

        self._advance = jax.jit(advance, donate_argnums=0)

    def window(self) -> Any:
        """Makes a few steps; what comes back is ready when they are."""
        for _ in range(_STEPS_PER_WINDOW.value):
            self._state, rows_grad = self._advance(self._state, self._rows, self._batch)
        return self._state, rows_grad


def _loss(params: Any, embeddings: jax.Array, batch: Batch) -> tuple[jax.Array, None]:
    # The type that each platform multiplies fast.
    dtype = jnp.bfloat16 if _PLATFORM.value == devices.GPU else jnp.float32
    hidden = embeddings.reshape(embeddings.shape[0], -1).astype(dtype)
    for kernel in params["hidden"]:
        hidden = jax.nn.relu(hidden @ kernel.astype(hidden.dtype))
    logit = (hidden.astype(jnp.float32) @ params["out"])[:, 0]
    return optax.sigmoid_binary_cross_entropy(logit, batch.label).mean(), None


def _params(rng: np.random.Generator) -> Any:
    widths = [_FEATURES.value * _WIDTH.value] + [_HIDDEN.value] * _LAYERS.value
    hidden = [
        rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0]))
        for shape in itertools.pairwise(widths)
    ]
    out = rng.standard_normal((_HIDDEN.value, 1), np.float32) / np.float32(np.sqrt(_HIDDEN.value))
    return {"hidden": hidden, "out": out}


def _batches(rng: np.random.Generator) -> list[Batch]:
    shape = (_EXAMPLES.value, _FEATURES.value)
    draw = measure.zipf_ids if _IDS.value == "zipf" else measure.uniform_ids
    ids = draw(rng, _DISTINCT_BATCHES * shape[0] * shape[1], _ROWS.value)
    return [
        Batch(part, np.ones(shape, bool), rng.integers(0, 2, shape[0]).astype(np.float32))
        for part in ids.reshape(_DISTINCT_BATCHES, *shape)
    ]


def _setup(name: str, mesh: jax.sharding.Mesh, max_ctas: int = 4) -> TrainSetup:
    num_tokens = _EXAMPLES.value * _FEATURES.value
    ctx = async_emb.make_context_handle(
        mesh,
        "data",
        data_axis="data",
        tokens_per_batch=num_tokens,
        emb_width=_WIDTH.value,
        num_unique=_UNIQUE.value or num_tokens,
        num_devices_per_node=mesh.size,
        options=async_emb.AsyncEmbOptions(min_ctas=min(max_ctas, 4), max_ctas=max_ctas),
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


def _steps(mesh: jax.sharding.Mesh, max_ctas: int) -> dict[str, TrainStep]:
    shared, rows, tokens = None, _SHARED_ROWS.value, _SHARED_TOKENS.value
    if rows is not None and tokens is not None:
        shared = SharedCapacity(rows=rows, tokens_per_rank=tokens)
    steps = {
        mode: TrainStep(
            _setup(mode, mesh, max_ctas), mode, shared=shared if mode == EXACT else None
        )
        for mode in MODES
    }
    if _PLAIN.value:
        for mode in _PLAIN_MODES:
            name = f"plain_jax_{mode}"
            steps[name] = TrainStep(_setup(name, mesh), mode, make_engine=PlainEngine)
    return steps


def _measure(
    mesh: jax.sharding.Mesh,
    max_ctas: int,
    batches: Sequence[Batch],
    params: Any,
    table: Any,
) -> list[dict[str, Any]]:
    """One record of all ways to train, and one of what the engine says of each."""
    steps = _steps(mesh, max_ctas)
    runs = {name: Run(step, batches, params, table) for name, step in steps.items()}
    windows: dict[str, Callable[[], Any]] = {name: run.window for name, run in runs.items()}
    windows[_DENSE_ONLY] = DenseOnly(_setup(_DENSE_ONLY, mesh), batches[0], params).window
    times = measure.time_in_turn(windows, repetitions=_REPETITIONS.value)
    step_ms = {name: ms / _STEPS_PER_WINDOW.value for name, ms in times.items()}
    dense_ms = step_ms[_DENSE_ONLY]
    records: list[dict[str, Any]] = [
        {
            "case": f"training step, {_IDS.value} ids",
            "max_ctas": max_ctas,
            "step_ms": {name: round(ms, 3) for name, ms in step_ms.items()},
            "exposed_ms": {name: round(ms - dense_ms, 3) for name, ms in step_ms.items()},
        }
    ]
    for name, run in runs.items():
        records.append({"case": name, **run.describe()})
        run.close()
    return records


def main(argv: Sequence[str]) -> None:
    """Prints the machine, the sizes, and the records."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    mesh = devices.training_mesh(_PLATFORM.value, _DEVICES.value)
    rng = np.random.default_rng(_SEED)
    params, batches = _params(rng), _batches(rng)
    table = rng.standard_normal((_ROWS.value, _WIDTH.value), np.float32) * 0.05
    table = table.astype(ml_dtypes.bfloat16)
    sizes = {
        "N": _EXAMPLES.value * _FEATURES.value,
        "W": _WIDTH.value,
        "V": _ROWS.value,
        "U": _UNIQUE.value or _EXAMPLES.value * _FEATURES.value,
        "R": mesh.size,
        "hidden": f"{_LAYERS.value} x {_HIDDEN.value}",
        "steps_per_window": _STEPS_PER_WINDOW.value,
        "distinct_rows": int(np.mean([np.unique(batch.ids).size for batch in batches])),
    }
    records = [measure.describe_machine(), sizes]
    # A rank alone has nobody to communicate with.
    choices = [int(text) for text in _MAX_CTAS.value][: None if mesh.size > 1 else 1]
    for max_ctas in choices:
        records += _measure(mesh, max_ctas, batches, params, table)
    for record in records:
        measure.print_json(record)
    if _OUT.value:
        with open(_OUT.value, "w", encoding="utf-8") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    app.run(main)
