"""A training setup small enough for an exact oracle of its schedule."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import Mesh

from xrex.cuda.async_emb import async_emb, reference
from xrex.optimizers.recsys import RowwiseAdagrad, RowwiseAdagradLazy
from xrex.train.train_state import TrainSetup, TrainState

VOCAB_ROWS, EMB_WIDTH = 40, 8
NUM_EXAMPLES, NUM_TOKENS = 8, 3
LEARNING_RATE, EPS = 0.05, 1e-6
EAGER = RowwiseAdagrad(initial_accumulator=0.1, eps=EPS, decay_factor=0.9, weight_decay_factor=0.99)
LAZY = RowwiseAdagradLazy(
    initial_accumulator=0.1, eps=EPS, accum_decay_rate=0.01, weight_decay_rate=0.001
)


class ToyBatch(NamedTuple):
    """ids int32 [B, F], mask bool [B, F], and push float32 [B, F, W], a part of the gradient."""

    ids: np.ndarray
    mask: np.ndarray
    push: np.ndarray


def toy_batch(seed: int) -> ToyBatch:
    """Ids from a small vocabulary, so that neighbouring batches share rows; some padding."""
    rng = np.random.default_rng(seed)
    shape = (NUM_EXAMPLES, NUM_TOKENS)
    ids = np.minimum(rng.zipf(1.3, shape) - 1, VOCAB_ROWS - 1).astype(np.int32)
    mask = rng.random(shape) < 0.9
    push = rng.normal(size=(*shape, EMB_WIDTH)).astype(ml_dtypes.bfloat16).astype(np.float32)
    return ToyBatch(ids, mask, push)


def toy_loss(params: Any, embeddings: jax.Array, batch: ToyBatch) -> tuple[jax.Array, jax.Array]:
    """A loss whose gradient for a token is mask * (embedding + push), exactly; aux: the rows."""
    rows = embeddings.astype(jnp.float32)
    terms = (0.5 * rows * rows + rows * batch.push) * batch.mask[..., None]
    return jnp.sum(terms) + params["bias"], embeddings


def toy_gradient(embeddings: np.ndarray, batch: ToyBatch) -> np.ndarray:
    """The gradient of `toy_loss` for embeddings bf16 [N, W], in NumPy."""
    push = batch.push.reshape(-1, EMB_WIDTH)
    total = (embeddings.astype(np.float32) + push) * batch.mask.reshape(-1, 1)
    return total.astype(ml_dtypes.bfloat16)


def toy_setup(
    optimizer: Any = EAGER,
    *,
    loss_fn: Any = toy_loss,
    num_devices: int | None = None,
    num_unique: int = NUM_EXAMPLES * NUM_TOKENS,
    out_of_range: Literal["clip", "zero"] = "clip",
    name: str = "",
    **changes: Any,
) -> TrainSetup:
    """A setup over the first devices, by default all; `changes` replace fields of the setup."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    ctx = async_emb.make_context_handle(
        mesh,
        "data",
        data_axis="data",
        tokens_per_batch=NUM_EXAMPLES * NUM_TOKENS,
        emb_width=EMB_WIDTH,
        num_unique=num_unique,
        num_devices_per_node=mesh.size,
        options=async_emb.AsyncEmbOptions(deterministic=True, out_of_range=out_of_range),
        name=name,
    )
    fields = {
        "ctx": ctx,
        "vocab_rows": VOCAB_ROWS,
        "loss_fn": loss_fn,
        "dense_optimizer": optax.sgd(0.25),
        "embedding_optimizer": optimizer,
        "learning_rate": LEARNING_RATE,
    }
    return TrainSetup(**(fields | changes))


def toy_table(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(VOCAB_ROWS, EMB_WIDTH)).astype(ml_dtypes.bfloat16)


def toy_params() -> dict[str, Any]:
    return {"bias": np.float32(0)}


