"""Runs of every mode, saved after any step and gone on with on other devices."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optax
import pytest

from tests.xrex.train import helpers
from xrex.train.batches import look_ahead
from xrex.train.checkpoint import Checkpoints
from xrex.train.staleness import EXACT, MODES, ONE_STEP, SharedCapacity
from xrex.train.train_state import TrainSetup, TrainState
from xrex.train.train_step import TrainStep

BATCHES = [helpers.toy_batch(seed) for seed in range(6)]
CONFIG = {"table_rows": helpers.VOCAB_ROWS}
ALL_MODES = pytest.mark.parametrize("mode", MODES)
SAVE_AFTER = pytest.mark.parametrize("save_after", range(1, len(BATCHES)))


@functools.cache
def make_step(mode: str, num_devices: int) -> TrainStep:
    """Compiled once for all tests. The gradients of its loss do not depend on the devices."""
    setup = helpers.toy_setup(
        helpers.LAZY,
        num_devices=num_devices,
        dense_optimizer=optax.adam(optax.linear_schedule(0.5, 0.1, len(BATCHES))),
        learning_rate=optax.linear_schedule(0.1, 0.01, len(BATCHES)),
        max_grad_norm=20.0,
    )
    return TrainStep(setup, mode, shared=shared_capacity(setup) if mode == EXACT else None)


def shared_capacity(setup: TrainSetup) -> SharedCapacity:
    """Room for what some pairs of the batches share, but not for all."""
    return SharedCapacity(rows=4, tokens_per_rank=setup.ctx.tokens_per_rank)


def fresh_state(step: TrainStep) -> TrainState:
    return step.init(helpers.toy_params(), helpers.toy_table())


def go_on(step: TrainStep, state: TrainState, start: int) -> TrainState:
    """Trains on the batches from `start` to the last one; the final state in host memory."""
    for batch, next_batch in look_ahead(BATCHES[start:]):
        state, _ = step.step(state, batch, next_batch)
    return helpers.host_copy(step.flush(state))


def run_and_save(mode: str, num_devices: int, folder: Path, save_after: int) -> TrainState:
    """A run that saves in the middle of its pipeline and goes on."""
    with make_step(mode, num_devices) as step, Checkpoints(folder, CONFIG) as checkpoints:
        state = fresh_state(step)
        for number in range(save_after):
            state, _ = step.step(state, BATCHES[number], BATCHES[number + 1])
        return go_on(step, checkpoints.save(step, state), save_after)


def resume(mode: str, num_devices: int, folder: Path) -> TrainState:
    with make_step(mode, num_devices) as step, Checkpoints(folder, CONFIG) as checkpoints:
        state = checkpoints.restore(fresh_state(step))
        return go_on(step, state, int(state.step))


@ALL_MODES
@SAVE_AFTER
@pytest.mark.parametrize(
    ("saved_on", "restored_on"), [(4, (1, 2, 4)), (1, (4,))], ids=["4_to_fewer", "1_to_4"]
)
def test_run_goes_on_with_equal_bits_on_other_devices(
    mode: str, save_after: int, saved_on: int, restored_on: tuple[int, ...], tmp_path: Path
) -> None:
    went_on = run_and_save(mode, saved_on, tmp_path, save_after)
    for num_devices in restored_on:
        helpers.assert_same_states(resume(mode, num_devices, tmp_path), went_on)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != ONE_STEP])
@SAVE_AFTER
def test_run_without_staleness_ends_alike_whether_it_was_saved_or_not(
    mode: str, save_after: int, tmp_path: Path
) -> None:
    saved = run_and_save(mode, 2, tmp_path, save_after)
    with make_step(mode, 2) as step:
        helpers.assert_same_states(saved, go_on(step, fresh_state(step), 0))


def test_pairs_of_the_test_take_both_ways() -> None:
    setup = make_step(EXACT, 2)._setup
    with TrainStep(setup, EXACT, shared=shared_capacity(setup)) as step:
        go_on(step, fresh_state(step), 0)
        counts = step.shared_counts()
    assert counts is not None
    assert 0 < counts.long_way_steps < counts.steps


def test_save_that_fails_in_the_middle_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    with make_step(EXACT, 2) as step, Checkpoints(tmp_path, CONFIG) as checkpoints:
        state, _ = step.step(fresh_state(step), BATCHES[0], BATCHES[1])
        state = checkpoints.save(step, state, {"offset": 1})
        state, _ = step.step(state, BATCHES[1], BATCHES[2])
        state = step.flush(state)
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(step, state, {"offset": object()})
        assert checkpoints.latest_step() == 1
        assert checkpoints.data_position() == {"offset": 1}
        assert int(checkpoints.restore(fresh_state(step)).step) == 1
        checkpoints.save(step, state, {"offset": 2})
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        assert checkpoints.latest_step() == 2
        assert checkpoints.data_position() == {"offset": 2}


def save_twice_and_die(folder: str) -> None:
    """Saves steps 1 and 2; is killed when the finished second one is to be given its name."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with make_step(EXACT, 1) as step, Checkpoints(folder, CONFIG) as checkpoints:
        state, _ = step.step(fresh_state(step), BATCHES[0], BATCHES[1])
        state = checkpoints.save(step, state)
        state, _ = step.step(state, BATCHES[1], BATCHES[2])
        os.rename = Path.rename = die  # type: ignore[assignment,method-assign]
        checkpoints.save(step, state)


def test_run_killed_while_saving_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    program = f"from {__name__} import save_twice_and_die as f; f({str(tmp_path)!r})"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, timeout=100, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(list(tmp_path.iterdir())) == 2  # what the killed save left lies beside
    with make_step(EXACT, 1) as step:
        whole = go_on(step, fresh_state(step), 0)
    helpers.assert_same_states(resume(EXACT, 1, tmp_path), whole)
