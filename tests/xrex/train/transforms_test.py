"""JAX transformations around the methods of a training step, and inside its loss function."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.xrex.train import helpers
from xrex.train.batches import look_ahead
from xrex.train.staleness import EXACT, MODES, ONE_STEP, SYNCHRONOUS
from xrex.train.train_state import TrainState
from xrex.train.train_step import TrainStep

BATCHES = [helpers.toy_batch(seed) for seed in range(5)]
ALL_MODES = pytest.mark.parametrize("mode", MODES)

Call = Callable[[Any, Any], Any]


def total(state: TrainState) -> jax.Array:
    return jnp.sum(state.table.astype(jnp.float32))


def state_of(result: Any) -> TrainState:
    """The first result of any of the methods is the state, or they return it alone."""
    return result if isinstance(result, TrainState) else result[0]


def scanned(call: Call, state: TrainState, batch: Any) -> Any:
    def body(state: TrainState, _: None) -> tuple[TrainState, None]:
        return state_of(call(state, batch)), None

    return jax.lax.scan(body, state, length=2)


def conditional(call: Call, state: TrainState, batch: Any) -> Any:
    def chosen(state: TrainState) -> TrainState:
        return state_of(call(state, batch))

    return jax.lax.cond(state.step < 10, chosen, lambda state: state, state)


def differentiated(call: Call, state: TrainState, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        return total(state_of(call(state._replace(dense_params=params), batch)))

    return jax.grad(loss)(state.dense_params)


def rematerialized(call: Call, state: TrainState, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        return total(state_of(call(state._replace(dense_params=params), batch)))

    return jax.checkpoint(loss)(state.dense_params)


def mapped(call: Call, state: TrainState, batch: Any) -> Any:
    def one(step: jax.Array) -> jax.Array:
        return state_of(call(state._replace(step=step), batch)).step

    return jax.vmap(one)(jnp.arange(3))


AROUND = {
    "jit": lambda call, state, batch: jax.jit(call)(state, batch),
    "scan": scanned,
    "cond": conditional,
    "grad": differentiated,
    "remat": rematerialized,
    "vmap": mapped,
}


CALLS: dict[str, Callable[[TrainStep], Call]] = {
    "step": lambda step: lambda state, batch: step.step(state, batch),
    "flush": lambda step: lambda state, _: step.flush(state),
    "lookup": lambda step: step.lookup,
    "evaluate": lambda step: step.evaluate,
}


@pytest.fixture(scope="module", params=MODES)
def armed(request: pytest.FixtureRequest) -> Any:
    """A step with BATCHES[1] looked up ahead, its state, and what the run ends with."""
    # A context of its own: it stays open beside those of the other tests.
    with TrainStep(helpers.toy_setup(name="armed"), request.param) as step:
        ends: list[TrainState] = []
        for _ in range(2):
            state = step.init(helpers.toy_params(), helpers.toy_table())
            state, _ = step.step(state, BATCHES[0], BATCHES[1])
            if ends:
                yield step, state
            state, _ = step.step(state, BATCHES[1])
            ends.append(helpers.host_copy(step.flush(state)))
        # Everything that was refused in between has lost nothing.
        helpers.assert_same_states(*ends)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
@pytest.mark.parametrize("call", CALLS.keys())
def test_methods_refuse_to_be_traced(armed: Any, call: str, around: Any) -> None:
    step, state = armed
    message = (
        rf"TrainStep.{call} was traced by a JAX transformation .* call it from Python, step by "
        "step. Inside the loss function all of them work"
    )
    with pytest.raises(TypeError, match=message):
        around(CALLS[call](step), state, BATCHES[1])


def remat_loss(params: Any, embeddings: jax.Array, batch: helpers.ToyBatch) -> Any:
    """The whole model is computed twice: also in the backward pass."""
    return jax.checkpoint(helpers.mlp_loss)(params, embeddings, batch)


def scan_loss(params: Any, embeddings: jax.Array, batch: helpers.ToyBatch) -> Any:
    """Three layers of one kernel."""

    def layer(hidden: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(hidden @ params["hidden"] @ params["hidden"].T), None

    rows = (embeddings.astype(jnp.float32) + batch.push) * batch.mask[..., None]
    hidden, _ = jax.lax.scan(layer, rows.reshape(rows.shape[0], -1), length=3)
    scores = (hidden @ params["hidden"] @ params["out"])[:, 0]
    return jnp.mean(jax.nn.softplus(scores)), scores


def cond_loss(params: Any, embeddings: jax.Array, batch: helpers.ToyBatch) -> Any:
    """Another model where the batch has many tokens that count; the toy batches have both."""

    def few() -> tuple[jax.Array, jax.Array]:
        loss, scores = helpers.mlp_loss(params, embeddings, batch)
        return 0.5 * loss, scores

    def many() -> tuple[jax.Array, jax.Array]:
        return helpers.mlp_loss(params, embeddings, batch)

    return jax.lax.cond(jnp.sum(batch.mask) > 21, many, few)


INSIDE = {"remat": remat_loss, "scan": scan_loss, "cond": cond_loss}
LOSSES = pytest.mark.parametrize("loss_fn", INSIDE.values(), ids=INSIDE.keys())


@functools.cache
def train(mode: str, loss_fn: Any, num_steps: int = len(BATCHES)) -> tuple[TrainState, Any]:
    """The state at the end, and the counters of the first rank."""
    with TrainStep(helpers.toy_setup(helpers.LAZY, loss_fn=loss_fn), mode) as step:
        state = step.init(helpers.mlp_params(), helpers.toy_table())
        for batch, next_batch in look_ahead(BATCHES[:num_steps]):
            state, _ = step.step(state, batch, next_batch)
        return helpers.host_copy(step.flush(state)), step.counters()[0]


def test_toy_batches_take_both_branches() -> None:
    assert len({int(batch.mask.sum()) > 21 for batch in BATCHES}) == 2


@LOSSES
def test_transformations_inside_the_loss_train_alike_in_exact_and_synchronous_mode(
    loss_fn: Any,
) -> None:
    states = [train(mode, loss_fn)[0] for mode in (EXACT, SYNCHRONOUS)]
    helpers.assert_same_states(*states)


@LOSSES
def test_transformations_inside_the_loss_train_in_one_step_mode_as_without_a_pipeline(
    loss_fn: Any,
) -> None:
    # A single step has no stale rows, so it has the values of the synchronous one.
    states = [train(mode, loss_fn, 1)[0] for mode in (ONE_STEP, SYNCHRONOUS)]
    helpers.assert_same_states(*states)


@ALL_MODES
@LOSSES
def test_each_exchange_happens_once_a_step_whatever_the_loss_does(mode: str, loss_fn: Any) -> None:
    counts = train(mode, loss_fn)[1]
    # Where updates are deferred, one more ends the run, and the first step has none to make.
    num_updates = len(BATCHES) + (mode != SYNCHRONOUS)
    assert counts.lookup_steps_armed == counts.lookup_steps_done == len(BATCHES)
    assert counts.update_steps_armed == counts.update_steps_done == num_updates
