"""Where a run's time goes, by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class PhaseTimer:
    """Adds up the seconds spent in named phases; what no phase covers is "other"."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds: dict[str, float] = {}
        self._running: str | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of the block for `name`. Phases do not nest: each second counts once."""
        if self._running is not None:
            raise RuntimeError(f"phase {name!r} started inside phase {self._running!r}")
        self._running, start = name, self._clock()
        try:
            yield
        finally:
            self._running = None
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def report(self) -> dict[str, float]:
        """Seconds by phase, in the order of their first start, then "other" and "total"."""
        total = self._clock() - self._start
        other = total - sum(self._seconds.values())
        return {**self._seconds, "other": other, "total": total}
