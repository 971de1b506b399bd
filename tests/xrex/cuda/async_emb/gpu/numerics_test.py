"""Lookup and update on GPUs: the oracle's bits, and the host backend's, at every kind of shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.gpu.devices import ON_GPUS, beside_a_host_of, gpu_mesh
from tests.xrex.cuda.async_emb.gpu.steps import DECAY, EPS, LEARNING_RATE, Steps
from tests.xrex.cuda.async_emb.native_program import NativeUpdate, native_program
from tests.xrex.cuda.async_emb.numerics_cases import (
    EAGER,
    LAZY,
    UpdateCase,
    any_bits,
    assert_same_bits,
    assert_same_state,
    bf16,
    make_batch,
    make_case,
)
from tests.xrex.cuda.async_emb.testing import put, ready_context
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.reference import (
    BFLOAT16,
    Bf16Array,
    TableState,
    exact_lookup,
    exact_update,
)
from xrex.cuda.async_emb.reference_formula import formula_update

I32 = np.iinfo(np.int32)
HYPER: dict[str, Any] = {"learning_rate": 0.05, "eps": 1e-8}
DECAYS = pytest.mark.parametrize("decay", [EAGER, LAZY], ids=["eager", "lazy"])
POLICIES = pytest.mark.parametrize("out_of_range", ["clip", "zero"])

# Shard widths with a number of tokens of each rank. Odd, powers of two, and both sides of those.
WIDTHS = [
    (1, 4097),
    (2, 1000),
    (3, 257),
    (5, 1),
    (7, 64),
    (8, 2048),
    (13, 65),
    (16, 3001),
    (31, 128),
    (32, 63),
    (33, 700),
    (63, 129),
    (64, 4096),
    (65, 2),
    (96, 511),
    (127, 33),
    (128, 1024),
    (129, 100),
    (192, 17),
    (255, 300),
    (256, 1500),
    (257, 77),
]


def outcome(
    platform: str, num_ranks: int, case: UpdateCase, ids: np.ndarray, decay: Any, **options: Any
) -> tuple[Bf16Array, NativeUpdate]:
    """What a lookup and an update give on a platform."""
    shape = (num_ranks, case.num_tokens, case.grads.shape[1], case.num_slots)
    with native_program(*shape, decay, platform=platform, **options) as program:
        return program.lookup(ids, case.state.table), program.update(case)


def assert_exact(found: NativeUpdate, case: UpdateCase, decay: Any) -> None:
    expected = exact_update(*case, decay=decay, **HYPER)
    np.testing.assert_array_equal(found.valids, int(expected.valid))
    np.testing.assert_array_equal(found.norms, expected.norm)
    assert_same_state(found.state, expected.state)


def assert_equal(found: NativeUpdate, other: NativeUpdate) -> None:
    np.testing.assert_array_equal(found.valids, other.valids)
    np.testing.assert_array_equal(found.norms, other.norms)
    assert_same_state(found.state, other.state)


@ON_GPUS
@pytest.mark.parametrize(("shard_width", "tokens"), WIDTHS)
def test_bits_of_every_shard_width_are_the_oracles(
    num_ranks: int, shard_width: int, tokens: int
) -> None:
    rng = np.random.default_rng(shard_width)
    num_tokens, width = num_ranks * tokens, num_ranks * shard_width
    num_rows, num_slots = 1 + num_tokens // 2, 1 + num_tokens // 3
    case = make_case(rng, num_tokens, num_rows, width, num_slots)
    ids = make_batch(rng, num_tokens, num_rows, num_slots).ids
    table = any_bits(rng, num_rows, width)
    with native_program(num_ranks, num_tokens, width, num_slots, LAZY, platform="gpu") as program:
        assert_same_bits(program.lookup(ids, table), exact_lookup(ids, table))
        assert_exact(program.update(case), case, LAZY)


@ON_GPUS
@DECAYS
@POLICIES
@pytest.mark.parametrize(("shard_width", "tokens"), [(3, 130), (64, 257), (257, 40)])
def test_bits_are_those_of_the_host_backend(
    num_ranks: int, decay: Any, out_of_range: str, shard_width: int, tokens: int
) -> None:
    beside_a_host_of(num_ranks)
    rng = np.random.default_rng(shard_width)
    num_tokens = num_ranks * tokens
    case = make_case(rng, num_tokens, 90, num_ranks * shard_width, 70)
    ids = make_batch(rng, num_tokens, 90, 70).ids
    rows, update = outcome("gpu", num_ranks, case, ids, decay, out_of_range=out_of_range)
    host_rows, host_update = outcome("cpu", num_ranks, case, ids, decay, out_of_range=out_of_range)
    assert_same_bits(rows, host_rows)
    assert_equal(update, host_update)
    assert_same_bits(rows, exact_lookup(ids, case.state.table, out_of_range))
    assert_exact(update, case, decay)


@ON_GPUS
@DECAYS
@pytest.mark.parametrize("shard_width", [1, 16, 96, 257])
def test_result_in_any_order_of_sums_lies_within_the_bound(
    num_ranks: int, decay: Any, shard_width: int
) -> None:
    rng = np.random.default_rng(shard_width)
    case = make_case(rng, num_ranks * 600, 300, num_ranks * shard_width, 200)
    ids = make_batch(rng, case.num_tokens, 300, 200).ids
    rows, found = outcome("gpu", num_ranks, case, ids, decay, deterministic=False)
    assert_same_bits(rows, exact_lookup(ids, case.state.table))
    expected = formula_update(*case, **HYPER, decay=decay)
    assert found.valids.tolist() == [1] * num_ranks
    assert len(set(found.norms.tolist())) == 1
    assert expected.norm.contains(found.norms[0])
    assert expected.table.contains(found.state.table).all()
    assert expected.row_state.contains(found.state.row_state).all()
    np.testing.assert_array_equal(found.state.last_step, expected.last_step)


@ON_GPUS
@pytest.mark.parametrize("deterministic", [True, False])
def test_one_id_in_every_position(num_ranks: int, deterministic: bool) -> None:
    rng = np.random.default_rng(4)
    num_tokens, width = num_ranks * 64 * 70, num_ranks * 24
    case = make_case(rng, num_tokens, 50, width, 30)
    case.segment_ids[:] = 5
    case.unique_tokens[:] = 50
    case.unique_tokens[5] = 49
    ids = np.full(num_tokens, 37, np.int32)
    rows, found = outcome("gpu", num_ranks, case, ids, LAZY, deterministic=deterministic)
    assert_same_bits(rows, exact_lookup(ids, case.state.table))
    if deterministic:
        assert_exact(found, case, LAZY)
    else:
        expected = formula_update(*case, **HYPER, decay=LAZY)
        assert expected.table.contains(found.state.table).all()
        assert expected.row_state.contains(found.state.row_state).all()


@ON_GPUS
@POLICIES
def test_batch_without_a_row(num_ranks: int, out_of_range: str) -> None:
    num_tokens = num_ranks * 33
    case = make_case(np.random.default_rng(5), num_tokens, 20, num_ranks * 8, 12)
    case.segment_ids[:] = -1
    case.unique_tokens[:] = 20
    case.grads[:] = np.nan
    ids = np.full(num_tokens, 20, np.int32)
    rows, found = outcome("gpu", num_ranks, case, ids, EAGER, out_of_range=out_of_range)
    assert_same_bits(rows, exact_lookup(ids, case.state.table, out_of_range))
    assert (found.norms.tolist(), found.valids.tolist()) == ([0] * num_ranks, [1] * num_ranks)
    assert_same_state(found.state, case.state)


@ON_GPUS
@POLICIES
def test_ids_at_the_ends_of_table_and_int32(num_ranks: int, out_of_range: str) -> None:
    ends = [-1, 0, 89, 90, -90, -91, I32.min, I32.max]
    ids = np.tile(np.array(ends, np.int32), 4 * num_ranks)
    table = any_bits(np.random.default_rng(6), 90, num_ranks * 6)
    shape = (num_ranks, len(ids), num_ranks * 6, 4)
    with native_program(*shape, EAGER, platform="gpu", out_of_range=out_of_range) as program:
        assert_same_bits(program.lookup(ids, table), exact_lookup(ids, table, out_of_range))
        stats = async_emb.stats(program.ctx)
    assert [stats[rank].ids_out_of_range for rank in range(num_ranks)] == [16] * num_ranks


@ON_GPUS
@DECAYS
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradient_that_is_not_finite_on_one_token_skips_the_step_on_all_ranks(
    num_ranks: int, decay: Any, value: float, deterministic: bool
) -> None:
    case = make_case(np.random.default_rng(7), num_ranks * 80, 90, num_ranks * 8, 70)
    case.grads[np.flatnonzero(case.segment_ids >= 0)[-1], 3] = value
    shape = (num_ranks, case.num_tokens, num_ranks * 8, 70)
    options = {"platform": "gpu", "deterministic": deterministic}
    with native_program(*shape, decay, **options) as program:
        found = program.update(case)
        stats = async_emb.stats(program.ctx)
    np.testing.assert_array_equal(found.norms, abs(value))
    assert found.valids.tolist() == [0] * num_ranks
    assert_same_state(found.state, case.state)
    assert {rank.updates_skipped_non_finite for rank in stats.values()} == {1}


@ON_GPUS
def test_subnormal_values_are_kept(num_ranks: int) -> None:
    rng = np.random.default_rng(8)
    case = make_case(rng, num_ranks * 80, 90, num_ranks * 8, 70)
    case = case._replace(grads=bf16(case.grads.astype(np.float32) * 1e-39))
    case.state.table[::2] = any_bits(rng, 45, num_ranks * 8).view(np.uint16) % 128
    case.state.row_state[::3] = 1e-40
    shape = (num_ranks, case.num_tokens, num_ranks * 8, 70)
    with native_program(*shape, LAZY, eps=1e-30, platform="gpu") as program:
        found = program.update(case)
    expected = exact_update(*case, decay=LAZY, learning_rate=0.05, eps=1e-30)
    np.testing.assert_array_equal(found.norms, expected.norm)
    assert_same_state(found.state, expected.state)


# --- A shard of more than 2^31 elements ---------------------------------------------------------

HUGE_WIDTH = 64
HUGE_ROWS = 2**31 // HUGE_WIDTH + 3
# Both ends, and both sides of element 2^31.
HUGE_IDS = [0, 1, HUGE_ROWS - 1, HUGE_ROWS - 2, 2**31 // HUGE_WIDTH - 1, 2**31 // HUGE_WIDTH]


def huge_table(steps: Steps, rows: np.ndarray, values: Bf16Array) -> jax.Array:
    """A table made on the device: zeros but for some rows."""

    def make(values: jax.Array) -> jax.Array:
        zeros = jnp.zeros((HUGE_ROWS, steps.ctx.emb_width), BFLOAT16)
        return zeros.at[rows].set(values, unique_indices=True)

    sharding = jax.NamedSharding(steps.ctx.mesh, steps.ctx.table_spec)
    return jax.jit(make, out_shardings=sharding)(put(steps.ctx, values, P(None, "x")))


def zeros_of(steps: Steps, dtype: Any) -> jax.Array:
    sharding = jax.NamedSharding(steps.ctx.mesh, P())
    return jax.jit(lambda: jnp.zeros(HUGE_ROWS, dtype), out_shardings=sharding)()


@jax.jit
def rows_of(array: jax.Array, rows: jax.Array) -> jax.Array:
    return array.at[rows].get(mode="promise_in_bounds", unique_indices=True)


@jax.jit
def num_rows_with_values(array: jax.Array) -> jax.Array:
    return jnp.sum(jnp.any(array.reshape(HUGE_ROWS, -1) != 0, axis=1), dtype=jnp.int32)


@ON_GPUS
def test_both_ends_of_a_shard_of_more_than_2_to_the_31_elements(num_ranks: int) -> None:
    rng = np.random.default_rng(9)
    rows, width = np.array(HUGE_IDS, np.int32), num_ranks * HUGE_WIDTH
    num_tokens = num_ranks * 12
    values = bf16(1 + rng.random((len(rows), width)))
    case = make_case(rng, num_tokens, len(rows), width, len(rows))
    segments = (np.arange(num_tokens) % len(rows)).astype(np.int32)
    case = case._replace(segment_ids=segments, unique_tokens=rows)
    sizes = {"tokens_per_batch": num_tokens, "emb_width": width, "num_unique": len(rows)}
    with ready_context(gpu_mesh(num_ranks), name="huge", **sizes) as ctx:
        steps = Steps(ctx)
        state: Any = TableState(
            huge_table(steps, rows, values),
            zeros_of(steps, jnp.float32),
            zeros_of(steps, jnp.int32),
        )
        slots = rng.integers(0, len(rows), num_tokens)
        ids = rows[slots]
        ids[::3] -= HUGE_ROWS  # counted from the end
        table, pin = steps.start_lookup(steps.put_ids(ids), state.table, steps.open_gate())
        embeddings, table = steps.finish_lookup(table, pin)
        assert_same_bits(embeddings, values[slots])

        in_flight = steps.start_update(
            state._replace(table=table), *steps.put_update(case), steps.open_gate()
        )
        finished = steps.finish_update(in_flight)
        small = TableState(values, np.zeros(len(rows), np.float32), np.zeros(len(rows), np.int32))
        expected = exact_update(
            small,
            case.grads,
            segments,
            np.arange(len(rows), dtype=np.int32),
            learning_rate=LEARNING_RATE,
            eps=EPS,
            decay=DECAY,
        )
        np.testing.assert_array_equal(finished.norms, expected.norm)
        found = TableState(*(np.asarray(rows_of(x, rows)) for x in finished.state))
        assert_same_state(found, expected.state)
        for array in finished.state:
            assert int(num_rows_with_values(array)) == len(rows)
