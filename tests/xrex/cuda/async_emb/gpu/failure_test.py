"""Aborts and time-outs while a step waits on the device, which a long program holds up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from tests.xrex.cuda.async_emb.gpu.devices import (
    ON_GPUS,
    Hold,
    gpu_mesh,
    hold_of,
    is_open,
    wait_until_armed,
)
from tests.xrex.cuda.async_emb.gpu.steps import (
    Steps,
    are_rows,
    expected_update,
    is_nan,
    on_host,
    random_ids,
    same_state,
)
from tests.xrex.cuda.async_emb.native_group import message_of, outcome, running
from tests.xrex.cuda.async_emb.numerics_cases import (
    UpdateCase,
    assert_same_bits,
    assert_same_state,
    make_case,
)
from tests.xrex.cuda.async_emb.testing import ready_context
from xrex.cuda.async_emb import async_emb, native
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle, AsyncEmbOptions
from xrex.cuda.async_emb.reference import TableState

ABORTED = "async_emb communicator aborted: "
NUM_ROWS, NUM_SLOTS, TOKENS, SHARD_WIDTH = 20_000, 4096, 4096, 128

# How long a step is held up that must still wait when it is aborted: much longer than Python
# takes to get there.
LONG_HOLD_SECS = 2.0

# How long one is held up whose abort may come at any time, and how many such aborts there are.
HOLD_SECS = 0.4
NUM_ABORTS = 18


@pytest.fixture
def hold(num_ranks: int) -> Hold:
    return hold_of(num_ranks)


def context(num_ranks: int, **options: Any) -> Any:
    return ready_context(
        gpu_mesh(num_ranks),
        name="failure",
        tokens_per_batch=num_ranks * TOKENS,
        emb_width=num_ranks * SHARD_WIDTH,
        num_unique=NUM_SLOTS,
        options=AsyncEmbOptions(**({"deterministic": True} | options)),
    )


def case_of(num_ranks: int, seed: int = 0) -> UpdateCase:
    rng = np.random.default_rng(seed)
    return make_case(rng, num_ranks * TOKENS, NUM_ROWS, num_ranks * SHARD_WIDTH, NUM_SLOTS)


class Placed(NamedTuple):
    """The inputs of a whole step, on the devices and ready."""

    state: TableState
    update: Any
    ids: Any


def place(steps: Steps, case: UpdateCase, ids: np.ndarray) -> Placed:
    placed = Placed(steps.put_state(case.state), steps.put_update(case), steps.put_ids(ids))
    return jax.block_until_ready(placed)


def run_whole_step(steps: Steps, placed: Placed, gate: Any) -> Any:
    """An update and then a lookup in the updated table; nothing is waited for."""
    finished = steps.finish_update(steps.start_update(placed.state, *placed.update, gate))
    table, pin = steps.start_lookup(placed.ids, finished.state.table, gate)
    embeddings, table = steps.finish_lookup(table, pin)
    return finished._replace(state=finished.state._replace(table=table)), embeddings


def abort_while_held(ctx: AsyncEmbContextHandle, gate: Any) -> None:
    """Aborts steps that wait for a hold; returns when they are off the devices."""
    assert not is_open(gate), "the hold was over before the abort"
    async_emb.abort(ctx)


def assert_works(steps: Steps, case: UpdateCase) -> None:
    ids = random_ids(steps.ctx, NUM_ROWS, 1)
    finished, embeddings = run_whole_step(steps, place(steps, case, ids), steps.open_gate())
    expected = expected_update(case)
    assert_same_state(on_host(finished.state), expected.state)
    assert finished.valids.tolist() == [1] * steps.ctx.group_size
    assert are_rows(embeddings, ids, expected.state.table)


def error_of(ctx: AsyncEmbContextHandle) -> str | None:
    try:
        async_emb.check(ctx)
    except RuntimeError as error:
        return str(error)
    return None


def wait_for_error(ctx: AsyncEmbContextHandle, patience_secs: float) -> str | None:
    """The sticky error, once there is one."""
    deadline = time.monotonic() + patience_secs
    while (error := error_of(ctx)) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return error


# --- Aborts in the middle of a step -------------------------------------------------------------


def parts_of(state: Any) -> list[TableState]:
    """What each rank holds: its columns of the table, and its copies of the rest."""
    shards = [x.addressable_shards for x in state]
    return [
        TableState(*(np.array(shard.data) for shard in of_rank))
        for of_rank in zip(*shards, strict=True)
    ]


def parts_of_host(state: TableState) -> list[TableState]:
    """What each rank has to hold of a state."""
    num_parts = state.table.shape[1] // SHARD_WIDTH
    return [state._replace(table=part) for part in np.split(state.table, num_parts, axis=1)]


def fate_on(rank: int, finished: Any, wanted: tuple[TableState, TableState]) -> str:
    """Whether an aborted step is "done" or "undone" on a rank; it must be one of them."""
    undone, done = wanted
    found = parts_of(finished.state)[rank]
    norm, valid = np.asarray(finished.norms)[rank], int(np.asarray(finished.valids)[rank])
    if same_state(found, undone):
        assert np.isnan(norm)
        assert valid == 0
        return "undone"
    assert_same_state(found, done)
    assert valid == 1
    return "done"


@ON_GPUS
@pytest.mark.parametrize("moment", ["held up", "any", "over"])
def test_aborted_step_is_whole_or_undone_on_each_rank(
    num_ranks: int, hold: Hold, moment: str
) -> None:
    case = case_of(num_ranks)
    after = expected_update(case).state
    wanted = list(zip(parts_of_host(case.state), parts_of_host(after), strict=True))
    delays = np.linspace(0.0, 1.3 * HOLD_SECS, NUM_ABORTS) if moment == "any" else [0.0]
    fates: set[str] = set()
    with context(num_ranks) as ctx:
        steps, ids = Steps(ctx), random_ids(ctx, NUM_ROWS, 1)
    for delay_secs in delays:
        with context(num_ranks) as ctx:  # equal to the first one: programs serve them all
            assert_works(steps, case)
            placed = place(steps, case, ids)
            gate = hold.start(LONG_HOLD_SECS if moment == "held up" else HOLD_SECS)
            finished, embeddings = run_whole_step(steps, placed, gate)
            if moment == "held up":
                abort_while_held(ctx, gate)
            elif moment == "over":
                jax.block_until_ready((finished, embeddings))
                async_emb.abort(ctx)
            else:
                time.sleep(delay_secs)
                async_emb.abort(ctx)

            for rank in range(num_ranks):
                fate = fate_on(rank, finished, wanted[rank])
                rows = np.split(np.asarray(embeddings), num_ranks)[rank]
                own_ids = np.split(ids, num_ranks)[rank]
                came_whole = fate == "done" and are_rows(rows, own_ids, after.table)
                assert came_whole or (moment != "over" and is_nan(rows))
                fates.add(fate)
            assert error_of(ctx) == f"{ABORTED}abort() was called"
    assert fates <= {"held up": {"undone"}, "over": {"done"}}.get(moment, {"undone", "done"})


@ON_GPUS
def test_after_an_abort_in_a_step_new_contexts_work_in_the_same_process(
    num_ranks: int, hold: Hold
) -> None:
    case = case_of(num_ranks)
    with context(num_ranks) as ctx:
        steps = Steps(ctx)
        assert_works(steps, case)
        for _ in range(3):
            async_emb.reset_table_binding(ctx)
            placed = place(steps, case, random_ids(ctx, NUM_ROWS, 1))
            gate = hold.start(LONG_HOLD_SECS)
            finished, embeddings = run_whole_step(steps, placed, gate)
            abort_while_held(ctx, gate)
            assert is_nan(embeddings)
            assert_same_state(on_host(finished.state), case.state)
            async_emb.destroy(ctx)
            async_emb.initialize(ctx)
            assert_works(steps, case)


@ON_GPUS
def test_update_that_was_done_before_the_abort_stays(num_ranks: int, hold: Hold) -> None:
    case = case_of(num_ranks)
    with context(num_ranks) as ctx:
        steps = Steps(ctx)
        assert_works(steps, case)  # and compiles what must not be compiled during the hold
        in_flight = steps.start_update(
            steps.put_state(case.state), *steps.put_update(case), steps.open_gate()
        )
        ids = steps.put_ids(random_ids(ctx, NUM_ROWS, 1))
        jax.block_until_ready((in_flight, ids))
        async_emb.drain(ctx)
        gate = hold.start(LONG_HOLD_SECS)
        table, pin = steps.start_lookup(ids, in_flight.table, gate)
        wait_until_armed(ctx, lookups=2)
        abort_while_held(ctx, gate)
        embeddings, table = steps.finish_lookup(table, pin)
        finished = steps.finish_update(in_flight._replace(table=table))
        assert is_nan(embeddings)
        assert finished.valids.tolist() == [1] * num_ranks
        assert_same_state(on_host(finished.state), expected_update(case).state)


@ON_GPUS
def test_abort_wakes_a_thread_that_drains(num_ranks: int, hold: Hold) -> None:
    case = case_of(num_ranks)
    with context(num_ranks) as ctx:
        steps = Steps(ctx)
        assert_works(steps, case)  # and compiles what must not be compiled during the hold
        state, inputs = steps.put_state(case.state), steps.put_update(case)
        jax.block_until_ready((state, inputs))
        gate = hold.start(LONG_HOLD_SECS)
        in_flight = steps.start_update(state, *inputs, gate)
        wait_until_armed(ctx, updates=2)
        with running(async_emb.drain, ctx) as waiting:
            abort_while_held(ctx, gate)
            assert message_of(RuntimeError, outcome, waiting) == f"{ABORTED}abort() was called"
        finished = steps.finish_update(in_flight)
        assert_same_state(on_host(finished.state), case.state)


# --- Time-outs ----------------------------------------------------------------------------------

TIMEOUT_SECS, STUCK_SECS = 1, 3.0


class Stuck(NamedTuple):
    """Steps that wait for devices which are held up for longer than the time-out.

    Attributes:
        steps: of the context.
        case: the update's inputs.
        gate: opens when the devices are free again.
        in_flight: of the update.
        pin: of the lookup in the updated table; None if there is only the update.
    """

    steps: Steps
    case: UpdateCase
    gate: jax.Array
    in_flight: Any
    pin: Any


@contextlib.contextmanager
def stuck(num_ranks: int, hold: Hold, *, with_lookup: bool) -> Iterator[Stuck]:
    case = case_of(num_ranks)
    with context(num_ranks, timeout_secs=TIMEOUT_SECS) as ctx:
        steps = Steps(ctx)
        assert_works(steps, case)
        async_emb.reset_table_binding(ctx)
        state, inputs = steps.put_state(case.state), steps.put_update(case)
        ids = steps.put_ids(random_ids(ctx, NUM_ROWS, 1))
        jax.block_until_ready((state, inputs, ids))
        gate, pin = hold.start(STUCK_SECS), None
        in_flight = steps.start_update(state, *inputs, gate)
        if with_lookup:
            table, pin = steps.start_lookup(ids, in_flight.table, gate)
            in_flight = in_flight._replace(table=table)
        wait_until_armed(ctx, lookups=1 + with_lookup, updates=2)
        yield Stuck(steps, case, gate, in_flight, pin)


def assert_times_out(label: str, wait: Any, step: Stuck) -> None:
    with pytest.raises(RuntimeError) as caught:
        wait(step.steps.ctx)
    assert str(caught.value) == f"async_emb: {label} timed out waiting for step 2"
    assert not is_open(step.gate), "the wait ended with the step"


def snapshot_of(region: str) -> Any:
    return lambda ctx: native.load()._test_snapshot(ctx.context_id, region)


@ON_GPUS
@pytest.mark.parametrize(
    ("label", "wait"),
    [("drain", async_emb.drain), ("test snapshot", snapshot_of("update_stats"))],
    ids=["drain", "snapshot"],
)
def test_wait_for_an_update_that_is_held_up_times_out(
    num_ranks: int, hold: Hold, label: str, wait: Any
) -> None:
    with stuck(num_ranks, hold, with_lookup=False) as step:
        assert_times_out(label, wait, step)


@ON_GPUS
@pytest.mark.parametrize(
    ("label", "wait"),
    [("readiness", async_emb.wait_step_ready), ("test snapshot", snapshot_of("lookup_ids"))],
    ids=["readiness", "snapshot"],
)
def test_wait_for_a_lookup_that_is_held_up_times_out(
    num_ranks: int, hold: Hold, label: str, wait: Any
) -> None:
    case = case_of(num_ranks)
    with context(num_ranks, timeout_secs=TIMEOUT_SECS) as ctx:
        steps, ids = Steps(ctx), random_ids(ctx, NUM_ROWS, 1)
        assert_works(steps, case)
        table, device_ids = steps.put_state(case.state).table, steps.put_ids(ids)
        jax.block_until_ready((table, device_ids))
        gate = hold.start(STUCK_SECS)
        table, pin = steps.start_lookup(device_ids, table, gate)
        wait_until_armed(ctx, lookups=2)
        assert_times_out(label, wait, Stuck(steps, case, gate, None, pin))
        embeddings, table = steps.finish_lookup(table, pin)
        assert is_nan(embeddings)
        assert_same_bits(table, case.state.table)


@ON_GPUS
def test_watchdog_gives_up_a_step_that_nobody_waits_for(num_ranks: int, hold: Hold) -> None:
    with stuck(num_ranks, hold, with_lookup=True) as step:
        steps, case, gate, in_flight, pin = step
        error = wait_for_error(steps.ctx, patience_secs=STUCK_SECS)
        assert not is_open(gate), "the error came after the devices were free again"
        assert error is not None
        assert error.startswith(ABORTED)
        assert f"timed out after {TIMEOUT_SECS} s" in error

        embeddings, table = steps.finish_lookup(in_flight.table, pin)
        finished = steps.finish_update(in_flight._replace(table=table))
        assert is_nan(embeddings)
        assert np.isnan(np.asarray(finished.norms)).all()
        assert finished.valids.tolist() == [0] * num_ranks
        assert_same_state(on_host(finished.state), case.state)
        async_emb.destroy(steps.ctx)
        async_emb.initialize(steps.ctx)
        assert_works(steps, case)


@ON_GPUS
def test_loop_that_pauses_for_longer_than_the_time_out_goes_on(num_ranks: int) -> None:
    case = case_of(num_ranks)
    with context(num_ranks, timeout_secs=TIMEOUT_SECS) as ctx:
        steps = Steps(ctx)
        table, pin = steps.start_lookup(
            steps.put_ids(random_ids(ctx, NUM_ROWS, 1)),
            steps.put_state(case.state).table,
            steps.open_gate(),
        )
        jax.block_until_ready(table)
        async_emb.wait_step_ready(ctx)
        time.sleep(2.5 * TIMEOUT_SECS)
        embeddings, _ = steps.finish_lookup(table, pin)
        assert are_rows(embeddings, random_ids(ctx, NUM_ROWS, 1), case.state.table)
        assert error_of(ctx) is None
