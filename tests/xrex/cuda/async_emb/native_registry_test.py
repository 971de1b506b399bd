"""The registry of native contexts: what the calls by context id do."""

import numpy as np
import pytest

from tests.xrex.cuda.async_emb.native_group import (
    connect,
    ids_of,
    make_context,
    message_of,
    random_table,
)
from xrex.cuda.async_emb import async_emb_api

NOT_INITIALIZED = "async_emb context not initialized"
UNKNOWN_ID = 4711


@pytest.fixture
def registered():
    """Two contexts of one rank each, ready and registered under one id."""
    contexts = [make_context(context_id=77, device_key=key) for key in (0, 5)]
    for context in contexts:
        connect([context])
        async_emb_api.register_context(context)
    yield contexts
    async_emb_api.destroy_contexts(77)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("wait_step_ready", 0),
        ("drain", 0),
        ("abort", None),
        ("check", None),
        ("reset_table_binding", None),
        ("stats", {}),
        ("has_contexts", False),
        ("destroy_contexts", 0),
    ],
)
def test_calls_for_an_id_without_contexts_do_nothing(call, result):
    assert getattr(async_emb_api, call)(UNKNOWN_ID) == result


def test_snapshot_for_an_id_without_contexts_is_refused():
    message = message_of(ValueError, async_emb_api._test_snapshot, UNKNOWN_ID, "lookup_ids")
    assert message == NOT_INITIALIZED


def test_snapshot_for_a_device_without_a_context_is_refused(registered):
    message = message_of(ValueError, async_emb_api._test_snapshot, 77, "lookup_ids", 1)
    assert message == NOT_INITIALIZED


def test_snapshot_is_of_the_device_that_was_asked_for(registered):
    ids = ids_of(2)
    for context, own_ids in zip(registered, ids, strict=True):
        context.arm_lookup(own_ids, random_table())
    snapshot = async_emb_api._test_snapshot(77, "lookup_ids", device=5)
    np.testing.assert_array_equal(np.frombuffer(snapshot, np.int32), ids[1])


def test_second_context_under_a_key_is_refused(registered):
    twin = make_context(context_id=77, device_key=5)
    message = message_of(RuntimeError, async_emb_api.register_context, twin)
    assert "context 77 exists on device 5 already: destroy it first" in message


def arm_and_finish(context, num_steps):
    for _ in range(num_steps):
        context.arm_lookup(ids_of(1)[0], random_table())
        context.consume_lookup()


@pytest.mark.parametrize("wait", ["wait_step_ready", "drain"])
@pytest.mark.parametrize(("num_steps", "least"), [((3, 1), 1), ((1, 3), 1), ((2, 0), 0)])
def test_waits_give_the_least_step_of_all_devices(registered, wait, num_steps, least):
    for context, steps in zip(registered, num_steps, strict=True):
        arm_and_finish(context, steps)
    assert getattr(async_emb_api, wait)(77) == least


@pytest.mark.parametrize("call", ["wait_step_ready", "drain", "check", "reset_table_binding"])
@pytest.mark.parametrize("failed", [0, 1])
def test_error_of_one_device_is_raised_for_the_id(registered, call, failed):
    registered[failed].abort("it broke")
    message = message_of(RuntimeError, getattr(async_emb_api, call), 77)
    assert message == "async_emb communicator aborted: it broke"


def test_destroying_forgets_all_devices_of_the_id(registered):
    assert async_emb_api.destroy_contexts(77) == len(registered)
    assert not async_emb_api.has_contexts(77)


def test_destroyed_context_is_closed_though_python_holds_it():
    context = make_context(context_id=78)
    connect([context])
    async_emb_api.register_context(context)
    async_emb_api.destroy_contexts(78)
    message = message_of(RuntimeError, context.check)
    assert message == "async_emb communicator aborted: context 78 rank 0 is closed"


def test_handlers_of_all_targets_are_there():
    assert set(async_emb_api.ffi_handlers("cpu")) == {
        f"xrex_async_emb_{call}"
        for call in (
            "lookup_start",
            "lookup_done",
            "rowwise_adagrad_update_start",
            "rowwise_adagrad_lazy_update_start",
            "rowwise_adagrad_update_done",
            "order",
        )
    }
