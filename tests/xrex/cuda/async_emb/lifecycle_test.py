from __future__ import annotations

import concurrent.futures
import logging
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.xrex.cuda.async_emb.memory_store import MemoryStore
from tests.xrex.cuda.async_emb.testing import (
    bits,
    make_handle,
    make_mesh,
    needs_devices,
    on_cpu_only,
    random_table,
    ready_context,
)
from xrex.cuda.async_emb import async_emb, async_emb_api, lifecycle, native
from xrex.cuda.async_emb.async_emb import AsyncEmbOptions
from xrex.cuda.async_emb.comm_utils import ProcessExchange

NUM_RANKS = jax.device_count()
FOUR_RANKS = pytest.mark.skipif(NUM_RANKS != 4, reason="needs 4 devices, no more")


def test_context_of_every_rank_is_ready_after_initialize():
    with ready_context(name="ready") as ctx:
        assert async_emb_api.has_contexts(ctx.context_id)
        assert set(async_emb.stats(ctx)) == set(range(NUM_RANKS))


def test_initialize_twice_keeps_the_contexts():
    with ready_context(name="twice") as ctx:
        async_emb.initialize(ctx)
        assert async_emb_api.has_contexts(ctx.context_id)


def test_initialize_on_a_failed_context_says_the_way_out():
    with ready_context(name="failed") as ctx:
        async_emb.abort(ctx)
        message = (
            r"^async_emb communicator aborted: .*; call destroy\(ctx\), then initialize\(ctx\)"
        )
        with pytest.raises(RuntimeError, match=message):
            async_emb.initialize(ctx)


def test_contexts_are_up_inside_the_block_only():
    ctx = make_handle(name="block")
    with async_emb.initialized(ctx) as entered:
        assert entered is ctx
        assert async_emb_api.has_contexts(ctx.context_id)
    assert not async_emb_api.has_contexts(ctx.context_id)


def test_block_that_raises_takes_the_contexts_down():
    ctx = make_handle(name="raising block")
    with pytest.raises(KeyError), async_emb.initialized(ctx):
        raise KeyError
    assert not async_emb_api.has_contexts(ctx.context_id)


def test_equal_handle_can_be_initialized_again_after_an_abort():
    with ready_context(name="again") as ctx:
        async_emb.abort(ctx)
        async_emb.destroy(ctx)
        async_emb.initialize(make_handle(name="again"))
        async_emb.check(ctx)


def test_destroy_without_contexts_does_nothing():
    ctx = make_handle(name="never initialized")
    async_emb.destroy(ctx)
    async_emb.destroy(ctx)
    assert not async_emb_api.has_contexts(ctx.context_id)


class Token:
    """Stands for a running program, which ends when it is told to."""

    def __init__(self, on_wait: Any) -> None:
        self.block_until_ready = on_wait


def test_destroy_keeps_the_contexts_while_programs_run(monkeypatch):
    found = []
    with ready_context(name="waits") as ctx:
        token = Token(lambda: found.append(async_emb_api.has_contexts(ctx.context_id)))
        monkeypatch.setattr(lifecycle, "_running_programs", lambda: [token])
    assert found == [True]
    assert not async_emb_api.has_contexts(ctx.context_id)


def test_destroy_goes_on_without_programs_that_hang(monkeypatch, caplog):
    gate = threading.Event()
    monkeypatch.setattr(lifecycle, "_DESTROY_TIMEOUT_SECS", 0.0)
    monkeypatch.setattr(lifecycle, "_running_programs", lambda: [Token(gate.wait)])
    with caplog.at_level(logging.WARNING), ready_context(name="hangs") as ctx:
        pass
    gate.set()
    assert not async_emb_api.has_contexts(ctx.context_id)
    assert "'hangs') without waiting any longer: call abort(ctx)" in caplog.text


def test_destroy_waits_for_the_programs_beside_a_failed_one(monkeypatch):
    def fail() -> None:
        raise jax.errors.JaxRuntimeError("a step failed")

    waited = threading.Event()
    tokens = [Token(fail), Token(waited.set)]
    with ready_context(name="failed program"):
        monkeypatch.setattr(lifecycle, "_running_programs", lambda: tokens)
    assert waited.is_set()


def test_programs_with_side_effects_that_this_thread_has_started_are_known():
    jax.effects_barrier()
    assert lifecycle._running_programs() == []
    jax.jit(lambda x: jax.debug.callback(lambda _: None, x))(jnp.zeros(()))
    assert len(lifecycle._running_programs()) == 1


