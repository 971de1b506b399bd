import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrex.train.batches import Batch
from xrex.train.features import FeatureLayout, Field
from xrex.train.model import MlpRanker, masked_mean

LAYOUT = FeatureLayout((Field("user"), Field("tags", 3)))


def random_batch(seed: int, size: int = 4) -> tuple[jax.Array, Batch]:
    rng = np.random.default_rng(seed)
    embeddings = jnp.asarray(rng.normal(size=(size, 4, 8)), jnp.bfloat16)
    mask = np.ones((size, 4), np.bool_)
    mask[:, 3] = False
    labels = rng.integers(0, 2, size).astype(np.float32)
    weights = np.ones(size, np.float32)
    return embeddings, Batch(np.zeros((size, 4), np.int32), mask, labels, weights)


def test_masked_mean_is_the_mean_of_the_filled_slots() -> None:
    values = jnp.array([[[1.0], [3.0], [100.0]]])
    assert masked_mean(values, jnp.array([[True, True, False]])).tolist() == [[2.0]]


def test_masked_mean_of_no_value_is_zero() -> None:
    values = jnp.array([[[5.0], [7.0]]])
    assert masked_mean(values, jnp.array([[False, False]])).tolist() == [[0.0]]


def test_padding_slots_get_no_gradient() -> None:
    model = MlpRanker(LAYOUT, 8, hidden=(16,), crosses=[("user", "tags")])
    embeddings, batch = random_batch(0)
    grad = jax.jit(jax.grad(lambda emb: model.loss(model.init(0), emb, batch)[0]))(embeddings)
    assert np.asarray(grad[:, 3] == 0).all()
    assert np.asarray(grad[:, 1] != 0).any()


def test_examples_of_weight_zero_do_not_count() -> None:
    model = MlpRanker(LAYOUT, 8, hidden=(16,))
    embeddings, batch = random_batch(1)
    params = model.init(0)
    loss = jax.jit(model.loss)
    whole, _ = loss(params, embeddings[:2], jax.tree.map(lambda x: x[:2], batch))
    weights = np.array([1, 1, 0, 0], np.float32)
    filled = Batch(batch.ids, batch.mask, batch.labels, weights)
    weighted, _ = loss(params, embeddings, filled)
    assert float(weighted) == pytest.approx(float(whole), rel=1e-6)


def test_loss_of_a_batch_without_examples_is_zero() -> None:
    model = MlpRanker(LAYOUT, 8, hidden=(16,))
    embeddings, batch = random_batch(2)
    empty = Batch(batch.ids, batch.mask, batch.labels, np.zeros(4, np.float32))
    assert float(jax.jit(model.loss)(model.init(0), embeddings, empty)[0]) == 0.0


def test_same_seed_gives_the_same_parameters() -> None:
    model = MlpRanker(LAYOUT, 8)
    jax.tree.map(np.testing.assert_array_equal, model.init(3), model.init(3))


def test_cross_of_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match=r"crosses name \['item'\]"):
        MlpRanker(LAYOUT, 8, crosses=[("user", "item")])