def mlp_params() -> dict[str, Any]:
    """Of `mlp_loss`."""
    rng = np.random.default_rng(5)
    width = NUM_TOKENS * EMB_WIDTH
    return {
        "hidden": (rng.normal(size=(width, 16)) / 4).astype(np.float32),
        "out": (rng.normal(size=(16, 1)) / 4).astype(np.float32),
    }


def mlp_loss(params: Any, embeddings: jax.Array, batch: ToyBatch) -> tuple[jax.Array, jax.Array]:
    """Two layers, so that gradients of table and dense parameters depend on each other."""
    rows = (embeddings.astype(jnp.float32) + batch.push) * batch.mask[..., None]
    hidden = jnp.tanh(rows.reshape(rows.shape[0], -1) @ params["hidden"])
    scores = (hidden @ params["out"])[:, 0]
    return jnp.mean(jax.nn.softplus(scores) - 0.3 * scores), scores


def make_oracle(
    setup: TrainSetup,
    batches: Sequence[Any],
    table: np.ndarray,
    change: Callable[[np.ndarray, int], np.ndarray] = lambda grads, _: grads,
) -> reference.ScheduleOracle:
    """The oracle of a run whose step t (from 1) trains on batches[t - 1].

    `change` is applied to the gradients of each step, given with its number.
    """
    lazy = isinstance(setup.embedding_optimizer, RowwiseAdagradLazy)

    def update(
        state: reference.TableState, grads: np.ndarray, batch: reference.Batch, step: int
    ) -> reference.UpdateResult:
        decay: reference.EagerDecay | reference.LazyDecay
        if lazy:
            decay = reference.LazyDecay(step, LAZY.accum_decay_rate, LAZY.weight_decay_rate)
        else:
            decay = reference.EagerDecay(EAGER.decay_factor, EAGER.weight_decay_factor)
        return reference.exact_update(
            state,
            grads,
            batch.segment_ids,
            batch.unique_tokens,
            learning_rate=float(setup.learning_rate_at(jnp.int32(step))),
            eps=EPS,
            decay=decay,
        )

    accumulator = np.full(VOCAB_ROWS, 0.1, np.float32)
    last_step = np.zeros(VOCAB_ROWS, np.int32) if lazy else None
    return reference.ScheduleOracle(
        reference.TableState(table, accumulator, last_step),
        lambda embeddings, _, step: change(toy_gradient(embeddings, batches[step - 1]), step),
        update,
        first_step=1,
    )


def oracle_batch(setup: TrainSetup, batch: ToyBatch) -> reference.Batch:
    """A batch as the oracle takes it: padding has segment -1."""
    listed = np.where(batch.mask, batch.ids, VOCAB_ROWS)
    unique_tokens, segment_ids = async_emb.make_segments(listed, VOCAB_ROWS, setup.ctx.num_unique)
    return reference.Batch(batch.ids.reshape(-1), segment_ids, unique_tokens)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Compares two arrays bit for bit."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def assert_same_states(actual: Any, expected: Any) -> None:
    """Compares two pytrees of arrays bit for bit."""
    jax.tree.map(assert_same_bits, host_copy(actual), host_copy(expected))


def assert_same_table(state: TrainState, expected: reference.TableState) -> None:
    """Compares table, row_state and last_step with the oracle's, bit for bit."""
    assert_same_bits(host_copy(state.table), expected.table)
    assert_same_bits(host_copy(state.embedding_state.row_state), expected.row_state)
    if expected.last_step is not None:
        assert_same_bits(host_copy(state.embedding_state.last_step), expected.last_step)


def host_copy(tree: Any) -> Any:
    """NumPy copies, not views: a view would keep the array from being donated."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def copies_of_tables(text: str) -> list[str]:
    """Copies of arrays with a dimension of the vocabulary: the table and the optimizer's state."""
    pattern = rf"\[{VOCAB_ROWS}(?:,\d+)*\]\S* copy(?:-start)?\("
    return [line for line in text.splitlines() if re.search(pattern, line)]
