import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from xrex.train.prefetch import Prefetcher


def same(item: Any) -> Any:
    return item


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


class Gated:
    """Numbers from 0; says when one is asked for and gives it when it is let through."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.number = -1

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.asked.release()
        assert self.gate.acquire(timeout=30)
        self.number += 1
        return self.number


@pytest.mark.parametrize("depth", [1, 3, 20])
def test_results_come_in_order(depth: int) -> None:
    with Prefetcher(iter(range(10)), lambda x: x * x, depth=depth) as results:
        assert list(results) == [x * x for x in range(10)]


@pytest.mark.parametrize("depth", [1, 3])
def test_results_are_made_ahead_up_to_the_depth_and_no_further(depth: int) -> None:
    ahead, taken = [], 0
    full = threading.Event()

    def source() -> Iterator[int]:
        for number in range(200):
            ahead.append(number - taken)
            if number == depth - 1:
                full.set()
            yield number

    with Prefetcher(source(), same, depth=depth) as results:
        assert full.wait(timeout=30)
        for _ in results:
            taken += 1
    # One more than the depth may be seen while a result has left the queue but is not counted.
    assert depth - 1 <= max(ahead) <= depth


def test_preparing_runs_in_another_thread() -> None:
    with Prefetcher(iter([0]), lambda _: threading.current_thread(), depth=1) as results:
        assert next(results) is not threading.current_thread()


def test_several_workers_prepare_at_once_and_keep_the_order() -> None:
    both = threading.Barrier(2)

    def prepare(item: int) -> int:
        both.wait(timeout=30)  # ends only if another one is being prepared
        return item

    with Prefetcher(iter(range(6)), prepare, depth=2, workers=2) as results:
        assert list(results) == list(range(6))


def test_error_of_one_worker_comes_after_the_results_before_it_and_ends_the_rest() -> None:
    with Prefetcher(iter([1, 0, 2]), lambda x: 4 // x, depth=3, workers=3) as results:
        assert next(results) == 4
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                next(results)


def failing_source() -> Iterator[int]:
    yield 1
    raise OSError("disk is gone")


def test_error_of_the_source_comes_after_the_items_before_it_and_stays() -> None:
    with Prefetcher(failing_source(), same, depth=5) as results:
        assert next(results) == 1
        for _ in range(2):
            with pytest.raises(OSError, match="disk is gone"):
                next(results)


def test_error_of_preparing_is_raised() -> None:
    with (
        Prefetcher(iter([0]), lambda x: 1 // x, depth=1) as results,
        pytest.raises(ZeroDivisionError),
    ):
        next(results)


def test_end_stays_the_end() -> None:
    with Prefetcher(iter([1]), same, depth=1) as results:
        assert list(results) == [1]
        assert list(results) == []


def test_closing_ends_the_thread_though_results_lie_ready() -> None:
    results = Prefetcher(iter(range(100)), same, depth=2)
    assert next(results) == 0
    results.close()
    results.close()
    assert prefetch_threads() == []


def test_closing_wakes_up_a_source_that_waits() -> None:
    source = Gated()
    results = Prefetcher(source, same, depth=1, wake=source.gate.release)
    assert source.asked.acquire(timeout=30)
    results.close()
    assert prefetch_threads() == []


def test_closed_prefetcher_is_refused() -> None:
    results = Prefetcher(iter([1]), same, depth=1)
    results.close()
    with pytest.raises(RuntimeError, match="is closed; make a new one"):
        next(results)


def test_forgotten_prefetcher_leaves_no_thread() -> None:
    results = Prefetcher(iter(range(100)), same, depth=1)
    assert next(results) == 0
    del results
    gc.collect()
    assert prefetch_threads() == []


def test_no_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="workers=0"):
        Prefetcher(iter([]), same, depth=1, workers=0)


def test_depth_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="depth=0"):
        Prefetcher(iter([]), same, depth=0)
