"""The native context when something goes wrong: time-outs, aborts, closing, waiting threads."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.xrex.cuda.async_emb.native_group import (
    PATIENCE_SECS,
    arm_all,
    bits,
    ids_of,
    is_nan,
    make_context,
    message_of,
    outcome,
    random_table,
    ready_group,
    running,
    shards_of,
)
from xrex.cuda.async_emb import async_emb_api

ABORTED = "async_emb communicator aborted: "

# The calls that wait for a lookup, with the label that their time-out carries.
WAITS = [
    pytest.param("readiness", lambda context: context.wait_step_ready(), id="readiness"),
    pytest.param("drain", lambda context: context.drain(), id="drain"),
    pytest.param("test snapshot", lambda context: context.snapshot("lookup_ids"), id="snapshot"),
]


def arm_first_rank(contexts, ids=None):
    """Arms a lookup whose peers do not come."""
    ids = ids_of(len(contexts)) if ids is None else ids
    table = random_table(2 * len(contexts))
    return contexts[0].arm_lookup(ids[0], shards_of(table)[0])


# --- A peer that never comes ----------------------------------------------------------------


@pytest.mark.parametrize(("label", "wait"), WAITS)
def test_wait_for_a_peer_that_never_arms_times_out(label, wait):
    with ready_group(2, timeout_secs=1) as contexts:
        arm_first_rank(contexts)
        message = message_of(RuntimeError, wait, contexts[0])
        assert message == f"async_emb: {label} timed out waiting for step 1"


def test_time_out_names_the_step_that_was_waited_for():
    with ready_group(2, timeout_secs=1) as contexts:
        arm_all(contexts, ids_of(2), random_table(4))
        for context in contexts:
            context.consume_lookup()
        arm_first_rank(contexts)
        message = message_of(RuntimeError, contexts[0].wait_step_ready)
        assert message == "async_emb: readiness timed out waiting for step 2"


def test_time_out_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("XAI_ASYNC_EMB_TIMEOUT_SECONDS", "1")
    with ready_group(2) as contexts:
        arm_first_rank(contexts)
        message = message_of(RuntimeError, contexts[0].drain)
        assert message == "async_emb: drain timed out waiting for step 1"


@pytest.fixture
def timed_out_group():
    """Four ranks, of which ranks 0 and 2 waited in vain for the others."""
    with ready_group(4, timeout_secs=1) as contexts:
        shards = shards_of(random_table(8))
        for rank in (0, 2):
            contexts[rank].arm_lookup(ids_of(4)[rank], shards[rank])
        message_of(RuntimeError, contexts[0].wait_step_ready)
        yield contexts


def test_after_a_time_out_every_rank_knows_which_ranks_did_not_come(timed_out_group):
    for context in timed_out_group:
        message = message_of(RuntimeError, context.check)
        assert message.startswith(f"{ABORTED}lookup step 1 of rank ")
        assert message.endswith(" timed out after 1 s: ranks 1, 3 have not arrived")


def test_after_a_time_out_the_armed_step_delivers_nan(timed_out_group):
    assert is_nan(timed_out_group[2].consume_lookup())


def test_step_that_nobody_waits_for_times_out_too():
    with ready_group(2, timeout_secs=1) as contexts:
        arm_first_rank(contexts)
        assert is_nan(contexts[0].consume_lookup())


# --- abort --------------------------------------------------------------------------------


@pytest.mark.parametrize(("label", "wait"), WAITS)
def test_abort_from_another_thread_ends_a_wait(label, wait):
    with ready_group(2) as contexts:
        arm_first_rank(contexts)
        with running(wait, contexts[0]) as waiting:
            contexts[0].abort("enough")
            assert message_of(RuntimeError, outcome, waiting) == f"{ABORTED}enough", label


def test_abort_of_one_rank_ends_the_wait_of_another():
    with ready_group(2) as contexts:
        arm_first_rank(contexts)
        with running(contexts[0].wait_step_ready) as waiting:
            contexts[1].abort("enough")
            assert message_of(RuntimeError, outcome, waiting) == f"{ABORTED}enough"


def test_abort_from_another_thread_ends_a_lookup_with_nan():
    with ready_group(2) as contexts:
        arm_first_rank(contexts)
        with running(contexts[0].consume_lookup) as waiting:
            contexts[0].abort("enough")
            assert is_nan(outcome(waiting))


def test_abort_reaches_all_ranks():
    with ready_group(4) as contexts:
        contexts[2].abort("enough")
        assert [context.error for context in contexts] == ["enough"] * 4


def test_second_abort_changes_nothing():
    with ready_group(2) as contexts:
        contexts[0].abort("first")
        contexts[0].abort("second")
        contexts[1].abort("third")
        assert [context.error for context in contexts] == ["first", "first"]


def test_aborts_of_many_threads_all_return():
    with ready_group(2) as contexts:
        arm_first_rank(contexts)
        with ThreadPoolExecutor(9) as pool:
            waiting = pool.submit(contexts[0].wait_step_ready)
            aborts = [pool.submit(contexts[i % 2].abort, "enough") for i in range(8)]
            assert [outcome(call) for call in aborts] == [None] * 8
            assert message_of(RuntimeError, outcome, waiting) == f"{ABORTED}enough"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("check", ()),
        ("wait_step_ready", ()),
        ("drain", ()),
        ("reset_table_binding", ()),
        ("snapshot", ("lookup_ids",)),
        ("reset", (0, 1)),
        ("handshake", ([b"x"],)),
        ("arm_lookup", (ids_of(1)[0], random_table())),
    ],
)
def test_after_an_abort_every_call_raises_the_reason(call, arguments):
    with ready_group(1) as (context,):
        context.abort("enough")
        message = message_of(RuntimeError, getattr(context, call), *arguments)
        assert message == f"{ABORTED}enough"


def test_without_a_reason_an_abort_says_where_it_came_from():
    with ready_group(1) as (context,):
        context.abort()
        assert context.error == "abort() was called"


def test_after_an_abort_the_counters_are_readable():
    with ready_group(2) as contexts:
        arm_first_rank(contexts)
        contexts[0].abort()
        contexts[0].consume_lookup()
        assert contexts[0].stats()["lookup_steps_armed"] == 1


def test_nothing_is_armed_after_an_abort():
    with ready_group(1) as (context,):
        context.abort()
        message_of(RuntimeError, arm_first_rank, [context])
        assert context.lookup_steps_armed == 0


def test_lookup_that_was_complete_before_the_abort_keeps_its_rows_on_all_ranks():
    table, ids = random_table(4), ids_of(2)
    with ready_group(2) as contexts:
        arm_all(contexts, ids, table)
        for context in contexts:
            context.wait_step_ready()
        contexts[0].abort()
        for context, own_ids in zip(contexts, ids, strict=True):
            np.testing.assert_array_equal(bits(context.consume_lookup()), bits(table[own_ids]))


def test_new_contexts_work_beside_an_aborted_group():
    table, ids = random_table(4), ids_of(2)
    with ready_group(2) as aborted, ready_group(2) as contexts:
        arm_first_rank(aborted)
        aborted[0].abort()
        arm_all(contexts, ids, table)
        for context, own_ids in zip(contexts, ids, strict=True):
            np.testing.assert_array_equal(bits(context.consume_lookup()), bits(table[own_ids]))


# --- Threads ------------------------------------------------------------------------------


@pytest.fixture
def unhurried_threads():
    """A Python thread keeps the interpreter until it lets go of it by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE_SECS)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("unhurried_threads")
