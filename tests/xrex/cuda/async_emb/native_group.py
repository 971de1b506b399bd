"""Native contexts made by hand, one thread for each call that may block."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from xrex.cuda.async_emb import native

BFLOAT16 = ml_dtypes.bfloat16

async_emb_api = native.load()

# Sizes of the contexts made here: T, w, U and the rows V of their tables.
TOKENS, SHARD_WIDTH, SLOTS, VOCAB_ROWS = 3, 2, 5, 7

# How long a call that must end is waited for. It ends at once, or something is broken.
PATIENCE_SECS = 60


def make_context(world_size: int = 1, **changes: Any) -> Any:
    """A native context that has no rank yet."""
    arguments = {
        "context_id": 1,
        "tokens_per_rank": TOKENS,
        "shard_width": SHARD_WIDTH,
        "emb_width": world_size * SHARD_WIDTH,
        "num_unique": SLOTS,
    }
    arguments |= changes
    return async_emb_api.AsyncEmbContext(world_size=world_size, **arguments)


def connect(contexts: list[Any]) -> None:
    """Gives the contexts their ranks and brings them up together."""
    world_size = len(contexts)
    payloads = [context.reset(rank, world_size) for rank, context in enumerate(contexts)]
    received = [list(of_rank) for of_rank in zip(*payloads, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        list(pool.map(lambda context, own: context.handshake(own), contexts, received))


@contextlib.contextmanager
def ready_group(world_size: int, **changes: Any) -> Iterator[list[Any]]:
    """The ready contexts of one communicator, by rank, closed at the end of the with block."""
    contexts = [make_context(world_size, device_key=rank, **changes) for rank in range(world_size)]
    try:
        connect(contexts)
        yield contexts
    finally:
        for context in contexts:
            context.close()


@contextlib.contextmanager
def running(call: Callable[..., Any], *args: Any) -> Iterator[concurrent.futures.Future]:
    """Runs `call` in a thread of its own, which has ended at the end of the with block."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(call, *args)


def outcome(future: concurrent.futures.Future) -> Any:
    """What a call in another thread returned, or raised."""
    return future.result(timeout=PATIENCE_SECS)


def random_table(num_columns: int = SHARD_WIDTH, seed: int = 0) -> np.ndarray:
    """A bfloat16 table [V, num_columns]."""
    values = np.random.default_rng(seed).normal(size=(VOCAB_ROWS, num_columns))
    return values.astype(BFLOAT16)


def shards_of(table: np.ndarray) -> list[np.ndarray]:
    """Each rank's columns of `table`."""
    world_size = table.shape[1] // SHARD_WIDTH
    return [np.ascontiguousarray(part) for part in np.split(table, world_size, axis=1)]


def ids_of(world_size: int, seed: int = 0) -> np.ndarray:
    """Ids [R, T] inside the table."""
    ids = np.random.default_rng(seed).integers(0, VOCAB_ROWS, (world_size, TOKENS))
    return ids.astype(np.int32)


def arm_all(contexts: list[Any], ids: np.ndarray, table: np.ndarray) -> list[int]:
    """Arms a lookup on every rank; returns the step's number on each."""
    shards = shards_of(table)
    return [
        context.arm_lookup(own_ids, shard)
        for context, own_ids, shard in zip(contexts, ids, shards, strict=True)
    ]


def message_of(error_type: type[Exception], call: Callable[..., Any], *args: Any) -> str:
    """What the error says that `call` must raise."""
    with pytest.raises(error_type) as caught:
        call(*args)
    return str(caught.value)


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of a bfloat16 array."""
    return x.view(np.uint16)


def is_nan(embeddings: np.ndarray) -> bool:
    """Whether nothing but NaN was delivered."""
    return bool(np.isnan(embeddings.astype(np.float32)).all())
