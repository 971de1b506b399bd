"""The exact oracle: what lookup and update must compute, bit for bit, in NumPy alone.

Every float32 operation is taken in the contract's order, so results may be compared as bits.
`reference_formula` reads the same formulas a second time, in float64 and without an order.
Both see the global arrays: the whole table [V, W] and the tokens of all ranks, rank after rank.

Letters: N tokens of the global batch, V table rows, W columns, U slots of `unique_tokens`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from xrex.cuda.async_emb.options import OutOfRange

type Bf16Array = NDArray[Any]  # ml_dtypes.bfloat16, which numpy's stubs don't know
type F32Array = NDArray[np.float32]
type I32Array = NDArray[np.int32]
type Outcome = Literal["applied", "pending", "invalid", "non_finite"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_RUN_LENGTH = 64


class TableState(NamedTuple):
    """What an update changes.

    Attributes:
        table: bf16 [V, W].
        row_state: f32 [V], rowwise Adagrad's accumulator.
        last_step: i32 [V], the step that touched a row last; None for the eager form.
    """

    table: Bf16Array
    row_state: F32Array
    last_step: I32Array | None = None


class EagerDecay(NamedTuple):
    """Decay of the rows that a step touches, as factors of one step. 1 is no decay."""

    decay_factor: float = 1.0
    weight_decay_factor: float = 1.0


class LazyDecay(NamedTuple):
    """Decay that catches up on the steps since a row was touched last, as rates per step."""

    step: int
    accum_decay_rate: float = 0.0
    weight_decay_rate: float = 0.0


class UpdateResult(NamedTuple):
    """The state after an update, its gradient norm, and why it was or wasn't applied.

    `norm` is given for skipped steps too. Of several reasons to skip the first counts:
    pending, invalid (segments or duplicate slots), non_finite.
    """

    state: TableState
    norm: np.float32
    valid: bool
    outcome: Outcome


def exact_lookup(ids: I32Array, table: Bf16Array, out_of_range: OutOfRange = "clip") -> Bf16Array:
    """Rows of `table` as JAX's indexing reads them, bit for bit.

    Args:
        ids: [N] int32 or int64. Negative ids count from the end once.
        table: bf16 [V, W].
        out_of_range: what an id outside the table reads: the nearest row, or zeros.

    Returns:
        bf16 [N, W].
    """
    num_rows = table.shape[0]
    rows, in_range = _wrap_ids(ids, num_rows)
    bits = table.view(np.uint16)[np.clip(rows, 0, num_rows - 1)]
    if out_of_range == "zero":
        bits[~in_range] = 0
    return bits.view(BFLOAT16)


def exact_segment_sums(
    grads: Bf16Array | F32Array, segment_ids: I32Array, num_segments: int
) -> F32Array:
    """A[u, c]: sums the gradients of each segment in ascending token order, in runs of 64.

    Each run is summed left to right; the sums of a segment's runs are summed by the same rule until
    one is left. An empty segment gives +0.

    Args:
        grads: [N, W].
        segment_ids: [N]; tokens outside [0, num_segments) are left out.
        num_segments: U.

    Returns:
        f32 [U, W].
    """
    taken = np.flatnonzero((segment_ids >= 0) & (segment_ids < num_segments))
    segments = segment_ids[taken]
    order = taken[np.argsort(segments, kind="stable")]
    lengths = np.bincount(segments, minlength=num_segments)
    values = grads[order].astype(np.float32)
    with np.errstate(all="ignore"):
        while lengths.max(initial=0) > 1:
            values, lengths = _sum_runs(values, lengths)
    sums = np.zeros((num_segments, grads.shape[1]), np.float32)
    sums[lengths > 0] = values
    return sums


def exact_row_stats(row_grads: F32Array, num_ranks: int = 1) -> F32Array:
    """S[u]: sums the squares of all columns in one fixed tree, inside and across ranks.

    A rank's w = q * 2^m columns (q odd) make 2^m leaves of q columns summed left to right; leaves,
    and then ranks, are added in pairs of neighbours. An odd last rank is carried up unchanged.

    Args:
        row_grads: f32 [U, W], the segment sums after their rounding to bfloat16.
        num_ranks: number of column shards, a divisor of W.

    Returns:
        f32 [U].
    """
    num_slots, emb_width = row_grads.shape
    shard_width = emb_width // num_ranks
    num_leaves = shard_width & -shard_width
    with np.errstate(all="ignore"):
        squares = row_grads * row_grads
        leaves = squares.reshape(num_slots, num_ranks, num_leaves, shard_width // num_leaves)
        sums = leaves[..., 0].copy()
        for column in range(1, leaves.shape[-1]):
            sums += leaves[..., column]
        return _pair_tree(_pair_tree(sums))


def exact_update(
    state: TableState,
    grads: Bf16Array,
    segment_ids: I32Array,
    unique_tokens: I32Array,
    *,
    learning_rate: float,
    eps: float,
    decay: EagerDecay | LazyDecay,
    pending: int = 1,
    num_ranks: int = 1,
) -> UpdateResult:
    """Rowwise Adagrad in the deterministic order, bit for bit. The inputs stay as they are.

    Args:
        state: before the update; `last_step` is needed by, and only by, `LazyDecay`.
        grads: bf16 [N, W].
        segment_ids: i32 [N], slot of each token; -1 leaves a token out, any other index outside
            [0, U) makes the step invalid.
        unique_tokens: i32 [U]; negative ids count from the end once. Slots inside the table must be
            distinct, or the step is invalid; slots outside change no row.
        learning_rate: rounded to float32; not finite skips the step.
        eps: added to the root of the accumulator.
        decay: eager factors or lazy rates.
        pending: 0 skips the step.
        num_ranks: number of column shards. Any power of two gives the same bits.
    """
    num_slots = unique_tokens.shape[0]
    num_rows, emb_width = state.table.shape
    rows, used = _wrap_ids(unique_tokens, num_rows)
    row_grads = _via_bf16(exact_segment_sums(grads, segment_ids, num_slots))
    stats = exact_row_stats(row_grads, num_ranks)
    with np.errstate(all="ignore"):
        norm = np.sqrt(_sum_all(stats))
    rate = np.float32(learning_rate)

    if not pending:
        return UpdateResult(state, norm, False, "pending")
    if np.any((segment_ids < -1) | (segment_ids >= num_slots)) or _has_duplicates(rows[used]):
        return UpdateResult(state, norm, False, "invalid")
    if not (np.isfinite(norm) and np.isfinite(rate)):
        return UpdateResult(state, norm, False, "non_finite")

    rows, row_grads, stats = rows[used], row_grads[used], stats[used]
    accum_factor, weight_factor = _decay_factors(state, rows, decay)
    with np.errstate(all="ignore"):
        mean_square = stats * (np.float32(1) / np.float32(emb_width))
        accum = state.row_state[rows] * accum_factor + mean_square
        scale = -rate * (np.float32(1) / (np.sqrt(accum) + np.float32(eps)))
        change = _via_bf16(scale[:, None] * row_grads)
        factor = np.where(stats > 0, weight_factor, np.float32(1))
        decayed = _via_bf16(state.table[rows].astype(np.float32) * factor[:, None])
        new_rows = (decayed + change).astype(BFLOAT16)

    table, row_state, last_step = state.table.copy(), state.row_state.copy(), state.last_step
    table[rows] = new_rows
    row_state[rows] = accum
    if isinstance(decay, LazyDecay) and last_step is not None:
        last_step = last_step.copy()
        last_step[rows] = decay.step
    return UpdateResult(TableState(table, row_state, last_step), norm, True, "applied")


def _wrap_ids(ids: I32Array, num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Ids after negative ones were counted from the end once, and which lie in the table."""
    wide = ids.astype(np.int64)
    rows = np.where(wide < 0, wide + num_rows, wide)
    return rows, (rows >= 0) & (rows < num_rows)


