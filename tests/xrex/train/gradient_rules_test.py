"""What a step does with large gradients and with those that are not finite, in every mode."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from tests.xrex.train import helpers
from xrex.cuda.async_emb import reference
from xrex.train.batches import look_ahead
from xrex.train.staleness import EXACT, MODES, ONE_STEP, SYNCHRONOUS, SharedCapacity
from xrex.train.train_state import StepMetrics, TrainSetup, TrainState
from xrex.train.train_step import TrainStep

ALL_MODES = pytest.mark.parametrize("mode", MODES)
# So many shared rows that some pairs of the batches below have room and some have not.
SHARED_ROWS = 5
NUM_IDS = 12
# About half of the batches below have larger gradients.
LIMIT = 24.0
NUM_STEPS = 10
BAD_STEP = 4


class RuledBatch(NamedTuple):
    """A toy batch whose loss can go wrong in one place at a time.

    Attributes:
      ids: int32 [B, F].
      mask: bool [B, F].
      push: float32 [B, F, W].
      bias_grad: float32 [B], all the gradient of the bias.
      root: bool [B], whether the loss has a root of zero: its value is 0, its slope infinite.
      extra: float32 [B], added to the loss.
    """

    ids: np.ndarray
    mask: np.ndarray
    push: np.ndarray
    bias_grad: np.ndarray
    root: np.ndarray
    extra: np.ndarray


def ruled_batch(seed: int) -> RuledBatch:
    """Nothing wrong. Half of the batches have pushes of twice the size; ids from a few rows."""
    batch = helpers.toy_batch(seed)
    ones = np.ones(helpers.NUM_EXAMPLES, np.float32)
    push = batch.push * (1 + seed % 2)
    return RuledBatch(batch.ids % NUM_IDS, batch.mask, push, ones, ones < 0, 0 * ones)


def ruled_loss(params: Any, embeddings: jax.Array, batch: RuledBatch) -> Any:
    loss, rows = helpers.toy_loss({"bias": 0.0}, embeddings, batch)
    bias, root = params["bias"], batch.root[0]
    zero = jnp.where(root, bias - jax.lax.stop_gradient(bias), 1.0)
    loss += bias * batch.bias_grad[0] + jnp.where(root, jnp.sqrt(zero), 0.0)
    return loss + batch.extra[0], rows


ADAM = optax.adam(0.01)
BATCHES = [ruled_batch(seed) for seed in range(NUM_STEPS)]


class Outcome(NamedTuple):
    """Of a run, in host memory: the state at its end, metrics and dense state of its steps."""

    state: TrainState
    metrics: list[StepMetrics]
    dense: list[Any]


@functools.cache
def make_setup(**changes: Any) -> TrainSetup:
    fields = {
        "optimizer": helpers.LAZY,
        "loss_fn": ruled_loss,
        "dense_optimizer": optax.sgd(0.25, momentum=0.5),
    }
    return helpers.toy_setup(**(fields | changes))


@functools.cache
def make_step(setup: TrainSetup, mode: str, shared_rows: int) -> TrainStep:
    """Compiled once for all tests."""
    return TrainStep(setup, mode, shared=room_for(shared_rows, setup) if mode == EXACT else None)


def room_for(shared_rows: int, setup: TrainSetup) -> SharedCapacity:
    return SharedCapacity(rows=shared_rows, tokens_per_rank=setup.ctx.tokens_per_rank)


def run(
    mode: str,
    batches: Sequence[Any] = BATCHES,
    params: Any = None,
    shared_rows: int = SHARED_ROWS,
    **changes: Any,
) -> Outcome:
    metrics, dense = [], []
    with make_step(make_setup(**changes), mode, shared_rows) as step:
        state = step.init(params or helpers.toy_params(), helpers.toy_table())
        for batch, next_batch in look_ahead(batches):
            state, step_metrics = step.step(state, batch, next_batch)
            metrics.append(helpers.host_copy(step_metrics))
            dense.append(helpers.host_copy((state.dense_params, state.dense_opt_state)))
        return Outcome(helpers.host_copy(step.flush(state)), metrics, dense)


def run_oracle(
    mode: str,
    batches: Sequence[Any],
    change: Any,
    setup: TrainSetup | None = None,
) -> reference.TableState:
    """The table and its state after the same run; `change` as in `helpers.make_oracle`."""
    setup = setup or make_setup()
    oracle = helpers.make_oracle(setup, batches, helpers.toy_table(), change)
    for batch, next_batch in look_ahead(batches):
        following = None
        if next_batch is not None and mode == ONE_STEP:
            following = helpers.oracle_batch(setup, next_batch)
        oracle.step(helpers.oracle_batch(setup, batch), following)
        if mode != ONE_STEP:
            oracle.flush()
    oracle.flush()
    return oracle.state


def with_bad_step(bad: RuledBatch) -> list[RuledBatch]:
    return [*BATCHES[: BAD_STEP - 1], bad, *BATCHES[BAD_STEP : NUM_STEPS - 2]]


def pushed(batch: RuledBatch, value: float) -> RuledBatch:
    """A batch with such a push, and so such a gradient, in a token that counts."""
    push = batch.push.copy()
    push[tuple(np.argwhere(batch.mask)[3])] = value
    return batch._replace(push=push)


def everywhere(value: float) -> np.ndarray:
    return np.full(helpers.NUM_EXAMPLES, value, np.float32)


def numpy_norm(metrics: StepMetrics, batch: RuledBatch) -> float:
    """Of the bias's gradient and those of the rows, summed for each row and rounded to bfloat16."""
    grads = helpers.toy_gradient(metrics.aux.reshape(-1, helpers.EMB_WIDTH), batch)
    sums = np.zeros((helpers.VOCAB_ROWS, helpers.EMB_WIDTH))
    np.add.at(sums, batch.ids.reshape(-1), grads.astype(np.float64))
    sums = sums.astype(ml_dtypes.bfloat16).astype(np.float64)
    return float(np.sqrt(np.sum(sums**2) + batch.bias_grad[0] ** 2))


