import copy
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings

from tests.xrex.cuda.async_emb.numerics_cases import (
    EAGER,
    LAZY,
    UpdateCase,
    any_bits,
    assert_same_bits,
    assert_same_state,
    bf16,
    invalid_cases,
    make_case,
    update_cases,
)
from xrex.cuda.async_emb.reference import (
    BFLOAT16,
    Batch,
    Bf16Array,
    EagerDecay,
    LazyDecay,
    ScheduleOracle,
    TableState,
    UpdateResult,
    exact_lookup,
    exact_row_stats,
    exact_segment_sums,
    exact_update,
)
from xrex.cuda.async_emb.reference_formula import FormulaResult, formula_update

BIG = 2.0**24  # adding 1 to it is lost in float32
I32 = np.iinfo(np.int32)
HYPER: dict[str, Any] = {"learning_rate": 0.05, "eps": 1e-8}
DETERMINISTIC = settings(derandomize=True, deadline=None, max_examples=40)


def exact(case: UpdateCase, decay: EagerDecay | LazyDecay, **overrides: Any) -> UpdateResult:
    return exact_update(*case, decay=decay, **(HYPER | overrides))


def formula(case: UpdateCase, decay: EagerDecay | LazyDecay, **overrides: Any) -> FormulaResult:
    return formula_update(*case, decay=decay, **(HYPER | overrides))


def tiny_case(grads: object, row: object = (1.0, 2.0), accumulator: float = 3.5) -> UpdateCase:
    """Two tokens of row 1 of three; last steps are 4, 1 and 2."""
    table = np.full((3, 2), 7.0)
    table[1] = row
    row_state = np.array([0.5, accumulator, 0.25], np.float32)
    state = TableState(bf16(table), row_state, np.array([4, 1, 2], np.int32))
    return UpdateCase(state, bf16(grads), np.array([0, 0], np.int32), np.array([1], np.int32))


class TestExactLookup:
    TABLE = bf16([[1, 2], [3, 4], [5, 6]])
    IDS = np.array([0, 2, -1, -3, 3, -4, I32.max, I32.min], np.int32)

    def test_ids_out_of_range_read_the_nearest_row(self) -> None:
        found = exact_lookup(self.IDS, self.TABLE, "clip")
        assert found[:, 0].tolist() == [1, 5, 5, 1, 5, 1, 5, 1]

    def test_ids_out_of_range_read_zeros_under_policy_zero(self) -> None:
        found = exact_lookup(self.IDS, self.TABLE, "zero")
        assert found.tolist() == [[1, 2], [5, 6], [5, 6], [1, 2], [0, 0], [0, 0], [0, 0], [0, 0]]

    def test_keeps_every_bit_pattern(self) -> None:
        table = np.arange(2**16, dtype=np.uint16).reshape(-1, 16).view(BFLOAT16)
        ids = np.arange(len(table), dtype=np.int32)[::-1]
        assert_same_bits(exact_lookup(ids, table), table[::-1])


