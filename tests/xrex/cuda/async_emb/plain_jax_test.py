import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.numerics_cases import (
    EAGER,
    LAZY,
    UpdateCase,
    any_bits,
    assert_same_bits,
    assert_same_state,
    bf16,
    invalid_cases,
    make_batch,
    make_case,
    on_ranks,
)
from xrex.cuda.async_emb import plain_jax
from xrex.cuda.async_emb.handle import AsyncEmbContextHandle, make_context_handle
from xrex.cuda.async_emb.options import AsyncEmbOptions
from xrex.cuda.async_emb.reference import EagerDecay, LazyDecay, TableState, exact_lookup
from xrex.cuda.async_emb.reference_formula import formula_update

NUM_TOKENS, NUM_ROWS, EMB_WIDTH, NUM_SLOTS = 160, 90, 16, 70
EPS = 1e-8


def handle(mesh: Mesh, axes: Any = "x", data_axis: Any = None, **options: Any) -> Any:
    return make_context_handle(
        mesh,
        axes,
        data_axis=axes if data_axis is None else data_axis,
        tokens_per_batch=NUM_TOKENS,
        emb_width=EMB_WIDTH,
        num_unique=NUM_SLOTS,
        num_devices_per_node=1,
        options=AsyncEmbOptions(any_world_size=True, **options),
    )


def on_line(num_ranks: int, **options: Any) -> AsyncEmbContextHandle:
    return handle(Mesh(np.array(jax.devices()[:num_ranks]), ("x",)), **options)


