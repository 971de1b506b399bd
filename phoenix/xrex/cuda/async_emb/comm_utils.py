"""Mesh arithmetic, stable ids, and the exchange of bootstrap payloads between processes."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

AxisNames = str | Sequence[str]


class LocalRank(NamedTuple):
    """One rank whose device belongs to this process.

    Attributes:
        group: index of its replica group.
        rank: its index inside the group.
        device_key: what the platform reports as the device's ordinal inside an FFI handler. It is
            a key to find a context by, never an index.
    """

    group: int
    rank: int
    device_key: int


def normalize_axes(mesh: Mesh, axes: AxisNames, label: str) -> tuple[str, ...]:
    """Returns `axes` as a tuple of distinct axes of `mesh`.

    Args:
        mesh: the device mesh.
        axes: one axis name or a sequence of them.
        label: the argument's name, for messages.

    Raises:
        ValueError: a name is not an axis of the mesh or stands twice.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"async_emb: {label} names {name!r}, which is not an axis of the mesh; "
                f"choose among {', '.join(map(repr, mesh.axis_names))}"
            )
    if len(set(names)) != len(names):
        raise ValueError(f"async_emb: {label}={names!r} names an axis twice; name each axis once")
    return names


def axes_size(mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns the number of devices along `axes`: the product of their sizes."""
    return math.prod(mesh.shape[name] for name in axes)


def check_data_axis(mesh: Mesh, table_axis: tuple[str, ...], data_axis: tuple[str, ...]) -> None:
    """Checks that tokens and table columns are spread over the same ranks in the same order.

    Raises:
        ValueError: a table axis is not a data axis; a data axis of size > 1 is not a table axis;
            the axes of size > 1 stand in another order.
    """
    for name in table_axis:
        if name not in data_axis:
            raise ValueError(
                f"async_emb: table axis {name!r} is not in data_axis={data_axis!r}; every rank "
                "that holds columns of the table must also hold tokens: add it to data_axis"
            )
    for name in data_axis:
        if name not in table_axis and mesh.shape[name] > 1:
            raise ValueError(
                f"async_emb: data axis {name!r} of size {mesh.shape[name]} is not in "
                f"table_axis={table_axis!r}; tokens may be sharded over table axes only: add it "
                "to table_axis or take it out of data_axis"
            )
    table_order = [name for name in table_axis if mesh.shape[name] > 1]
    data_order = [name for name in data_axis if mesh.shape[name] > 1]
    if table_order != data_order:
        raise ValueError(
            f"async_emb: table_axis={table_axis!r} and data_axis={data_axis!r} name the axes in "
            "different orders; the rank of a token is its index along both: use one order"
        )


def replica_groups(mesh: Mesh, table_axis: Sequence[str]) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns the devices of each replica group in rank order.

    The rank is the row-major index along `table_axis` in the order given. The groups follow the
    row-major order of the other mesh axes, in the order of the mesh.
    """
    outside = [name for name in mesh.axis_names if name not in table_axis]
    order = [mesh.axis_names.index(name) for name in (*outside, *table_axis)]
    devices = np.transpose(mesh.devices, order).reshape(-1, axes_size(mesh, table_axis))
    return tuple(tuple(group) for group in devices)


def mesh_platform(mesh: Mesh) -> str:
    """Returns the FFI platform of the mesh's devices: "cpu" or "CUDA".

    Raises:
        ValueError: the devices are of another platform.
    """
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        return "cpu"
    if platform in ("gpu", "cuda"):
        return "CUDA"
    raise ValueError(
        f"async_emb: the mesh is made of {platform!r} devices; only cpu and CUDA devices have a "
        "backend: make the mesh of jax.devices('cpu') or jax.devices('cuda')"
    )


def device_key(device: jax.Device, platform: str) -> int:
    """Returns the ordinal that FFI handlers on `device` report.

    Raises:
        ValueError: the device has no such ordinal in this process.
    """
    key = device.id if platform == "cpu" else device.local_hardware_id
    if key is None:
        raise ValueError(
            f"async_emb: device {device} has no local hardware id in process "
            f"{jax.process_index()}; only a device's own process can make its context"
        )
    return int(key)


def local_ranks(mesh: Mesh, table_axis: Sequence[str]) -> list[LocalRank]:
    """Returns the ranks that live on devices of this process, group after group."""
    platform = mesh_platform(mesh)
    return [
        LocalRank(group_idx, rank, device_key(device, platform))
        for group_idx, group in enumerate(replica_groups(mesh, table_axis))
        for rank, device in enumerate(group)
        if device.process_index == jax.process_index()
    ]


def process_indices(mesh: Mesh) -> list[int]:
    """Returns the processes that own devices of the mesh, ascending."""
    return sorted({int(device.process_index) for device in mesh.devices.flat})


def require_positive_int(label: str, value: Any) -> int:
    """Returns `value` as an int.

    Raises:
        ValueError: it is not a whole number or not positive.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(
            f"async_emb: {label}={value!r} is a {type(value).__name__}; it is a size: give a whole "
            "number of at least 1"
        ) from error
    if isinstance(value, bool) or number < 1:
        raise ValueError(
            f"async_emb: {label}={value!r}; it is a size: give a whole number of at least 1"
        )
    return number


def stable_id(description: Mapping[str, Any]) -> int:
    """Returns a positive 63-bit hash of `description`, the same in every process and run."""
    digest = hashlib.sha256(canonical_text(description).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 1) or 1


def canonical_text(description: Mapping[str, Any]) -> str:
    """Returns one text for each `description` of plain values, independent of key order."""
    return json.dumps(description, sort_keys=True, separators=(",", ":"))


class KeyValueStore(Protocol):
    """What the exchange needs of jax.distributed's store."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Writes a key; writing one twice is an error."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Waits for a key and returns its value."""

    def key_value_delete(self, key: str) -> None:
        """Deletes a key."""


def distributed_store() -> KeyValueStore:
    """Returns the store that jax.distributed.initialize connected this process to.

    JAX has no public accessor for it, hence the private module.

    Raises:
        RuntimeError: jax.distributed is not initialised.
    """
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "async_emb: several processes exchange their bootstrap payloads through "
            "jax.distributed, which is not initialised: call jax.distributed.initialize() first"
        )
    return client