class TestExactSums:
    def sum_of(self, *values: float) -> float:
        column = np.array(values, np.float32)[:, None]
        return float(exact_segment_sums(column, np.zeros(len(values), np.int32), 1)[0, 0])

    def test_a_run_is_summed_left_to_right(self) -> None:
        assert self.sum_of(BIG, 1, 1) == BIG
        assert self.sum_of(1, 1, BIG) == BIG + 2

    def test_a_run_ends_after_64_tokens(self) -> None:
        assert self.sum_of(BIG, *[1] * 63) == BIG
        assert self.sum_of(BIG, *[1] * 65) == BIG + 2

    def test_run_sums_are_summed_in_runs_of_64(self) -> None:
        one = [1] + [0] * 63
        # 66 run sums: the first 64 make BIG, and the last two 1 + 1 before they meet it.
        assert self.sum_of(BIG, *[0] * 4095, *one, *one) == BIG + 2

    def test_tokens_are_taken_in_ascending_order_whatever_their_segments(self) -> None:
        grads = np.array([[1], [BIG], [1], [1], [1], [BIG]], np.float32)
        sums = exact_segment_sums(grads, np.array([0, 1, 0, 1, 1, 0], np.int32), 2)
        assert sums.tolist() == [[BIG + 2], [BIG]]

    def test_segment_without_tokens_is_positive_zero(self) -> None:
        sums = exact_segment_sums(bf16([[1.0]]), np.array([2], np.int32), 4)
        assert_same_bits(sums, np.array([[0.0], [0.0], [1.0], [0.0]], np.float32))

    def test_segment_of_one_token_keeps_negative_zero(self) -> None:
        sums = exact_segment_sums(bf16([[-0.0]]), np.array([0], np.int32), 1)
        assert_same_bits(sums, np.array([[-0.0]], np.float32))

    def test_tokens_outside_all_segments_are_left_out(self) -> None:
        segment_ids = np.array([-1, 0, 2, I32.min], np.int32)
        sums = exact_segment_sums(bf16([[1], [2], [4], [8]]), segment_ids, 2)
        assert sums.tolist() == [[2], [0]]

    @pytest.mark.parametrize(
        ("columns", "num_ranks", "expected"),
        [
            ([4096, 1, 1], 1, BIG),  # one leaf of three columns
            ([1, 1, 4096], 1, BIG + 2),
            ([4096, 1, 1, 1], 1, BIG + 2),  # four leaves: (BIG + 1) + (1 + 1)
            ([4096, 1, 1, 1, 1, 0], 1, BIG + 2),  # two leaves of three columns
            ([4096, 1, 1], 3, BIG),  # ranks: (BIG + 1) + 1
            ([1, 1, 4096], 3, BIG + 2),
            ([4096, 0, 1, 0, 1, 0, 1, 0, 0, 0], 5, BIG + 2),  # ((BIG + 1) + (1 + 1)) + 0
            ([4096, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 3, BIG + 10),  # ((BIG+1)+2 + 4) + 4
        ],
    )
    def test_squares_are_summed_in_one_tree(
        self, columns: list[float], num_ranks: int, expected: float
    ) -> None:
        assert exact_row_stats(np.array([columns], np.float32), num_ranks).tolist() == [expected]

    @pytest.mark.parametrize("emb_width", [8, 24, 40, 56, 96, 800])
    def test_power_of_two_rank_counts_give_the_same_bits(self, emb_width: int) -> None:
        rows = np.random.default_rng(emb_width).standard_normal((50, emb_width)).astype(np.float32)
        for num_ranks in (2, 4, 8):
            assert_same_bits(exact_row_stats(rows, num_ranks), exact_row_stats(rows))


class TestUpdateByHand:
    """A = (3, 4), S = 25, S / W = 12.5; lr / (sqrt(a) + eps) = 0.5 / (4 + 4)."""

    GRADS = ((1, 0), (2, 4))
    HYPER: ClassVar[dict[str, Any]] = {"learning_rate": 0.5, "eps": 4.0}

    def assert_row_1(
        self, result: UpdateResult, row: list[float], accumulator: float, last_step: int = 1
    ) -> None:
        assert result.outcome == "applied"
        assert result.state.table.tolist() == [[7, 7], row, [7, 7]]
        assert result.state.row_state.tolist() == [0.5, accumulator, 0.25]
        assert result.state.last_step is not None
        assert result.state.last_step.tolist() == [4, last_step, 2]

    def test_no_decay(self) -> None:
        result = exact(tiny_case(self.GRADS), EagerDecay(), **self.HYPER)
        assert result.norm == 5
        self.assert_row_1(result, [1 - 0.1875, 2 - 0.25], 16)

    def test_eager_decay_scales_accumulator_and_weights_before_the_step(self) -> None:
        case = tiny_case(self.GRADS, accumulator=7)
        result = exact(case, EagerDecay(0.5, 0.25), **self.HYPER)
        self.assert_row_1(result, [0.25 - 0.1875, 0.5 - 0.25], 16)

    def test_lazy_decay_catches_up_on_two_steps(self) -> None:
        case = tiny_case(self.GRADS, accumulator=14)
        result = exact(case, LazyDecay(3, np.log(2), np.log(2) / 2), **self.HYPER)
        self.assert_row_1(result, [0.5 - 0.1875, 1 - 0.25], 16, last_step=3)

    def test_lazy_decay_takes_no_step_back(self) -> None:
        result = exact(tiny_case(self.GRADS), LazyDecay(-5, 1.0, 1.0), **self.HYPER)
        self.assert_row_1(result, [1 - 0.1875, 2 - 0.25], 16, last_step=-5)

    def test_lazy_delta_beyond_int32_does_not_overflow(self) -> None:
        case = tiny_case(self.GRADS, accumulator=16)
        assert case.state.last_step is not None
        case.state.last_step[1] = I32.min
        # 2^32 - 1 steps at a rate of 2^-32 ln 2 each.
        result = exact(case, LazyDecay(I32.max, np.log(2) * 2.0**-32), **self.HYPER)
        assert result.state.row_state[1] == 16 * 0.5 + 12.5

    def test_accumulator_averages_squares_and_not_the_square_of_the_mean(self) -> None:
        result = exact(tiny_case(((1, -1), (0, 0)), accumulator=0), EagerDecay(), **self.HYPER)
        assert result.state.row_state[1] == 1

    def test_eps_is_added_to_the_root(self) -> None:
        result = exact(tiny_case(((8, 0), (0, 0)), accumulator=4), EagerDecay(), **self.HYPER)
        assert result.state.table[1, 0] == bf16(1 - 8 * 0.5 / (36**0.5 + 4))

    def test_a_gradient_of_zero_decays_the_accumulator_and_not_the_weights(self) -> None:
        case = tiny_case(((1, 4), (-1, -4)), accumulator=8)
        self.assert_row_1(exact(case, EagerDecay(0.5, 0.5), **self.HYPER), [1, 2], 4)

    def test_a_gradient_of_zero_on_an_empty_accumulator_changes_nothing(self) -> None:
        case = tiny_case(((0, 0), (0, 0)), accumulator=0)
        self.assert_row_1(exact(case, EagerDecay(0.5, 0.5), eps=1e-10), [1, 2], 0)

    def test_a_gradient_of_zero_counts_as_a_lazy_step(self) -> None:
        case = tiny_case(((0, 0), (0, 0)), accumulator=4)
        self.assert_row_1(exact(case, LazyDecay(3, np.log(2), 1.0)), [1, 2], 1, last_step=3)

    def test_weights_and_changes_are_rounded_to_bfloat16_before_they_meet(self) -> None:
        # 257/256 rounds to 1 before 1/256 is added; without, the sum would be 129/128.
        case = tiny_case(((-1, 0), (0, 0)), row=(2, 0), accumulator=0.5)
        decay = EagerDecay(weight_decay_factor=257 / 512)
        result = exact(case, decay, learning_rate=1 / 256, eps=2.0**-40)
        assert result.state.table[1, 0] == 1

    def test_slots_outside_the_table_change_no_row_and_count_in_the_norm(self) -> None:
        case = tiny_case(((3, 0), (0, 4)))
        case = case._replace(
            segment_ids=np.array([0, 1], np.int32), unique_tokens=np.array([3, -4], np.int32)
        )
        result = exact(case, EagerDecay(0.5, 0.5))
        assert result.norm == 5
        assert result.outcome == "applied"
        assert_same_state(result.state, case.state)

    def test_negative_slots_count_from_the_end(self) -> None:
        case = tiny_case(self.GRADS)
        wrapped = case._replace(unique_tokens=np.array([-2], np.int32))
        assert_same_state(exact(wrapped, EAGER).state, exact(case, EAGER).state)

    def test_inputs_are_not_written_to(self) -> None:
        case = tiny_case(self.GRADS)
        before = copy.deepcopy(case.state)
        exact(case, LAZY)
        assert_same_state(case.state, before)


class TestSkippedSteps:
    CASE = make_case(np.random.default_rng(1), 40, 20, 6, 16)

    def assert_skipped(self, case: UpdateCase, outcome: str, **overrides: Any) -> UpdateResult:
        for decay in (EAGER, LAZY):
            result = exact(case, decay, **overrides)
            assert (result.outcome, result.valid) == (outcome, False)
            assert_same_state(result.state, case.state)
            assert not formula(case, decay, **overrides).valid
        return result

    def test_nothing_pending_still_has_a_norm(self) -> None:
        result = self.assert_skipped(self.CASE, "pending", pending=0)
        assert result.norm == exact(self.CASE, EAGER).norm

    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    def test_gradient_that_is_not_finite_shows_in_the_norm(self, value: float) -> None:
        grads = self.CASE.grads.copy()
        grads[np.flatnonzero(self.CASE.segment_ids >= 0)[-1], 2] = value
        result = self.assert_skipped(self.CASE._replace(grads=grads), "non_finite")
        np.testing.assert_equal(float(result.norm), abs(value))

    def test_norm_that_overflows(self) -> None:
        grads = self.CASE.grads.copy()
        grads[self.CASE.segment_ids >= 0] = 1e30
        assert self.assert_skipped(self.CASE._replace(grads=grads), "non_finite").norm == np.inf

    @pytest.mark.parametrize("rate", [np.inf, np.nan, 1e39])
    def test_learning_rate_that_is_not_finite_in_float32(self, rate: float) -> None:
        with np.errstate(over="ignore"):
            self.assert_skipped(self.CASE, "non_finite", learning_rate=rate)

    def test_gradient_that_is_left_out_may_be_anything(self) -> None:
        grads = self.CASE.grads.copy()
        grads[self.CASE.segment_ids < 0] = np.nan
        expected = exact(self.CASE, EAGER)
        assert_same_state(exact(self.CASE._replace(grads=grads), EAGER).state, expected.state)

    @pytest.mark.parametrize(
        "case", [pytest.param(case, id=name) for name, case in invalid_cases(CASE)]
    )
    def test_wrong_index(self, case: UpdateCase) -> None:
        self.assert_skipped(case, "invalid")

    def test_pending_is_named_before_invalid_and_invalid_before_non_finite(self) -> None:
        segment_ids = np.full(40, -2, np.int32)
        case = self.CASE._replace(segment_ids=segment_ids)
        self.assert_skipped(case, "pending", pending=0, learning_rate=np.nan)
        self.assert_skipped(case, "invalid", learning_rate=np.nan)

    def test_batch_of_padding_alone_changes_nothing_but_is_valid(self) -> None:
        case = self.CASE._replace(
            segment_ids=np.full(40, -1, np.int32), unique_tokens=np.full(16, 20, np.int32)
        )
        result = exact(case, LAZY)
        assert (result.outcome, float(result.norm)) == ("applied", 0)
        assert_same_state(result.state, case.state)


@pytest.mark.parametrize("decay", [EAGER, LAZY, EagerDecay(0.0), LazyDecay(9, 30.0, 5.0)])
class TestOraclesAgree:
    @DETERMINISTIC
    @given(case=update_cases())
    def test_exact_lies_within_the_bound_of_the_formula(
        self, decay: EagerDecay | LazyDecay, case: UpdateCase
    ) -> None:
        self.assert_within_bound(case, decay)

    @DETERMINISTIC
    @given(case=update_cases(num_ranks=8))
    def test_bits_are_equal_for_all_power_of_two_rank_counts(
        self, decay: EagerDecay | LazyDecay, case: UpdateCase
    ) -> None:
        one = exact(case, decay)
        for num_ranks in (2, 4, 8):
            several = exact(case, decay, num_ranks=num_ranks)
            assert_same_state(several.state, one.state)
            assert several.norm == one.norm

    def test_any_order_of_tokens_lies_within_the_bound(self, decay: EagerDecay | LazyDecay) -> None:
        rng = np.random.default_rng(5)
        case = make_case(rng, 2000, 30, 8, 25)
        expected = formula(case, decay)
        for _ in range(10):
            order = rng.permutation(case.num_tokens)
            shuffled = exact(
                case._replace(grads=case.grads[order], segment_ids=case.segment_ids[order]), decay
            )
            assert expected.table.contains(shuffled.state.table).all()
            assert expected.row_state.contains(shuffled.state.row_state).all()

    @pytest.mark.parametrize("eps", [1e-8, 1e-10])
    @pytest.mark.parametrize("accumulator", [0.0, 0.1])
    def test_eps_and_accumulator_of_common_size(
        self, decay: EagerDecay | LazyDecay, eps: float, accumulator: float
    ) -> None:
        case = make_case(np.random.default_rng(7), 200, 40, 5, 40)
        case.state.row_state[:] = accumulator
        self.assert_within_bound(case, decay, eps=eps)

    def test_subnormal_values(self, decay: EagerDecay | LazyDecay) -> None:
        rng = np.random.default_rng(8)
        case = make_case(rng, 200, 40, 5, 40)
        case = case._replace(grads=bf16(case.grads.astype(np.float32) * 1e-39))
        case.state.table[::2] = any_bits(rng, 20, 5).view(np.uint16) % 128
        self.assert_within_bound(case, decay)

    def assert_within_bound(
        self, case: UpdateCase, decay: EagerDecay | LazyDecay, **overrides: Any
    ) -> None:
        result, expected = exact(case, decay, **overrides), formula(case, decay, **overrides)
        assert result.valid
        assert expected.valid
        assert expected.table.contains(result.state.table).all()
        assert expected.row_state.contains(result.state.row_state).all()
        assert expected.norm.contains(result.norm)
        np.testing.assert_array_equal(expected.last_step, result.state.last_step)


class TestBoundIsSharp:
    """Each mistake that an implementation could make leaves the bound."""

    CASE = make_case(np.random.default_rng(3), 400, 60, 16, 60)
    EXPECTED = formula(CASE, EAGER)

    def test_nearly_every_weight_has_one_permitted_value(self) -> None:
        one_value = self.EXPECTED.table.low == self.EXPECTED.table.high
        assert one_value.mean() > 0.97

    def test_accumulators_are_bounded_to_a_few_units_in_the_last_place(self) -> None:
        low, high = self.EXPECTED.row_state.low, self.EXPECTED.row_state.high
        num_roundings = 15 + 4  # the sum of 16 squares; mean, decay and their sum
        assert np.median((high - low) / low) < 2.1 * num_roundings * 2.0**-24

    def test_eps_inside_the_root(self) -> None:
        eps = 0.01
        expected = formula(self.CASE, EAGER, eps=eps)
        inside = self.CASE.state._replace(row_state=self.CASE.state.row_state + eps / 0.875)
        wrong = exact(self.CASE._replace(state=inside), EAGER, eps=1e-20)
        assert not expected.table.contains(wrong.state.table).all()

    @pytest.mark.parametrize(
        "wrong_decay", [EAGER._replace(decay_factor=0.8751), EAGER._replace(weight_decay_factor=1)]
    )
    def test_other_decay(self, wrong_decay: EagerDecay) -> None:
        wrong = exact(self.CASE, wrong_decay).state
        assert not (
            self.EXPECTED.table.contains(wrong.table).all()
            and self.EXPECTED.row_state.contains(wrong.row_state).all()
        )

    def test_one_token_forgotten(self) -> None:
        segment_ids = self.CASE.segment_ids.copy()
        segment_ids[np.flatnonzero(segment_ids >= 0)[0]] = -1
        wrong = exact(self.CASE._replace(segment_ids=segment_ids), EAGER)
        assert not self.EXPECTED.norm.contains(wrong.norm)

    def test_gradient_sums_kept_in_float32(self) -> None:
        sums = exact_segment_sums(self.CASE.grads, self.CASE.segment_ids, self.CASE.num_slots)
        wrong_norm = np.sqrt(np.sum(np.square(sums)))
        assert not self.EXPECTED.norm.contains(wrong_norm)


class TestScheduleOracle:
    """Every update adds 1 to the table, so that embeddings tell how many they have seen."""

    BATCH = Batch(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))

    def oracle(self) -> ScheduleOracle:
        def add_one(state: TableState, grads: Bf16Array, batch: Batch, step: int) -> UpdateResult:
            del batch
            self.applied_steps.append(step)
            assert float(grads[0, 0]) == 100 + step
            table = bf16(state.table.astype(np.float32) + 1)
            return UpdateResult(state._replace(table=table), np.float32(1), True, "applied")

        def gradient(embeddings: Bf16Array, batch: Batch, step: int) -> Bf16Array:
            del batch
            return bf16(np.full(embeddings.shape, 100 + step))

        self.applied_steps: list[int] = []
        state = TableState(bf16([[0.0]]), np.zeros(1, np.float32))
        return ScheduleOracle(state, gradient, add_one)

    def run(self, oracle: ScheduleOracle, num_steps: int) -> list[float]:
        """Steps up to the end of the data; the updates that each step's rows have seen."""
        following = [self.BATCH] * (num_steps - 1) + [None]
        return [float(oracle.step(self.BATCH, batch)[0][0, 0]) for batch in following]

    def test_rows_have_seen_the_updates_of_all_steps_but_the_last_one(self) -> None:
        assert self.run(self.oracle(), 5) == [0, 0, 1, 2, 3]

    def test_gradients_are_applied_in_the_next_step_under_their_own_number(self) -> None:
        oracle = self.oracle()
        assert oracle.step(self.BATCH, self.BATCH)[1] is None
        assert self.applied_steps == []
        assert oracle.step(self.BATCH, self.BATCH)[1] is not None
        assert self.applied_steps == [0]

    @pytest.mark.parametrize("num_steps", [1, 2, 3])
    def test_flush_applies_what_waits_and_the_next_step_sees_everything(
        self, num_steps: int
    ) -> None:
        oracle = self.oracle()
        for _ in range(num_steps):
            oracle.step(self.BATCH, self.BATCH)
        assert oracle.flush() is not None
        assert self.applied_steps == list(range(num_steps))
        assert self.run(oracle, 3) == [num_steps, num_steps, num_steps + 1]

    def test_flush_with_nothing_waiting_does_nothing(self) -> None:
        oracle = self.oracle()
        assert oracle.flush() is None
        assert float(oracle.state.table[0, 0]) == 0

    def test_without_a_next_batch_the_step_after_looks_up_itself(self) -> None:
        oracle = self.oracle()
        assert self.run(oracle, 1) + self.run(oracle, 2) == [0, 0, 1]
