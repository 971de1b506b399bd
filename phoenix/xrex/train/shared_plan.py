"""Which rows two neighbouring batches share, ready for the devices."""

from __future__ import annotations

import threading
from typing import NamedTuple

import jax
import numpy as np

from xrex.cuda.async_emb.id_groups import IdGroups, SharedRows, plan_shared_rows
from xrex.train.prepared_batch import PreparedBatch
from xrex.train.staleness import SharedCapacity
from xrex.train.train_state import TrainSetup, place

# Threads that prepare batches side by side get no further apart than this.
_RECENT_KEPT = 8
# Batches are prepared no further ahead of the step than this.
_PLANS_KEPT = 256


class _Ids(NamedTuple):
    """What a plan takes of a batch."""

    serial: int
    ids: np.ndarray
    groups: IdGroups


class SharedArrays(NamedTuple):
    """The plan for a step as global arrays. C shared rows, S tokens on each of R ranks.

    Attributes:
      tokens: int32 [R * S], local positions of each rank's tokens in shared rows; over the data
        axes, like the next two.
      segments: int32 [R * S], index into `rows` for each of these, -1 for padding.
      row_ids: int32 [R * (C + 1)], on every rank the shared rows and, to the end, at least one id
        outside the table.
      rows: int32 [C], shared rows, then V; replicated.
      rest_segments: int32 [N], segments of the step's other tokens, else -1; over the data axes.
      rest_unique: int32 [U], the step's rows with V in place of the shared ones; replicated.
      next_index: int32 [N], index into `rows` of the row that a token of the next step reads, or
        -1; over the data axes.
    """

    tokens: jax.Array
    segments: jax.Array
    row_ids: jax.Array
    rows: jax.Array
    rest_segments: jax.Array
    rest_unique: jax.Array
    next_index: jax.Array


class SharedPlan(NamedTuple):
    """How many rows and tokens a step shares with the next one; `arrays` is None if too many."""

    num_rows: int
    num_tokens: int
    arrays: SharedArrays | None


class SharedPlanner:
    """Makes the plans of neighbouring batches, ahead of the step where it is told of both."""

    def __init__(self, setup: TrainSetup, capacity: SharedCapacity) -> None:
        self._setup, self._capacity = setup, capacity
        self._lock = threading.Lock()
        # By the number in the order of preparation; guarded by _lock, as is _plans.
        self._recent: dict[int, _Ids] = {}
        self._plans: dict[tuple[int, int], SharedPlan] = {}

    def prepared(self, number: int, batch: PreparedBatch) -> None:
        """Makes the plans between this batch and its neighbours that were prepared before it.

        Args:
          number: its place in the order in which batches were begun to be prepared.
          batch: prepared in any thread, and perhaps after one that was begun later.
        """
        own = _Ids(batch.serial, batch.ids, batch.groups)
        with self._lock:
            before, after = self._recent.get(number - 1), self._recent.get(number + 1)
            self._recent[number] = own
            for old in [key for key in self._recent if key <= number - _RECENT_KEPT]:
                del self._recent[old]
        for current, following in ((before, own), (own, after)):
            if current is not None and following is not None:
                plan = self._make(current, following)
                with self._lock:
                    self._plans[current.serial, following.serial] = plan
                    self._drop_plans(own.serial - _PLANS_KEPT)

    def plan(self, current: PreparedBatch, following: PreparedBatch) -> SharedPlan:
        """The plan from a step's batch to the next one's. Much earlier ones are dropped."""
        with self._lock:
            known = self._plans.pop((current.serial, following.serial), None)
            self._drop_plans(current.serial - _RECENT_KEPT)
        return known or self._make(
            _Ids(current.serial, current.ids, current.groups),
            _Ids(following.serial, following.ids, following.groups),
        )

    def _drop_plans(self, oldest: int) -> None:
        """Drops plans of batches whose serial is below `oldest`; with `_lock`."""
        for old in [pair for pair in self._plans if pair[0] < oldest]:
            del self._plans[old]

    def clear(self) -> None:
        """Forgets all batches and plans."""
        with self._lock:
            self._recent.clear()
            self._plans.clear()

    def empty(self) -> SharedArrays:
        """The arrays of a plan that shares nothing."""
        setup, capacity = self._setup, self._capacity
        num_shared_tokens = capacity.tokens_per_rank * setup.ctx.group_size
        num_tokens, outside = setup.ctx.tokens_per_batch, setup.vocab_rows

        def full(size: int, value: int) -> np.ndarray:
            return np.full(size, value, np.int32)

        return self._place(
            SharedRows(
                num_rows=0,
                num_tokens=0,
                max_rank_tokens=0,
                fits=True,
                rows=full(capacity.rows, outside),
                tokens=full(num_shared_tokens, 0),
                segments=full(num_shared_tokens, -1),
                rest_unique=full(setup.ctx.num_unique, outside),
                rest_segments=full(num_tokens, -1),
                next_index=full(num_tokens, -1),
            )
        )

    def _make(self, current: _Ids, following: _Ids) -> SharedPlan:
        setup, capacity = self._setup, self._capacity
        shared = plan_shared_rows(
            current.groups,
            following.ids,
            setup.vocab_rows,
            num_ranks=setup.ctx.group_size,
            row_capacity=capacity.rows,
            token_capacity=capacity.tokens_per_rank,
            out_of_range=setup.ctx.options.out_of_range,
        )
        arrays = self._place(shared) if shared.fits else None
        return SharedPlan(shared.num_rows, shared.num_tokens, arrays)

    def _place(self, shared: SharedRows) -> SharedArrays:
        setup = self._setup
        tokens, replicated = setup.token_sharding(), setup.replicated()
        assert shared.rows is not None  # as all arrays of a plan that fits
        row_ids = np.append(shared.rows, np.int32(setup.vocab_rows))
        return SharedArrays(
            tokens=place(shared.tokens, tokens),
            segments=place(shared.segments, tokens),
            row_ids=place(np.tile(row_ids, setup.ctx.group_size), tokens),
            rows=place(shared.rows, replicated),
            rest_segments=place(shared.rest_segments, tokens),
            rest_unique=place(shared.rest_unique, replicated),
            next_index=place(shared.next_index, tokens),
        )
