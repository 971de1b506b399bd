"""How processes that read shares of the data make one batch of them.

Every process reads its own share of the blocks, and the training step wants the whole batch in
every process. So each batch is a round: each process publishes its part, and takes the parts of
all. The parts go through the store of `jax.distributed`, not through devices, so that a round may
run in a thread beside the training step.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from xrex.cuda.async_emb.comm_utils import KeyValueStore
from xrex.train.batches import Batch

# How long one look into the store waits before it asks whether the exchange was closed.
_LOOK_MS = 200
_ARRAYS = (
    ("ids", np.dtype(np.int32)),
    ("mask", np.dtype(np.bool_)),
    ("labels", np.dtype(np.float32)),
    ("weights", np.dtype(np.float32)),
)


class ShareExchangeError(RuntimeError):
    """The processes could not make a batch together: one of them failed, is late, or has closed."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What one process brings to a round.

    Attributes:
      part: its part of the batch; None if its share of the epoch is used up.
      position: where its share goes on after this part; plain JSON values.
      dropped_rows: malformed rows that it has left out so far.
      stop: it was asked to end the run.
    """

    part: Batch | None
    position: Mapping[str, int]
    dropped_rows: int = 0
    stop: bool = False


class ShareExchange(Protocol):
    """An all-gather of shares.

    Attributes:
      share_idx: which of the shares this process reads.
      num_shares: how many there are.
    """

    share_idx: int
    num_shares: int

    def all_gather(self, share: Share) -> list[Share]:
        """The shares of this round, by process. Every process calls it equally often.

        Raises:
          ShareExchangeError: see there.
        """
        ...

    def fail(self, reason: str) -> None:
        """Tells the others, instead of a share, that this process cannot go on."""
        ...

    def close(self) -> None:
        """Wakes up an `all_gather` that waits in another thread; no round follows."""
        ...


class Alone:
    """The exchange of a single process, which reads everything."""

    share_idx = 0
    num_shares = 1

    def all_gather(self, share: Share) -> list[Share]:
        """See `ShareExchange`."""
        return [share]

    def fail(self, reason: str) -> None:
        """See `ShareExchange`. There is nobody to tell."""

    def close(self) -> None:
        """See `ShareExchange`. Nothing ever waits."""


class StoreExchange:
    """The exchange of several processes, through a key-value store that they share.

    A message is deleted by its process once all have taken it. Those of the last round stay.

    Args:
      store: where the messages lie.
      name: what the keys begin with; another one for every exchange of a run.
      process: index of this process.
      num_processes: how many take part.
      timeout_secs: how long a round waits for a process.
      clock: seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        store: KeyValueStore,
        name: str,
        *,
        process: int,
        num_processes: int,
        timeout_secs: float = 600,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.share_idx, self.num_shares = process, num_processes
        self._store, self._name = store, name
        self._timeout_secs, self._clock = timeout_secs, clock
        self._round = 0
        self._closed = threading.Event()

    def all_gather(self, share: Share) -> list[Share]:
        """See `ShareExchange`."""
        self._publish(_encode(share))
        shares = [
            share if process == self.share_idx else self._take(process)
            for process in range(self.num_shares)
        ]
        # All have published this round, so all have taken everything of the round before.
        if self._round > 0:
            self._store.key_value_delete(self._key(self._round - 1, self.share_idx))
        self._round += 1
        return shares

    def fail(self, reason: str) -> None:
        """See `ShareExchange`."""
        self._publish(_pack({"failed": reason}))

    def close(self) -> None:
        """See `ShareExchange`."""
        self._closed.set()

    def _publish(self, message: bytes) -> None:
        self._store.key_value_set_bytes(self._key(self._round, self.share_idx), message)

    def _take(self, process: int) -> Share:
        deadline = self._clock() + self._timeout_secs
        while True:
            if self._closed.is_set():
                raise ShareExchangeError(f"data exchange {self._name} was closed while it waited")
            try:
                message = self._store.blocking_key_value_get_bytes(
                    self._key(self._round, process), _LOOK_MS
                )
            except Exception as error:
                if self._clock() < deadline and "DEADLINE_EXCEEDED" in str(error):
                    continue
                raise ShareExchangeError(
                    f"process {process} did not bring its part of batch {self._round} of data "
                    f"exchange {self._name} within {self._timeout_secs} s ({error}); look at its "
                    "log, it may have failed or be reading slowly"
                ) from error
            return self._decode(process, message)

    def _decode(self, process: int, message: bytes) -> Share:
        header_bytes = int.from_bytes(message[:4], "little")
        header = json.loads(message[4 : 4 + header_bytes])
        if "failed" in header:
            raise ShareExchangeError(
                f"process {process} could not read its share of the data: {header['failed']}"
            )
        shape = header.pop("shape")
        return Share(_unpack_arrays(message[4 + header_bytes :], shape), **header)

    def _key(self, round_number: int, process: int) -> str:
        return f"xrex_train/{self._name}/{round_number}/{process}"


def _encode(share: Share) -> bytes:
    header: dict[str, Any] = {
        "position": dict(share.position),
        "dropped_rows": share.dropped_rows,
        "stop": share.stop,
        "shape": None if share.part is None else share.part.ids.shape,
    }
    arrays = [] if share.part is None else [getattr(share.part, name) for name, _ in _ARRAYS]
    return _pack(header, *(np.ascontiguousarray(array).tobytes() for array in arrays))


def _pack(header: Mapping[str, Any], *contents: bytes) -> bytes:
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, *contents])


def _unpack_arrays(content: bytes, shape: list[int] | None) -> Batch | None:
    if shape is None:
        return None
    batch_size, num_slots = shape
    shapes = [(batch_size, num_slots)] * 2 + [(batch_size,)] * 2
    arrays, offset = [], 0
    for (_, dtype), array_shape in zip(_ARRAYS, shapes, strict=True):
        count = int(np.prod(array_shape))
        arrays.append(np.frombuffer(content, dtype, count, offset).reshape(array_shape))
        offset += count * dtype.itemsize
    return Batch(*arrays)
