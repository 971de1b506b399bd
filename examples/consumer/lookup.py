"""Looks up a batch of rows of a table that is sharded over four CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np

from xrex.cuda.async_emb import async_emb
from xrex.utils import recsys_async_emb_lookup as lookup

NUM_TOKENS = 8
NUM_ROWS = 100
NUM_COLUMNS = 16


def main() -> None:
    """Compares a lookup of the native core with plain indexing."""
    num_devices = jax.device_count()
    ctx = async_emb.make_context_handle(
        jax.make_mesh((num_devices,), ("ranks",)),
        "ranks",
        data_axis="ranks",
        tokens_per_batch=NUM_TOKENS,
        emb_width=NUM_COLUMNS,
        num_unique=NUM_TOKENS,
        num_devices_per_node=num_devices,
    )

    @jax.jit
    def read(ids: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        table, pin = lookup.lookup_start(ids, table, gate=ids, ctx=ctx)
        return lookup.lookup_done(table, pin, ctx)

    ids = np.arange(NUM_TOKENS, dtype=np.int32) * 7
    values = np.arange(NUM_ROWS * NUM_COLUMNS).reshape(NUM_ROWS, NUM_COLUMNS) % 251
    table = jax.device_put(
        jnp.asarray(values, jnp.bfloat16), jax.NamedSharding(ctx.mesh, ctx.table_spec)
    )
    with async_emb.initialized(ctx):
        rows, _ = read(ids, table)
        np.testing.assert_array_equal(np.asarray(rows), np.asarray(table)[ids])
    print(f"consumer: {NUM_TOKENS} rows of {NUM_COLUMNS} read by {num_devices} devices")


if __name__ == "__main__":
    main()
