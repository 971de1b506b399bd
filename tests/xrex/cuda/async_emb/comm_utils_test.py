from __future__ import annotations

import concurrent.futures
import itertools
import types
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from tests.xrex.cuda.async_emb.memory_store import MemoryStore
from tests.xrex.processes import run_in_processes
from xrex.cuda.async_emb import async_emb, comm_utils
from xrex.cuda.async_emb.comm_utils import LocalRank, ProcessExchange

SHAPE = {"a": 2, "b": 1, "c": 2, "d": 2}


def device(index: int, platform: str = "cpu", process: int = 0, local: int | None = None):
    return types.SimpleNamespace(
        id=index, platform=platform, process_index=process, local_hardware_id=local
    )


def mesh_of(devices, shape: dict[str, int] | None = None):
    """What the functions read of a mesh, over stand-ins for devices that a test has not got."""
    shape = shape or {"x": len(devices)}
    array = np.empty(len(devices), object)
    array[:] = devices
    return types.SimpleNamespace(
        axis_names=tuple(shape), shape=shape, devices=array.reshape(*shape.values())
    )


@pytest.mark.parametrize("table_axis", [("a",), ("c", "a"), ("a", "b", "c", "d"), ("d", "b"), ()])
def test_rank_is_the_row_major_index_along_the_table_axes(table_axis):
    mesh = mesh_of([device(i) for i in range(8)], SHAPE)
    found = comm_utils.replica_groups(mesh, table_axis)
    outside = [name for name in SHAPE if name not in table_axis]
    expected = {}
    for index in itertools.product(*map(range, SHAPE.values())):
        place = dict(zip(SHAPE, index, strict=True))
        group, rank = 0, 0
        for name in outside:
            group = group * SHAPE[name] + place[name]
        for name in table_axis:
            rank = rank * SHAPE[name] + place[name]
        expected[group, rank] = mesh.devices[index].id
    assert expected == {
        (group_idx, rank): found_device.id
        for group_idx, group in enumerate(found)
        for rank, found_device in enumerate(group)
    }


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs CPU devices")
def test_local_ranks_on_cpu_are_keyed_by_the_global_device_id():
    devices = jax.devices()[:4][::-1]
    mesh = Mesh(np.array(devices), ("x",))
    found = comm_utils.local_ranks(mesh, ("x",))
    assert found == [LocalRank(0, rank, d.id) for rank, d in enumerate(devices)]


def test_local_ranks_on_gpus_are_keyed_by_the_local_hardware_id():
    me = jax.process_index()
    devices = [
        device(0, "gpu", process=me + 1),
        device(1, "gpu", process=me, local=1),
        device(2, "gpu", process=me + 1),
        device(3, "gpu", process=me, local=0),
    ]
    found = comm_utils.local_ranks(mesh_of(devices, {"g": 2, "x": 2}), ("x",))
    assert found == [LocalRank(0, 1, 1), LocalRank(1, 1, 0)]


def test_device_of_another_process_has_no_key():
    with pytest.raises(ValueError, match="no local hardware id in process 0"):
        comm_utils.device_key(device(5, "gpu", local=None), "CUDA")


@pytest.mark.parametrize(
    ("platform", "expected"), [("cpu", "cpu"), ("gpu", "CUDA"), ("cuda", "CUDA")]
)
def test_platforms_have_the_names_of_the_ffi(platform, expected):
    assert comm_utils.mesh_platform(mesh_of([device(0, platform)])) == expected


def test_other_platforms_are_refused():
    with pytest.raises(ValueError, match="made of 'tpu' devices"):
        comm_utils.mesh_platform(mesh_of([device(0, "tpu")]))


def test_processes_of_a_mesh_are_listed_once_in_order():
    devices = [device(i, process=process) for i, process in enumerate([4, 0, 4, 2])]
    assert comm_utils.process_indices(mesh_of(devices)) == [0, 2, 4]


def test_stable_id_does_not_change_between_releases():
    # Processes of two versions must not meet under one id by accident, nor miss each other: the
    # value was computed once by hand from the definition.
    assert comm_utils.stable_id({"b": [1, 2], "a": "x"}) == 4111641425567155403


def test_stable_id_does_not_depend_on_the_order_of_keys():
    assert comm_utils.stable_id({"a": 1, "b": 2}) == comm_utils.stable_id({"b": 2, "a": 1})


payload_lists = st.integers(1, 4).flatmap(
    lambda size: st.lists(
        st.lists(st.binary(max_size=5), min_size=size, max_size=size), min_size=size, max_size=size
    )
)


@given(payload_lists)
@settings(deadline=None)
def test_rank_receives_what_each_rank_made_for_it(made):
    payloads = {(3, source): items for source, items in enumerate(made)}
    decoded = comm_utils.decode_payloads(comm_utils.encode_payloads(payloads))
    for rank in range(len(made)):
        received = comm_utils.payloads_for(decoded, 3, rank, len(made))
        assert received == [made[source][rank] for source in range(len(made))]


