"""The handle of an embedding context: what a program knows about it, as static data."""

from __future__ import annotations

import dataclasses
import threading
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from xrex.cuda.async_emb import comm_utils
from xrex.cuda.async_emb.options import AsyncEmbOptions

_INT32_MAX = np.iinfo(np.int32).max

_lock = threading.Lock()
_description_of_id: dict[int, str] = {}
_name_of_id: dict[int, str] = {}


class AsyncEmbContextHandle(NamedTuple):
    """Names a context and carries its sizes. Hashable, so it may be a static argument.

    Attributes:
        context_id: positive int64, the same in every process and run for the same arguments.
        group_size: R, ranks in each replica group.
        flatten_replicas: global device ids of all replica groups, group after group, in rank order.
        tokens_per_rank: T, tokens of the batch on each rank.
        shard_width: w, columns of the table on each rank.
        emb_width: W = R * w, columns of the table.
        num_unique: U, capacity of the list of distinct ids of a batch.
        num_devices_per_node: devices of one host. Part of the context's identity; only the
            transports between GPUs use it, to tell which ranks share a host.
        mesh: the mesh that programs run over.
        table_axis: mesh axes that the table's columns are sharded over, in rank order.
        data_axis: mesh axes that the tokens are sharded over.
        options: see AsyncEmbOptions.
    """

    context_id: int
    group_size: int
    flatten_replicas: tuple[int, ...]
    tokens_per_rank: int
    shard_width: int
    emb_width: int
    num_unique: int
    num_devices_per_node: int
    mesh: Mesh
    table_axis: tuple[str, ...]
    data_axis: tuple[str, ...]
    options: AsyncEmbOptions

    def attrs(self) -> dict[str, np.generic]:
        """Returns the attributes that every FFI call carries, with the types handlers expect."""
        return {
            "context_id": np.int64(self.context_id),
            "group_size": np.int32(self.group_size),
            "tokens_per_rank": np.int64(self.tokens_per_rank),
            "shard_width": np.int64(self.shard_width),
            "emb_width": np.int64(self.emb_width),
            "num_unique": np.int64(self.num_unique),
        }

    @property
    def platform(self) -> str:
        """The FFI platform of the mesh's devices: "cpu" or "CUDA"."""
        return comm_utils.mesh_platform(self.mesh)

    @property
    def tokens_per_batch(self) -> int:
        """N = R * T, tokens of the global batch."""
        return self.group_size * self.tokens_per_rank

    @property
    def tokens_spec(self) -> PartitionSpec:
        """How ids, gradients, segment ids, embeddings and pins lie on the mesh (dimension 0)."""
        return PartitionSpec(self.data_axis)

    @property
    def table_spec(self) -> PartitionSpec:
        """How the table [V, W] lies on the mesh: its columns over the table axes."""
        return PartitionSpec(None, self.table_axis)


def make_context_handle(
    mesh: Mesh,
    table_axis: comm_utils.AxisNames,
    *,
    data_axis: comm_utils.AxisNames,
    tokens_per_batch: int,
    emb_width: int,
    num_unique: int,
    num_devices_per_node: int,
    options: AsyncEmbOptions = AsyncEmbOptions(),  # noqa: B008, a frozen value
    name: str = "",
) -> AsyncEmbContextHandle:
    """Makes the handle of a context. Pure: touches no device, loads no native code.

    Mesh axes of size > 1 outside `table_axis` make independent replica groups: each has a
    communicator of its own and sees the whole batch.

    Args:
        mesh: the device mesh.
        table_axis: axis or axes that the table's columns are sharded over. Their order is the rank
            order.
        data_axis: axis or axes that the tokens are sharded over: all table axes, in the same order,
            and beside them only axes of size 1.
        tokens_per_batch: N, tokens of the global batch; a multiple of the number of ranks.
        emb_width: W, columns of the table; a multiple of the number of ranks.
        num_unique: U, capacity of the list of distinct ids of a batch.
        num_devices_per_node: devices of one host, for the transports between GPUs; CPU devices
            make no use of it.
        options: see AsyncEmbOptions.
        name: tells contexts of equal sizes apart (one for each table); native messages carry it.

    Raises:
        ValueError: an axis is not in the mesh; a table axis is not a data axis; `data_axis` shards
            tokens outside `table_axis` or in another order; `tokens_per_batch` or `emb_width` does
            not divide by the number of ranks; a size is not positive or too large; another spec
            already has this id.
        TypeError: `mesh`, `options` or `name` has the wrong type.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"async_emb: mesh is a {type(mesh).__name__}; give a jax.sharding.Mesh of devices"
        )
    if not isinstance(options, AsyncEmbOptions):
        raise TypeError(f"async_emb: options is a {type(options).__name__}; give AsyncEmbOptions")
    if not isinstance(name, str):
        raise TypeError(f"async_emb: name={name!r} is a {type(name).__name__}; give a str")
    table_axes = comm_utils.normalize_axes(mesh, table_axis, "table_axis")
    data_axes = comm_utils.normalize_axes(mesh, data_axis, "data_axis")
    comm_utils.check_data_axis(mesh, table_axes, data_axes)
    group_size = comm_utils.axes_size(mesh, table_axes)
    tokens = _require_size("tokens_per_batch", tokens_per_batch)
    width = _require_size("emb_width", emb_width)
    groups = comm_utils.replica_groups(mesh, table_axes)
    handle = AsyncEmbContextHandle(
        context_id=0,
        group_size=group_size,
        flatten_replicas=tuple(int(device.id) for group in groups for device in group),
        tokens_per_rank=_split("tokens_per_batch", tokens, group_size, table_axes),
        shard_width=_split("emb_width", width, group_size, table_axes),
        emb_width=width,
        num_unique=_require_size("num_unique", num_unique),
        num_devices_per_node=_require_size("num_devices_per_node", num_devices_per_node),
        mesh=mesh,
        table_axis=table_axes,
        data_axis=data_axes,
        options=options,
    )
    return handle._replace(context_id=_claim_id(handle, name))


def context_name(ctx: AsyncEmbContextHandle) -> str:
    """Returns the `name` that the handle was made with in this process; "" if it was not."""
    with _lock:
        return _name_of_id.get(ctx.context_id, "")


def _require_size(label: str, value: int) -> int:
    size = comm_utils.require_positive_int(label, value)
    if size > _INT32_MAX:
        raise ValueError(
            f"async_emb: {label}={size} is greater than {_INT32_MAX}; tokens, columns and slots "
            "are counted in 32 bits: split the batch or the table"
        )
    return size


def _split(label: str, size: int, group_size: int, table_axes: tuple[str, ...]) -> int:
    if size % group_size:
        raise ValueError(
            f"async_emb: {label}={size} does not divide by the {group_size} ranks along "
            f"table_axis={table_axes!r}; pad it to a multiple of {group_size}"
        )
    return size // group_size


def _claim_id(handle: AsyncEmbContextHandle, name: str) -> int:
    """Returns the id of what the handle says, and refuses one that something else has already."""
    spec = handle._asdict() | {
        "platform": handle.platform,  # device ids count anew on each
        "mesh": list(handle.mesh.shape.items()),
        "options": dataclasses.asdict(handle.options),
        "name": name,
    }
    context_id = comm_utils.stable_id(spec)
    description = comm_utils.canonical_text(spec)
    with _lock:
        known = _description_of_id.setdefault(context_id, description)
        _name_of_id.setdefault(context_id, name)
    if known != description:
        raise ValueError(
            f"async_emb: two specs have the same context id {context_id}: {known} and "
            f"{description}; give one of them another name="
        )
    return context_id