def _has_duplicates(rows: NDArray[np.int64]) -> bool:
    return np.unique(rows).size != rows.size


def _via_bf16(values: F32Array) -> F32Array:
    return values.astype(BFLOAT16).astype(np.float32)


def _decay_factors(
    state: TableState, rows: NDArray[np.int64], decay: EagerDecay | LazyDecay
) -> tuple[F32Array, F32Array]:
    """Per row: the factor of the accumulator, and that of the weights where S > 0."""
    if isinstance(decay, EagerDecay):
        ones = np.ones(rows.shape, np.float32)
        return ones * np.float32(decay.decay_factor), ones * np.float32(decay.weight_decay_factor)
    if state.last_step is None:
        raise ValueError("lazy decay needs last_step, but the state has None")
    missed = np.maximum(0, np.int64(decay.step) - state.last_step[rows].astype(np.int64))
    elapsed = missed.astype(np.float32)

    def factor(rate: float) -> F32Array:
        exponent = -np.float32(rate) * elapsed
        return np.exp(exponent.astype(np.float64)).astype(np.float32)

    with np.errstate(all="ignore"):
        return factor(decay.accum_decay_rate), factor(decay.weight_decay_rate)


def _sum_runs(values: F32Array, lengths: NDArray[np.int64]) -> tuple[F32Array, NDArray[np.int64]]:
    """One level of the runs-of-64 rule.

    Args:
        values: [sum(lengths), W], segment after segment.
        lengths: values of each segment.

    Returns:
        The sums of the runs in the same layout, and the number of runs of each segment.
    """
    num_runs = -(-lengths // _RUN_LENGTH)
    segment_of_run = np.repeat(np.arange(lengths.size), num_runs)
    first_run = np.cumsum(num_runs) - num_runs
    skipped = (np.arange(segment_of_run.size) - first_run[segment_of_run]) * _RUN_LENGTH
    starts = (np.cumsum(lengths) - lengths)[segment_of_run] + skipped
    run_lengths = np.minimum(_RUN_LENGTH, lengths[segment_of_run] - skipped)

    sums = values[starts]
    longest_first = np.argsort(-run_lengths, kind="stable")
    for position in range(1, int(run_lengths.max())):
        reaching = longest_first[: np.count_nonzero(run_lengths > position)]
        sums[reaching] += values[starts[reaching] + position]
    return sums, num_runs


def _sum_all(values: F32Array) -> np.float32:
    """Sum of [n] values by the runs-of-64 rule."""
    one_segment = np.zeros(values.shape, np.int32)
    return np.float32(exact_segment_sums(values[:, None], one_segment, 1)[0, 0])


def _pair_tree(values: F32Array) -> F32Array:
    """Adds the last axis up in pairs of neighbours; an odd last value is carried unchanged."""
    while (count := values.shape[-1]) > 1:
        pairs = values[..., 0 : count - 1 : 2] + values[..., 1::2]
        values = np.concatenate([pairs, values[..., count - count % 2 :]], axis=-1)
    root: F32Array = values[..., 0]
    return root


class Batch(NamedTuple):
    """Inputs of one step: ids i32 [N], segment_ids i32 [N] and unique_tokens i32 [U]."""

    ids: I32Array
    segment_ids: I32Array
    unique_tokens: I32Array


type GradientFn = Callable[[Bf16Array, Batch, int], Bf16Array]
type UpdateFn = Callable[[TableState, Bf16Array, Batch, int], UpdateResult]


class ScheduleOracle:
    """Training with staleness 1: a step's gradients are applied during the next step.

    Step t uses rows that have seen the updates of steps up to t - 2, since they were read before
    step t - 1's gradients existed. The first step, also after `flush`, reads its own batch itself
    and so sees every update.

    Args:
        state: the state to start from; it isn't written to.
        gradient_fn: (embeddings bf16 [N, W], batch, step) -> gradients bf16 [N, W].
        update_fn: (state, gradients, batch, step) -> result; batch and step are those that the
            gradients come from, not those of the step in which they are applied.
        first_step: number of the first step.
        out_of_range: what lookups of ids outside the table give.
    """

    def __init__(
        self,
        state: TableState,
        gradient_fn: GradientFn,
        update_fn: UpdateFn,
        *,
        first_step: int = 0,
        out_of_range: OutOfRange = "clip",
    ) -> None:
        self.state = state
        self.next_step = first_step
        self._gradient_fn = gradient_fn
        self._update_fn = update_fn
        self._out_of_range = out_of_range
        self._armed: Bf16Array | None = None
        self._deferred: tuple[Bf16Array, Batch, int] | None = None

    def step(
        self, batch: Batch, next_batch: Batch | None = None
    ) -> tuple[Bf16Array, UpdateResult | None]:
        """One step; looks `next_batch` up in advance, if there is one.

        Returns:
            The embeddings bf16 [N, W] that the step used, and the result of the update that ran
            beside it (None when there was none to apply).
        """
        embeddings = self._lookup(batch) if self._armed is None else self._armed
        applied = self._apply_deferred()
        self._armed = None if next_batch is None else self._lookup(next_batch)
        grads = self._gradient_fn(embeddings, batch, self.next_step)
        self._deferred = (grads, batch, self.next_step)
        self.next_step += 1
        return embeddings, applied

    def flush(self) -> UpdateResult | None:
        """Drops the lookup in advance and applies the gradients that wait."""
        self._armed = None
        return self._apply_deferred()

    def _lookup(self, batch: Batch) -> Bf16Array:
        return exact_lookup(batch.ids, self.state.table, self._out_of_range)

    def _apply_deferred(self) -> UpdateResult | None:
        if self._deferred is None:
            return None
        grads, batch, step = self._deferred
        self._deferred = None
        result = self._update_fn(self.state, grads, batch, step)
        self.state = result.state
        return result
