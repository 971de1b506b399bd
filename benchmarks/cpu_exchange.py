"""Lookup and update on virtual CPU devices, native against plain JAX, in one run.

Both forms run start to end with nothing beside them, so that the figure is the work itself and not
how well it hides. As in a training step, the arrays of an update are donated. Units: milliseconds a
call, N tokens in the global batch, V rows, W columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import measure
from benchmarks.exchange_forms import Exchange, make_exchanges, random_gradients
from xrex.cuda.async_emb import async_emb
from xrex.train import devices

_DEVICES = flags.DEFINE_integer("devices", 4, "Virtual CPU devices, one rank each.")
_TOKENS = flags.DEFINE_integer("tokens", 65_536, "N, tokens of the global batch.")
_WIDTH = flags.DEFINE_integer("width", 64, "W, columns of the table.")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "V, rows of the table.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 15, "Timed calls of each form.")

_SEED = 0


def _run(kind: str, ids: Any, ctx: Any, forms: dict[str, Exchange]) -> dict[str, Any]:
    """Times both forms on one draw of ids and returns the record to print."""
    on_tokens = NamedSharding(ctx.mesh, ctx.tokens_spec)
    unique, segments = async_emb.make_segments(ids, _ROWS.value, ctx.num_unique)
    token_ids = jax.device_put(ids, on_tokens)
    for form in forms.values():
        form.set_gradients(
            random_gradients(ctx, ids.size),
            jax.device_put(segments, on_tokens),
            jax.device_put(unique, NamedSharding(ctx.mesh, P())),
        )

    def time_call(call: Callable[[Exchange], Any]) -> dict[str, float]:
        return measure.time_in_turn(
            {name: functools.partial(call, form) for name, form in forms.items()},
            repetitions=_REPETITIONS.value,
        )

    lookup = time_call(lambda form: form.lookup([token_ids]))
    update = time_call(Exchange.update)
    total = {name: lookup[name] + update[name] for name in forms}
    return {
        "case": f"lookup + update, {kind} ids",
        "distinct": int((unique < _ROWS.value).sum()),
        "lookup_ms": {name: round(ms, 2) for name, ms in lookup.items()},
        "update_ms": {name: round(ms, 2) for name, ms in update.items()},
        "lookup_speedup": round(lookup["plain_jax"] / lookup["native"], 2),
        "update_speedup": round(update["plain_jax"] / update["native"], 2),
        "speedup": round(total["plain_jax"] / total["native"], 2),
    }


def main(argv: Sequence[str]) -> None:
    """Prints the machine, the sizes, and a record for each kind of ids."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    mesh = devices.cpu_mesh(_DEVICES.value)
    ctx = async_emb.make_context_handle(
        mesh,
        "data",
        data_axis="data",
        tokens_per_batch=_TOKENS.value,
        emb_width=_WIDTH.value,
        num_unique=_TOKENS.value,
        num_devices_per_node=_DEVICES.value,
    )
    async_emb.initialize(ctx)
    rng = np.random.default_rng(_SEED)
    forms = make_exchanges(ctx, _ROWS.value)
    measure.print_json(measure.describe_machine())
    measure.print_json(
        {"N": _TOKENS.value, "W": _WIDTH.value, "V": _ROWS.value, "R": _DEVICES.value}
    )
    for kind, draw in (("Zipf(1.2)", measure.zipf_ids), ("uniform", measure.uniform_ids)):
        ids = draw(rng, _TOKENS.value, _ROWS.value)
        measure.print_json(_run(kind, ids, ctx, forms))
    async_emb.destroy(ctx)


if __name__ == "__main__":
    app.run(main)
