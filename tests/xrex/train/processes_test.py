"""The pipelined step on CPU devices of two processes, where it takes the plain JAX path."""

import logging

import numpy as np

from tests.xrex.processes import run_in_processes
from tests.xrex.train import helpers
from xrex.train.batches import look_ahead
from xrex.train.train_step import TrainStep

NUM_PROCESSES, DEVICES_PER_PROCESS = 2, 2
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


def train_and_check() -> None:
    """Body of one process: trains, and checks its own shards."""
    setup = helpers.toy_setup(helpers.LAZY, learning_rate=1.0)
    assert setup.ctx.group_size == NUM_PROCESSES * DEVICES_PER_PROCESS
    oracle = helpers.make_oracle(setup, BATCHES, helpers.toy_table())
    records = Records()
    logging.getLogger("xrex").addHandler(records)
    with TrainStep(setup) as step:
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


def test_two_processes_train_on_the_plain_path_as_the_oracle_says() -> None:
    run_in_processes(
        "tests.xrex.train.processes_test",
        train_and_check.__name__,
        num_processes=NUM_PROCESSES,
        devices_per_process=DEVICES_PER_PROCESS,
    )