def exchange_of(
    store: MemoryStore, process: int, generation: int = 1, timeout_secs: int = 60, **more: Any
):
    return ProcessExchange(
        store,
        context_id=255,
        generation=generation,
        process=process,
        processes=[0, 2, 5],
        timeout_secs=timeout_secs,
        **more,
    )


def publish_for_others(store: MemoryStore, exchange: ProcessExchange, round_name: str):
    for process in (2, 5):
        store.key_value_set_bytes(f"{exchange.prefix}/{round_name}/{process}", b"")


def own_keys(store: MemoryStore) -> list[str]:
    return [key for key in store.values if key.endswith("/0")]


def test_every_process_receives_the_messages_of_all():
    store = MemoryStore()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = [
            pool.submit(exchange_of(store, p).all_gather, "payload", b"from %d" % p)
            for p in (0, 2, 5)
        ]
    expected = {0: b"from 0", 2: b"from 2", 5: b"from 5"}
    assert [future.result() for future in found] == [expected] * 3


def test_process_that_does_not_come_is_named():
    exchange = exchange_of(MemoryStore(), process=0, timeout_secs=0)
    with pytest.raises(
        RuntimeError, match=r"process 2 did not reach the payload round.*collective"
    ):
        exchange.all_gather("payload", b"")


class SlowStore(MemoryStore):
    """A store of which every answer takes 25 s of the clock `now`."""

    now = 1000.0

    def __init__(self) -> None:
        super().__init__()
        self.timeouts_ms: list[int] = []

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        self.timeouts_ms.append(timeout_in_ms)
        self.now += 25
        return super().blocking_key_value_get_bytes(key, timeout_in_ms)


def test_one_deadline_holds_for_all_messages_of_a_round():
    store = SlowStore()
    exchange = exchange_of(store, process=0, clock=lambda: store.now)
    publish_for_others(store, exchange, "payload")
    exchange.all_gather("payload", b"")
    assert store.timeouts_ms == [60_000, 35_000, 10_000]


def test_all_messages_of_earlier_exchanges_leave_the_store_once_every_process_is_past_them():
    store = MemoryStore()
    exchange = exchange_of(store, process=0)
    for round_name in ("payload", "ready"):
        publish_for_others(store, exchange, round_name)
        exchange.all_gather(round_name, b"")
    for generation in (2, 3):
        exchange = exchange_of(
            store, process=0, generation=generation, timeout_secs=0, earlier=exchange
        )
        if generation == 3:
            publish_for_others(store, exchange, "payload")
            exchange.all_gather("payload", b"")
        else:
            with pytest.raises(RuntimeError, match="process 2 did not reach"):
                exchange.all_gather("payload", b"")
            assert len(own_keys(store)) == 3
    assert own_keys(store) == [f"{exchange.prefix}/payload/0"]


def test_messages_of_an_earlier_generation_are_not_read():
    store = MemoryStore()
    for process in (2, 5):
        exchange = exchange_of(store, process)
        store.key_value_set_bytes(f"{exchange.prefix}/payload/{process}", b"stale")
    exchange = exchange_of(store, process=0, generation=2, timeout_secs=0)
    with pytest.raises(RuntimeError, match="process 2 did not reach"):
        exchange.all_gather("payload", b"new")


def test_forgotten_message_leaves_the_store():
    store = MemoryStore()
    exchange = exchange_of(store, process=0)
    publish_for_others(store, exchange, "payload")
    exchange.all_gather("payload", b"large")
    exchange.forget("payload")
    assert own_keys(store) == []


def test_several_processes_without_jax_distributed_are_told_to_initialize_it():
    with pytest.raises(RuntimeError, match=r"call jax\.distributed\.initialize\(\) first"):
        comm_utils.distributed_store()


def exchange_and_report() -> None:
    """Body of one of two processes; prints the context's id and why it is refused."""
    process = jax.process_index()
    earlier = None
    for generation in (1, 2):
        exchange = ProcessExchange(
            comm_utils.distributed_store(),
            context_id=7,
            generation=generation,
            process=process,
            processes=[0, 1],
            timeout_secs=30,
            earlier=earlier,
        )
        found = exchange.all_gather("payload", bytes([process, generation, 0]))
        assert found == {0: bytes([0, generation, 0]), 1: bytes([1, generation, 0])}
        exchange.all_gather("ready", b"")
        exchange.forget("payload")
        earlier = exchange
    ctx = async_emb.make_context_handle(
        Mesh(np.array(jax.devices()), ("x",)),
        "x",
        data_axis="x",
        tokens_per_batch=8,
        emb_width=8,
        num_unique=8,
        num_devices_per_node=2,
    )
    print("id", ctx.context_id)
    try:
        async_emb.initialize(ctx)
    except ValueError as error:
        print("refused:", error)


def test_two_processes_exchange_payloads_and_refuse_the_host_backend():
    outputs = run_in_processes(
        "tests.xrex.cuda.async_emb.comm_utils_test",
        exchange_and_report.__name__,
        num_processes=2,
        devices_per_process=1,
    )
    first, second = ([line for line in out.splitlines() if line] for out in outputs)
    assert first[0] == second[0]
    for process, lines in enumerate([first, second]):
        assert f"CPU devices of processes [0, 1], and this is process {process}" in lines[-1]
