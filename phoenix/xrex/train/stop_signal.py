"""Ending a run by a signal, after the step that is running."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """While in a `with` block, SIGTERM and SIGINT ask the run to stop instead of killing it.

    The first one is noted. A second one does what it would have done without this object. To be
    used in the main thread.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def name(self) -> str | None:
        """The signal that came, such as "SIGTERM"; None if none did."""
        return None if self._received is None else self._received.name

    def requested(self) -> bool:
        """Whether a signal came."""
        return self._received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._received is not None:
            self._restore()
            signal.raise_signal(number)
            return
        self._received = signal.Signals(number)
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"\n{self.name}: saving after this step; once more ends at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
