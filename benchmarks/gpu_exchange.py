"""Lookup and update on GPUs, native against plain JAX, in one run.

Both forms run start to end with nothing beside them, so that the figure is the work itself and not
how well it hides. A sample is the time of a program of several calls in a row, divided by their
number. As in a training step, the arrays of an update are donated. Units:
milliseconds a call, N tokens in the global batch, V rows, W columns, R ranks, one on each GPU.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import measure
from benchmarks.exchange_forms import Exchange, make_exchanges, random_gradients
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.async_emb import AsyncEmbOptions

_DEVICES = flags.DEFINE_integer("devices", None, "GPUs to use, all by default.")
_TOKENS = flags.DEFINE_list("tokens", ["131072", "524288"], "Values of N.")
_WIDTHS = flags.DEFINE_list("widths", ["64", "256"], "Values of W.")
_ROWS = flags.DEFINE_integer("rows", 4_000_000, "V, rows of the table.")
_MAX_CTAS = flags.DEFINE_list("max_ctas", ["4"], "Blocks that the communicator may take.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 15, "Samples of each form.")
_CALLS = flags.DEFINE_integer("calls", 10, "Calls in one program.")
_OUT = flags.DEFINE_string("out", "", "File that the records are written to as well.")

_SEED = 0
_DRAWS = {"Zipf(1.2)": measure.zipf_ids, "uniform": measure.uniform_ids}


def _time(forms: dict[str, Exchange], call: Callable[[Exchange], Any]) -> dict[str, float]:
    """Times `call` on each form in turn: milliseconds for one of the calls in its program."""
    times = measure.time_in_turn(
        {name: functools.partial(call, form) for name, form in forms.items()},
        repetitions=_REPETITIONS.value,
    )
    return {name: ms / _CALLS.value for name, ms in times.items()}


def _run(kind: str, ids: np.ndarray, ctx: Any, forms: dict[str, Exchange]) -> dict[str, Any]:
    """Times both forms on one draw of ids and returns the record."""
    on_tokens = NamedSharding(ctx.mesh, ctx.tokens_spec)
    unique, segments = async_emb.make_segments(ids, _ROWS.value, ctx.num_unique)
    rng = np.random.default_rng(_SEED)
    batches = [jax.device_put(rng.permutation(ids), on_tokens) for _ in range(_CALLS.value)]
    for form in forms.values():
        form.set_gradients(
            random_gradients(ctx, ids.size),
            jax.device_put(segments, on_tokens),
            jax.device_put(unique, NamedSharding(ctx.mesh, P())),
        )
    lookup = _time(forms, lambda form: form.lookup(batches))
    update = _time(forms, Exchange.update)
    return {
        "R": ctx.group_size,
        "N": ids.size,
        "W": ctx.emb_width,
        "V": _ROWS.value,
        "ids": kind,
        "max_ctas": ctx.options.max_ctas,
        "distinct": int((unique < _ROWS.value).sum()),
        "lookup_ms": {name: round(ms, 3) for name, ms in lookup.items()},
        "update_ms": {name: round(ms, 3) for name, ms in update.items()},
        "lookup_speedup": round(lookup["plain_jax"] / lookup["native"], 2),
        "update_speedup": round(update["plain_jax"] / update["native"], 2),
    }


def main(argv: Sequence[str]) -> None:
    """Prints the machine and a record for each case."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    devices = jax.devices("gpu")[: _DEVICES.value]
    mesh = Mesh(np.array(devices), ("data",))
    records = [measure.describe_machine()]
    measure.print_json(records[0])
    for num_tokens in map(int, _TOKENS.value):
        rng = np.random.default_rng(_SEED)
        draws = {kind: draw(rng, num_tokens, _ROWS.value) for kind, draw in _DRAWS.items()}
        for width in map(int, _WIDTHS.value):
            for max_ctas in map(int, _MAX_CTAS.value):
                ctx = async_emb.make_context_handle(
                    mesh,
                    "data",
                    data_axis="data",
                    tokens_per_batch=num_tokens,
                    emb_width=width,
                    num_unique=num_tokens,
                    num_devices_per_node=len(devices),
                    options=AsyncEmbOptions(min_ctas=min(max_ctas, 4), max_ctas=max_ctas),
                )
                with async_emb.initialized(ctx):
                    forms = make_exchanges(ctx, _ROWS.value, _CALLS.value)
                    for kind, ids in draws.items():
                        records.append(_run(kind, ids, ctx, forms))
                        measure.print_json(records[-1])
    if _OUT.value:
        with open(_OUT.value, "w", encoding="utf-8") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    app.run(main)