@on_cpu_only("GPUs of several processes are served")
@pytest.mark.parametrize(
    "call",
    [
        async_emb.initialize,
        async_emb.destroy,
        async_emb.check,
        async_emb.stats,
        async_emb.wait_step_ready,
        async_emb.drain,
        async_emb.abort,
        async_emb.reset_table_binding,
    ],
)
def test_host_calls_refuse_cpu_devices_of_several_processes(call, monkeypatch):
    ctx = make_handle(name="processes")
    monkeypatch.setattr(lifecycle.comm_utils, "process_indices", lambda _: [0, 1])
    with pytest.raises(ValueError, match=r"CPU devices of processes \[0, 1\]"):
        call(ctx)


def test_host_calls_without_contexts_find_nothing_to_do():
    ctx = make_handle(name="no contexts")
    assert async_emb.wait_step_ready(ctx) == 0
    assert async_emb.drain(ctx) == 0
    assert async_emb.stats(ctx) == {}
    async_emb.check(ctx)


def test_stats_of_a_new_context_are_zero():
    with ready_context(name="stats") as ctx:
        assert async_emb.stats(ctx)[NUM_RANKS - 1] == lifecycle.RankStats(*[0] * 15)


def test_waits_of_both_kinds_add_up():
    stats = lifecycle.RankStats(*[0] * 13, lookup_wait_secs=0.5, update_wait_secs=2.0)
    assert stats.wait_secs == 2.5


@needs_devices(3)
def test_refused_rank_is_named_and_no_context_is_left():
    ctx = make_handle(make_mesh(num_ranks=3), name="three ranks")
    message = (
        "^async_emb: rank 0 failed to initialize: async_emb currently requires power-of-two EP$"
    )
    with pytest.raises(ValueError, match=message):
        async_emb.initialize(ctx)
    assert not async_emb_api.has_contexts(ctx.context_id)


@needs_devices(3)
def test_any_number_of_ranks_is_allowed_on_request():
    options = AsyncEmbOptions(any_world_size=True)
    with ready_context(make_mesh(num_ranks=3), name="any", options=options) as ctx:
        assert set(async_emb.stats(ctx)) == {0, 1, 2}


@needs_devices(4)
def test_counters_of_replica_groups_stand_side_by_side():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("replica", "x"))
    sizes = {"tokens_per_batch": 16, "emb_width": 8}
    with ready_context(mesh, name="replicas", **sizes) as ctx:
        assert ctx.group_size == 2
        assert set(async_emb.stats(ctx)) == {0, 1, 2, 3}


