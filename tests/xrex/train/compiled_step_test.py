"""What the programs of a step compile to, and how often."""

import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from tests.xrex.train import helpers
from xrex.train.batches import look_ahead
from xrex.train.engines import NativeEngine
from xrex.train.exact_schedule import ExactSchedule, _Ahead
from xrex.train.one_step_schedule import OneStepSchedule
from xrex.train.prepared_batch import prepare_batch
from xrex.train.schedule import nothing_deferred
from xrex.train.shared_plan import SharedPlanner
from xrex.train.staleness import EXACT, MODES, ONE_STEP, SYNCHRONOUS, SharedCapacity
from xrex.train.synchronous_schedule import SynchronousSchedule
from xrex.train.train_state import init_state, place, shardings_of
from xrex.train.train_step import TrainStep

COMPILED = "/jax/core/compile/backend_compile_duration"


ALL_MODES = pytest.mark.parametrize("mode", MODES)
LIMITS = pytest.mark.parametrize("limit", [None, 1.0], ids=["unlimited", "limited"])


class Program(NamedTuple):
    """A jitted program of a step, and its arguments."""

    program: Any
    arguments: tuple[Any, ...]

    def text(self) -> str:
        return self.program.lower(*self.arguments).compile().as_text()


def programs_of(
    mode: str, loss_fn: Any = helpers.toy_loss, params: Any = None, **changes: Any
) -> dict[str, Program]:
    """The programs that the steps of a mode run, by name."""
    setup = helpers.toy_setup(helpers.LAZY, loss_fn=loss_fn, **changes)
    state = init_state(setup, params or helpers.toy_params(), helpers.toy_table())
    batch = prepare_batch(setup, helpers.toy_batch(0))
    arrays, deferred = batch.arrays, nothing_deferred(setup)
    schedule: Any
    if mode == ONE_STEP:
        schedule = OneStepSchedule(setup, NativeEngine(setup.ctx))
        schedule._make_programs(shardings_of(state))
        pin = place(np.zeros(setup.ctx.group_size, np.float32), setup.token_sharding())
        return {
            "advance": Program(schedule._advance, (state, deferred, pin, arrays, arrays.ids)),
            "advance_to_no_batch": Program(schedule._advance, (state, deferred, pin, arrays, None)),
        }
    if mode == SYNCHRONOUS:
        schedule = SynchronousSchedule(setup, NativeEngine(setup.ctx))
        schedule._make_programs(shardings_of(state))
        return {"advance": Program(schedule._advance, (state, arrays))}
    capacity = SharedCapacity(rows=4, tokens_per_rank=2)
    schedule = ExactSchedule(setup, NativeEngine, capacity)
    schedule._make_programs(shardings_of(state))
    replicated = setup.replicated()
    ahead = _Ahead(
        deferred.update.grads, place(np.float32(0), replicated), place(np.bool_(False), replicated)
    )
    common = (state, deferred, ahead, arrays)
    shared = SharedPlanner(setup, capacity).empty()
    return {
        "short_way": Program(schedule._short_way, (*common, arrays.ids, shared)),
        "long_way": Program(schedule._long_way, (*common, arrays.ids)),
        "last": Program(schedule._last, common),
    }


def matrix_loss(params: Any, embeddings: jax.Array, batch: helpers.ToyBatch) -> Any:
    """Has matrix products in both passes."""
    del batch
    rows = embeddings.astype(jnp.float32).reshape(helpers.NUM_EXAMPLES, -1)
    return jnp.sum(jnp.tanh(rows @ params["kernel"])), None


@ALL_MODES
@LIMITS
def test_step_makes_no_copy_of_the_table(mode: str, limit: float | None) -> None:
    programs = programs_of(mode, max_grad_norm=limit)
    copies = {name: helpers.copies_of_tables(each.text()) for name, each in programs.items()}
    assert copies == {name: [] for name in programs}


@ALL_MODES
def test_a_copy_of_the_table_would_be_seen(mode: str) -> None:
    for program, arguments in programs_of(mode).values():
        not_donating = Program(jax.jit(program.__wrapped__), arguments)
        assert helpers.copies_of_tables(not_donating.text()) != []


