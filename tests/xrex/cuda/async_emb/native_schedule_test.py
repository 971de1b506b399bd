"""Training with staleness 1 through the native calls against the schedule's oracle, bit for bit."""

import numpy as np
import pytest

from tests.xrex.cuda.async_emb.native_program import native_program
from tests.xrex.cuda.async_emb.native_schedule import (
    EMB_WIDTH,
    EPS,
    FLUSH_AFTER,
    NUM_SLOTS,
    NUM_STEPS,
    NUM_TOKENS,
    NativeSchedule,
    expected_outcomes,
    make_oracle,
    make_setting,
)
from tests.xrex.cuda.async_emb.numerics_cases import (
    EAGER,
    LAZY,
    assert_same_bits,
    assert_same_state,
    on_ranks,
)
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.reference import EagerDecay, LazyDecay, TableState


@on_ranks(1, 2, 4, 8)
@pytest.mark.parametrize("decay", [EAGER, LAZY])
def test_fifty_steps_with_a_flush_and_a_skipped_update(
    num_ranks: int, decay: EagerDecay | LazyDecay
) -> None:
    setting = make_setting()
    outcomes: dict[int, str] = {}
    oracle = make_oracle(setting, decay, outcomes)
    shape = (num_ranks, NUM_TOKENS, EMB_WIDTH, NUM_SLOTS)
    with native_program(*shape, decay, eps=EPS) as program:
        native = NativeSchedule(program, setting.state)
        for step in range(NUM_STEPS):
            batch, next_batch = setting.batches[step : step + 2]
            embeddings, norms = native.step(step, batch, next_batch, setting.noises[step])
            expected, applied = oracle.step(batch, next_batch)
            assert_same_bits(embeddings, expected)
            np.testing.assert_array_equal(norms, 0 if applied is None else applied.norm)
            if step + 1 in (FLUSH_AFTER, NUM_STEPS):
                native.flush()
                oracle.flush()
                on_host = TableState(*(np.asarray(x).copy() for x in native.state))
                assert_same_state(on_host, oracle.state)
        stats = async_emb.stats(program.ctx)
    assert outcomes == expected_outcomes()
    assert {rank.updates_skipped_non_finite for rank in stats.values()} == {1}
    assert {rank.updates_skipped_pending for rank in stats.values()} == {2}
