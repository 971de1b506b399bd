"""The order in which examples come, in batches, from a position that can be saved.

In every epoch the reader's blocks are shuffled and dealt to the shares of the processes. A share
reads a few blocks at a time, a window of at least `shuffle_examples` examples, shuffles the
window and gives its examples out; then the next window. So what is in memory is a window, whatever
the size of the data, and the order is a function of the seed, the epoch and the reader's blocks.

A position is where the next example stands: the epoch, and for every share the first block of its
window and an offset in it. Going on from one reads that one window again and nothing before it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from xrex.train.batches import Batch, empty_batch, join_batches, make_batch
from xrex.train.data_files import Dropped
from xrex.train.features import ExampleSet, concatenate
from xrex.train.readers import ExampleReader
from xrex.train.share_exchange import Alone, Share, ShareExchange

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StreamBatch:
    """A batch and where it stands.

    Attributes:
      batch: the global batch, the same in every process.
      epoch: which pass over the data it belongs to, from 0.
      position: what `BatchStream.restore` goes on from after this batch; plain JSON values, the
        same in every process.
      dropped_rows: malformed rows that all processes have left out so far.
      stop: a process was asked to end the run before this batch was made.
    """

    batch: Batch
    epoch: int
    position: Mapping[str, Any]
    dropped_rows: int
    stop: bool


class _Window(NamedTuple):
    """Blocks [first, end) of a share's order, read and shuffled."""

    first: int
    end: int
    examples: ExampleSet
    dropped_rows: int


class _ShareOfEpoch:
    """One share's examples in one epoch, in their order."""

    def __init__(
        self,
        reader: ExampleReader,
        order: np.ndarray,
        window_seed: tuple[int, int],
        shuffle_examples: int,
        note_dropped: Callable[[Dropped], None],
    ) -> None:
        self._reader, self._order = reader, order
        self._window_seed, self._shuffle_examples = window_seed, shuffle_examples
        self._note_dropped = note_dropped
        self._window: _Window | None = None
        self._offset = 0
        self._dropped_before = 0  # in the windows before this one

    def restore(self, position: Mapping[str, int]) -> None:
        """Goes to a position that `position` gave."""
        self._dropped_before = position["dropped_rows"]
        self._window = None
        if position["block"] < len(self._order):
            self._window = self._read_window(position["block"])
        self._offset = position["offset"]

    def carry_dropped(self, dropped_rows: int) -> None:
        """Sets the count of the epochs before."""
        self._dropped_before = dropped_rows

    def position(self) -> dict[str, int]:
        """Where the next example stands, and what was dropped before its window."""
        block = 0 if self._window is None else self._window.first
        return {
            "block": block,
            "offset": self._offset,
            "dropped_rows": self._dropped_before,
        }

    def dropped_rows(self) -> int:
        """Malformed rows that this share has left out in all its epochs."""
        return self._dropped_before + (0 if self._window is None else self._window.dropped_rows)

    def take(self, count: int) -> ExampleSet | None:
        """The next examples, up to `count`; None at the end."""
        pieces = []
        while count > 0:
            if self._window is None or self._offset == len(self._window.examples):
                if not self._next_window():
                    break
                continue
            end = min(self._offset + count, len(self._window.examples))
            pieces.append(self._window.examples.take(slice(self._offset, end)))
            count -= end - self._offset
            self._offset = end
        return concatenate(pieces) if pieces else None

    def _next_window(self) -> bool:
        first = 0 if self._window is None else self._window.end
        if first == len(self._order):
            return False
        dropped_rows = self.dropped_rows()
        self._window = self._read_window(first)
        self._dropped_before, self._offset = dropped_rows, 0
        return True

    def _read_window(self, first: int) -> _Window:
        parts, count, end, dropped = [], 0, first, Dropped()
        while end < len(self._order) and (end == first or count < self._shuffle_examples):
            block = self._reader.read(int(self._order[end]))
            parts.append(block.examples)
            count, end, dropped = count + len(block.examples), end + 1, dropped + block.dropped
        self._note_dropped(dropped)
        examples = concatenate(parts)
        if self._shuffle_examples > 0:
            rng = np.random.Generator(np.random.PCG64([*self._window_seed, first]))
            examples = examples.take(rng.permutation(len(examples)))
        return _Window(first, end, examples, dropped.num_rows)


