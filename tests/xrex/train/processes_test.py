"""The pipelined step on CPU devices of two processes, where it takes the plain JAX path."""

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from tests.xrex.train import helpers
from xrex.train.batches import look_ahead
from xrex.train.pipelined_step import PipelinedTrainStep

NUM_PROCESSES, DEVICES_PER_PROCESS = 2, 2
TIMEOUT_SECS = 50
BATCHES = [helpers.toy_batch(seed) for seed in range(6)]
# Sums in another order move a row, of values below 4, by a bfloat16 step of 2**-8 in each update.
ROUNDING = len(BATCHES) * 2.0**-8 * 4


class Records(logging.Handler):
    """Keeps the messages of the project's loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def run_process(process: int, port: int) -> None:
    """Body of one process: trains, and checks its own shards."""
    jax.distributed.initialize(f"localhost:{port}", num_processes=NUM_PROCESSES, process_id=process)
    setup = helpers.toy_setup(helpers.LAZY, learning_rate=1.0)
    assert setup.ctx.group_size == NUM_PROCESSES * DEVICES_PER_PROCESS
    oracle = helpers.make_oracle(setup, BATCHES, helpers.toy_table())
    records = Records()
    logging.getLogger("xrex").addHandler(records)
    with PipelinedTrainStep(setup) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        for batch, next_batch in look_ahead(BATCHES):
            state, _ = step.step(state, batch, next_batch)
            oracle.step(
                helpers.oracle_batch(setup, batch),
                None if next_batch is None else helpers.oracle_batch(setup, next_batch),
            )
        state = step.flush(state)
    oracle.flush()
    (message,) = records.messages
    assert "training on the plain JAX path" in message
    assert len(state.table.addressable_shards) == DEVICES_PER_PROCESS
    for shard in state.table.addressable_shards:
        found = np.asarray(shard.data).astype(np.float32)
        expected = oracle.state.table[shard.index].astype(np.float32)
        np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING)
    jax.distributed.shutdown()


def test_two_processes_train_on_the_plain_path_as_the_oracle_says() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).parents[3]
    program = (
        "import sys; from tests.xrex.train.processes_test import run_process; "
        "run_process(*map(int, sys.argv[1:]))"
    )
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "phoenix"), *sys.path]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES_PER_PROCESS}",
        "PJRT_NPROC": "8",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(process), str(port)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(NUM_PROCESSES)
    ]
    try:
        errors = [process.communicate(timeout=TIMEOUT_SECS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
