"""From a reader's batches to what a training step takes: made ready ahead, and in pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from xrex.train.batch_stream import BatchStream, StreamBatch
from xrex.train.batches import Batch
from xrex.train.prefetch import Prefetcher


@dataclasses.dataclass(frozen=True)
class StepInput[Prepared]:
    """What one step needs.

    Attributes:
      batch: the batch to train on, prepared.
      next_batch: the batch of the step after it, prepared; None at the end of the data.
      host: the batch in host memory, with its place in the data.
      ends_epoch: no batch of the same epoch follows.
    """

    batch: Prepared
    next_batch: Prepared | None
    host: StreamBatch
    ends_epoch: bool


class DataPipeline[Prepared]:
    """Iterates over the inputs of steps; threads read and prepare batches ahead.

    `state` is the position after the batch that came out last. What lies ready beyond it counts as
    not yet read, so that a run which saves the state with its checkpoint goes on with the next
    batch.

    An error of reading or preparing a batch is raised when that batch is looked ahead for, one
    step before it would be trained on, and again by every `next` after that. Use the pipeline in a
    `with` block, or call `close`.

    Args:
      stream: the batches. The pipeline closes it.
      prepare: makes of a batch what the step takes, and starts its way to the devices
        (`TrainStep.prepare`); runs in threads.
      depth: batches that may lie ready or be in the making, beside the one looked ahead, at least
        1.
      workers: threads that prepare, at least 1.
    """

    def __init__(
        self,
        stream: BatchStream,
        prepare: Callable[[Batch], Prepared],
        *,
        depth: int = 2,
        workers: int = 1,
    ) -> None:
        self._stream, self._prepare = stream, prepare
        self._depth, self._workers = depth, workers
        self._position = stream.state()
        self._prefetcher: Prefetcher[StreamBatch, tuple[StreamBatch, Prepared]] | None = None
        self._current: tuple[StreamBatch, Prepared] | None = None

    def state(self) -> Mapping[str, Any]:
        """What `restore` goes on from, after the batch that came out last; plain JSON values."""
        return self._position

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a position; to be called before the first batch is taken.

        Raises:
          RuntimeError: a batch was taken already.
          ValueError: see `BatchStream.restore`.
        """
        if self._prefetcher is not None:
            raise RuntimeError(
                "restore was called after the first batch was taken, when later ones are being "
                "read; make a new pipeline and restore that"
            )
        self._stream.restore(state)
        self._position = state

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepInput[Prepared]:
        if self._prefetcher is None:
            prefetcher = self._prefetcher = self._start()
            self._current = next(prefetcher, None)
        else:
            prefetcher = self._prefetcher
        if self._current is None:
            raise StopIteration
        host, batch = self._current
        following = next(prefetcher, None)
        self._current, self._position = following, host.position
        if following is None:
            return StepInput(batch, None, host, ends_epoch=True)
        return StepInput(batch, following[1], host, following[0].epoch != host.epoch)

    def _start(self) -> Prefetcher[StreamBatch, tuple[StreamBatch, Prepared]]:
        prepare = self._prepare  # the thread must not hold the pipeline, which could never go then
        return Prefetcher(
            self._stream,
            lambda item: (item, prepare(item.batch)),
            depth=self._depth,
            workers=self._workers,
            wake=self._stream.close,
        )

    def close(self) -> None:
        """Ends the thread and the stream. May be called twice."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
