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
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import measure
from xrex.cuda.async_emb import async_emb, plain_jax
from xrex.train import cpu_devices

_DEVICES = flags.DEFINE_integer("devices", 4, "Virtual CPU devices, one rank each.")
_TOKENS = flags.DEFINE_integer("tokens", 65_536, "N, tokens of the global batch.")
_WIDTH = flags.DEFINE_integer("width", 64, "W, columns of the table.")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "V, rows of the table.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 15, "Timed calls of each form.")

_SEED = 0
_PARAMETERS = {"learning_rate": 0.01, "eps": 1e-8, "decay_factor": 1.0}


class Exchange:
    """One table with its state, and jitted calls of one form that run on it in place."""

    def __init__(self, lookup: Callable, update: Callable, table: Any, row_state: Any) -> None:
        self._lookup = lookup
        self._update = update
        self._table = table
        self._row_state = row_state
        self._gradients: Any = None

    def set_gradients(self, grads: Any, segment_ids: Any, unique_tokens: Any) -> None:
        """Takes what the next updates apply: grads bf16 [N, W] and their segments."""
        self._gradients = grads, segment_ids, unique_tokens

    def lookup(self, ids: Any) -> Any:
        """Looks ids int32 [N] up: embeddings bf16 [N, W]."""
        embeddings, self._table = self._lookup(ids, self._table)
        return embeddings

    def update(self) -> Any:
        """Updates the table with the gradients: the norm, float32 []."""
        *gradients, self._table, self._row_state, norm = self._update(
            *self._gradients, self._table, self._row_state
        )
        self._gradients = gradients
        return norm


def _native(ctx: Any, jit: Callable) -> tuple[Callable, Callable]:
    def lookup(ids: Any, table: Any) -> Any:
        table, pin = async_emb.lookup_start(ids, table, ids, ctx)
        embeddings = async_emb.lookup_done(pin, ctx, table)
        return embeddings, async_emb.order_after(table, embeddings, platform=ctx.platform)

    def update(grads: Any, segments: Any, unique: Any, table: Any, row_state: Any) -> Any:
        started = async_emb.rowwise_adagrad_update_start(
            grads, segments, unique, table, row_state, jnp.int32(1), grads, ctx, **_PARAMETERS
        )
        norm, _, pin = async_emb.rowwise_adagrad_update_done(started[0], ctx, *started)
        return *async_emb.order_after(started, pin, platform=ctx.platform), norm

    return jit(lookup, update)


def _plain(ctx: Any, jit: Callable) -> tuple[Callable, Callable]:
    def lookup(ids: Any, table: Any) -> Any:
        return plain_jax.lookup(ids, table, ctx), table

    def update(grads: Any, segments: Any, unique: Any, table: Any, row_state: Any) -> Any:
        table, row_state, norm, _ = plain_jax.rowwise_adagrad_update(
            grads, segments, unique, table, row_state, jnp.int32(1), ctx, **_PARAMETERS
        )
        return grads, segments, unique, table, row_state, norm

    return jit(lookup, update)


def _jit_on(ctx: Any) -> Callable:
    tokens, table = ctx.tokens_spec, ctx.table_spec

    def jit(lookup: Callable, update: Callable) -> tuple[Callable, Callable]:
        on_mesh = {"mesh": ctx.mesh, "check_vma": False}
        mapped_lookup = jax.shard_map(
            lookup, in_specs=(tokens, table), out_specs=(tokens, table), **on_mesh
        )
        mapped_update = jax.shard_map(
            update,
            in_specs=(tokens, tokens, P(), table, P()),
            out_specs=(tokens, tokens, P(), table, P(), P()),
            **on_mesh,
        )
        return (
            jax.jit(mapped_lookup, donate_argnums=1),
            jax.jit(mapped_update, donate_argnums=(0, 1, 2, 3, 4)),
        )

    return jit


def _run(kind: str, ids: Any, ctx: Any, forms: dict[str, Exchange]) -> dict[str, Any]:
    """Times both forms on one draw of ids and returns the record to print."""
    rng = np.random.default_rng(_SEED)
    on_tokens = NamedSharding(ctx.mesh, ctx.tokens_spec)
    unique, segments = async_emb.make_segments(ids, _ROWS.value, ctx.num_unique)
    grads = rng.standard_normal((ids.size, ctx.emb_width), np.float32).astype(ml_dtypes.bfloat16)
    token_ids = jax.device_put(ids, on_tokens)
    for form in forms.values():
        form.set_gradients(
            jax.device_put(grads, on_tokens),
            jax.device_put(segments, on_tokens),
            jax.device_put(unique, NamedSharding(ctx.mesh, P())),
        )

    def time_call(call: Callable[[Exchange], Any]) -> dict[str, float]:
        return measure.time_in_turn(
            {name: functools.partial(call, form) for name, form in forms.items()},
            repetitions=_REPETITIONS.value,
        )

    lookup = time_call(lambda form: form.lookup(token_ids))
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
    mesh = cpu_devices.cpu_mesh(_DEVICES.value)
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
    values = rng.standard_normal((_ROWS.value, _WIDTH.value), np.float32)

    def make(form: Callable) -> Exchange:
        table = jax.device_put(
            values.astype(ml_dtypes.bfloat16), NamedSharding(mesh, ctx.table_spec)
        )
        row_state = jax.device_put(np.full(_ROWS.value, 0.1, np.float32), NamedSharding(mesh, P()))
        lookup, update = form(ctx, _jit_on(ctx))
        return Exchange(lookup, update, table, row_state)

    forms = {"native": make(_native), "plain_jax": make(_plain)}
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
