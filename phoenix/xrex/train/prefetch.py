"""A thread that makes items ready before they are asked for."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self


class _Channel:
    """What the thread and its reader share; `lock` guards every field."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.lock = threading.Condition()
        self.ready: collections.deque[Any] = collections.deque()
        self.error: BaseException | None = None
        self.ended = False
        self.closed = False

    def wait_for_room(self) -> bool:
        """Waits until another item may be made; False if nobody wants one."""
        with self.lock:
            self.lock.wait_for(lambda: self.closed or len(self.ready) < self.depth)
            return not self.closed

    def put(self, item: Any) -> None:
        """Hands an item over; there is room for it."""
        with self.lock:
            self.ready.append(item)
            self.lock.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Says that no item follows, and why if it is an error."""
        with self.lock:
            self.error, self.ended = error, True
            self.lock.notify_all()

    def close(self) -> None:
        """Says that no item is wanted any more."""
        with self.lock:
            self.closed = True
            self.ready.clear()
            self.lock.notify_all()


def _fill(channel: _Channel, items: Iterator[Any], prepare: Callable[[Any], Any]) -> None:
    """Body of the thread."""
    error: BaseException | None = None
    try:
        while channel.wait_for_room():
            try:
                item = next(items)
            except StopIteration:
                break
            channel.put(prepare(item))
    except BaseException as caught:
        error = caught
    channel.end(error)


def _close(channel: _Channel, wake: Callable[[], None], thread: threading.Thread) -> None:
    channel.close()
    wake()
    thread.join()


class Prefetcher[Item, Result]:
    """Iterates over the prepared items, which a thread makes up to `depth` ahead.

    An error of the thread, in `items` or in `prepare`, is raised by `next` after the items before
    it, and by every `next` from then on. Use it in a `with` block, or call `close`.

    Args:
      items: what to prepare. From now on the thread alone uses it.
      prepare: makes the result; runs in the thread.
      depth: results that may lie ready, at least 1. One more may be in the making.
      wake: called by `close`, to wake up `items` if it waits for something.
    """

    def __init__(
        self,
        items: Iterator[Item],
        prepare: Callable[[Item], Result],
        *,
        depth: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}; at least 1 result must be made ahead")
        self._channel = _Channel(depth)
        thread = threading.Thread(
            target=_fill, args=(self._channel, items, prepare), name="prefetch", daemon=True
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
            if channel.ready:
                item = channel.ready.popleft()
                channel.lock.notify_all()
                return item
            if channel.error is not None:
                raise channel.error
            raise StopIteration

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