def test_batches_of_the_test_take_both_ways() -> None:
    with TrainStep(make_setup(), EXACT, shared=room_for(SHARED_ROWS, make_setup())) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        for batch, next_batch in look_ahead(BATCHES):
            state, _ = step.step(state, batch, next_batch)
        counts = step.shared_counts()
    assert counts is not None
    assert 0 < counts.long_way_steps < counts.steps


@ALL_MODES
def test_gradient_norm_sums_the_gradients_of_a_row_first(mode: str) -> None:
    batch = BATCHES[0]
    one_id = batch._replace(ids=np.full_like(batch.ids, 7), mask=np.ones_like(batch.mask))
    batches = [one_id, *BATCHES[1:3]]
    for metrics, batch in zip(
        run(mode, batches, max_grad_norm=LIMIT).metrics, batches, strict=True
    ):
        assert float(metrics.grad_norm) == pytest.approx(numpy_norm(metrics, batch), rel=1e-6)


@ALL_MODES
def test_gradient_norm_is_not_reported_unless_asked_for(mode: str) -> None:
    assert all(np.isnan(metrics.grad_norm) for metrics in run(mode, BATCHES[:3]).metrics)


@ALL_MODES
@pytest.mark.parametrize("optimizer", [helpers.EAGER, helpers.LAZY], ids=["eager", "lazy"])
def test_large_gradients_are_scaled_in_table_and_dense_parameters(
    mode: str, optimizer: Any
) -> None:
    changes = {"optimizer": optimizer, "max_grad_norm": LIMIT, "dense_optimizer": optax.sgd(0.25)}
    outcome = run(mode, **changes)
    norms = np.array([metrics.grad_norm for metrics in outcome.metrics])
    scales = np.asarray(jax.jit(lambda x: jnp.where(x > LIMIT, LIMIT / x, 1.0))(norms))
    assert 2 <= np.count_nonzero(scales < 1) <= NUM_STEPS - 2

    def clip(grads: np.ndarray, step: int) -> np.ndarray:
        return (grads.astype(np.float32) * scales[step - 1]).astype(grads.dtype)

    expected = run_oracle(mode, BATCHES, clip, make_setup(**changes))
    helpers.assert_same_table(outcome.state, expected)
    bias = float(outcome.state.dense_params["bias"])
    assert bias == pytest.approx(-0.25 * float(np.sum(scales)), rel=1e-6)


@ALL_MODES
def test_gradients_below_the_limit_are_left_as_they_are(mode: str) -> None:
    helpers.assert_same_states(run(mode, max_grad_norm=1e6).state, run(mode).state)


def mlp(mode: str, batches: Sequence[Any], **changes: Any) -> TrainState:
    return run(
        mode,
        batches,
        params=helpers.mlp_params(),
        loss_fn=helpers.mlp_loss,
        dense_optimizer=ADAM,
        **changes,
    ).state


def test_clipped_exact_training_has_the_bits_of_synchronous_training() -> None:
    states = [mlp(mode, BATCHES, max_grad_norm=0.05) for mode in (EXACT, SYNCHRONOUS)]
    helpers.assert_same_states(*states)
    unclipped = mlp(SYNCHRONOUS, BATCHES)
    assert np.any(unclipped.table != states[0].table)


@pytest.mark.parametrize("limit", [0.0, -1.0, np.inf, np.nan])
def test_limit_that_is_not_positive_and_finite_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="it must be positive and finite"):
        helpers.toy_setup(max_grad_norm=limit)


