from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.testing import (
    AXIS_TYPES,
    ON_GPU,
    EntryGraph,
    bits,
    make_mesh,
    on_cpu_only,
)
from xrex.cuda.async_emb.async_emb import order_after
from xrex.cuda.async_emb.ordering import ORDER_TARGET


def tie(x, *pins):
    return order_after(x, *pins, platform="CUDA" if ON_GPU else "cpu")


def test_bits_stay_as_they_are():
    patterns = np.array([0x80000000, 0x7FC00001, 0xFFA00000, 0x00000001, 0x7F800000], np.uint32)
    x = patterns.view(np.float32)
    found = jax.jit(tie)(x, jnp.float32(np.nan))
    np.testing.assert_array_equal(bits(found), patterns)


def test_every_dtype_passes_through():
    x = {
        "f32": jnp.ones((2, 3)),
        "bf16": jnp.ones(4, jnp.bfloat16),
        "i8": jnp.arange(3, dtype=jnp.int8),
        "bool": jnp.array([True, False]),
        "complex": jnp.array(1 + 2j),
        "empty": jnp.zeros((0, 2)),
    }
    found = jax.jit(tie)(x, jnp.int32(1))
    assert jax.tree.map(lambda a: (a.dtype, a.shape), found) == jax.tree.map(
        lambda a: (a.dtype, a.shape), x
    )
    jax.tree.map(np.testing.assert_array_equal, found, x)


@pytest.mark.parametrize(("x", "pins"), [({}, (1.0,)), ({"a": 2.0}, ()), ({"a": 2.0}, ({},))])
def test_without_values_or_pins_there_is_nothing_to_order(x, pins):
    assert tie(x, *pins) == x


@on_cpu_only("on GPUs the schedule keeps the order, and no operand")
def test_value_needs_every_pin_in_the_compiled_program():
    def program(x, a, b):
        return tie(x, jnp.sin(a), {"b": b @ b})

    arguments = (jnp.ones(3), jnp.ones((7,)), jnp.ones((5, 5)))
    graph = EntryGraph(jax.jit(program).lower(*arguments).compile().as_text())
    tied = graph.call(ORDER_TARGET)
    assert graph.lines[tied].startswith("f32[3]")
    operands = [graph.lines[name] for name in graph.needs(tied)]
    assert any(operand.startswith("f32[7]") for operand in operands)
    assert any(operand.startswith("f32[5,5]") for operand in operands)


def test_donated_value_is_not_copied():
    jitted = jax.jit(tie, donate_argnums=0)
    text = jitted.lower(jnp.ones((64, 8)), jnp.float32(0)).compile().as_text()
    assert " copy(" not in text


def test_gradient_of_the_value_passes_and_none_flows_into_pins():
    def loss(x, pin):
        return jnp.sum(tie(x**2, pin * 3.0) * jnp.arange(3.0))

    dx, dpin = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.array([1.0, 2.0, 3.0]), jnp.ones(2))
    np.testing.assert_array_equal(dx, [0.0, 4.0, 12.0])
    np.testing.assert_array_equal(dpin, [0.0, 0.0])


def test_integers_beside_a_differentiated_value_are_allowed():
    def loss(x, count):
        x, count = tie((x, count), count)
        return x * count

    assert jax.jit(jax.grad(loss))(2.0, 3) == 3.0


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_value_keeps_its_place_on_the_mesh_whatever_the_pins(axis_type, check_vma):
    mesh = make_mesh(axis_type)
    num_ranks = mesh.devices.size

    def per_rank(same, different):
        return tie(same, different), tie(different, same)

    mapped = jax.shard_map(
        per_rank, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P("x")), check_vma=check_vma
    )
    different = jax.device_put(np.arange(2.0 * num_ranks), jax.NamedSharding(mesh, P("x")))
    found_same, found_different = jax.jit(mapped)(jnp.float32(7), different)
    assert found_same == 7
    np.testing.assert_array_equal(found_different, np.arange(2.0 * num_ranks))


def test_replicated_value_does_not_vary_after_a_varying_pin():
    mesh = make_mesh(num_ranks=2)

    def per_rank(same, different):
        tied = tie(same, different)
        assert not jax.typeof(tied).manual_axis_type.varying
        return tied

    mapped = jax.shard_map(per_rank, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    jax.eval_shape(mapped, jnp.float32(1), jnp.ones(2))


def test_on_cuda_a_barrier_holds_the_value_back():
    def program(x, pin):
        return order_after(x, pin, platform="CUDA")

    text = jax.jit(program).trace(jnp.ones(3), jnp.ones(2)).lower(lowering_platforms=("cuda",))
    (barrier,) = re.findall(r".*optimization_barrier.*", text.as_text())
    assert "tensor<3xf32>" in barrier
    assert "tensor<2xf32>" in barrier
    assert "custom_call" not in text.as_text()


def test_before_compilation_the_barrier_is_there_too():
    text = jax.jit(tie).lower(jnp.ones(3), jnp.ones(2)).as_text()
    assert "optimization_barrier" in text


def test_unknown_platform_is_refused():
    with pytest.raises(ValueError, match="platform='gpu'; give 'cpu' or 'CUDA'"):
        order_after(jnp.ones(1), jnp.ones(1), platform="gpu")


def test_what_native_code_cannot_take_is_refused():
    with pytest.raises(TypeError, match=r"dtype key<fry>.*jax.random.key_data"):
        tie(jax.random.key(0), 1.0)
    with pytest.raises(TypeError, match="got a str where it takes an array"):
        tie("x", 1.0)
