from __future__ import annotations

import concurrent.futures
import threading
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.xrex.cuda.async_emb.memory_store import MemoryStore
from tests.xrex.cuda.async_emb.testing import make_handle, make_mesh, ready_context
from xrex.cuda.async_emb import async_emb, async_emb_api, lifecycle, native
from xrex.cuda.async_emb.async_emb import AsyncEmbOptions
from xrex.cuda.async_emb.comm_utils import ProcessExchange

NUM_RANKS = 4


def test_context_of_every_rank_is_ready_after_initialize():
    with ready_context(name="ready") as ctx:
        assert async_emb_api.has_contexts(ctx.context_id)
        assert set(async_emb.stats(ctx)) == set(range(NUM_RANKS))


def test_initialize_twice_keeps_the_contexts():
    with ready_context(name="twice") as ctx:
        async_emb.abort(ctx)
        with pytest.raises(RuntimeError, match="async_emb communicator aborted"):
            async_emb.initialize(ctx)
        assert async_emb_api.has_contexts(ctx.context_id)


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


def test_host_calls_without_contexts_find_nothing_to_do():
    ctx = make_handle(name="no contexts")
    assert async_emb.wait_step_ready(ctx) == 0
    assert async_emb.drain(ctx) == 0
    assert async_emb.stats(ctx) == {}
    async_emb.check(ctx)


def test_stats_of_a_new_context_are_zero():
    with ready_context(name="stats") as ctx:
        assert async_emb.stats(ctx)[1] == lifecycle.RankStats(*[0] * 14)


def test_refused_rank_is_named_and_no_context_is_left():
    ctx = make_handle(make_mesh(num_ranks=3), name="three ranks")
    message = (
        "^async_emb: rank 0 failed to initialize: async_emb currently requires power-of-two EP$"
    )
    with pytest.raises(ValueError, match=message):
        async_emb.initialize(ctx)
    assert not async_emb_api.has_contexts(ctx.context_id)


def test_any_number_of_ranks_is_allowed_on_request():
    options = AsyncEmbOptions(any_world_size=True)
    with ready_context(make_mesh(num_ranks=3), name="any", options=options) as ctx:
        assert set(async_emb.stats(ctx)) == {0, 1, 2}


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

    def handshake(self, payloads: list[bytes]) -> None:
        self.payloads = payloads
        if self.rank == self.api.failing_handshake:
            raise RuntimeError("the network is down")
        if self.api.failing_handshake is not None:
            assert self.aborted.wait(20)
            raise RuntimeError("aborted")

    def abort(self, reason: str) -> None:
        del reason
        self.aborted.set()

    def close(self) -> None:
        self.closed = True


class FakeApi:
    """The native module with contexts that do nothing, each on one process's devices."""

    def __init__(self, failing_reset: int | None = None, failing_handshake: int | None = None):
        self.failing_reset = failing_reset
        self.failing_handshake = failing_handshake
        self.made: list[FakeContext] = []
        self.registered: list[FakeContext] = []

    def AsyncEmbContext(self, *args: object, device_key: int, **options: object) -> FakeContext:  # noqa: N802
        del args, options
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


def initialize_with(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda *_: api)
    async_emb.initialize(make_handle(name="fake"))


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


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ({"failing_reset": 2}, "rank 2 failed to initialize: no memory for the arena: 1024 bytes"),
        ({"failing_handshake": 1}, "rank 1 failed to initialize: the network is down"),
    ],
)
def test_one_failing_rank_takes_all_down(failure, message, monkeypatch):
    api = FakeApi(**failure)
    with pytest.raises(RuntimeError, match=f"^async_emb: {message}"):
        initialize_with(api, monkeypatch)
    assert not api.registered
    assert all(context.closed for context in api.made)


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


def test_ranks_of_two_processes_get_each_others_payloads(monkeypatch):
    apis = [FakeApi(), FakeApi()]
    assert bring_up_two_processes(apis, monkeypatch) == [None, None]
    contexts = apis[0].made + apis[1].made
    for rank, context in enumerate(contexts):
        assert context.payloads == [b"%d->%d" % (source, rank) for source in range(NUM_RANKS)]


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ({"failing_reset": 3}, "process 1: rank 3 failed to initialize: no memory for the arena"),
        ({"failing_handshake": 2}, "process 1: rank 2 failed to initialize: the network is down"),
    ],
)
def test_failure_in_one_process_is_raised_in_all(failing, message, monkeypatch):
    apis = [FakeApi(), FakeApi(**failing)]
    errors = bring_up_two_processes(apis, monkeypatch)
    assert [type(error) for error in errors] == [RuntimeError] * 2
    assert all(message in str(error) for error in errors)
    assert all(context.closed for api in apis for context in api.made)


@pytest.fixture
def pool_not_warned_of(monkeypatch):
    monkeypatch.setattr(lifecycle, "_warned_of_pool", False)


@pytest.mark.usefixtures("pool_not_warned_of")
def test_small_thread_pool_is_warned_of_once(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", str(2 * jax.device_count() - 1))
    with pytest.warns(RuntimeWarning, match=f"set PJRT_NPROC={2 * jax.device_count()}"):
        async_emb.initialize(make_handle(name="small pool"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async_emb.initialize(make_handle(name="small pool 2"))
    async_emb.destroy(make_handle(name="small pool"))
    async_emb.destroy(make_handle(name="small pool 2"))


@pytest.mark.usefixtures("pool_not_warned_of")
def test_large_thread_pool_is_not_warned_of(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", str(2 * jax.device_count()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async_emb.initialize(make_handle(name="large pool"))
    async_emb.destroy(make_handle(name="large pool"))


def test_replica_groups_of_one_process_come_up_side_by_side():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "x"))
    ctx = make_handle(mesh, name="two groups")
    async_emb.initialize(ctx)
    try:
        async_emb.check(ctx)
        keys = [device.id for device in mesh.devices.flat]
        assert len({async_emb_api._test_snapshot(ctx.context_id, "lookup_ids", k) for k in keys})
    finally:
        async_emb.destroy(ctx)