class Schedule:
    """The order of a compiled program of `matrix_loss`, by line."""

    def __init__(self, mode: str, program: str) -> None:
        params = {"kernel": np.ones((24, 16), np.float32)}
        text = programs_of(mode, matrix_loss, params)[program].text()
        self._entry = text[text.index("ENTRY") :].splitlines()
        self.forward = self._lines(r'op_name="[^"]*/jvp\(\)/dot_general')
        self.backward = self._lines(r'op_name="[^"]*/transpose\(jvp\(\)\)/dot_general')
        self.lookup_starts = self._calls("lookup_start")
        self.lookup_ends = self._calls("lookup_done")
        self.update_starts = self._calls("rowwise_adagrad_lazy_update_start")
        self.update_ends = self._calls("rowwise_adagrad_update_done")

    def _lines(self, pattern: str) -> list[int]:
        found = [number for number, line in enumerate(self._entry) if re.search(pattern, line)]
        assert found, pattern
        return found

    def _calls(self, name: str) -> list[int]:
        return self._lines(f'custom_call_target="xrex_async_emb_{name}"')


def test_dense_passes_run_beside_the_exchange() -> None:
    order = Schedule(ONE_STEP, "advance")
    (taken,), (armed,) = order.lookup_ends, order.lookup_starts
    (started,), (ended,) = order.update_starts, order.update_ends
    assert taken < started < min(order.forward)
    assert max(order.forward) < ended < armed < min(order.backward)


def test_short_way_hides_all_but_what_is_shared() -> None:
    order = Schedule(EXACT, "short_way")
    started, shared_started = order.update_starts
    ended, shared_ended = order.update_ends
    armed, rows_armed = order.lookup_starts
    taken, rows_taken = order.lookup_ends
    assert started < min(order.forward)
    assert max(order.forward) < ended < armed < min(order.backward)
    assert max(order.backward) < taken < shared_started < shared_ended < rows_armed < rows_taken


def test_long_way_hides_the_update_before_and_nothing_else() -> None:
    order = Schedule(EXACT, "long_way")
    before_started, started = order.update_starts
    before_ended, ended = order.update_ends
    (armed,), (taken,) = order.lookup_starts, order.lookup_ends
    assert before_started < min(order.forward)
    assert max(order.forward) < before_ended < min(order.backward)
    assert max(order.backward) < started < ended < armed < taken


def test_synchronous_step_does_one_thing_after_the_other() -> None:
    order = Schedule(SYNCHRONOUS, "advance")
    (armed,), (taken,) = order.lookup_starts, order.lookup_ends
    (started,), (ended,) = order.update_starts, order.update_ends
    assert armed < taken < min(order.forward)
    assert max(order.backward) < started < ended


@pytest.fixture
def compilations() -> Any:
    seen: list[str] = []

    def listener(event: str, _: float, **__: Any) -> None:
        if event == COMPILED:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)


def make_step(mode: str, **changes: Any) -> TrainStep:
    """In the mode EXACT some of the toy batches take the short way and some the long one."""
    setup = helpers.toy_setup(helpers.LAZY, **changes)
    capacity = SharedCapacity(rows=5, tokens_per_rank=setup.ctx.tokens_per_rank)
    return TrainStep(setup, mode, shared=capacity if mode == EXACT else None)


@ALL_MODES
@LIMITS
def test_nothing_compiles_after_the_second_step(
    mode: str, limit: float | None, compilations: list[str]
) -> None:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 12)
    batches = [helpers.toy_batch(seed) for seed in range(12)]
    with make_step(
        mode,
        learning_rate=schedule,
        dense_optimizer=optax.adam(schedule),
        max_grad_norm=limit,
    ) as step:
        state = step.init(helpers.toy_params(), helpers.toy_table())
        for number, (batch, next_batch) in enumerate(itertools.pairwise(batches), start=1):
            state, _ = step.step(state, batch, next_batch)
            if number == 2:
                assert compilations
                compilations.clear()
            assert number < 2 or compilations == []
        counts = step.shared_counts()
        assert counts is None or 0 < counts.long_way_steps < counts.steps
        state = step.flush(state)
        compilations.clear()
        state, _ = step.step(state, batches[0], batches[1])  # the refill after a flush
        step.flush(state)
        assert compilations == []


@ALL_MODES
def test_steps_are_compiled_anew_for_batches_of_another_type(mode: str) -> None:
    batches = [helpers.toy_batch(seed) for seed in range(6)]
    # The pushes are numbers that bfloat16 holds, too.
    others = [batch._replace(push=batch.push.astype(ml_dtypes.bfloat16)) for batch in batches[3:]]
    states = []
    for data in (batches, [*batches[:3], *others]):
        with make_step(mode) as step:
            state = step.init(helpers.toy_params(), helpers.toy_table())
            for batch, next_batch in look_ahead(data):
                state, _ = step.step(state, batch, next_batch)
            states.append(helpers.host_copy(step.flush(state)))
    helpers.assert_same_states(*states)
