import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from xrex.train.batch_stream import BatchStream, StreamBatch
from xrex.train.data_files import DataFileError, Dropped
from xrex.train.features import ExampleSet, FeatureLayout, Field
from xrex.train.readers import ArrayReader, Block
from xrex.train.share_exchange import Share, ShareExchangeError

LAYOUT = FeatureLayout((Field("only"),))


def numbered_examples(first: int, count: int) -> ExampleSet:
    """Example i holds the value i."""
    rows = np.arange(first, first + count, dtype=np.int32)[:, None]
    return ExampleSet(LAYOUT, rows, np.ones_like(rows, np.bool_), np.zeros(count, np.float32))


class UnevenReader:
    """Blocks of given sizes, examples numbered from 1; and what each block drops."""

    layout = LAYOUT
    num_examples = None

    def __init__(self, sizes: Sequence[int], dropped: Sequence[int] = ()) -> None:
        self.sizes = list(sizes)
        self.dropped = list(dropped) or [0] * len(self.sizes)
        self.reads: list[int] = []

    @property
    def num_blocks(self) -> int:
        return len(self.sizes)

    def read(self, block: int) -> Block:
        self.reads.append(block)
        count = self.dropped[block]
        dropped = Dropped(count, {"x": count}, f"block {block}") if count else Dropped()
        return Block(numbered_examples(1 + sum(self.sizes[:block]), self.sizes[block]), dropped)


class Group:
    """Makes the exchanges of processes that are threads of this one."""

    def __init__(self, num_shares: int) -> None:
        self.num_shares = num_shares
        self.shares: dict[int, Share] = {}
        self.barrier = threading.Barrier(num_shares)

    def exchange(self, share_idx: int) -> "ThreadExchange":
        return ThreadExchange(self, share_idx)


class ThreadExchange:
    def __init__(self, group: Group, share_idx: int) -> None:
        self.group, self.share_idx, self.num_shares = group, share_idx, group.num_shares
        self.failures: list[str] = []

    def all_gather(self, share: Share) -> list[Share]:
        self.group.shares[self.share_idx] = share
        try:
            self.group.barrier.wait(timeout=30)
            shares = [self.group.shares[share_idx] for share_idx in range(self.num_shares)]
            self.group.barrier.wait(timeout=30)
        except threading.BrokenBarrierError as error:
            raise ShareExchangeError("a process failed") from error
        return shares

    def fail(self, reason: str) -> None:
        self.failures.append(reason)
        self.group.barrier.abort()

    def close(self) -> None:
        self.group.barrier.abort()


def in_processes(
    reader: Any, num_shares: int, batch_size: int, position: Any = None, **options: Any
) -> list[list[StreamBatch]]:
    """What the stream of each process yields."""
    group = Group(num_shares)

    def run(share_idx: int) -> list[StreamBatch]:
        stream = BatchStream(reader, batch_size, exchange=group.exchange(share_idx), **options)
        if position is not None:
            stream.restore(position)
        return list(stream)

    with ThreadPoolExecutor(num_shares) as pool:
        return list(pool.map(run, range(num_shares)))


def values(item: StreamBatch) -> list[int]:
    """The real examples of a batch."""
    return item.batch.ids[item.batch.weights > 0, 0].tolist()


def all_values(items: Sequence[StreamBatch]) -> list[list[int]]:
    return [values(item) for item in items]


SIZES = st.lists(st.integers(0, 9), min_size=4, max_size=9).filter(any)
STREAMS = {
    "sizes": SIZES,
    "half_batch": st.integers(1, 6),
    "window": st.integers(0, 25),
    "seed": st.integers(0, 3),
    "num_shares": st.sampled_from([1, 2]),
}


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(**STREAMS)
def test_every_epoch_holds_every_example_once_in_every_process(
    sizes: list[int], half_batch: int, window: int, seed: int, num_shares: int
) -> None:
    streams = in_processes(
        UnevenReader(sizes),
        num_shares,
        2 * half_batch,
        seed=seed,
        shuffle_examples=window,
        num_epochs=2,
    )
    for items in streams:
        for epoch in (0, 1):
            seen = [value for item in items if item.epoch == epoch for value in values(item)]
            assert sorted(seen) == list(range(1, 1 + sum(sizes)))
    assert all_values(streams[0]) == all_values(streams[-1])
    assert [item.position for item in streams[0]] == [item.position for item in streams[-1]]


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(data=st.data(), **STREAMS)
def test_restored_stream_yields_the_rest_of_the_whole_one(
    data: Any, sizes: list[int], half_batch: int, window: int, seed: int, num_shares: int
) -> None:
    options = {"seed": seed, "shuffle_examples": window, "num_epochs": 2}
    (whole, *_) = in_processes(UnevenReader(sizes), num_shares, 2 * half_batch, **options)
    done = data.draw(st.integers(1, len(whole)))
    position = json.loads(json.dumps(whole[done - 1].position))
    (rest, *_) = in_processes(
        UnevenReader(sizes), num_shares, 2 * half_batch, position=position, **options
    )
    assert all_values(rest) == all_values(whole[done:])
    assert [item.position for item in rest] == [item.position for item in whole[done:]]


