import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from xrex.train.batches import Batch
from xrex.train.share_exchange import Alone, Share, ShareExchangeError, StoreExchange


class Store:
    """jax.distributed's key-value store, in this process; a get does not wait for long."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.waiting = threading.Event()

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self.changed:
            self.waiting.set()
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            del self.values[key]


def share(seed: int, count: int | None = 3) -> Share:
    if count is None:
        return Share(None, {"block": seed}, 0)
    rng = np.random.default_rng(seed)
    batch = Batch(
        rng.integers(0, 1000, (count, 2)).astype(np.int32),
        rng.random((count, 2)) < 0.5,
        rng.random(count).astype(np.float32),
        rng.random(count).astype(np.float32),
    )
    return Share(batch, {"block": seed, "offset": 2}, 10 * seed, stop=seed == 1)


def assert_same(found: Share, expected: Share) -> None:
    assert (found.position, found.dropped_rows, found.stop) == (
        expected.position,
        expected.dropped_rows,
        expected.stop,
    )
    assert (found.part is None) == (expected.part is None)
    if found.part is not None and expected.part is not None:
        for name in ("ids", "mask", "labels", "weights"):
            actual, wanted = getattr(found.part, name), getattr(expected.part, name)
            assert actual.dtype == wanted.dtype
            np.testing.assert_array_equal(actual, wanted)


def exchanges(store: Store, num_processes: int, **options: float) -> list[StoreExchange]:
    return [
        StoreExchange(store, "data", process=process, num_processes=num_processes, **options)
        for process in range(num_processes)
    ]


def test_every_process_takes_the_shares_of_all() -> None:
    rounds = [[share(0), share(1), share(2)], [share(3), share(4, None), share(5)]]

    def run(exchange: StoreExchange) -> list[list[Share]]:
        return [exchange.all_gather(shares[exchange.share_idx]) for shares in rounds]

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(run, exchanges(Store(), 3)):
            for taken, shares in zip(found, rounds, strict=True):
                for one, expected in zip(taken, shares, strict=True):
                    assert_same(one, expected)


def test_only_the_messages_of_the_last_round_stay() -> None:
    store = Store()
    with ThreadPoolExecutor(2) as pool:

        def run(exchange: StoreExchange) -> None:
            for number in range(5):
                exchange.all_gather(share(number))

        list(pool.map(run, exchanges(store, 2)))
    assert sorted(store.values) == ["xrex_train/data/4/0", "xrex_train/data/4/1"]


def test_failure_of_another_process_is_raised_with_its_reason() -> None:
    first, second = exchanges(Store(), 2)
    second.fail("day.tsv:7: is odd")
    with pytest.raises(
        ShareExchangeError, match=r"process 1 could not read its share of the data: day.tsv:7"
    ):
        first.all_gather(share(0))


def test_late_process_is_named() -> None:
    times = iter([0.0, 4.9, 5.0])
    exchange, _ = (
        StoreExchange(
            Store(), "data", process=process, num_processes=2, timeout_secs=5, clock=times.__next__
        )
        for process in range(2)
    )
    with pytest.raises(
        ShareExchangeError, match=r"process 1 did not bring its part of batch 0 .* within 5 s"
    ):
        exchange.all_gather(share(0))


def test_broken_store_is_not_waited_for() -> None:
    class Broken(Store):
        def blocking_key_value_get_bytes(self, *_: Any) -> bytes:
            raise RuntimeError("UNAVAILABLE: coordinator is gone")

    exchange, _ = exchanges(Broken(), 2)
    with pytest.raises(ShareExchangeError, match="coordinator is gone"):
        exchange.all_gather(share(0))


def test_closing_wakes_up_who_waits() -> None:
    store = Store()
    exchange, _ = exchanges(store, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(exchange.all_gather, share(0))
        assert store.waiting.wait(timeout=30)
        exchange.close()
        with pytest.raises(ShareExchangeError, match="was closed while it waited"):
            waiting.result(timeout=30)


def test_single_process_takes_what_it_brings() -> None:
    alone, own = Alone(), share(1)
    assert alone.all_gather(own) == [own]
    assert (alone.share_idx, alone.num_shares) == (0, 1)
