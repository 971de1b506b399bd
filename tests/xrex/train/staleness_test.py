"""Each staleness mode against the oracle of its schedule, and against the others."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from tests.xrex.train import helpers
from xrex.train.batches import look_ahead
from xrex.train.staleness import EXACT, MODES, ONE_STEP, SYNCHRONOUS, SharedCapacity
from xrex.train.train_state import TrainState
from xrex.train.train_step import TrainStep

NUM_STEPS = 24
BATCHES = [helpers.toy_batch(seed) for seed in range(NUM_STEPS)]
OPTIMIZERS = pytest.mark.parametrize(
    "optimizer", [helpers.EAGER, helpers.LAZY], ids=["eager", "lazy"]
)
DEVICES = pytest.mark.parametrize("num_devices", [1, 2, 4])
# Room for everything, for some of the pairs of batches, and for hardly any.
CAPACITIES = {
    "roomy": SharedCapacity(rows=24, tokens_per_rank=6),
    "narrow": SharedCapacity(rows=9, tokens_per_rank=5),
    "tiny": SharedCapacity(rows=1, tokens_per_rank=1),
}


def needs(num_devices: int) -> int:
    if len(jax.devices()) < num_devices:
        pytest.skip(f"needs {num_devices} devices")
    return num_devices


def run(
    step: TrainStep,
    params: Any,
    batches: list[helpers.ToyBatch],
    flush_after: tuple[int, ...] = (),
) -> tuple[TrainState, list[Any]]:
    """Trains; the final state, and loss and aux of every step, in host memory."""
    seen = []
    state = step.init(params, helpers.toy_table())
    for number, (batch, next_batch) in enumerate(look_ahead(batches), start=1):
        state, metrics = step.step(state, batch, next_batch)
        seen.append(helpers.host_copy((metrics.loss, metrics.aux)))
        if number in flush_after:
            state = step.flush(state)
    return helpers.host_copy(step.flush(state)), seen


@DEVICES
@OPTIMIZERS
def test_synchronous_steps_equal_the_oracle(num_devices: int, optimizer: Any) -> None:
    setup = helpers.toy_setup(optimizer, num_devices=needs(num_devices))
    oracle = helpers.make_oracle(setup, BATCHES, helpers.toy_table())
    with TrainStep(setup, SYNCHRONOUS) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        for batch in BATCHES:
            state, metrics = step.step(state, batch)
            expected, _ = oracle.step(helpers.oracle_batch(setup, batch))
            applied = oracle.flush()
            rows = helpers.host_copy(metrics.aux).reshape(expected.shape)
            helpers.assert_same_bits(rows, expected)
            assert applied is not None
            assert float(metrics.norm) == applied.norm
            helpers.assert_same_table(state, oracle.state)


@DEVICES
@OPTIMIZERS
@pytest.mark.parametrize("capacity", CAPACITIES.values(), ids=CAPACITIES.keys())
def test_exact_steps_equal_the_oracle_of_synchronous_training(
    num_devices: int, optimizer: Any, capacity: SharedCapacity
) -> None:
    setup = helpers.toy_setup(optimizer, num_devices=needs(num_devices))
    oracle = helpers.make_oracle(setup, BATCHES, helpers.toy_table())
    with TrainStep(setup, EXACT, shared=capacity) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        for batch, next_batch in look_ahead(BATCHES):
            state, metrics = step.step(state, batch, next_batch)
            expected, _ = oracle.step(helpers.oracle_batch(setup, batch))
            oracle.flush()
            rows = helpers.host_copy(metrics.aux).reshape(expected.shape)
            helpers.assert_same_bits(rows, expected)
        state = step.flush(state)
        counts = step.shared_counts()
    helpers.assert_same_table(state, oracle.state)
    assert counts is not None
    assert counts.steps == NUM_STEPS - 1
    assert 0 < counts.rows < counts.tokens


def test_capacities_of_the_test_take_both_ways() -> None:
    ways = {}
    for name, capacity in CAPACITIES.items():
        setup = helpers.toy_setup(num_devices=needs(4))
        with TrainStep(setup, EXACT, shared=capacity) as step:
            run(step, helpers.toy_params(), BATCHES)
            counts = step.shared_counts()
            assert counts is not None
            ways[name] = counts.long_way_steps
    assert ways["roomy"] == 0
    assert 0 < ways["narrow"] < NUM_STEPS - 1
    assert ways["tiny"] == NUM_STEPS - 1


@DEVICES
@pytest.mark.parametrize("capacity", CAPACITIES.values(), ids=CAPACITIES.keys())
def test_exact_training_of_a_dense_model_has_the_bits_of_synchronous_training(
    num_devices: int, capacity: SharedCapacity
) -> None:
    setup = helpers.toy_setup(
        helpers.LAZY,
        loss_fn=helpers.mlp_loss,
        dense_optimizer=optax.adam(0.01),
        num_devices=needs(num_devices),
    )
    with TrainStep(setup, SYNCHRONOUS) as step:
        synchronous = run(step, helpers.mlp_params(), BATCHES)
    with TrainStep(setup, EXACT, shared=capacity) as step:
        exact = run(step, helpers.mlp_params(), BATCHES)
    helpers.assert_same_states(exact, synchronous)


def test_stale_steps_differ_from_synchronous_ones_on_the_same_batches() -> None:
    setup = helpers.toy_setup(loss_fn=helpers.mlp_loss, learning_rate=0.5)
    tables = []
    for mode in (ONE_STEP, SYNCHRONOUS):
        with TrainStep(setup, mode) as step:
            tables.append(run(step, helpers.mlp_params(), BATCHES)[0].table)
    assert np.any(tables[0] != tables[1])


@pytest.mark.parametrize("mode", [EXACT, SYNCHRONOUS])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_values_do_not_depend_on_where_the_run_came_to_rest(mode: str, steps_before: int) -> None:
    setup = helpers.toy_setup(helpers.LAZY, loss_fn=helpers.mlp_loss)
    batches = BATCHES[:8]
    with TrainStep(setup, SYNCHRONOUS) as step:
        expected = run(step, helpers.mlp_params(), batches)
    with TrainStep(setup, mode) as step:
        if steps_before == 0:
            step.flush(step.init(helpers.mlp_params(), helpers.toy_table()))
        rested = run(
            step, helpers.mlp_params(), batches, flush_after=(steps_before, steps_before + 2)
        )
    helpers.assert_same_states(rested, expected)


@pytest.mark.parametrize("mode", MODES)
def test_modes_differ_in_what_the_rows_of_the_second_step_have_seen(mode: str) -> None:
    setup = helpers.toy_setup()
    batch = BATCHES[0]
    with TrainStep(setup, mode) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        state, first = step.step(state, batch, batch)
        first_rows = helpers.host_copy(first.aux)
        state, second = step.step(state, batch)
        seen_no_update = np.array_equal(helpers.host_copy(second.aux), first_rows)
    assert seen_no_update == (mode == ONE_STEP)


def test_masked_tokens_of_an_exact_step_read_updated_rows() -> None:
    setup = helpers.toy_setup(num_devices=1)
    everything = BATCHES[0]._replace(mask=np.ones_like(BATCHES[0].mask))
    nothing = everything._replace(mask=np.zeros_like(everything.mask))
    rows = []
    for mode in (EXACT, SYNCHRONOUS):
        with TrainStep(setup, mode) as step:
            state = step.init(helpers.toy_params(), helpers.toy_table())
            state, _ = step.step(state, everything, nothing)
            state, metrics = step.step(state, nothing)
            rows.append(helpers.host_copy(metrics.aux))
    helpers.assert_same_bits(*rows)


@pytest.mark.parametrize("policy", ["clip", "zero"])
def test_ids_outside_the_table_read_what_they_read_in_synchronous_training(policy: str) -> None:
    setup = helpers.toy_setup(num_devices=2, out_of_range=policy)
    bad = BATCHES[1].ids.copy()
    bad[:, 0] = [-1, 0, 39, 40, 41, -40, -41, np.iinfo(np.int32).max]
    batches = [BATCHES[0]._replace(ids=bad), BATCHES[1]._replace(ids=bad), *BATCHES[2:5]]
    results = []
    for mode in (EXACT, SYNCHRONOUS):
        with TrainStep(setup, mode) as step:
            results.append(run(step, helpers.toy_params(), batches))
    helpers.assert_same_states(*results)


def test_exact_step_has_room_for_what_any_batch_can_share_by_token() -> None:
    setup = helpers.toy_setup(num_devices=2)
    with TrainStep(setup, EXACT) as step:
        run(step, helpers.toy_params(), [BATCHES[0]] * 4)
        counts = step.shared_counts()
    assert counts is not None
    assert counts.tokens == 3 * int(BATCHES[0].mask.sum())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"staleness": "two_steps"}, "no staleness mode 'two_steps'; choose one of one_step"),
        (
            {"staleness": ONE_STEP, "shared": SharedCapacity(rows=1, tokens_per_rank=1)},
            "of use in the mode 'exact', not 'one_step'",
        ),
        (
            {"staleness": EXACT, "shared": SharedCapacity(rows=25, tokens_per_rank=1)},
            r"exceeds the batch: at most rows=24",
        ),
    ],
    ids=["mode", "unused", "too_large"],
)
def test_mode_that_cannot_be_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainStep(helpers.toy_setup(), **arguments)


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_capacity_that_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="it is a count of at least 1"):
        SharedCapacity(rows=value, tokens_per_rank=1)