def per_rank(
    ctx: AsyncEmbContextHandle, function: Callable, in_specs: Any, out_specs: Any, check_vma: bool
) -> Callable:
    return jax.shard_map(
        function, mesh=ctx.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


@functools.cache
def lookup_program(ctx: AsyncEmbContextHandle, check_vma: bool = True) -> Any:
    specs = (ctx.tokens_spec, ctx.table_spec)
    call = functools.partial(plain_jax.lookup, ctx=ctx)
    return jax.jit(per_rank(ctx, call, specs, ctx.tokens_spec, check_vma))


@functools.cache
def update_program(
    ctx: AsyncEmbContextHandle, decay: EagerDecay | LazyDecay, check_vma: bool = True
) -> Any:
    """(state, grads, segment_ids, unique_tokens, pending, learning_rate) -> state, norm, valid."""

    def update(
        state: Any, grads: Any, segment_ids: Any, unique_tokens: Any, pending: Any, rate: Any
    ) -> Any:
        inputs = (grads, segment_ids, unique_tokens, state.table, state.row_state)
        if isinstance(decay, EagerDecay):
            table, row_state, norm, valid = plain_jax.rowwise_adagrad_update(
                *inputs, pending, ctx, learning_rate=rate, eps=EPS, **decay._asdict()
            )
            return state._replace(table=table, row_state=row_state), norm, valid
        *arrays, norm, valid = plain_jax.rowwise_adagrad_lazy_update(
            *inputs,
            state.last_step,
            decay.step,
            pending,
            ctx,
            learning_rate=rate,
            eps=EPS,
            accum_decay_rate=decay.accum_decay_rate,
            weight_decay_rate=decay.weight_decay_rate,
        )
        return type(state)(*arrays), norm, valid

    state_specs, tokens = specs_of_state(ctx), ctx.tokens_spec
    specs = (state_specs, tokens, tokens, P(), P(), P())
    return jax.jit(per_rank(ctx, update, specs, (state_specs, P(), P()), check_vma))


def specs_of_state(ctx: AsyncEmbContextHandle) -> Any:
    specs: Any = (ctx.table_spec, P(), P())
    return TableState(*specs)


def update(
    ctx: AsyncEmbContextHandle,
    case: UpdateCase,
    decay: EagerDecay | LazyDecay,
    *,
    pending: int = 1,
    learning_rate: float = 0.05,
    check_vma: bool = True,
) -> tuple[TableState, float, int]:
    program = update_program(ctx, decay, check_vma)
    state, norm, valid = program(*case, np.int32(pending), np.float32(learning_rate))
    return TableState(*(np.asarray(x) for x in state)), float(norm), int(valid)


def assert_within_bound(
    ctx: AsyncEmbContextHandle, case: UpdateCase, decay: EagerDecay | LazyDecay, **options: Any
) -> None:
    state, norm, valid = update(ctx, case, decay, **options)
    expected = formula_update(*case, learning_rate=0.05, eps=EPS, decay=decay, arithmetic="xla")
    assert valid == expected.valid == 1
    assert expected.norm.contains(norm)
    assert expected.table.contains(state.table).all()
    assert expected.row_state.contains(state.row_state).all()
    if isinstance(decay, LazyDecay):
        np.testing.assert_array_equal(state.last_step, expected.last_step)


def some_case(seed: int) -> UpdateCase:
    return make_case(np.random.default_rng(seed), NUM_TOKENS, NUM_ROWS, EMB_WIDTH, NUM_SLOTS)


@on_ranks(1, 2, 4, 8)
class TestOnRanks:
    @pytest.mark.parametrize("out_of_range", ["clip", "zero"])
    def test_lookup_is_exact_for_all_ids_and_bit_patterns(
        self, num_ranks: int, out_of_range: Any
    ) -> None:
        rng = np.random.default_rng(num_ranks)
        table = any_bits(rng, NUM_ROWS, EMB_WIDTH)
        ids = make_batch(rng, NUM_TOKENS, NUM_ROWS, NUM_SLOTS).ids
        ctx = on_line(num_ranks, out_of_range=out_of_range)
        for check_vma in (True, False):
            found = lookup_program(ctx, check_vma)(ids, table)
            assert_same_bits(found, exact_lookup(ids, table, out_of_range))

    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("decay", [EAGER, LAZY])
    def test_update_lies_within_the_bound_of_the_formula(
        self, num_ranks: int, decay: EagerDecay | LazyDecay, check_vma: bool
    ) -> None:
        assert_within_bound(on_line(num_ranks), some_case(num_ranks), decay, check_vma=check_vma)

    def test_gradient_of_one_rank_that_is_not_finite_stops_all_ranks(self, num_ranks: int) -> None:
        case = some_case(2)
        grads = case.grads.copy()
        grads[np.flatnonzero(case.segment_ids >= 0)[-1], 3] = np.inf
        state, norm, valid = update(on_line(num_ranks), case._replace(grads=grads), LAZY)
        assert (norm, valid) == (np.inf, 0)
        assert_same_state(state, case.state)

    def test_update_leaves_the_bits_of_all_other_rows(self, num_ranks: int) -> None:
        case = some_case(3)
        listed = case.unique_tokens[case.unique_tokens < NUM_ROWS]
        others = np.setdiff1d(np.arange(NUM_ROWS), listed)
        case.state.table[others] = any_bits(np.random.default_rng(4), len(others), EMB_WIDTH)
        state, _, valid = update(on_line(num_ranks), case, LAZY)
        assert valid == 1
        assert_same_bits(state.table[others], case.state.table[others])
        assert_same_bits(state.row_state[others], case.state.row_state[others])


@on_ranks(2)
class TestUpdate:
    @settings(derandomize=True, deadline=None, max_examples=30)
    @given(seed=st.integers(0, 2**32 - 1), small=st.booleans(), accumulator=st.booleans())
    def test_any_values_lie_within_the_bound(
        self, num_ranks: int, seed: int, small: bool, accumulator: bool
    ) -> None:
        case = some_case(seed)
        if small:  # gradients whose squares are subnormal, and gradients that are so themselves
            tiny = np.float32(2) ** np.float32(-60 if accumulator else -126)
            case = case._replace(grads=bf16(case.grads.astype(np.float32) * tiny))
        case.state.row_state[:] *= np.float32(accumulator)
        for decay in (EAGER, LAZY):
            assert_within_bound(on_line(num_ranks), case, decay)

    @pytest.mark.parametrize("index", range(5))
    def test_wrong_index_changes_nothing(self, num_ranks: int, index: int) -> None:
        _, case = list(invalid_cases(some_case(5)))[index]
        for decay in (EAGER, LAZY):
            state, norm, valid = update(on_line(num_ranks, check_inputs=True), case, decay)
            assert valid == 0
            assert np.isfinite(norm)
            assert_same_state(state, case.state)

    def test_nothing_pending_changes_nothing_but_has_a_norm(self, num_ranks: int) -> None:
        case = some_case(6)
        state, norm, valid = update(on_line(num_ranks), case, LAZY, pending=0)
        assert valid == 0
        assert norm == update(on_line(num_ranks), case, LAZY)[1]
        assert_same_state(state, case.state)

    @pytest.mark.parametrize("rate", [np.nan, np.inf])
    def test_learning_rate_array_that_is_not_finite_changes_nothing(
        self, num_ranks: int, rate: float
    ) -> None:
        case = some_case(7)
        state, _, valid = update(on_line(num_ranks), case, EAGER, learning_rate=rate)
        assert valid == 0
        assert_same_state(state, case.state)

    def test_padding_alone_is_valid_and_changes_nothing(self, num_ranks: int) -> None:
        case = some_case(8)
        case.segment_ids[:] = -1
        case.unique_tokens[:] = NUM_ROWS
        case.grads[:] = np.nan
        state, norm, valid = update(on_line(num_ranks), case, LAZY)
        assert (norm, valid) == (0, 1)
        assert_same_state(state, case.state)

    def test_slots_count_from_the_end_once_and_update_nothing_outside(self, num_ranks: int) -> None:
        case = some_case(9)
        case.unique_tokens[case.unique_tokens == NUM_ROWS] = NUM_ROWS + 1
        case.unique_tokens[case.unique_tokens % 2 == 0] -= NUM_ROWS
        case.unique_tokens[-3:] = [-NUM_ROWS - 1, 2**31 - 1, -(2**31)]
        assert_within_bound(on_line(num_ranks), case, LAZY)

    def test_a_new_learning_rate_does_not_compile_again(self, num_ranks: int) -> None:
        ctx, case = on_line(num_ranks), some_case(10)
        update(ctx, case, EAGER, learning_rate=0.1)
        compiled = update_program(ctx, EAGER)._cache_size()
        update(ctx, case, EAGER, learning_rate=0.2)
        assert update_program(ctx, EAGER)._cache_size() == compiled

    def test_table_that_is_donated_is_updated_in_place(self, num_ranks: int) -> None:
        ctx, case = on_line(num_ranks), some_case(11)
        shardings = jax.tree.map(lambda s: jax.NamedSharding(ctx.mesh, s), specs_of_state(ctx))
        state = jax.device_put(case.state, shardings)
        before = [s.data.unsafe_buffer_pointer() for s in state.table.addressable_shards]
        program = jax.jit(update_program(ctx, LAZY), donate_argnums=0)
        state, *_ = program(state, *case[1:], np.int32(1), np.float32(0.1))
        after = [s.data.unsafe_buffer_pointer() for s in state.table.addressable_shards]
        assert before == after


class TestRowsBeyond:
    """Row numbers of slots that update nothing."""

    def test_they_lie_outside_the_largest_table(self) -> None:
        num_rows = 2**31 - 1
        rows = np.asarray(plain_jax._rows_beyond(num_rows, NUM_SLOTS)).astype(np.int64)
        assert rows.min() >= num_rows
        assert len(set(rows.tolist())) == NUM_SLOTS

    @pytest.mark.parametrize("num_rows", [1, NUM_ROWS, 2**31 - 1])
    def test_writing_to_them_changes_nothing(self, num_rows: int) -> None:
        rows = plain_jax._rows_beyond(num_rows, NUM_SLOTS)
        array = jnp.zeros(min(num_rows, NUM_ROWS))
        written = jax.jit(plain_jax._set_rows)(array, rows, jnp.ones(NUM_SLOTS))
        np.testing.assert_array_equal(np.asarray(written), 0)


@on_ranks(8)
class TestMeshes:
    """Meshes of eight devices; `table_axis` names the rank order."""

    @pytest.mark.parametrize(
        ("shape", "table_axis", "data_axis"),
        [
            pytest.param((2, 4, 1), ("b", "a"), ("b", "a"), id="two axes in another order"),
            pytest.param((8, 1, 1), ("a",), ("a", "c"), id="data axis of size one beside"),
            pytest.param((2, 4, 1), ("b",), ("b",), id="two replica groups"),
        ],
    )
    def test_lookup_and_update(
        self,
        num_ranks: int,
        shape: tuple[int, ...],
        table_axis: tuple[str, ...],
        data_axis: tuple[str, ...],
    ) -> None:
        if num_ranks != np.prod(shape):
            pytest.skip(f"the mesh has {np.prod(shape)} devices")
        mesh = Mesh(np.array(jax.devices()[:num_ranks]).reshape(shape), ("a", "b", "c"))
        ctx = handle(mesh, table_axis, data_axis)
        case = some_case(12)
        ids = make_batch(np.random.default_rng(12), NUM_TOKENS, NUM_ROWS, NUM_SLOTS).ids
        found = lookup_program(ctx)(ids, case.state.table)
        assert_same_bits(found, exact_lookup(ids, case.state.table))
        assert_within_bound(ctx, case, LAZY)


class TestRefusals:
    def test_call_outside_shard_map(self) -> None:
        with pytest.raises(ValueError, match=r"plain_jax\.lookup was traced under no mesh"):
            plain_jax.lookup(np.zeros(NUM_TOKENS, np.int32), bf16([[0.0]]), on_line(1))

    def test_gradients_of_another_dtype(self) -> None:
        case = some_case(13)
        wrong = case._replace(grads=case.grads.astype(np.float32))
        with pytest.raises(TypeError, match="grads of dtype float32; the rule is bfloat16"):
            update(on_line(1), wrong, EAGER)

    def test_decay_factor_above_one(self) -> None:
        with pytest.raises(ValueError, match=r"decay_factor=1\.5"):
            update(on_line(1), some_case(14), EagerDecay(1.5))

    def test_derivative_with_respect_to_the_table(self) -> None:
        ctx = on_line(1)

        def loss(table: jax.Array) -> jax.Array:
            return lookup_program(ctx)(np.zeros(NUM_TOKENS, np.int32), table).sum()

        with pytest.raises(ValueError, match="no derivative with respect to table"):
            jax.grad(loss)(some_case(15).state.table)
