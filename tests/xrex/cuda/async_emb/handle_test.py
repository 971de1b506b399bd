from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.xrex.cuda.async_emb.testing import make_handle, make_mesh, needs_devices
from xrex.cuda.async_emb import comm_utils
from xrex.cuda.async_emb.async_emb import AsyncEmbOptions, make_context_handle

NUM_RANKS = 4

pytestmark = needs_devices(NUM_RANKS)


def mesh_of(shape: dict[str, int], devices: list[jax.Device] | None = None) -> Mesh:
    devices = devices or jax.devices()
    count = int(np.prod(list(shape.values())))
    return Mesh(np.array(devices[:count]).reshape(*shape.values()), tuple(shape))


def handle(mesh: Mesh, table_axis: object = "x", data_axis: object = "x", **changes: object):
    sizes = {
        "tokens_per_batch": 32,
        "emb_width": 16,
        "num_unique": 20,
        "num_devices_per_node": 4,
    }
    return make_context_handle(mesh, table_axis, data_axis=data_axis, **(sizes | changes))


def test_fields_follow_from_the_arguments():
    mesh = mesh_of({"x": NUM_RANKS})
    ctx = handle(mesh)
    expected = {
        "group_size": NUM_RANKS,
        "flatten_replicas": tuple(d.id for d in jax.devices()[:NUM_RANKS]),
        "tokens_per_rank": 8,
        "shard_width": 4,
        "emb_width": 16,
        "num_unique": 20,
        "num_devices_per_node": 4,
        "mesh": mesh,
        "table_axis": ("x",),
        "data_axis": ("x",),
        "options": AsyncEmbOptions(),
    }
    assert ctx._asdict() == {"context_id": ctx.context_id, **expected}


def test_fields_come_in_the_order_that_callers_rely_on():
    assert handle(mesh_of({"x": 1}))._fields == (
        "context_id",
        "group_size",
        "flatten_replicas",
        "tokens_per_rank",
        "shard_width",
        "emb_width",
        "num_unique",
        "num_devices_per_node",
        "mesh",
        "table_axis",
        "data_axis",
        "options",
    )


def test_attributes_have_the_types_that_handlers_expect():
    ctx = handle(mesh_of({"x": NUM_RANKS}))
    attrs = ctx.attrs()
    assert attrs == {
        "context_id": ctx.context_id,
        "group_size": 4,
        "tokens_per_rank": 8,
        "shard_width": 4,
        "emb_width": 16,
        "num_unique": 20,
    }
    assert attrs["group_size"].dtype == np.int32
    assert {value.dtype for name, value in attrs.items() if name != "group_size"} == {
        np.dtype(np.int64)
    }


def test_equal_arguments_make_equal_and_hashable_handles():
    first, second = handle(mesh_of({"x": NUM_RANKS})), handle(mesh_of({"x": NUM_RANKS}))
    assert first == second
    assert hash(first) == hash(second)


def test_axis_may_be_a_name_or_a_tuple():
    mesh = mesh_of({"x": NUM_RANKS})
    assert handle(mesh, "x", "x") == handle(mesh, ("x",), ["x"])


def test_ranks_of_two_table_axes_count_row_major_in_the_given_order():
    mesh = mesh_of({"a": 2, "b": 2})
    ids = [d.id for d in jax.devices()[:4]]
    assert handle(mesh, ("a", "b"), ("a", "b")).flatten_replicas == tuple(ids)
    swapped = handle(mesh, ("b", "a"), ("b", "a"))
    assert swapped.flatten_replicas == (ids[0], ids[2], ids[1], ids[3])


def test_axes_outside_the_table_make_replica_groups():
    mesh = mesh_of({"replica": 2, "x": 2})
    ctx = handle(mesh, "x", "x")
    assert ctx.group_size == 2
    assert ctx.flatten_replicas == tuple(d.id for d in jax.devices()[:4])
    other = handle(mesh_of({"x": 2, "replica": 2}), "x", "x")
    ids = [d.id for d in jax.devices()[:4]]
    assert other.flatten_replicas == (ids[0], ids[2], ids[1], ids[3])


def test_data_axis_of_size_1_outside_the_table_is_allowed():
    ctx = handle(mesh_of({"one": 1, "x": NUM_RANKS}), "x", ("x", "one"))
    assert ctx.data_axis == ("x", "one")
    assert ctx.group_size == NUM_RANKS