class ProcessExchange:
    """All-gathers one message of every process that takes part, once for each round.

    Keys carry a generation number, so that a context that is made again never reads what an
    earlier one wrote. What this process wrote is deleted once nobody can want it any more: on
    `forget`, and the rest when all processes have reached the first round of a later exchange.

    Attributes:
        prefix: what the keys begin with; differs between contexts and generations.
        process: index of this process.
        processes: all processes that take part.
        timeout_secs: how long a round may wait for all its messages together.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        context_id: int,
        generation: int,
        process: int,
        processes: Sequence[int],
        timeout_secs: int,
        earlier: ProcessExchange | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Publishes nothing yet.

        Args:
            store: where the messages lie.
            context_id: the context that is brought up.
            generation: how often it was tried, the same number in all processes.
            process: see the class.
            processes: see the class.
            timeout_secs: see the class.
            earlier: the exchange of an earlier generation, to be tidied up.
            clock: seconds of a clock that only goes forward.
        """
        self.prefix = f"xrex_async_emb/{context_id:016x}/{generation}"
        self.process = process
        self.processes = list(processes)
        self.timeout_secs = timeout_secs
        self._store = store
        self._earlier = earlier
        self._clock = clock
        self._published: list[str] = []

    def all_gather(self, round_name: str, message: bytes) -> dict[int, bytes]:
        """Publishes `message` and returns the messages of all processes by process index.

        Raises:
            RuntimeError: a process did not publish its message in time.
        """
        deadline = self._clock() + self.timeout_secs
        self._store.key_value_set_bytes(self._key(round_name, self.process), message)
        self._published.append(round_name)
        messages = {}
        for process in self.processes:
            key = self._key(round_name, process)
            left_ms = max(1, round(1000 * (deadline - self._clock())))
            try:
                messages[process] = self._store.blocking_key_value_get_bytes(key, left_ms)
            except Exception as error:
                raise RuntimeError(
                    f"async_emb: process {process} did not reach the {round_name} round of "
                    f"initialize within {self.timeout_secs} s (key {key}: {error}); initialize is "
                    "collective: call it in every process, equally often"
                ) from error
        self._forget_earlier()
        return messages

    def forget(self, round_name: str) -> None:
        """Deletes this process's message of a round that every process has read."""
        self._published.remove(round_name)
        self._store.key_value_delete(self._key(round_name, self.process))

    def _forget_earlier(self) -> None:
        """Deletes what this process left of earlier exchanges; every process is past those."""
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier._forget_earlier()
            for round_name in tuple(earlier._published):
                earlier.forget(round_name)

    def _key(self, round_name: str, process: int) -> str:
        return f"{self.prefix}/{round_name}/{process}"


Payloads = dict[tuple[int, int], list[bytes]]


def encode_payloads(payloads: Payloads) -> bytes:
    """Packs what the local ranks, keyed (group, rank), made for each rank of their group."""
    entries = [
        [group, rank, [base64.b64encode(item).decode() for item in items]]
        for (group, rank), items in payloads.items()
    ]
    return json.dumps(entries).encode()


def decode_payloads(message: bytes) -> Payloads:
    """Unpacks `encode_payloads`."""
    return {
        (group, rank): [base64.b64decode(item) for item in items]
        for group, rank, items in json.loads(message)
    }


def payloads_for(payloads: Payloads, group: int, rank: int, group_size: int) -> list[bytes]:
    """Returns what every rank of `group` made for `rank`, in rank order."""
    return [payloads[group, source][rank] for source in range(group_size)]