def test_bad_environment_fails_at_initialize(monkeypatch):
    monkeypatch.setenv("XAI_ASYNC_EMB_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match=r"XAI_ASYNC_EMB_TIMEOUT_SECONDS.*'soon'"):
        async_emb.initialize(make_handle(name="bad environment"))


def test_timeout_option_overrides_the_environment(monkeypatch):
    monkeypatch.setenv("XAI_ASYNC_EMB_TIMEOUT_SECONDS", "soon")
    options = AsyncEmbOptions(timeout_secs=20)
    with ready_context(name="timeout option", options=options) as ctx:
        async_emb.check(ctx)


ABORTED = "async_emb communicator aborted: another rank failed to initialize"


class FakeContext:
    """A native context whose handshake waits for all ranks, or for an abort."""

    def __init__(self, api: FakeApi, device_key: int) -> None:
        self.api = api
        self.device_key = device_key
        self.aborted = threading.Event()
        self.closed = False

    def reset(self, rank: int, world_size: int) -> list[bytes]:
        self.rank = rank
        if rank == self.api.failing_reset:
            raise MemoryError("no memory for the arena: 1024 bytes needed")
        return [b"%d->%d" % (rank, other) for other in range(world_size)]

    def handshake(self, payloads: list[bytes], timeout_secs: int) -> None:
        self.payloads = payloads
        self.handshake_timeout_secs = timeout_secs
        own_error = self.api.handshake_errors.get(self.rank)
        if self.api.handshake_errors and (own_error is None or self.rank in self.api.late_ranks):
            assert self.aborted.wait(20)
        if self.api.handshake_errors:
            raise RuntimeError(own_error or ABORTED)

    def abort(self, reason: str) -> None:
        del reason
        self.aborted.set()

    def close(self) -> None:
        self.closed = True


class FakeApi:
    """The native module with contexts that do nothing, each on one process's devices."""

    def __init__(
        self,
        failing_reset: int | None = None,
        handshake_errors: dict[int, str] | None = None,
        late_ranks: frozenset[int] = frozenset(),
    ):
        self.failing_reset = failing_reset
        self.handshake_errors = handshake_errors or {}
        self.late_ranks = late_ranks
        self.made: list[FakeContext] = []
        self.registered: list[FakeContext] = []
        self.options: dict[str, object] = {}

    def AsyncEmbContext(self, *args: object, device_key: int, **options: object) -> FakeContext:  # noqa: N802
        del args
        self.options = options
        self.made.append(FakeContext(self, device_key))
        return self.made[-1]

    def register_context(self, context: FakeContext) -> None:
        self.registered.append(context)

    def has_contexts(self, context_id: int) -> bool:
        del context_id
        return bool(self.registered)

    def destroy_contexts(self, context_id: int) -> None:
        del context_id
        self.registered.clear()


def initialize_with(api: FakeApi, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(native, "load", lambda *_: api)
    async_emb.initialize(make_handle(name="fake", **changes))


def test_handshake_of_each_rank_gets_the_payloads_made_for_it(monkeypatch):
    api = FakeApi()
    initialize_with(api, monkeypatch)
    assert [context.payloads for context in api.registered] == [
        [b"%d->%d" % (source, rank) for source in range(NUM_RANKS)] for rank in range(NUM_RANKS)
    ]


def test_contexts_are_keyed_by_their_device(monkeypatch):
    api = FakeApi()
    initialize_with(api, monkeypatch)
    keys = [context.device_key for context in api.registered]
    assert keys == [device.id for device in jax.devices()[:NUM_RANKS]]


@FOUR_RANKS
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ({"failing_reset": 2}, "rank 2 failed to initialize: no memory for the arena: 1024 bytes"),
        (
            {"handshake_errors": {1: "the network is down"}},
            "rank 1 failed to initialize: the network is down",
        ),
    ],
)
def test_one_failing_rank_takes_all_down(failure, message, monkeypatch):
    api = FakeApi(**failure)
    with pytest.raises(RuntimeError, match=f"^async_emb: {message}"):
        initialize_with(api, monkeypatch)
    assert not api.registered
    assert all(context.closed for context in api.made)


def test_handshakes_may_take_longer_than_a_step(monkeypatch):
    api = FakeApi()
    initialize_with(api, monkeypatch, options=AsyncEmbOptions(timeout_secs=1))
    assert {context.handshake_timeout_secs for context in api.made} == {1800}


@on_cpu_only("they are GPUs here")
@pytest.mark.parametrize("transport", ["nccl", "lsa"])
def test_transport_between_gpus_is_refused_on_cpu_devices(transport):
    ctx = make_handle(name="transport", options=AsyncEmbOptions(transport=transport))
    with pytest.raises(ValueError, match=f"'{transport}', which needs GPUs: .* must be 'auto'"):
        async_emb.initialize(ctx)
    assert not async_emb_api.has_contexts(ctx.context_id)


def test_name_of_the_handle_reaches_the_native_contexts(monkeypatch):
    api = FakeApi()
    initialize_with(api, monkeypatch)
    assert api.options["name"] == "fake"


@FOUR_RANKS
def test_rank_that_caused_the_failure_is_named_though_another_failed_before(monkeypatch):
    errors = {0: ABORTED, 2: "the network is down", 3: "no memory"}
    api = FakeApi(handshake_errors=errors, late_ranks=frozenset({2, 3}))
    with pytest.raises(RuntimeError, match=r"^async_emb: rank 2 failed .*: the network is down"):
        initialize_with(api, monkeypatch)