def distinct_handles():
    mesh = mesh_of({"x": NUM_RANKS})
    reversed_mesh = mesh_of({"x": NUM_RANKS}, jax.devices()[:NUM_RANKS][::-1])
    return {
        "plain": handle(mesh),
        "name": handle(mesh, name="items"),
        "option": handle(mesh, options=AsyncEmbOptions(deterministic=True)),
        "tokens": handle(mesh, tokens_per_batch=64),
        "width": handle(mesh, emb_width=32),
        "slots": handle(mesh, num_unique=21),
        "node": handle(mesh, num_devices_per_node=2),
        "devices": handle(reversed_mesh),
        "axis name": handle(mesh_of({"y": NUM_RANKS}), "y", "y"),
        "groups": handle(mesh_of({"r": 2, "x": 2}), "x", "x", tokens_per_batch=16, emb_width=8),
    }


def test_specs_say_how_global_arrays_lie():
    ctx = make_handle()
    assert ctx.tokens_spec == PartitionSpec(("x",))
    assert ctx.table_spec == PartitionSpec(None, ("x",))


def test_ids_differ_with_every_part_of_the_spec():
    ids = {label: ctx.context_id for label, ctx in distinct_handles().items()}
    assert len(set(ids.values())) == len(ids), ids


def test_ids_are_positive_int64():
    for ctx in distinct_handles().values():
        assert 0 < ctx.context_id < 2**63


def test_id_is_the_same_in_another_process_with_another_hash_seed():
    script = (
        "from tests.xrex.cuda.async_emb.testing import make_handle\n"
        "print(make_handle(name='across').context_id)"
    )
    root = Path(__file__).parents[4]
    path = os.pathsep.join([str(root), str(root / "phoenix"), *sys.path])
    env = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert int(found.stdout) == make_handle(name="across").context_id


def test_two_specs_under_one_id_are_refused(monkeypatch):
    mesh = mesh_of({"x": NUM_RANKS})
    monkeypatch.setattr(comm_utils, "stable_id", lambda _: 12345)
    handle(mesh, name="first")
    with pytest.raises(ValueError, match=r"same context id 12345.*another name="):
        handle(mesh, name="second")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            ("y", "y"),
            "table_axis names 'y', which is not an axis of the mesh; choose among 'a', 'b'",
        ),
        (("a", "y"), "data_axis names 'y', which is not an axis"),
        ((("a", "a"), "a"), r"table_axis=\('a', 'a'\) names an axis twice"),
        ((("a", "b"), "a"), r"table axis 'b' is not in data_axis=\('a',\)"),
        (("a", ("a", "b")), r"data axis 'b' of size 2 is not in table_axis=\('a',\)"),
        ((("a", "b"), ("b", "a")), "name the axes in different orders"),
    ],
)
def test_axes_that_break_a_rule_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        handle(mesh_of({"a": 2, "b": 2}), *axes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_batch": 30}, "tokens_per_batch=30 does not divide by the 4 ranks"),
        ({"emb_width": 18}, "emb_width=18 does not divide by the 4 ranks"),
        (
            {"tokens_per_batch": 0},
            "tokens_per_batch=0; it is a size: give a whole number of at least 1",
        ),
        ({"emb_width": -4}, "emb_width=-4; it is a size"),
        ({"num_unique": 0}, "num_unique=0; it is a size"),
        ({"num_devices_per_node": 0}, "num_devices_per_node=0; it is a size"),
        ({"num_unique": 2.5}, "num_unique=2.5 is a float; it is a size: give a whole number"),
        ({"tokens_per_batch": True}, "tokens_per_batch=True; it is a size"),
        ({"tokens_per_batch": 2**31}, "tokens_per_batch=2147483648 is greater than 2147483647"),
    ],
)
def test_sizes_that_break_a_rule_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        handle(mesh_of({"x": NUM_RANKS}), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"deterministic": True}}, "options is a dict"),
        ({"name": 3}, "name=3 is a int"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(changes, message):
    with pytest.raises(TypeError, match=message):
        handle(mesh_of({"x": NUM_RANKS}), **changes)


def test_mesh_without_devices_is_refused():
    with pytest.raises(TypeError, match=r"mesh is a AbstractMesh; give a jax\.sharding\.Mesh"):
        handle(make_mesh().abstract_mesh)
