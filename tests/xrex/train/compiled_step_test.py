import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.xrex.train import helpers
from xrex.train.batches import look_ahead
from xrex.train.engines import NativeEngine
from xrex.train.one_step_schedule import OneStepSchedule
from xrex.train.prepared_batch import prepare_batch
from xrex.train.schedule import nothing_deferred
from xrex.train.train_state import init_state
from xrex.train.train_step import TrainStep

COMPILED = "/jax/core/compile/backend_compile_duration"


def advance_and_arguments(loss_fn: Any = helpers.toy_loss, params: Any = None) -> tuple[Any, Any]:
    setup = helpers.toy_setup(helpers.LAZY, loss_fn=loss_fn)
    state = init_state(setup, params or helpers.toy_params(), helpers.toy_table())
    schedule = OneStepSchedule(setup, NativeEngine(setup.ctx))
    batch = prepare_batch(setup, helpers.toy_batch(0))
    schedule.compile(state, batch)
    arrays = batch.arrays
    pin = jax.device_put(jnp.zeros(setup.ctx.group_size), setup.token_sharding())
    return schedule._advance, (state, nothing_deferred(setup), pin, arrays, arrays.ids)


def matrix_loss(params: Any, embeddings: jax.Array, batch: helpers.ToyBatch) -> Any:
    """Has matrix products in both passes."""
    del batch
    rows = embeddings.astype(jnp.float32).reshape(helpers.NUM_EXAMPLES, -1)
    return jnp.sum(jnp.tanh(rows @ params["kernel"])), None


def compiled_text(program: Any, arguments: Any) -> str:
    return program.lower(*arguments).compile().as_text()


def test_step_makes_no_copy_of_the_table() -> None:
    program, arguments = advance_and_arguments()
    assert helpers.copies_of_tables(compiled_text(program, arguments)) == []


def test_a_copy_of_the_table_would_be_seen() -> None:
    program, arguments = advance_and_arguments()
    not_donating = jax.jit(program.__wrapped__)
    assert helpers.copies_of_tables(compiled_text(not_donating, arguments)) != []


def test_dense_passes_run_beside_the_exchange() -> None:
    text = compiled_text(
        *advance_and_arguments(matrix_loss, {"kernel": np.ones((24, 16), np.float32)})
    )
    entry = text[text.index("ENTRY") :].splitlines()

    def lines(pattern: str) -> list[int]:
        found = [number for number, line in enumerate(entry) if re.search(pattern, line)]
        assert found, pattern
        return found

    def call(name: str) -> int:
        (line,) = lines(f'custom_call_target="xrex_async_emb_{name}"')
        return line

    forward = lines(r'op_name="[^"]*/jvp\(\)/dot_general')
    backward = lines(r'op_name="[^"]*/transpose\(jvp\(\)\)/dot_general')
    assert call("lookup_done") < call("rowwise_adagrad_lazy_update_start") < min(forward)
    assert max(forward) < call("rowwise_adagrad_update_done") < call("lookup_start")
    assert call("lookup_start") < min(backward)


@pytest.fixture
def compilations() -> Any:
    seen: list[str] = []

    def listener(event: str, _: float, **__: Any) -> None:
        if event == COMPILED:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)


def test_nothing_compiles_after_the_second_step(compilations: list[str]) -> None:
    def schedule(step: Any) -> Any:
        return 0.1 / step

    batches = [helpers.toy_batch(seed) for seed in range(12)]
    with TrainStep(helpers.toy_setup(helpers.LAZY, learning_rate=schedule)) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        for number, (batch, next_batch) in enumerate(look_ahead(batches), start=1):
            if next_batch is None:
                break
            state, _ = step.step(state, batch, next_batch)
            if number == 2:
                assert compilations
                compilations.clear()
            assert number < 2 or compilations == []
        state = step.flush(state)
        compilations.clear()
        state, _ = step.step(state, batches[0], batches[1])  # the refill after a flush
        step.flush(state)
        assert compilations == []