def test_order_without_shuffling_is_that_of_the_reader() -> None:
    items = list(BatchStream(UnevenReader([3, 0, 4]), 2, num_epochs=1))
    assert all_values(items) == [[1, 2], [3, 4], [5, 6], [7]]


def test_seed_and_epoch_make_the_order() -> None:
    def order(seed: int) -> list[list[int]]:
        stream = BatchStream(
            UnevenReader([5] * 4), 20, seed=seed, shuffle_examples=100, num_epochs=2
        )
        return all_values(list(stream))

    assert order(1) == order(1)
    first, second = order(1)
    assert len({tuple(first), tuple(second), tuple(order(2)[0])}) == 3


def test_restored_stream_reads_the_window_of_its_position_and_nothing_before_it() -> None:
    stream = BatchStream(UnevenReader([5] * 8), 5, shuffle_examples=10, num_epochs=1)
    positions = [item.position for item in stream]
    reader = UnevenReader([5] * 8)
    restored = BatchStream(reader, 5, shuffle_examples=10, num_epochs=1)
    restored.restore(positions[4])
    next(restored)
    assert len(reader.reads) == 2


def test_window_is_no_larger_than_it_must_be() -> None:
    reader = UnevenReader([5] * 8)
    next(BatchStream(reader, 5, shuffle_examples=11))
    assert len(reader.reads) == 3


def test_short_share_is_filled_up_until_the_others_are_done() -> None:
    reader = UnevenReader([2, 5])
    (items, _) = in_processes(reader, 2, 4, num_epochs=1)
    weights = [item.batch.weights.tolist() for item in items]
    assert weights == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 0]]
    assert not items[1].batch.mask[:2].any()


def test_stream_without_end_starts_over() -> None:
    stream = BatchStream(UnevenReader([3]), 2)
    assert [next(stream).epoch for _ in range(5)] == [0, 0, 1, 1, 2]


def test_dropped_rows_are_counted_over_epochs_processes_and_restores() -> None:
    reader = UnevenReader([2, 2, 2, 2], dropped=[1, 0, 0, 4])
    options = {"num_epochs": 2}
    (items, _) = in_processes(reader, 2, 2, **options)
    assert [item.dropped_rows for item in items] == [1, 1, 5, 5, 6, 6, 10, 10]
    (rest, _) = in_processes(reader, 2, 2, position=items[2].position, **options)
    assert [item.dropped_rows for item in rest] == [5, 6, 6, 10, 10]


def test_what_was_dropped_is_known_by_column() -> None:
    stream = BatchStream(UnevenReader([1, 1], dropped=[1, 3]), 2, num_epochs=1)
    list(stream)
    assert stream.dropped == Dropped(4, {"x": 4}, "block 0")


def test_epoch_without_an_example_is_refused() -> None:
    stream = BatchStream(UnevenReader([0, 0], dropped=[1, 2]), 2)
    with pytest.raises(ValueError, match=r"all 3 rows were malformed .* first here: block 0"):
        next(stream)


def test_failing_reader_tells_the_other_processes() -> None:
    class Failing(UnevenReader):
        def read(self, block: int) -> Block:
            if block == 1:
                raise DataFileError("b.tsv", 3, None, "is odd")
            return super().read(block)

    group = Group(2)
    exchanges = [group.exchange(0), group.exchange(1)]

    def take_one(exchange: ThreadExchange) -> Exception | None:
        try:
            next(BatchStream(Failing([2, 2]), 2, exchange=exchange))
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(take_one, exchanges))
    assert [type(error) for error in errors] == [ShareExchangeError, DataFileError]
    assert exchanges[1].failures == ["b.tsv:3: is odd"]


def test_stop_of_one_process_reaches_all_with_the_same_batch() -> None:
    group = Group(2)

    def run(share_idx: int) -> list[bool]:
        asked = iter([False, share_idx == 1, False])
        stream = BatchStream(
            UnevenReader([4, 4]),
            4,
            num_epochs=1,
            exchange=group.exchange(share_idx),
            stop_requested=lambda: next(asked),
        )
        return [item.stop for item in stream]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[False, True]] * 2


def test_position_of_other_settings_is_refused() -> None:
    stream = BatchStream(UnevenReader([4]), 2, seed=1)
    position = next(stream).position
    with pytest.raises(ValueError, match=r"\(seed: 1 there, 2 here\); go on with those"):
        BatchStream(UnevenReader([4]), 2, seed=2).restore(position)


def test_fewer_blocks_than_processes_are_refused() -> None:
    with pytest.raises(ValueError, match="the data have 1 blocks for 2 processes"):
        BatchStream(UnevenReader([4]), 2, exchange=Group(2).exchange(0))


@pytest.mark.parametrize("batch_size", [0, 3])
def test_batch_that_does_not_divide_is_refused(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size={batch_size} with 2 processes"):
        BatchStream(UnevenReader([2, 2]), batch_size, exchange=Group(2).exchange(0))


@pytest.mark.parametrize("name", ["seed", "shuffle_examples"])
def test_negative_settings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1"):
        BatchStream(ArrayReader(numbered_examples(1, 4)), 2, **{name: -1})
