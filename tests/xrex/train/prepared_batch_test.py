from typing import Any

import numpy as np
import pytest

from tests.xrex.train import helpers
from xrex.train.prepared_batch import check_loss, prepare_batch

SETUP = helpers.toy_setup()
BATCH = helpers.toy_batch(0)


def test_padding_has_no_segment() -> None:
    arrays = prepare_batch(SETUP, BATCH).arrays
    segments = helpers.host_copy(arrays.segment_ids).reshape(BATCH.mask.shape)
    np.testing.assert_array_equal(segments == -1, ~BATCH.mask)


def test_segments_lead_to_the_ids() -> None:
    arrays = helpers.host_copy(prepare_batch(SETUP, BATCH).arrays)
    listed = arrays.segment_ids >= 0
    rows = arrays.unique_tokens[arrays.segment_ids[listed]]
    np.testing.assert_array_equal(rows, BATCH.ids.reshape(-1)[listed])


def test_prepared_batch_is_returned_as_it_is() -> None:
    prepared = prepare_batch(SETUP, BATCH)
    assert prepare_batch(SETUP, prepared) is prepared
    assert prepared.source is BATCH


def test_batch_lies_as_the_context_says() -> None:
    arrays = prepare_batch(SETUP, BATCH).arrays
    assert arrays.ids.sharding == arrays.segment_ids.sharding == SETUP.token_sharding()
    assert arrays.unique_tokens.sharding == SETUP.replicated()
    assert arrays.batch.push.sharding == SETUP.token_sharding()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ids": BATCH.ids.astype(np.float32)}, TypeError, "token ids are float32"),
        ({"mask": BATCH.ids}, TypeError, "the token mask is int32; it must be bool"),
        ({"mask": BATCH.mask[:, :2]}, ValueError, r"ids \[8, 3\] and mask \[8, 2\]"),
        ({"push": BATCH.push[:4]}, ValueError, r"batch.push has shape \[4, 3, 8\]"),
    ],
)
def test_malformed_batch_is_refused(changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_batch(SETUP, BATCH._replace(**changes))


def test_batch_of_another_size_is_refused() -> None:
    half = helpers.ToyBatch(*(array[:4] for array in BATCH))
    with pytest.raises(ValueError, match=r"has 12 tokens \[4, 3\]; .* tokens_per_batch=24"):
        prepare_batch(SETUP, half)


@pytest.mark.skipif(SETUP.ctx.group_size != 4, reason="needs 4 devices, no more")
def test_examples_that_do_not_divide_by_the_ranks_are_refused() -> None:
    shape = (3, 8)
    batch = helpers.ToyBatch(
        BATCH.ids.reshape(shape), BATCH.mask.reshape(shape), np.zeros((3, 1), np.float32)
    )
    with pytest.raises(ValueError, match="3 examples do not divide by 4 ranks"):
        prepare_batch(SETUP, batch)


def test_loss_without_aux_is_refused() -> None:
    setup = helpers.toy_setup(loss_fn=lambda _, rows, __: rows.sum())
    arrays = prepare_batch(setup, BATCH).arrays
    with pytest.raises(TypeError, match=r"it must return \(loss, aux\)"):
        check_loss(setup, helpers.toy_params(), arrays)


def test_loss_of_another_type_is_refused() -> None:
    setup = helpers.toy_setup(loss_fn=lambda _, rows, __: (rows.sum(), None))
    arrays = prepare_batch(setup, BATCH).arrays
    with pytest.raises(TypeError, match=r"bfloat16.*it must be a float32 scalar"):
        check_loss(setup, helpers.toy_params(), arrays)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1, 2]] * helpers.NUM_EXAMPLES, r"have shape \[\]; give arrays"),
        (np.zeros((0, 3), np.int32), "no examples"),
    ],
    ids=["lists", "empty"],
)
def test_ids_that_are_no_arrays_of_examples_are_refused(ids: Any, message: str) -> None:
    batch = helpers.toy_batch(0)._replace(ids=ids, mask=None)
    with pytest.raises(ValueError, match=message):
        prepare_batch(helpers.toy_setup(), batch)


def test_batch_may_be_written_to_once_it_is_prepared() -> None:
    batch = helpers.toy_batch(0)
    push = np.zeros(batch.push.size + 16, np.float32)
    # Where JAX would use host memory as it lies: at a multiple of 64 bytes.
    start = (-push.ctypes.data % 64) // 4
    aligned = push[start : start + batch.push.size].reshape(batch.push.shape)
    aligned[...] = batch.push
    prepared = prepare_batch(helpers.toy_setup(num_devices=1), batch._replace(push=aligned))
    aligned[...] = 777
    helpers.assert_same_bits(helpers.host_copy(prepared.arrays.batch.push), batch.push)
