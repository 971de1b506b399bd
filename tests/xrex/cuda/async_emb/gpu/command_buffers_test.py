"""Programs whose other operations XLA records into command buffers: the calls still happen."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.xrex.cuda.async_emb.gpu.devices import gpu_mesh, on_one_gpu
from tests.xrex.cuda.async_emb.pipeline_pieces import (
    Pieces,
    assert_rows,
    assert_state,
    expected_update,
    initial_state,
    random_ids,
)
from tests.xrex.cuda.async_emb.testing import ready_context
from xrex.cuda.async_emb import async_emb

ROOT = Path(__file__).parents[5]
NUM_STEPS = 8

# The empty list switches command buffers off.
COMMANDS = {
    "off": "",
    "default": None,
    "all": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,DYNAMIC_SLICE_FUSION",
}


def run_steps() -> None:
    """Body of the process: steps between operations that command buffers take."""
    with ready_context(gpu_mesh(1), name="command buffers") as ctx:
        pieces = Pieces(ctx)

        def dense(x: Any) -> Any:
            for _ in range(4):
                x = jnp.sin(x) @ jnp.cos(x)
            return x

        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def program(update: Any, table: Any, state: Any, ids: Any, x: Any) -> Any:
            in_flight = pieces.start_update(update, table, state)
            x = dense(x)
            result = pieces.finish_update(in_flight, x[0, 0])
            table, pin = pieces.start_lookup(ids, result.table, result.pin)
            x = dense(x)
            embeddings, table = pieces.finish_lookup(table, pin, x[0, 0])
            return table, result.state, embeddings, result.norm, dense(x)

        table, state, expected = pieces.table(), pieces.state(), initial_state(ctx)
        x = jnp.ones((64, 64), jnp.float32)
        for seed in range(NUM_STEPS):
            table, state, embeddings, norm, x = program(
                pieces.update(seed), table, state, pieces.ids(seed), x
            )
            update = expected_update(ctx, expected, seed)
            expected = update.state
            assert_rows(embeddings, expected.table, random_ids(ctx, seed))
            assert np.float32(norm) == update.norm
        assert_state(table, state, expected)
        (stats,) = async_emb.stats(ctx).values()
        assert (stats.lookup_steps_done, stats.update_steps_done) == (NUM_STEPS, NUM_STEPS)
    print("right")


@on_one_gpu
@pytest.mark.parametrize("commands", COMMANDS.values(), ids=COMMANDS.keys())
def test_steps_are_right_with_command_buffers_of(commands: str | None) -> None:
    flags = [os.environ.get("XLA_FLAGS", "")]
    if commands is not None:
        flags.append(f"--xla_gpu_enable_command_buffer={commands}")
        flags.append("--xla_gpu_graph_min_graph_size=1")
    path = os.pathsep.join([str(ROOT), str(ROOT / "phoenix"), *sys.path])
    program = (
        "from tests.xrex.cuda.async_emb.gpu import command_buffers_test as test; test.run_steps()"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ
        | {
            "PYTHONPATH": path,
            "XLA_FLAGS": " ".join(flags).strip(),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.split()[-1:] == ["right"]
