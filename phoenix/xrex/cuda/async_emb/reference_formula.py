"""The formula oracle: rowwise Adagrad in float64, with the interval that float32 must stay in.

Written from the formulas alone; it shares no arithmetic with the exact oracle in `reference`.

Where the intervals come from. Let u = 2^-24 be the unit roundoff of float32.

1. One rounded operation gives x(1 + e) with |e| <= u while the result is normal, and is off by at
   most 2^-150 (half of the least subnormal) else. So an interval [l, h] of exact results becomes
   [l - u|l| - 2^-150, h + u|h| + 2^-150]. An exact zero stays zero.
2. n numbers x_i added in any order, with n - 1 rounded additions, give their sum up to
   g * sum|x_i|, g = (n - 1)u / (1 - (n - 1)u) (Higham, Accuracy and Stability of Numerical
   Algorithms, section 4.2); sums don't underflow. Adding zeros is exact, so where accumulators
   start doesn't matter.
3. When all x_i are multiples of one power of two q, and sum|x_i| <= 2^24 q, then every partial sum
   is representable, and the sum is exact in any order: gradients of like size add without error.
4. Rounding is monotone: an interval's image is that of its ends. Rounding to bfloat16 mostly takes
   both ends to one value, so the width of steps 1 and 2 vanishes instead of growing to one part
   in 2^8. The last sum, of two bfloat16 numbers, is rounded like this to float32 as well, since it
   alone sits on the ties of the rounding to bfloat16 as a rule.

XLA's arithmetic differs in two ways. It may take subnormals as zero: an interval that meets
(-2^-126, 2^-126) is extended to zero, and a sum errs by less than 2^-126 more per addition. Its
float32 exponential is allowed 4 units in the last place, and 2^-125 where the result underflows.

Fewer roundings than the contract has (a fused multiply-add, one division for a reciprocal and a
product) stay inside as well: step 1 widens to both sides of the exact result. Out of scope are
sums whose total is finite while partial sums overflow in some order.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xrex.cuda.async_emb.reference import (
    Bf16Array,
    EagerDecay,
    I32Array,
    LazyDecay,
    TableState,
)

type F64Array = NDArray[np.float64]
type Arithmetic = Literal["ieee", "xla"]

_UNIT = 2.0**-24 * (1 + 2.0**-20)  # the second factor covers the float64 roundings made here
_F32_MAX = float(np.finfo(np.float32).max)
_BF16_MAX = (2 - 2.0**-7) * 2.0**127
_LEAST_NORMAL = 2.0**-126


class Bounded(NamedTuple):
    """Values in float64, and the closed intervals in which float32 results must lie."""

    value: F64Array
    low: F64Array
    high: F64Array

    def contains(self, results: ArrayLike) -> NDArray[np.bool_]:
        """Which of the results, of any float dtype, lie in their intervals. NaN matches NaN."""
        found = np.asarray(results).astype(np.float64)
        inside = (found >= self.low) & (found <= self.high)
        return inside | (np.isnan(found) & np.isnan(self.value))


class FormulaResult(NamedTuple):
    """`formula_update`'s answer; `last_step` has no rounding and so no interval."""

    table: Bounded
    row_state: Bounded
    last_step: I32Array | None
    norm: Bounded
    valid: bool