class BatchStream:
    """Batches over a reader, epoch after epoch; see the module for their order.

    The last batch of an epoch is filled up. A process whose share is used up brings filling until
    the others are done, so that every process has the same number of batches.

    Args:
      reader: the data, the same in every process.
      batch_size: examples of the global batch; a multiple of the number of processes.
      seed: of the order.
      shuffle_examples: examples to shuffle among each other, at least (a window ends with a
        block); 0 keeps the reader's order.
      num_epochs: passes over the data; None for no end.
      exchange: makes one batch of the parts of several processes. By default this process reads
        everything.
      stop_requested: asked before each batch; a yes of any process stands in `StreamBatch.stop`.

    Raises:
      ValueError: an argument is out of its range, or there are fewer blocks than processes.
    """

    def __init__(
        self,
        reader: ExampleReader,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle_examples: int = 0,
        num_epochs: int | None = None,
        exchange: ShareExchange | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._reader, self._exchange = reader, exchange or Alone()
        self._num_epochs, self._stop_requested = num_epochs, stop_requested
        self._settings = {
            "batch_size": batch_size,
            "seed": seed,
            "shuffle_examples": shuffle_examples,
            "num_blocks": reader.num_blocks,
            "num_shares": self._exchange.num_shares,
        }
        self._check_arguments()
        self._part_size = batch_size // self._exchange.num_shares
        self._seed, self._shuffle_examples = seed, shuffle_examples
        self._dropped = Dropped()
        self._epoch, self._batches_in_epoch = 0, 0
        self._share = self._open_epoch(0)
        self._position = self._state([self._share.position()] * self._exchange.num_shares)

    def _check_arguments(self) -> None:
        settings = self._settings
        batch_size, num_shares = settings["batch_size"], settings["num_shares"]
        if batch_size < 1 or batch_size % num_shares:
            raise ValueError(
                f"batch_size={batch_size} with {num_shares} processes; each brings an equal part, "
                f"so it must be a positive multiple of {num_shares}"
            )
        if settings["seed"] < 0 or settings["shuffle_examples"] < 0:
            raise ValueError(
                f"seed={settings['seed']}, shuffle_examples={settings['shuffle_examples']}; "
                "neither may be negative"
            )
        if settings["num_blocks"] < num_shares:
            raise ValueError(
                f"the data have {settings['num_blocks']} blocks for {num_shares} processes; a "
                "process without a block would bring nothing but filling: give smaller blocks, "
                "more files or row groups, or fewer processes"
            )

    def state(self) -> Mapping[str, Any]:
        """Where the next batch begins: the position of the batch that came last."""
        return self._position

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a position: the next batch is the one that came after it.

        Raises:
          ValueError: the position was saved with other settings, which make another order.
          DataFileError: the window there cannot be read.
        """
        saved = state["settings"]
        differing = [
            f"{name}: {saved.get(name)} there, {value} here"
            for name, value in self._settings.items()
            if saved.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"the data position was saved with other settings ({'; '.join(differing)}); go on "
                "with those, since others put the examples into another order"
            )
        self._epoch, self._batches_in_epoch = state["epoch"], state["batches_in_epoch"]
        self._share = self._open_epoch(self._epoch)
        self._share.restore(state["shares"][self._exchange.share_idx])
        self._position = state

    @property
    def dropped(self) -> Dropped:
        """Malformed rows that this process has left out since the stream was made, by column."""
        return self._dropped

    def close(self) -> None:
        """Ends the exchange; a `next` that waits for other processes in another thread wakes up."""
        self._exchange.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamBatch:
        while self._num_epochs is None or self._epoch < self._num_epochs:
            shares = self._gather()
            if any(share.part is not None for share in shares):
                return self._join(shares)
            if self._batches_in_epoch == 0:
                raise ValueError(
                    f"epoch {self._epoch} has no example: all "
                    f"{sum(share.dropped_rows for share in shares)} rows were malformed and left "
                    f"out; the first here: {self._dropped.first}"
                )
            dropped_rows = self._share.dropped_rows()
            self._epoch, self._batches_in_epoch = self._epoch + 1, 0
            self._share = self._open_epoch(self._epoch)
            self._share.carry_dropped(dropped_rows)
        raise StopIteration

    def _gather(self) -> list[Share]:
        try:
            examples = self._share.take(self._part_size)
        except Exception as error:
            self._exchange.fail(str(error))
            raise
        part = None if examples is None else make_batch(examples, self._part_size)
        return self._exchange.all_gather(
            Share(
                part,
                self._share.position(),
                self._share.dropped_rows(),
                bool(self._stop_requested()),
            )
        )

    def _join(self, shares: list[Share]) -> StreamBatch:
        filling = empty_batch(self._part_size, self._reader.layout.num_slots)
        self._batches_in_epoch += 1
        self._position = self._state([share.position for share in shares])
        return StreamBatch(
            join_batches([filling if share.part is None else share.part for share in shares]),
            self._epoch,
            self._position,
            sum(share.dropped_rows for share in shares),
            any(share.stop for share in shares),
        )

    def _state(self, positions: list[Any]) -> Mapping[str, Any]:
        return {
            "epoch": self._epoch,
            "batches_in_epoch": self._batches_in_epoch,
            "shares": [dict(position) for position in positions],
            "settings": dict(self._settings),
        }

    def _open_epoch(self, epoch: int) -> _ShareOfEpoch:
        order = np.arange(self._reader.num_blocks)
        if self._shuffle_examples > 0:
            # The 1 keeps this apart from the seeds of windows, which are [seed, epoch, block].
            rng = np.random.Generator(np.random.PCG64([self._seed, epoch, 0, 1]))
            order = rng.permutation(order)
        return _ShareOfEpoch(
            self._reader,
            order[self._exchange.share_idx :: self._exchange.num_shares],
            (self._seed, epoch),
            self._shuffle_examples,
            self._note_dropped,
        )

    def _note_dropped(self, dropped: Dropped) -> None:
        if dropped.num_rows and not self._dropped.num_rows:
            _logger.warning("malformed rows are left out; the first one: %s", dropped.first)
        self._dropped += dropped
