"""The native context from Python: its life cycle, its lookups, its snapshots."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.xrex.cuda.async_emb.native_group import (
    BFLOAT16,
    PATIENCE_SECS,
    SHARD_WIDTH,
    SLOTS,
    TOKENS,
    VOCAB_ROWS,
    arm_all,
    bits,
    connect,
    ids_of,
    make_context,
    message_of,
    outcome,
    random_table,
    ready_group,
    running,
    shards_of,
)

NOT_INITIALIZED = "async_emb context not initialized"


# --- Construction -------------------------------------------------------------------------


def test_new_context_has_no_rank_and_is_not_ready():
    context = make_context(2, context_id=-5, device_key=3)
    assert (context.context_id, context.world_size, context.device_key) == (-5, 2, 3)
    assert (context.rank, context.ready, context.error) == (-1, False, None)


def test_counters_of_a_new_context_are_zero():
    assert set(make_context().stats().values()) == {0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_rank": 0}, "tokens_per_rank is 0"),
        ({"shard_width": -1}, "shard_width is -1"),
        ({"emb_width": 3}, "emb_width is 3"),
        ({"num_unique": 0}, "num_unique is 0"),
        ({"min_ctas": 5}, "max_ctas is 4"),
        ({"out_of_range": "wrap"}, "out_of_range is 'wrap'"),
        ({"timeout_secs": 0}, "timeout_secs is '0'"),
        ({"platform": "tpu"}, "platform 'tpu'"),
    ],
)
def test_bad_spec_is_a_value_error_that_names_the_value(changes, message):
    assert message in message_of(ValueError, lambda: make_context(**changes))


def test_context_of_no_ranks_is_refused():
    assert "world_size is 0" in message_of(ValueError, make_context, 0)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "soon", "1s"])
def test_bad_time_out_in_the_environment_is_refused(text, monkeypatch):
    monkeypatch.setenv("XAI_ASYNC_EMB_TIMEOUT_SECONDS", text)
    assert f"XAI_ASYNC_EMB_TIMEOUT_SECONDS is '{text}'" in message_of(ValueError, make_context)


def test_time_out_of_the_options_overrides_the_environment(monkeypatch):
    monkeypatch.setenv("XAI_ASYNC_EMB_TIMEOUT_SECONDS", "soon")
    assert make_context(timeout_secs=7).error is None


# --- reset --------------------------------------------------------------------------------


def test_reset_of_rank_0_makes_one_payload_for_each_rank():
    payloads = make_context(4).reset(0, 4)
    assert [type(payload) for payload in payloads] == [bytes] * 4
    assert all(payloads)


def test_reset_of_other_ranks_makes_empty_payloads():
    assert make_context(4).reset(3, 4) == [b""] * 4


@pytest.mark.parametrize(
    ("made_for", "rank", "world_size", "message"),
    [
        (2, 0, 0, "async_emb received an invalid rank or world size"),
        (2, -1, 2, "async_emb received an invalid rank or world size"),
        (2, 2, 2, "async_emb received an invalid rank or world size"),
        (2, 4, 4, "async_emb received an invalid rank or world size"),
        (2, 0, 4, "async_emb world size changed from 2 to 4"),
        (2, 0, 3, "async_emb world size changed from 2 to 3"),
        (3, 0, 2, "async_emb world size changed from 3 to 2"),
        (3, 0, 3, "async_emb currently requires power-of-two EP"),
    ],
)
def test_reset_refuses_with_the_documented_text(made_for, rank, world_size, message):
    assert message_of(ValueError, make_context(made_for).reset, rank, world_size) == message


def test_reset_allows_any_world_size_on_request():
    assert len(make_context(3, any_world_size=True).reset(0, 3)) == 3


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (0, 2)])
def test_rejected_reset_leaves_a_ready_context_as_it_was(rank, world_size):
    with ready_group(1) as (context,):
        message_of(ValueError, context.reset, rank, world_size)
        table, ids = random_table(), ids_of(1)
        arm_all([context], ids, table)
        np.testing.assert_array_equal(bits(context.consume_lookup()), bits(table[ids[0]]))


def test_reset_takes_a_ready_context_back():
    with ready_group(1) as (context,):
        context.reset(0, 1)
        assert not context.ready


def test_contexts_work_again_after_reset_and_handshake():
    with ready_group(2) as contexts:
        connect(contexts)
        table, ids = random_table(4), ids_of(2)
        arm_all(contexts, ids, table)
        for context, own_ids in zip(contexts, ids, strict=True):
            np.testing.assert_array_equal(bits(context.consume_lookup()), bits(table[own_ids]))


def test_ranks_may_be_given_anew():
    with ready_group(2) as contexts:
        connect(contexts[::-1])
        assert [context.rank for context in contexts] == [1, 0]


def test_reset_with_a_lookup_in_flight_is_refused():
    with ready_group(1) as (context,):
        arm_all([context], ids_of(1), random_table())
        assert "lookup step 1 is in flight" in message_of(RuntimeError, context.reset, 0, 1)


# --- handshake ----------------------------------------------------------------------------


def test_handshake_before_reset_is_refused():
    assert "came before reset" in message_of(RuntimeError, make_context().handshake, [b"x"])


def test_second_handshake_is_refused():
    context = make_context()
    payloads = context.reset(0, 1)
    context.handshake(payloads)
    assert "handshake came twice" in message_of(RuntimeError, context.handshake, payloads)


@pytest.mark.parametrize("payloads", [[], [b""], [b"a", b"b"]])
def test_wrong_payloads_are_refused(payloads):
    context = make_context()
    context.reset(0, 1)
    assert "one payload from each of 1 ranks" in message_of(ValueError, context.handshake, payloads)


def test_handshake_is_possible_after_refused_payloads():
    context = make_context()
    payloads = context.reset(0, 1)
    message_of(ValueError, context.handshake, [])
    context.handshake(payloads)
    assert context.ready


def test_payload_of_an_earlier_reset_is_not_taken():
    context = make_context()
    old = context.reset(0, 1)
    context.handshake(old)
    context.reset(0, 1)
    assert "has just made" in message_of(ValueError, context.handshake, old)


def test_handshake_without_peers_times_out_and_names_them():
    context = make_context(4, timeout_secs=1)
    payloads = context.reset(0, 4)
    message = message_of(RuntimeError, context.handshake, [payloads[0], b"", b"", b""])
    assert message == "async_emb: handshake timed out: ranks 1, 2, 3 have not arrived"


def test_abort_ends_a_handshake_that_waits():
    context = make_context(2)
    payloads = context.reset(0, 2)
    with running(context.handshake, [payloads[0], b""]) as handshake:
        context.abort("enough")
        assert message_of(RuntimeError, outcome, handshake).endswith("aborted: enough")


# --- Lookups ------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_lookup_delivers_rows_bit_for_bit(world_size):
    table = random_table(world_size * SHARD_WIDTH)
    bits(table)[:2] = [[0x8000], [0x7FC1]]  # -0.0, and a NaN with a payload
    ids = ids_of(world_size)
    ids[0] = [0, 1, -1]
    with ready_group(world_size) as contexts:
        arm_all(contexts, ids, table)
        for context, own_ids in zip(contexts, ids, strict=True):
            np.testing.assert_array_equal(bits(context.consume_lookup()), bits(table[own_ids]))


@pytest.mark.parametrize(("policy", "delivered"), [("clip", [6, 0, 5]), ("zero", [None, None, 5])])
def test_ids_out_of_range_follow_the_policy_and_are_counted(policy, delivered):
    table = random_table()
    with ready_group(1, out_of_range=policy) as (context,):
        context.arm_lookup(np.array([VOCAB_ROWS, -VOCAB_ROWS - 1, -2], np.int32), table)
        expected = np.array([table[i] if i is not None else [0, 0] for i in delivered], BFLOAT16)
        np.testing.assert_array_equal(bits(context.consume_lookup()), bits(expected))
        assert context.stats()["ids_out_of_range"] == 2


def test_each_rank_counts_its_own_ids_only():
    ids = np.array([[0, 99, 0], [99, 99, 0]], np.int32)
    with ready_group(2) as contexts:
        arm_all(contexts, ids, random_table(4))
        for context in contexts:
            context.consume_lookup()
        assert [context.stats()["ids_out_of_range"] for context in contexts] == [1, 2]


def test_waits_are_counted_for_the_pipeline_that_waited():
    with ready_group(1) as (context,):
        context.arm_lookup(ids_of(1)[0], random_table())
        context.consume_lookup()
        stats = context.stats()
    assert stats["lookup_wait_secs"] > 0.0
    assert stats["update_wait_secs"] == 0.0


def test_eight_contexts_run_steps_at_once():
    table = random_table(8 * SHARD_WIDTH)
    shards = shards_of(table)
    all_ids = [ids_of(8, seed) for seed in range(20)]

    def run(context):
        for ids in all_ids:
            own_ids = ids[context.rank]
            context.arm_lookup(own_ids, shards[context.rank])
            np.testing.assert_array_equal(bits(context.consume_lookup()), bits(table[own_ids]))
        return context.lookup_steps_done

    with ready_group(8) as contexts, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, contexts, timeout=PATIENCE_SECS)) == [len(all_ids)] * 8


def test_steps_are_counted_from_one():
    with ready_group(1) as (context,):
        steps = []
        for _ in range(3):
            steps += arm_all([context], ids_of(1), random_table())
            context.consume_lookup()
        assert steps == [1, 2, 3]


def test_armed_and_done_steps_are_counted_apart():
    with ready_group(1) as (context,):
        arm_all([context], ids_of(1), random_table())
        assert (context.lookup_steps_armed, context.lookup_steps_done) == (1, 0)


def test_second_arming_is_refused_and_the_first_stands():
    table, ids = random_table(), ids_of(1)
    with ready_group(1) as (context,):
        arm_all([context], ids, table)
        message = message_of(RuntimeError, arm_all, [context], ids, table + table)
        assert "lookup_start came before the lookup_done of step 1" in message
        np.testing.assert_array_equal(bits(context.consume_lookup()), bits(table[ids[0]]))


def test_consuming_nothing_is_refused():
    with ready_group(1) as (context,):
        message = message_of(RuntimeError, context.consume_lookup)
        assert "lookup_done came with no step armed" in message


@pytest.mark.parametrize("call", ["arm_lookup", "consume_lookup"])
def test_steps_of_a_context_that_is_not_ready_are_refused(call):
    context = make_context()
    arguments = (ids_of(1)[0], random_table()) if call == "arm_lookup" else ()
    message = message_of(RuntimeError, getattr(context, call), *arguments)
    assert "came before the context was ready: call initialize(ctx) first" in message


@pytest.mark.parametrize(
    "ids", [np.zeros(TOKENS, np.int64), np.zeros(TOKENS), np.zeros(2 * TOKENS, np.int32)[::2]]
)
def test_ids_are_never_converted(ids):
    with ready_group(1) as (context,):
        assert "int32" in message_of(TypeError, context.arm_lookup, ids, random_table())


@pytest.mark.parametrize(
    "table",
    [
        np.zeros((VOCAB_ROWS, SHARD_WIDTH), np.float16),
        np.zeros((VOCAB_ROWS, SHARD_WIDTH + 1), BFLOAT16),
        np.zeros((0, SHARD_WIDTH), BFLOAT16),
        np.zeros(SHARD_WIDTH, BFLOAT16),
        [[0.0, 0.0]],
    ],
)
def test_wrong_table_is_refused(table):
    with ready_group(1) as (context,):
        message = message_of(ValueError, context.arm_lookup, ids_of(1)[0], table)
        assert "arm_lookup needs" in message


def test_table_may_be_given_as_its_bits():
    table, ids = random_table(), ids_of(1)[0]
    with ready_group(1) as (context,):
        context.arm_lookup(ids, bits(table))
        np.testing.assert_array_equal(bits(context.consume_lookup()), bits(table[ids]))


# --- The table's binding and life time ------------------------------------------------------


def test_another_table_between_steps_is_counted_as_moved():
    first, second = random_table(seed=1), random_table(seed=2)
    with ready_group(1) as (context,):
        for table in (first, first, second):
            arm_all([context], ids_of(1), table)
            context.consume_lookup()
        assert context.stats()["table_moved"] == 1


def test_another_table_after_the_binding_was_reset_is_not_counted():
    first, second = random_table(seed=1), random_table(seed=2)
    with ready_group(1) as (context,):
        for table in (first, second):
            arm_all([context], ids_of(1), table)
            context.consume_lookup()
            context.reset_table_binding()
        assert context.stats()["table_moved"] == 0


def test_binding_is_not_reset_with_a_lookup_in_flight():
    with ready_group(1) as (context,):
        arm_all([context], ids_of(1), random_table())
        message = message_of(RuntimeError, context.reset_table_binding)
        assert "lookup step 1 is in flight" in message


def test_armed_lookup_keeps_the_table_alive():
    table = random_table()
    alive = weakref.ref(table)
    with ready_group(1) as (context,):
        context.arm_lookup(ids_of(1)[0], table)
        del table
        gc.collect()
        assert alive() is not None


@pytest.mark.parametrize("ending", ["consume_lookup", "close"])
def test_table_is_let_go_when_its_lookup_ends(ending):
    table = random_table()
    alive = weakref.ref(table)
    with ready_group(1) as (context,):
        context.arm_lookup(ids_of(1)[0], table)
        getattr(context, ending)()
        del table
        gc.collect()
        assert alive() is None


# --- Snapshots ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "num_bytes"),
    [
        ("lookup_ids", 2 * TOKENS * 4),
        ("lookup_send", 2 * TOKENS * SHARD_WIDTH * 2),
        ("lookup_embeddings", 2 * TOKENS * SHARD_WIDTH * 2),
        ("update_indices", 2 * TOKENS * 4),
        ("update_send", 2 * TOKENS * SHARD_WIDTH * 2),
        ("update_gradients", 2 * TOKENS * SHARD_WIDTH * 2),
        ("update_stats", SLOTS * 4),
        ("update_grad_accum", SLOTS * SHARD_WIDTH * 4),
    ],
)
def test_snapshot_has_the_size_of_its_region(region, num_bytes):
    with ready_group(2) as contexts:
        snapshot = contexts[1].snapshot(region)
        assert (type(snapshot), len(snapshot)) == (bytes, num_bytes)


def lookup_snapshot(region, dtype):
    """The region on rank 1 of 2 after a lookup; the ids [2, T] and the table [V, 2 w]."""
    table, ids = random_table(4), ids_of(2)
    with ready_group(2) as contexts:
        arm_all(contexts, ids, table)
        return np.frombuffer(contexts[1].snapshot(region), dtype), ids, table


def test_snapshot_of_the_ids_holds_all_ranks_ids():
    snapshot, ids, _ = lookup_snapshot("lookup_ids", np.int32)
    np.testing.assert_array_equal(snapshot, ids.ravel())


def test_snapshot_of_what_is_sent_holds_own_columns_of_all_tokens():
    snapshot, ids, table = lookup_snapshot("lookup_send", np.uint16)
    expected = bits(shards_of(table)[1][ids.ravel()])
    np.testing.assert_array_equal(snapshot, expected.ravel())


def test_snapshot_of_what_came_holds_all_columns_of_own_tokens():
    snapshot, ids, table = lookup_snapshot("lookup_embeddings", np.uint16)
    expected = np.concatenate([bits(shard[ids[1]]) for shard in shards_of(table)])
    np.testing.assert_array_equal(snapshot, expected.ravel())


def test_unknown_region_is_refused_with_the_names_of_all():
    with ready_group(1) as (context,):
        message = message_of(ValueError, context.snapshot, "arena")
        assert message.endswith(
            "must be one of lookup_ids, lookup_send, lookup_embeddings, update_indices, "
            "update_send, update_gradients, update_stats, update_grad_accum"
        )


@pytest.mark.parametrize("is_reset", [False, True])
def test_snapshot_of_a_context_that_is_not_ready_is_refused(is_reset):
    context = make_context()
    if is_reset:
        context.reset(0, 1)
    assert message_of(ValueError, context.snapshot, "lookup_ids") == NOT_INITIALIZED