@pytest.mark.parametrize(
    ("call", "arguments"),
    [("wait_step_ready", ()), ("drain", ()), ("consume_lookup", ()), ("snapshot", ("lookup_ids",))],
)
def test_other_python_threads_run_while_a_call_waits(call, arguments):
    ids, shards = ids_of(2), shards_of(random_table(4))
    entered = threading.Event()

    def wait(context):
        entered.set()
        return getattr(context, call)(*arguments)

    with ready_group(2, timeout_secs=5) as contexts:
        contexts[0].arm_lookup(ids[0], shards[0])
        with running(wait, contexts[0]) as waiting:
            assert entered.wait(PATIENCE_SECS)
            contexts[1].arm_lookup(ids[1], shards[1])
            outcome(waiting)
            assert contexts[0].error is None


@pytest.mark.usefixtures("unhurried_threads")
def test_other_python_threads_run_while_the_registry_waits():
    ids, shards = ids_of(2), shards_of(random_table(4))
    entered = threading.Event()

    def wait():
        entered.set()
        return async_emb_api.wait_step_ready(91)

    with ready_group(2, timeout_secs=5, context_id=91) as contexts:
        async_emb_api.register_context(contexts[0])
        try:
            contexts[0].arm_lookup(ids[0], shards[0])
            with running(wait) as waiting:
                assert entered.wait(PATIENCE_SECS)
                contexts[1].arm_lookup(ids[1], shards[1])
                assert outcome(waiting) == 1
        finally:
            async_emb_api.destroy_contexts(91)