def bring_up_two_processes(apis: list[FakeApi], monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Runs the bring-up of two processes, with two ranks each, in two threads."""
    ctx = make_handle(name="two processes")
    store = MemoryStore()
    ranks = lifecycle.comm_utils.local_ranks(ctx.mesh, ctx.table_axis)
    process = threading.local()
    monkeypatch.setattr(
        lifecycle.comm_utils,
        "local_ranks",
        lambda *_: ranks[2 * process.index : 2 * process.index + 2],
    )

    def bring_up(index: int) -> None:
        process.index = index
        exchange = ProcessExchange(
            store,
            context_id=ctx.context_id,
            generation=1,
            process=index,
            processes=[0, 1],
            timeout_secs=20,
        )
        lifecycle._bring_up(apis[index], ctx, exchange)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(bring_up, index) for index in range(2)]
    assert [key for key in store.values if "/payload/" in key] == [] or any(
        future.exception() for future in futures
    )
    return [future.exception() for future in futures]


@FOUR_RANKS
def test_ranks_of_two_processes_get_each_others_payloads(monkeypatch):
    apis = [FakeApi(), FakeApi()]
    assert bring_up_two_processes(apis, monkeypatch) == [None, None]
    contexts = apis[0].made + apis[1].made
    for rank, context in enumerate(contexts):
        assert context.payloads == [b"%d->%d" % (source, rank) for source in range(NUM_RANKS)]


@FOUR_RANKS
@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ({"failing_reset": 3}, "process 1: rank 3 failed to initialize: no memory for the arena"),
        (
            {"handshake_errors": {2: "the network is down"}},
            "process 1: rank 2 failed to initialize: the network is down",
        ),
    ],
)
def test_failure_in_one_process_is_raised_in_all(failing, message, monkeypatch):
    apis = [FakeApi(), FakeApi(**failing)]
    errors = bring_up_two_processes(apis, monkeypatch)
    assert [type(error) for error in errors] == [RuntimeError] * 2
    assert all(message in str(error) for error in errors)
    assert all(context.closed for api in apis for context in api.made)


@FOUR_RANKS
def test_process_that_caused_the_failure_is_named_in_all(monkeypatch):
    apis = [FakeApi(handshake_errors={0: ABORTED}), FakeApi(handshake_errors={3: "no network"})]
    errors = bring_up_two_processes(apis, monkeypatch)
    message = "async_emb: process 1: rank 3 failed to initialize: no network"
    assert [str(error) for error in errors] == [message] * 2


@pytest.fixture
def pool_not_warned_of(monkeypatch):
    monkeypatch.setattr(lifecycle, "_warned_of_pool", False)


@on_cpu_only("only CPU devices share a thread pool")
@pytest.mark.usefixtures("pool_not_warned_of")
def test_small_thread_pool_is_warned_of_once(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", str(2 * jax.device_count() - 1))
    with pytest.warns(RuntimeWarning, match=f"set PJRT_NPROC={2 * jax.device_count()}") as caught:
        async_emb.initialize(make_handle(name="small pool"))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async_emb.initialize(make_handle(name="small pool 2"))
    async_emb.destroy(make_handle(name="small pool"))
    async_emb.destroy(make_handle(name="small pool 2"))


@on_cpu_only("only CPU devices share a thread pool")
@pytest.mark.usefixtures("pool_not_warned_of")
def test_large_thread_pool_is_not_warned_of(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", str(2 * jax.device_count()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async_emb.initialize(make_handle(name="large pool"))
    async_emb.destroy(make_handle(name="large pool"))


@pytest.fixture
def two_groups(monkeypatch):
    """The native contexts of two replica groups of two ranks each, in the order of devices."""
    made: list[Any] = []
    register = async_emb_api.register_context

    def register_and_keep(context: Any) -> None:
        made.append(context)
        register(context)

    monkeypatch.setattr(async_emb_api, "register_context", register_and_keep)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "x"))
    sizes = {"tokens_per_batch": 16, "emb_width": 8}
    with ready_context(mesh, name="two groups", **sizes):
        yield made


@needs_devices(4)
def test_contexts_of_all_replica_groups_are_ready(two_groups):
    assert [context.ready for context in two_groups] == [True] * 4
    assert [context.rank for context in two_groups] == [0, 1, 0, 1]


@on_cpu_only("arms lookups on arrays of the host")
@needs_devices(4)
def test_replica_group_exchanges_without_the_other(two_groups):
    table = random_table(num_rows=16, width=8)
    columns = [np.ascontiguousarray(table[:, 4 * rank : 4 * rank + 4]) for rank in range(2)]
    ids = [np.arange(8, dtype=np.int32) + 8 * rank for rank in range(2)]
    group = two_groups[2:]
    for context, own_ids, own_columns in zip(group, ids, columns, strict=True):
        context.arm_lookup(own_ids, own_columns)
    for context, own_ids in zip(group, ids, strict=True):
        np.testing.assert_array_equal(bits(context.consume_lookup()), bits(table[own_ids]))
    assert [context.lookup_steps_armed for context in two_groups] == [0, 0, 1, 1]
