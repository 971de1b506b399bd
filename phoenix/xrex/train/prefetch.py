"""Threads that make items ready before they are asked for."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

_THREAD_NAME = "prefetch"


class _Channel:
    """What the thread and its reader share; `lock` guards every field."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.lock = threading.Condition()
        self.ready: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
        self.error: BaseException | None = None
        self.ended = False
        self.closed = False

    def wait_for_room(self) -> bool:
        """Waits until another item may be made; False if nobody wants one."""
        with self.lock:
            self.lock.wait_for(lambda: self.closed or self.ended or len(self.ready) < self.depth)
            return not (self.closed or self.ended)

    def put(self, result: concurrent.futures.Future[Any]) -> None:
        """Hands over a result that is being made; there is room for it, if it is still wanted."""
        with self.lock:
            if self.closed or self.ended:
                result.cancel()
                return
            self.ready.append(result)
            self.lock.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Says that no item follows, and why if it is an error."""
        with self.lock:
            self.error, self.ended = self.error or error, True
            self.lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """Says that an item could not be made, and that no later one is wanted."""
        with self.lock:
            self.error, self.ended = error, True
            self._drop()
            self.lock.notify_all()

    def close(self) -> None:
        """Says that no item is wanted any more."""
        with self.lock:
            self.closed = True
            self._drop()
            self.lock.notify_all()

    def _drop(self) -> None:
        """Forgets results, and those that were not begun are not made; with `lock`."""
        for result in self.ready:
            result.cancel()
        self.ready.clear()


def _fill(
    channel: _Channel, items: Iterator[Any], prepare: Callable[[Any], Any], workers: int
) -> None:
    """Body of the thread that reads the items."""
    error: BaseException | None = None
    pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix=_THREAD_NAME)
    try:
        while channel.wait_for_room():
            try:
                item = next(items)
            except StopIteration:
                break
            channel.put(pool.submit(prepare, item))
    except BaseException as caught:
        error = caught
    pool.shutdown()
    channel.end(error)


def _close(channel: _Channel, wake: Callable[[], None], thread: threading.Thread) -> None:
    channel.close()
    wake()
    thread.join()


class Prefetcher[Item, Result]:
    """Iterates over the prepared items, which threads make up to `depth` ahead, in their order.

    An error in `items` or in `prepare` is raised by `next` after the items before it, and by every
    `next` from then on. Use it in a `with` block, or call `close`.

    Args:
      items: what to prepare. From now on one thread alone uses it.
      prepare: makes the result; runs in threads, begun in the order of the items.
      depth: results that may lie ready or be in the making, at least 1.
      workers: threads that prepare, at least 1. More than `depth` have nothing to do.
      wake: called by `close`, to wake up `items` if it waits for something.
    """

    def __init__(
        self,
        items: Iterator[Item],
        prepare: Callable[[Item], Result],
        *,
        depth: int,
        workers: int = 1,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}; at least 1 result must be made ahead")
        if workers < 1:
            raise ValueError(f"workers={workers}; at least 1 thread must prepare")
        self._channel = _Channel(depth)
        thread = threading.Thread(
            target=_fill,
            args=(self._channel, items, prepare, workers),
            name=_THREAD_NAME,
            daemon=True,
        )
        # Also when it is forgotten, and before the interpreter goes.
        self._finalizer = weakref.finalize(self, _close, self._channel, wake, thread)
        thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Result:
        channel = self._channel
        with channel.lock:
            channel.lock.wait_for(lambda: channel.ready or channel.ended or channel.closed)
            if channel.closed:
                raise RuntimeError("the prefetcher is closed; make a new one to go on")
            if channel.error is not None and not channel.ready:
                raise channel.error
            if not channel.ready:
                raise StopIteration
            result = channel.ready.popleft()
            channel.lock.notify_all()
        try:
            return result.result()
        except BaseException as error:
            channel.fail(error)
            raise

    def close(self) -> None:
        """Ends the thread, waiting for the item it is at. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