def test_waits_with_nothing_armed_return_zero():
    with ready_group(1) as (context,):
        assert (context.wait_step_ready(), context.drain()) == (0, 0)


# --- Closing ------------------------------------------------------------------------------


def test_closing_twice_does_nothing():
    context = make_context()
    context.close()
    context.close()


@pytest.mark.parametrize("call", ["check", "drain", "wait_step_ready", "consume_lookup", "stats"])
def test_closed_context_refuses_calls(call):
    context = make_context()
    context.close()
    message = message_of(RuntimeError, getattr(context, call))
    assert message == "async_emb: the context is closed: make a new one"


def test_closing_with_a_lookup_armed_fails_the_peers():
    with ready_group(2) as contexts:
        arm_first_rank(contexts)
        contexts[0].close()
        assert contexts[1].error == "the context was closed with a lookup armed"


def test_closing_an_idle_rank_fails_the_next_step_of_the_others():
    with ready_group(2) as contexts:
        contexts[1].close()
        arm_first_rank(contexts)
        assert is_nan(contexts[0].consume_lookup())
        assert contexts[0].error == "rank 1 has closed its context"


def test_closing_after_a_complete_step_leaves_the_others_their_rows():
    table, ids = random_table(4), ids_of(2)
    with ready_group(2) as contexts:
        arm_all(contexts, ids, table)
        contexts[1].consume_lookup()
        contexts[1].close()
        np.testing.assert_array_equal(bits(contexts[0].consume_lookup()), bits(table[ids[0]]))


@pytest.mark.parametrize(("label", "wait"), WAITS)
def test_closing_ends_a_wait_of_another_thread(label, wait):
    reason = "the context was closed with a lookup armed"
    entered = threading.Event()

    def enter_and_wait(context):
        entered.set()
        return wait(context)

    with ready_group(2) as contexts:
        arm_first_rank(contexts)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(PATIENCE_SECS)
        try:
            with running(enter_and_wait, contexts[0]) as waiting:
                assert entered.wait(PATIENCE_SECS)
                contexts[0].close()
                assert message_of(RuntimeError, outcome, waiting) == ABORTED + reason, label
        finally:
            sys.setswitchinterval(interval)


def test_contexts_are_let_go_in_any_order_with_steps_in_flight():
    contexts = []
    with ready_group(4) as group:
        for context, own_ids, shard in zip(
            group[:3], ids_of(4), shards_of(random_table(8)), strict=False
        ):
            context.arm_lookup(own_ids, shard)
        contexts = [group[rank] for rank in (2, 0, 3, 1)]
        for context in contexts:
            context.close()
        assert message_of(RuntimeError, contexts[0].check).endswith("make a new one")
