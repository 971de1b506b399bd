"""Batches whose ids are a pytree of features, through the training step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.xrex.train import helpers
from xrex.train.batches import look_ahead
from xrex.train.prepared_batch import prepare_batch
from xrex.train.staleness import MODES
from xrex.train.train_state import TrainSetup
from xrex.train.train_step import TrainStep

ALL_MODES = pytest.mark.parametrize("mode", MODES)


class FeatureBatch(NamedTuple):
    """ids int [B], [B, F] and [B, F1, F2] by name, and a mask like them or None."""

    ids: dict[str, np.ndarray]
    mask: dict[str, np.ndarray] | None


def feature_batch(seed: int, *, mask: bool = True) -> FeatureBatch:
    """24 tokens, as a toy batch has."""
    rng = np.random.default_rng(seed)
    examples = helpers.NUM_EXAMPLES

    def ids(*shape: int) -> np.ndarray:
        return rng.integers(0, helpers.VOCAB_ROWS, (examples, *shape))

    features = {
        "user": ids().astype(np.uint64),
        "item": ids(1).astype(np.int32),
        "history": ids(1, 1).astype(np.int16),
    }
    masks = jax.tree.map(lambda x: rng.random(x.shape) < 0.8, features)
    return FeatureBatch(features, masks if mask else None)


def feature_loss(params: Any, embeddings: Any, batch: FeatureBatch) -> Any:
    """The gradient of a token is mask * its row."""
    mask = batch.mask
    if mask is None:
        mask = jax.tree.map(lambda x: jnp.ones(x.shape, bool), batch.ids)
    rows = jax.tree.map(lambda x: x.astype(jnp.float32), embeddings)
    terms = jax.tree.map(lambda x, kept: jnp.sum(0.5 * x * x * kept[..., None]), rows, mask)
    return sum(jax.tree.leaves(terms)) + params["bias"], embeddings


def setup_of(**changes: Any) -> TrainSetup:
    return helpers.toy_setup(**({"loss_fn": feature_loss} | changes))


def joined(batch: FeatureBatch) -> helpers.ToyBatch:
    """The same batch with one array of ids, in the order of the pytree."""

    def join(features: Any) -> np.ndarray:
        leaves = [x.reshape(len(x), -1) for x in jax.tree.leaves(features)]
        return np.concatenate([x.astype(leaf_type(x)) for x in leaves], axis=1)

    def leaf_type(leaf: np.ndarray) -> Any:
        return bool if leaf.dtype == bool else np.int32

    ids = join(batch.ids)
    mask = np.ones(ids.shape, bool) if batch.mask is None else join(batch.mask)
    return helpers.ToyBatch(ids, mask, np.zeros((*ids.shape, helpers.EMB_WIDTH), np.float32))


@pytest.mark.parametrize("mask", [True, False])
def test_embeddings_come_back_as_the_pytree_of_the_ids(mask: bool) -> None:
    batch = feature_batch(0, mask=mask)
    table = helpers.toy_table()
    with TrainStep(setup_of()) as step:
        state = step.init(helpers.toy_params(), table)
        _, rows = step.lookup(state, batch)
        rows = helpers.host_copy(rows)
    helpers.assert_same_states(rows, jax.tree.map(lambda ids: table[ids], batch.ids))


@ALL_MODES
@pytest.mark.parametrize("mask", [True, False])
def test_features_train_the_rows_that_one_array_of_their_ids_trains(mode: str, mask: bool) -> None:
    batches = [feature_batch(seed, mask=mask) for seed in range(4)]
    tables = []
    for loss_fn, data in (
        (feature_loss, batches),
        (helpers.toy_loss, [joined(batch) for batch in batches]),
    ):
        with TrainStep(setup_of(loss_fn=loss_fn), mode) as step:
            state = step.init(helpers.toy_params(), helpers.toy_table())
            for batch, next_batch in look_ahead(data):
                state, _ = step.step(state, batch, next_batch)
            tables.append(helpers.host_copy(step.flush(state)[3:]))
    helpers.assert_same_states(*tables)


def with_ids(**features: np.ndarray) -> FeatureBatch:
    batch = feature_batch(0)
    return batch._replace(ids=batch.ids | features)


def with_mask(**features: np.ndarray) -> FeatureBatch:
    batch = feature_batch(0)
    return batch._replace(mask=(batch.mask or {}) | features)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            with_ids(item=np.zeros((8, 1), np.float32)),
            TypeError,
            r"token ids\['item'\] are float32; they must be integers",
        ),
        (
            with_ids(user=np.zeros(9, np.int32)),
            ValueError,
            r"token ids\['user'\] have shape \[9\]; the first dimension",
        ),
        (with_ids(user=np.int32(1)), ValueError, r"token ids\['user'\] have shape \[\]"),
        (
            with_mask(more=np.zeros(8, bool)),
            ValueError,
            "both must have one structure",
        ),
        (
            with_mask(item=np.zeros(8, bool)),
            ValueError,
            r"token ids \[8, 1\] and mask \[8\] must have one shape",
        ),
        (
            with_mask(item=np.zeros((8, 1), np.int32)),
            TypeError,
            "the token mask is int32; it must be bool",
        ),
        (FeatureBatch({}, None), ValueError, "the batch has no id features"),
    ],
    ids=["type", "examples", "scalar", "structure", "shape", "mask_type", "nothing"],
)
def test_malformed_features_are_refused(batch: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_batch(setup_of(), batch)


def test_ids_that_no_signed_type_holds_are_outside_the_table() -> None:
    batch = with_ids(user=np.full(8, 2**64 - 1, np.uint64))
    segments = helpers.host_copy(prepare_batch(setup_of(), batch).arrays.segment_ids)
    # In the order of the pytree: history, item, user.
    assert (segments.reshape(8, 3)[:, 2] == -1).all()
    assert (segments.reshape(8, 3)[:, :2] >= 0).any()


def test_refused_id_is_named_with_its_place_and_their_number() -> None:
    batch = feature_batch(0, mask=False)
    item = batch.ids["item"].copy()
    item[2, 0], item[5, 0] = helpers.VOCAB_ROWS, -helpers.VOCAB_ROWS - 1
    bad = batch._replace(ids=batch.ids | {"item": item})
    message = (
        r"2 ids of the batch are outside the table of 40 rows, the first at example 2, token 1: 40"
    )
    with pytest.raises(ValueError, match=message):
        prepare_batch(setup_of(refuse_out_of_range=True), bad)


def test_negative_ids_that_wrap_into_the_table_are_not_refused() -> None:
    batch = feature_batch(0, mask=False)
    ids = batch.ids | {"item": np.full((8, 1), -helpers.VOCAB_ROWS)}
    groups = prepare_batch(setup_of(refuse_out_of_range=True), batch._replace(ids=ids)).groups
    assert groups.num_out_of_range == 0


def test_masked_ids_outside_the_table_are_not_refused() -> None:
    batch = with_ids(user=np.full(8, 99))
    batch = batch._replace(mask=(batch.mask or {}) | {"user": np.zeros(8, bool)})
    groups = prepare_batch(setup_of(refuse_out_of_range=True), batch).groups
    assert groups.num_out_of_range == 0


FEW_ROWS = 12


def narrow_batch(seed: int, num_rows: int = FEW_ROWS) -> helpers.ToyBatch:
    """Exactly so many distinct ids."""
    batch = helpers.toy_batch(seed)
    ids = (np.arange(batch.ids.size) + seed) % num_rows
    return batch._replace(ids=ids.reshape(batch.ids.shape), mask=np.ones_like(batch.mask))


@ALL_MODES
def test_too_many_distinct_ids_are_refused_and_nothing_is_lost(mode: str) -> None:
    batches = [narrow_batch(seed) for seed in range(5)]
    states = []
    for refuse in (False, True):
        with TrainStep(helpers.toy_setup(num_unique=FEW_ROWS), mode) as step:
            state = step.init(helpers.toy_params(), helpers.toy_table())
            for number, (batch, next_batch) in enumerate(look_ahead(batches)):
                if refuse and number == 2:
                    with pytest.raises(ValueError, match=f"{FEW_ROWS + 1}.*{FEW_ROWS}"):
                        step.step(state, batch, narrow_batch(0, FEW_ROWS + 1))
                state, _ = step.step(state, batch, next_batch)
            states.append(helpers.host_copy(step.flush(state)))
    helpers.assert_same_states(*states)