# What is wrong with one step, by kind.
WRONG = {
    "nan_in_a_token": pushed(BATCHES[BAD_STEP - 1], np.nan),
    "infinity_in_a_token": pushed(BATCHES[BAD_STEP - 1], -np.inf),
    "dense_gradient": BATCHES[BAD_STEP - 1]._replace(root=everywhere(1) > 0),
    "loss": BATCHES[BAD_STEP - 1]._replace(extra=everywhere(np.nan)),
    "ids_of_its_neighbours": pushed(
        BATCHES[BAD_STEP - 1]._replace(ids=BATCHES[BAD_STEP - 2].ids), np.nan
    ),
    # Finite, but the square of a sum over a row might not be.
    "large_gradient": pushed(BATCHES[BAD_STEP - 1], 2e18),
    "too_large_gradient": pushed(BATCHES[BAD_STEP - 1], 2e19),
}
KINDS = pytest.mark.parametrize("bad", WRONG.values(), ids=WRONG.keys())


def skip_bad_step(grads: np.ndarray, step: int) -> np.ndarray:
    return grads * grads.dtype.type(np.nan) if step == BAD_STEP else grads


def assert_bad_step_skipped(outcome: Outcome) -> None:
    """In what the steps reported and in the dense state; the table is for the oracle."""
    numbers = range(1, len(outcome.metrics) + 1)
    skipped = [bool(metrics.skipped) for metrics in outcome.metrics]
    assert skipped == [number == BAD_STEP for number in numbers]
    helpers.assert_same_states(outcome.dense[BAD_STEP - 1], outcome.dense[BAD_STEP - 2])
    for before, after in itertools.pairwise(outcome.dense[BAD_STEP - 1 :]):
        assert np.isfinite(after[0]["bias"])
        assert after[0]["bias"] != before[0]["bias"]


@ALL_MODES
@KINDS
def test_step_that_is_not_finite_changes_nothing(mode: str, bad: RuledBatch) -> None:
    batches = with_bad_step(bad)
    outcome = run(mode, batches)
    assert_bad_step_skipped(outcome)
    helpers.assert_same_table(outcome.state, run_oracle(mode, batches, skip_bad_step))


@KINDS
@pytest.mark.parametrize("shared_rows", [NUM_IDS, 1], ids=["short_way", "long_way"])
def test_exact_step_that_is_not_finite_changes_nothing_on_either_way(
    shared_rows: int, bad: RuledBatch
) -> None:
    batches = with_bad_step(bad)
    outcome = run(EXACT, batches, shared_rows=shared_rows)
    assert_bad_step_skipped(outcome)
    helpers.assert_same_table(outcome.state, run_oracle(EXACT, batches, skip_bad_step))


@ALL_MODES
@pytest.mark.parametrize(
    "bad",
    [
        WRONG["nan_in_a_token"],
        WRONG["dense_gradient"],
        WRONG["too_large_gradient"],
        BATCHES[BAD_STEP - 1]._replace(bias_grad=everywhere(1e30)),
    ],
    ids=["nan_in_a_token", "dense_gradient", "too_large_gradient", "dense_norm_overflows"],
)
def test_step_whose_norm_is_not_finite_changes_nothing(mode: str, bad: RuledBatch) -> None:
    batches = with_bad_step(bad)
    outcome = run(mode, batches, max_grad_norm=1e6)
    assert_bad_step_skipped(outcome)
    helpers.assert_same_table(outcome.state, run_oracle(mode, batches, skip_bad_step))


@pytest.mark.parametrize("limit", [None, 0.05])
def test_exact_training_skips_what_synchronous_training_skips(limit: float | None) -> None:
    batches = with_bad_step(WRONG["ids_of_its_neighbours"])
    helpers.assert_same_states(
        *(mlp(mode, batches, max_grad_norm=limit) for mode in (EXACT, SYNCHRONOUS))
    )


@ALL_MODES
@pytest.mark.parametrize("limit", [None, 1e6])
@pytest.mark.parametrize("kind", ["nan_in_a_token", "too_large_gradient"])
def test_table_alone_skips_its_gradients_where_steps_are_not_skipped(
    mode: str, limit: float | None, kind: str
) -> None:
    batches = with_bad_step(WRONG[kind])
    outcome = run(mode, batches, skip_nonfinite=False, max_grad_norm=limit)
    helpers.assert_same_table(outcome.state, run_oracle(mode, batches, skip_bad_step))
    assert not any(metrics.skipped for metrics in outcome.metrics)
    helpers.assert_same_states(outcome.dense, run(mode).dense[: len(batches)])


@ALL_MODES
def test_dense_parameters_take_what_comes_where_steps_are_not_skipped(mode: str) -> None:
    batches = with_bad_step(WRONG["dense_gradient"])
    outcome = run(mode, batches, skip_nonfinite=False)
    assert not any(metrics.skipped for metrics in outcome.metrics)
    assert np.isfinite(outcome.dense[BAD_STEP - 2][0]["bias"])
    assert not np.isfinite(outcome.dense[BAD_STEP - 1][0]["bias"])
    good = run_oracle(mode, batches, lambda grads, _: grads)
    helpers.assert_same_table(outcome.state, good)
