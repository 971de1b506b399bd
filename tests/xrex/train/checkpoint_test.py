from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.xrex.train import helpers
from xrex.train.batches import look_ahead
from xrex.train.checkpoint import CheckpointConfigError, Checkpoints
from xrex.train.staleness import SYNCHRONOUS
from xrex.train.train_state import TrainState
from xrex.train.train_step import TrainStep

SETUP = helpers.toy_setup(helpers.LAZY)
BATCHES = [helpers.toy_batch(seed) for seed in range(7)]
AT_REST = TrainStep(SETUP, SYNCHRONOUS)  # has nothing to flush
CONFIG = {"table_rows": helpers.VOCAB_ROWS}


def fresh_state() -> TrainState:
    return TrainStep(SETUP).init(helpers.toy_params(), helpers.toy_table())


def state_at(step: int) -> TrainState:
    return fresh_state()._replace(step=jax.device_put(np.int32(step), SETUP.replicated()))


def run(step: Any, state: TrainState, batches: list[helpers.ToyBatch]) -> TrainState:
    for batch, next_batch in look_ahead(batches):
        state, _ = step.step(state, batch, next_batch)
    return step.flush(state)


@pytest.mark.parametrize("save_after", [1, 3])
def test_resumed_run_equals_the_run_that_saved_and_went_on(tmp_path: Path, save_after: int) -> None:
    with TrainStep(SETUP) as step, Checkpoints(tmp_path, CONFIG) as checkpoints:
        state = fresh_state()
        # The save comes in the middle: a lookup is armed, an update deferred.
        for batch, next_batch in look_ahead(BATCHES[: save_after + 1]):
            if next_batch is not None:
                state, _ = step.step(state, batch, next_batch)
        state = checkpoints.save(step, state)
        went_on = helpers.host_copy(run(step, state, BATCHES[save_after:]))
    with TrainStep(SETUP) as step, Checkpoints(tmp_path, CONFIG) as checkpoints:
        state = checkpoints.restore(fresh_state())
        assert int(state.step) == save_after
        resumed = helpers.host_copy(run(step, state, BATCHES[save_after:]))
    helpers.assert_same_states(resumed, went_on)


def test_restored_arrays_have_the_shardings_of_the_run(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        state = checkpoints.save(AT_REST, fresh_state())
        restored = checkpoints.restore(fresh_state())
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, state)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_checkpoint_goes_on_with_equal_values_on_fewer_devices(
    tmp_path: Path, num_devices: int
) -> None:
    with TrainStep(SETUP) as step, Checkpoints(tmp_path, CONFIG) as checkpoints:
        state = checkpoints.save(step, run(step, fresh_state(), BATCHES[:3]))
        went_on = helpers.host_copy(run(step, state, BATCHES[3:]))
    setup = helpers.toy_setup(helpers.LAZY, num_devices=num_devices)
    with TrainStep(setup) as step, Checkpoints(tmp_path, CONFIG) as checkpoints:
        state = checkpoints.restore(step.init(helpers.toy_params(), helpers.toy_table()))
        resumed = helpers.host_copy(run(step, state, BATCHES[3:]))
    helpers.assert_same_states(resumed, went_on)


def test_interrupted_save_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(AT_REST, state_at(1))

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, Checkpoints(tmp_path, CONFIG) as checkpoints:
        # The last thing a save does is to give the finished folder its name.
        patch.setattr("os.rename", die)
        patch.setattr("pathlib.Path.rename", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(AT_REST, state_at(2))
    assert any("tmp" in path.name for path in tmp_path.iterdir())
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        assert checkpoints.latest_step() == 1
        assert int(checkpoints.restore(fresh_state()).step) == 1
        checkpoints.save(AT_REST, state_at(2))
        assert checkpoints.latest_step() == 2


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, CONFIG, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(AT_REST, state_at(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_data_position_is_kept_with_its_checkpoint(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(AT_REST, state_at(1), {"epoch": 0, "shares": [{"offset": 7}]})
        assert checkpoints.data_position() == {"epoch": 0, "shares": [{"offset": 7}]}
        checkpoints.save(AT_REST, state_at(2))
        assert checkpoints.data_position() is None


def test_step_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(AT_REST, state_at(1))
        first = (tmp_path / "1").stat().st_mtime_ns
        checkpoints.save(AT_REST, state_at(1))
        assert (tmp_path / "1").stat().st_mtime_ns == first


def test_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(AT_REST, state_at(1))
    with (
        Checkpoints(tmp_path, {"table_rows": 7}) as checkpoints,
        pytest.raises(CheckpointConfigError, match="table_rows: 40 there, 7 here"),
    ):
        checkpoints.restore(fresh_state())


def test_restoring_from_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with (
        Checkpoints(tmp_path, CONFIG) as checkpoints,
        pytest.raises(FileNotFoundError, match="there is no checkpoint in"),
    ):
        checkpoints.restore(fresh_state())


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, CONFIG, keep=0)