class _F32Intervals:
    """Float32 arithmetic on intervals."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._is_xla = arithmetic == "xla"

    def given(self, values: ArrayLike) -> Bounded:
        exact = np.asarray(values).astype(np.float64)
        return self._representable(exact, exact, exact)

    def rounded(self, value: F64Array, low: F64Array, high: F64Array) -> Bounded:
        low = low - np.abs(low) * _UNIT - np.where(low != 0, 2.0**-150, 0)
        high = high + np.abs(high) * _UNIT + np.where(high != 0, 2.0**-150, 0)
        return self._representable(value, low, high)

    def _representable(self, value: F64Array, low: F64Array, high: F64Array) -> Bounded:
        """Applies float32's greatest and, where flushed, least magnitudes."""
        if self._is_xla:
            meets = (low < _LEAST_NORMAL) & (high > -_LEAST_NORMAL)
            low = np.where(meets, np.minimum(low, 0), low)
            high = np.where(meets, np.maximum(high, 0), high)
        return Bounded(*(np.where(np.abs(x) > _F32_MAX, x * np.inf, x) for x in (value, low, high)))

    def add(self, a: Bounded, b: Bounded) -> Bounded:
        return self.rounded(a.value + b.value, a.low + b.low, a.high + b.high)

    def mul(self, a: Bounded, b: Bounded) -> Bounded:
        corners = np.stack(
            np.broadcast_arrays(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)
        )
        return self.rounded(a.value * b.value, corners.min(axis=0), corners.max(axis=0))

    def square_of_bf16(self, a: Bounded) -> Bounded:
        """Squares numbers of 8 significant bits: exact in float32, but for underflow."""
        ends = np.abs(np.stack([a.low, a.high]))
        low = np.where((a.low <= 0) & (a.high >= 0), 0, ends.min(axis=0))
        squares = Bounded(a.value**2, low**2, ends.max(axis=0) ** 2)
        return self._representable(*(_nearest_f32(x) for x in squares))

    def reciprocal(self, a: Bounded) -> Bounded:
        return self.rounded(1 / a.value, 1 / a.high, 1 / a.low)

    def sqrt(self, a: Bounded) -> Bounded:
        return self.rounded(*(np.sqrt(np.maximum(x, 0)) for x in a))

    def exp(self, a: Bounded) -> Bounded:
        value, low, high = (np.exp(x) for x in a)
        if self._is_xla:
            low = np.maximum(low * (1 - 8 * _UNIT) - 2 * _LEAST_NORMAL, 0)
            high = high * (1 + 8 * _UNIT) + 2 * _LEAST_NORMAL
        return self.rounded(value, low, high)

    def add_bf16(self, a: Bounded, b: Bounded) -> Bounded:
        """Adds two bfloat16 numbers in float32 and rounds the sum to bfloat16."""
        exact = Bounded(a.value + b.value, a.low + b.low, a.high + b.high)
        return self.bf16(self._representable(*(_nearest_f32(x) for x in exact)))

    def sums(
        self, terms: Bounded, groups: NDArray[np.int64], num_groups: int, term_bits: int = 24
    ) -> Bounded:
        """Adds terms [n, ...] of at most `term_bits` significant bits into [num_groups, ...]."""
        order = np.argsort(groups, kind="stable")
        present, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)

        def reduce(values: F64Array, ufunc: np.ufunc = np.add) -> F64Array:
            out = np.zeros((num_groups, *values.shape[1:]))
            out[present] = ufunc.reduceat(values[order], starts, axis=0)
            return out

        sizes = np.sort(np.abs([terms.low, terms.high]), axis=0)
        quanta = _quantum(sizes[0], term_bits, -149)
        quanta = np.where(terms.low * terms.high > 0, quanta, np.where(sizes[1] > 0, 0, np.inf))
        size = reduce(sizes[1])
        exact = size <= 2.0**24 * reduce(quanta, np.minimum)
        additions = np.zeros((num_groups, *(1,) * (size.ndim - 1)))
        additions[present] = (counts - 1).reshape(-1, *additions.shape[1:])
        error = additions * _UNIT
        slack = np.where(exact, 0, error / (1 - error) * size)
        if self._is_xla:
            slack += np.where(size > 0, additions * _LEAST_NORMAL, 0)
        value, low, high = (reduce(x) for x in terms)
        return self._representable(value, low - slack, high + slack)

    def bf16(self, a: Bounded) -> Bounded:
        return self._representable(*(_nearest_bf16(x) for x in a))


def _quantum(values: F64Array, bits: int, least_exponent: int) -> F64Array:
    """Distance of neighbours at `values` among numbers of `bits` significant bits."""
    _, exponents = np.frexp(values)
    quanta: F64Array = np.ldexp(1.0, np.maximum(exponents - bits, least_exponent))
    return quanta


def _nearest_f32(values: F64Array) -> F64Array:
    quanta = _quantum(values, 24, -149)
    return np.where(np.isfinite(values), np.rint(values / quanta) * quanta, values)


def _nearest_bf16(values: F64Array) -> F64Array:
    """Rounds float64 to bfloat16 at once, ties to even."""
    quanta = _quantum(values, 8, -133)
    nearest = np.where(np.isfinite(values), np.rint(values / quanta) * quanta, values)
    return np.where(np.abs(nearest) > _BF16_MAX, nearest * np.inf, nearest)


