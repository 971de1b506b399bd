"""The native lookup and update against the oracles, bit for bit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xrex.cuda.async_emb.native_program import (
    NativeProgram,
    NativeUpdate,
    lookup_without_jax,
    native_program,
)
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
    update_cases,
)
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.reference import (
    BFLOAT16,
    EagerDecay,
    LazyDecay,
    UpdateResult,
    exact_lookup,
    exact_update,
)
from xrex.cuda.async_emb.reference_formula import formula_update

NUM_TOKENS, NUM_ROWS, EMB_WIDTH, NUM_SLOTS = 160, 90, 16, 70
DECAYS = pytest.mark.parametrize("decay", [EAGER, LAZY])
HYPER: dict[str, Any] = {"learning_rate": 0.05, "eps": 1e-8}
I32 = np.iinfo(np.int32)
SEEDS = st.integers(0, 2**32 - 1)


def reproducible(max_examples: int) -> settings:
    return settings(derandomize=True, deadline=None, max_examples=max_examples)


def exact(case: UpdateCase, decay: EagerDecay | LazyDecay, **overrides: Any) -> UpdateResult:
    return exact_update(*case, decay=decay, **(HYPER | overrides))


def small_program(num_ranks: int, decay: EagerDecay | LazyDecay = LAZY, **options: Any) -> Any:
    return native_program(num_ranks, NUM_TOKENS, EMB_WIDTH, NUM_SLOTS, decay, **options)


def small_case(seed: int) -> UpdateCase:
    return make_case(np.random.default_rng(seed), NUM_TOKENS, NUM_ROWS, EMB_WIDTH, NUM_SLOTS)


def assert_exact(found: NativeUpdate, expected: UpdateResult) -> None:
    """State, and on every rank norm and valid, are those of the oracle."""
    np.testing.assert_array_equal(found.valids, int(expected.valid))
    np.testing.assert_array_equal(found.norms, expected.norm)
    assert_same_state(found.state, expected.state)


class TestLookup:
    @on_ranks(1, 2, 4, 8)
    @pytest.mark.parametrize("out_of_range", ["clip", "zero"])
    def test_all_ids_and_all_bit_patterns(self, num_ranks: int, out_of_range: Any) -> None:
        rng = np.random.default_rng(num_ranks)
        with small_program(num_ranks, out_of_range=out_of_range) as program:
            for _ in range(5):
                table = any_bits(rng, NUM_ROWS, EMB_WIDTH)
                ids = make_batch(rng, NUM_TOKENS, NUM_ROWS, NUM_SLOTS).ids
                expected = exact_lookup(ids, table, out_of_range)
                assert_same_bits(program.lookup(ids, table), expected)

    @on_ranks(2)
    def test_every_bfloat16_keeps_its_bits(self, num_ranks: int) -> None:
        table = np.arange(2**16, dtype=np.uint16).reshape(-1, 16).view(BFLOAT16)
        ids = np.random.default_rng(0).permutation(len(table)).astype(np.int32)
        with native_program(num_ranks, len(ids), 16, 8, EAGER) as program:
            assert_same_bits(program.lookup(ids, table), exact_lookup(ids, table))

    @on_ranks(2)
    @pytest.mark.parametrize("out_of_range", ["clip", "zero"])
    def test_ids_at_the_ends_of_table_and_int32(self, num_ranks: int, out_of_range: Any) -> None:
        ends = [-1, 0, NUM_ROWS - 1, NUM_ROWS, -NUM_ROWS, -NUM_ROWS - 1, I32.min, I32.max]
        ids = np.tile(np.array(ends, np.int32), NUM_TOKENS // len(ends))
        table = any_bits(np.random.default_rng(1), NUM_ROWS, EMB_WIDTH)
        with small_program(num_ranks, out_of_range=out_of_range) as program:
            expected = exact_lookup(ids, table, out_of_range)
            assert_same_bits(program.lookup(ids, table), expected)
            stats = async_emb.stats(program.ctx)
        counts = [stats[rank].ids_out_of_range for rank in range(num_ranks)]
        assert counts == [NUM_TOKENS // num_ranks // 2] * num_ranks

    @on_ranks(4)
    def test_one_id_in_every_position(self, num_ranks: int) -> None:
        table = any_bits(np.random.default_rng(2), NUM_ROWS, EMB_WIDTH)
        ids = np.full(NUM_TOKENS, 37, np.int32)
        with small_program(num_ranks) as program:
            assert_same_bits(program.lookup(ids, table), exact_lookup(ids, table))

    @on_ranks(2)
    @reproducible(15)
    @given(seed=SEEDS, tokens=st.integers(1, 70), width=st.integers(1, 40), rows=st.integers(1, 99))
    def test_any_shape(self, num_ranks: int, seed: int, tokens: int, width: int, rows: int) -> None:
        rng = np.random.default_rng(seed)
        table = any_bits(rng, rows, num_ranks * width)
        ids = make_batch(rng, num_ranks * tokens, rows, 4).ids
        with native_program(num_ranks, len(ids), num_ranks * width, 4, EAGER) as program:
            assert_same_bits(program.lookup(ids, table), exact_lookup(ids, table))

    @pytest.mark.parametrize("shard_width", range(1, 65))
    def test_every_shard_width(self, shard_width: int) -> None:
        rng = np.random.default_rng(shard_width)
        table = any_bits(rng, 31, 2 * shard_width)
        ids = make_batch(rng, 18, 31, 1).ids
        shards = [np.ascontiguousarray(half) for half in np.split(table, 2, axis=1)]
        assert_same_bits(lookup_without_jax(ids, shards), exact_lookup(ids, table))

    def test_rows_behind_2_to_the_31_elements(self) -> None:
        # Fresh zeros take address space only; four rows become memory.
        num_rows, width = 2**27 + 3, 16
        table = np.zeros((num_rows, width), np.uint16).view(BFLOAT16)
        rows = np.array([num_rows - 1, 2**27, 2**26, 5], np.int32)
        table[rows] = any_bits(np.random.default_rng(3), 4, width)
        ids = np.array([num_rows - 1, 2**27, 2**26, 5, -1, num_rows], np.int32)
        assert_same_bits(lookup_without_jax(ids, [table]), exact_lookup(ids, table))


class TestUpdate:
    @on_ranks(1, 2, 4, 8)
    @DECAYS
    def test_bits_are_those_of_the_oracle_on_any_number_of_ranks(
        self, num_ranks: int, decay: EagerDecay | LazyDecay
    ) -> None:
        with small_program(num_ranks, decay) as program:
            for seed in range(5):
                case = small_case(seed)
                assert_exact(program.update(case), exact(case, decay))

    @on_ranks(2)
    @pytest.mark.parametrize(
        "shard_width",
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 100],
    )
    def test_any_shard_width(self, num_ranks: int, shard_width: int) -> None:
        rng = np.random.default_rng(shard_width)
        width = num_ranks * shard_width
        case = make_case(rng, NUM_TOKENS, NUM_ROWS, width, NUM_SLOTS)
        ids = make_batch(rng, NUM_TOKENS, NUM_ROWS, NUM_SLOTS).ids
        with native_program(num_ranks, NUM_TOKENS, width, NUM_SLOTS, LAZY) as program:
            found = program.lookup(ids, case.state.table)
            assert_same_bits(found, exact_lookup(ids, case.state.table))
            assert_exact(program.update(case), exact(case, LAZY))

    @on_ranks(3)
    @DECAYS
    def test_three_ranks(self, num_ranks: int, decay: EagerDecay | LazyDecay) -> None:
        case = make_case(np.random.default_rng(3), 90, 50, 36, 40)
        with native_program(num_ranks, 90, 36, 40, decay, any_world_size=True) as program:
            assert_exact(program.update(case), exact(case, decay, num_ranks=num_ranks))

    @on_ranks(2)
    @reproducible(25)
    @given(case=update_cases(num_ranks=2))
    def test_any_shape(self, num_ranks: int, case: UpdateCase) -> None:
        shape = (case.num_tokens, case.grads.shape[1], case.num_slots)
        with native_program(num_ranks, *shape, LAZY) as program:
            assert_exact(program.update(case), exact(case, LAZY))

    @on_ranks(4)
    @DECAYS
    def test_result_lies_within_the_bound_of_the_formula_when_order_is_free(
        self, num_ranks: int, decay: EagerDecay | LazyDecay
    ) -> None:
        with small_program(num_ranks, decay, deterministic=False) as program:
            for seed in range(5):
                case = small_case(seed)
                found = program.update(case)
                expected = formula_update(*case, **HYPER, decay=decay)
                assert found.valids.tolist() == [1] * num_ranks
                assert len(set(found.norms.tolist())) == 1
                assert expected.norm.contains(found.norms[0])
                assert expected.table.contains(found.state.table).all()
                assert expected.row_state.contains(found.state.row_state).all()
                np.testing.assert_array_equal(found.state.last_step, expected.last_step)

    @on_ranks(4)
    def test_one_id_in_every_position_gets_one_update(self, num_ranks: int) -> None:
        rng = np.random.default_rng(4)
        num_tokens = 64 * 70  # three levels of runs
        case = make_case(rng, num_tokens, NUM_ROWS, EMB_WIDTH, NUM_SLOTS)
        case.segment_ids[:] = 5
        case.unique_tokens[5] = NUM_ROWS - 1
        case.unique_tokens[:5] = NUM_ROWS
        case.unique_tokens[6:] = NUM_ROWS
        with native_program(num_ranks, num_tokens, EMB_WIDTH, NUM_SLOTS, LAZY) as program:
            for _ in range(3):
                assert_exact(program.update(case), exact(case, LAZY))

    @on_ranks(2)
    def test_subnormal_values_are_kept(self, num_ranks: int) -> None:
        rng = np.random.default_rng(5)
        case = small_case(5)
        case = case._replace(grads=bf16(case.grads.astype(np.float32) * 1e-39))
        case.state.table[::2] = any_bits(rng, NUM_ROWS // 2, EMB_WIDTH).view(np.uint16) % 128
        case.state.row_state[::3] = 1e-40
        with small_program(num_ranks, eps=1e-30) as program:
            assert_exact(program.update(case), exact(case, LAZY, eps=1e-30))

    @on_ranks(2)
    def test_infinities_nans_and_zeros_of_listed_rows_are_carried_on(self, num_ranks: int) -> None:
        case = small_case(6)
        case.state.table[:] = bf16(
            np.random.default_rng(6).choice([np.inf, -np.inf, np.nan, 0.0, -0.0], (NUM_ROWS, 16))
        )
        case.grads[::3] = -0.0
        with small_program(num_ranks) as program:
            assert_exact(program.update(case), exact(case, LAZY))

    @on_ranks(2)
    def test_rows_that_are_not_listed_keep_every_bit(self, num_ranks: int) -> None:
        case = small_case(7)
        others = np.setdiff1d(np.arange(NUM_ROWS), case.unique_tokens)
        case.state.table[others] = any_bits(np.random.default_rng(7), len(others), EMB_WIDTH)
        with small_program(num_ranks) as program:
            found = program.update(case).state
        assert_same_bits(found.table[others], case.state.table[others])
        assert_same_bits(found.row_state[others], case.state.row_state[others])

    @on_ranks(2)
    @DECAYS
    def test_slots_outside_the_table_update_no_row(
        self, num_ranks: int, decay: EagerDecay | LazyDecay
    ) -> None:
        case = small_case(8)
        outside = [NUM_ROWS, -NUM_ROWS - 1, I32.max, I32.min, NUM_ROWS]
        case.unique_tokens[-5:] = outside
        case.segment_ids[-5:] = np.arange(NUM_SLOTS - 5, NUM_SLOTS)
        with small_program(num_ranks, decay) as program:
            assert_exact(program.update(case), exact(case, decay))

    @on_ranks(2)
    def test_negative_slots_count_from_the_end(self, num_ranks: int) -> None:
        case = small_case(9)
        listed = case.unique_tokens < NUM_ROWS
        case.unique_tokens[listed & (case.unique_tokens % 2 == 0)] -= NUM_ROWS
        with small_program(num_ranks) as program:
            assert_exact(program.update(case), exact(case, LAZY))

    @on_ranks(2)
    @DECAYS
    @pytest.mark.parametrize("eps", [1e-8, 1e-10, 0.5])
    @pytest.mark.parametrize("accumulator", [0.0, 0.1])
    def test_eps_and_first_accumulator(
        self, num_ranks: int, decay: EagerDecay | LazyDecay, eps: float, accumulator: float
    ) -> None:
        case = small_case(10)
        case.state.row_state[:] = accumulator
        case.grads[::2] = 0
        with small_program(num_ranks, decay, eps=eps) as program:
            assert_exact(program.update(case), exact(case, decay, eps=eps))

    @on_ranks(2)
    @pytest.mark.parametrize("accumulator", [0.0, 0.1])
    @DECAYS
    def test_gradients_that_cancel_decay_no_weights(
        self, num_ranks: int, decay: EagerDecay | LazyDecay, accumulator: float
    ) -> None:
        case = small_case(11)
        case.state.row_state[:] = accumulator
        case.grads[1::2] = -case.grads[::2]
        case.segment_ids[1::2] = case.segment_ids[::2]
        with small_program(num_ranks, decay) as program:
            found = program.update(case)
        assert_exact(found, exact(case, decay))
        assert_same_bits(found.state.table, case.state.table)

    @on_ranks(2)
    @pytest.mark.parametrize(
        "decay",
        [
            EagerDecay(),
            EagerDecay(0.0, 1e-3),
            LazyDecay(9),
            LazyDecay(I32.max, 1e-9, 2e-9),
            LazyDecay(9, 30.0, 50.0),
            LazyDecay(-4, 1.0, 1.0),
        ],
    )
    def test_extreme_decays(self, num_ranks: int, decay: EagerDecay | LazyDecay) -> None:
        case = small_case(12)
        assert case.state.last_step is not None
        case.state.last_step[::5] = I32.min
        case.state.last_step[1::5] = I32.max
        with small_program(num_ranks, decay) as program:
            assert_exact(program.update(case), exact(case, decay))

    @on_ranks(2)
    def test_learning_rate_and_step_may_change_without_compiling_again(
        self, num_ranks: int
    ) -> None:
        case = small_case(13)
        with small_program(num_ranks) as program:
            program.update(case)
            compiled = program.num_compiled_updates
            for step, learning_rate in ((3, 0.5), (11, -0.0), (12, -1e-3)):
                found = program.update(case, step=step, learning_rate=learning_rate)
                decay = LAZY._replace(step=step)
                assert_exact(found, exact(case, decay, learning_rate=learning_rate))
            assert program.num_compiled_updates == compiled


class TestSkippedUpdates:
    """All ranks skip, nothing changes, the reason is counted, and the next update works."""

    @on_ranks(4)
    @DECAYS
    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    def test_gradient_of_one_rank_that_is_not_finite(
        self, num_ranks: int, decay: EagerDecay | LazyDecay, value: float
    ) -> None:
        case = small_case(14)
        grads = case.grads.copy()
        grads[np.flatnonzero(case.segment_ids >= 0)[-1], 3] = value
        with small_program(num_ranks, decay) as program:
            found = self.skip(program, case._replace(grads=grads), decay, "non_finite")
            np.testing.assert_array_equal(found.norms, abs(value))

    @on_ranks(2)
    @pytest.mark.parametrize("rate", [np.inf, np.nan])
    def test_learning_rate_that_is_not_finite(self, num_ranks: int, rate: float) -> None:
        with small_program(num_ranks) as program:
            self.skip(program, small_case(15), LAZY, "non_finite", learning_rate=rate)

    @on_ranks(2)
    def test_norm_that_overflows(self, num_ranks: int) -> None:
        case = small_case(16)
        case.grads[case.segment_ids >= 0] = 1e30
        with small_program(num_ranks) as program:
            self.skip(program, case, LAZY, "non_finite")

    @on_ranks(2)
    @DECAYS
    def test_nothing_pending(self, num_ranks: int, decay: EagerDecay | LazyDecay) -> None:
        with small_program(num_ranks, decay) as program:
            self.skip(program, small_case(17), decay, "pending", pending=0)

    @on_ranks(4)
    @pytest.mark.parametrize("index", range(5))
    @DECAYS
    def test_wrong_index(self, num_ranks: int, decay: EagerDecay | LazyDecay, index: int) -> None:
        name, case = list(invalid_cases(small_case(18)))[index]
        with small_program(num_ranks, decay, check_inputs=True) as program:
            self.skip(program, case, decay, "invalid")
            stats = async_emb.stats(program.ctx)
        wrong_segments = sum(rank.segments_invalid for rank in stats.values())
        duplicates = {rank.duplicate_slots for rank in stats.values()}
        assert (wrong_segments, duplicates) == ((1, {0}) if "segment" in name else (0, {1}))

    def skip(
        self,
        program: NativeProgram,
        case: UpdateCase,
        decay: EagerDecay | LazyDecay,
        outcome: str,
        **overrides: Any,
    ) -> NativeUpdate:
        found = program.update(case, **overrides)
        expected = exact(case, decay, **overrides)
        assert expected.outcome == outcome
        assert_exact(found, expected)
        assert_same_state(found.state, case.state)
        for rank in async_emb.stats(program.ctx).values():
            assert getattr(rank, f"updates_skipped_{outcome}") == 1
            np.testing.assert_equal(rank.last_norm, float(expected.norm))
        good = small_case(19)
        assert_exact(program.update(good), exact(good, decay))
        return found


class TestPadding:
    @on_ranks(4)
    @DECAYS
    def test_rank_without_data(self, num_ranks: int, decay: EagerDecay | LazyDecay) -> None:
        case = small_case(20)
        case.segment_ids[: NUM_TOKENS // num_ranks] = -1
        case.grads[: NUM_TOKENS // num_ranks] = np.nan
        with small_program(num_ranks, decay) as program:
            assert_exact(program.update(case), exact(case, decay))

    @on_ranks(4)
    @pytest.mark.parametrize("out_of_range", ["clip", "zero"])
    def test_all_ranks_without_data(self, num_ranks: int, out_of_range: Any) -> None:
        case = small_case(21)
        case.segment_ids[:] = -1
        case.unique_tokens[:] = NUM_ROWS
        ids = np.full(NUM_TOKENS, NUM_ROWS, np.int32)
        with small_program(num_ranks, out_of_range=out_of_range) as program:
            found = program.lookup(ids, case.state.table)
            assert_same_bits(found, exact_lookup(ids, case.state.table, out_of_range))
            result = program.update(case)
        assert (result.norms.tolist(), result.valids.tolist()) == ([0] * num_ranks, [1] * num_ranks)
        assert_same_state(result.state, case.state)