def formula_update(
    state: TableState,
    grads: Bf16Array,
    segment_ids: I32Array,
    unique_tokens: I32Array,
    *,
    learning_rate: float,
    eps: float,
    decay: EagerDecay | LazyDecay,
    pending: int = 1,
    arithmetic: Arithmetic = "ieee",
) -> FormulaResult:
    """Rowwise Adagrad from its formulas, in float64 and in any order of sums.

    With k = unique_tokens[u], per slot u and column c:

      A = sum of grads of segment u;  G = bf16(A);  S = sum over c of G^2
      norm = sqrt(sum over u of S);  valid = norm and learning_rate finite, pending != 0
      a = row_state[k] * decay + S / W;  d = bf16(-learning_rate / (sqrt(a) + eps) * G)
      table[k, c] = bf16(bf16(table[k, c] * f) + d), where f is 1 if S = 0

    Args: as of `exact_update`, and
        arithmetic: "xla" widens the intervals by what XLA's arithmetic may do.
    """
    num_slots = len(unique_tokens)
    num_rows, emb_width = state.table.shape
    f32 = _F32Intervals(arithmetic)
    listed = [int(k) + num_rows if k < 0 else int(k) for k in unique_tokens]
    slots = [u for u, k in enumerate(listed) if 0 <= k < num_rows]
    rows = np.array([listed[u] for u in slots], np.int64)
    well_formed = len(set(rows.tolist())) == len(rows) and all(
        -1 <= u < num_slots for u in segment_ids.tolist()
    )

    with np.errstate(all="ignore"):
        gradient, stats, norm = _formula_gradient(f32, grads, segment_ids, num_slots)
        finite = np.isfinite(norm.value) and np.isfinite(np.float32(learning_rate))
        valid = bool(well_formed and pending and finite)
        table, row_state = _unrounded(state.table), _unrounded(state.row_state)
        if not valid:
            return FormulaResult(table, row_state, state.last_step, norm, valid)

        gradient, stats = (Bounded(*(x[slots] for x in b)) for b in (gradient, stats))
        accum_factor, weight_factor = _formula_decay(f32, state, rows, decay)
        mean_square = f32.mul(stats, f32.reciprocal(f32.given(np.float64(emb_width))))
        accum = f32.add(f32.mul(f32.given(state.row_state[rows]), accum_factor), mean_square)
        root = f32.add(f32.sqrt(accum), f32.given(np.float32(eps)))
        scale = f32.mul(f32.given(-np.float32(learning_rate)), f32.reciprocal(root))
        change = f32.bf16(f32.mul(_as_column(scale), gradient))
        factor = Bounded(
            np.where(stats.value > 0, weight_factor.value, 1),
            np.where(stats.high > 0, weight_factor.low, 1),
            np.where(stats.low > 0, weight_factor.high, 1),
        )
        decayed = f32.bf16(f32.mul(f32.given(state.table[rows]), _as_column(factor)))
        new_rows = f32.add_bf16(decayed, change)

    for old, new in zip((*table, *row_state), (*new_rows, *accum), strict=True):
        old[rows] = new
    last_step = state.last_step
    if isinstance(decay, LazyDecay) and last_step is not None:
        last_step = last_step.copy()
        last_step[rows] = decay.step
    return FormulaResult(table, row_state, last_step, norm, valid)


def _formula_gradient(
    f32: _F32Intervals, grads: Bf16Array, segment_ids: I32Array, num_slots: int
) -> tuple[Bounded, Bounded, Bounded]:
    """G [U, W], S [U] and the norm []."""
    tokens = np.isin(segment_ids, np.arange(num_slots))
    groups = segment_ids[tokens].astype(np.int64)
    gradient = f32.bf16(f32.sums(f32.given(grads[tokens]), groups, num_slots, term_bits=8))
    columns = Bounded(*(x.T for x in f32.square_of_bf16(gradient)))
    one_group = f32.sums(columns, np.zeros(len(columns.value), np.int64), 1)
    stats = Bounded(*(x[0] for x in one_group))
    whole = f32.sums(stats, np.zeros(num_slots, np.int64), 1)
    return gradient, stats, Bounded(*(x[0] for x in f32.sqrt(whole)))


def _unrounded(values: ArrayLike) -> Bounded:
    return Bounded(*(np.asarray(values).astype(np.float64) for _ in range(3)))


def _as_column(values: Bounded) -> Bounded:
    return Bounded(*(x[:, None] for x in values))


def _formula_decay(
    f32: _F32Intervals, state: TableState, rows: NDArray[np.int64], decay: EagerDecay | LazyDecay
) -> tuple[Bounded, Bounded]:
    if isinstance(decay, EagerDecay):
        factors = (np.full(rows.shape, np.float32(x)) for x in decay)
        accum_factor, weight_factor = (f32.given(x) for x in factors)
        return accum_factor, weight_factor
    assert state.last_step is not None
    missed = [float(max(0, decay.step - int(last))) for last in state.last_step[rows]]
    elapsed = f32.rounded(*_unrounded(missed))
    rates = (f32.given(-np.float32(x)) for x in (decay.accum_decay_rate, decay.weight_decay_rate))
    accum_factor, weight_factor = (f32.exp(f32.mul(x, elapsed)) for x in rates)
    return accum_factor, weight_factor
