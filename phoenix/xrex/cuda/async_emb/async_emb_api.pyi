"""Types of the native module. Programs use it through `async_emb`; tests and tools use it directly.

Calls that wait release the GIL. A bad value is a ValueError, every other failure a RuntimeError.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

class AsyncEmbContext:
    """The native context of one rank: its life cycle and, on the host backend, its lookups."""

    def __init__(
        self,
        context_id: int,
        world_size: int,
        *,
        tokens_per_rank: int,
        shard_width: int,
        emb_width: int,
        num_unique: int,
        out_of_range: str = "clip",
        deterministic: bool = False,
        check_inputs: bool = False,
        any_world_size: bool = False,
        min_ctas: int = 1,
        max_ctas: int = 4,
        transport: str = "auto",
        timeout_secs: int | None = None,
        platform: str = "cpu",
        device_key: int = 0,
        name: str = "",
    ) -> None: ...
    def reset(self, rank: int, world_size: int) -> list[bytes]:
        """Takes a rank; returns one payload for each rank, empty but on rank 0."""

    def handshake(self, payloads: list[bytes], timeout_secs: int | None = None) -> None:
        """Waits for all ranks; payloads[i] is what rank i made for this rank.

        timeout_secs: how long; None for the time-out of a step.
        """

    def close(self) -> None:
        """Ends a lookup that is armed and lets the context go."""

    def arm_lookup(self, ids: NDArray[np.int32], table: NDArray[Any]) -> int:
        """Arms a lookup of int32 [T] in a bfloat16 [V, w] table; returns the step's number."""

    def consume_lookup(self) -> NDArray[Any]:
        """Waits for the armed lookup; returns its rows, bfloat16 [T, W]."""

    def wait_step_ready(self) -> int:
        """Waits for the latest lookup; 0 if none was ever armed."""

    def drain(self) -> int:
        """Waits for the latest step of both pipelines; 0 if none was ever armed."""

    def reset_table_binding(self) -> None:
        """Forgets which table the steps work on."""

    def abort(self, reason: str = "abort() was called") -> None:
        """Ends every exchange that is not complete."""

    def check(self) -> None:
        """Raises the sticky error, if there is one."""

    def snapshot(self, region: str) -> bytes:
        """The bytes of one region of the arena."""

    def stats(self) -> dict[str, Any]:
        """The counters since the context was made; names as in RankStats."""

    @property
    def context_id(self) -> int:
        """The id that the FFI calls carry."""

    @property
    def rank(self) -> int:
        """This context's rank in its replica group."""

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""

    @property
    def device_key(self) -> int:
        """The ordinal that handlers on its device report."""

    @property
    def ready(self) -> bool:
        """Whether the handshake is complete."""

    @property
    def error(self) -> str | None:
        """The sticky error, if there is one."""

    @property
    def arena_bytes(self) -> int:
        """The size of its arena."""

    @property
    def lookup_steps_armed(self) -> int:
        """Lookups started."""

    @property
    def lookup_steps_done(self) -> int:
        """Lookups whose exchange completed."""

    @property
    def update_steps_armed(self) -> int:
        """Updates started."""

    @property
    def update_steps_done(self) -> int:
        """Updates completed."""

def register_context(context: AsyncEmbContext) -> None:
    """Makes a context known to the FFI handlers, under its platform, id and device key."""

def destroy_contexts(context_id: int) -> int:
    """Ends and forgets the local contexts of an id; returns how many there were."""

def has_contexts(context_id: int) -> bool:
    """Whether there are local contexts of an id."""

def wait_step_ready(context_id: int) -> int:
    """Waits for the latest lookup of all local contexts; returns the least step."""

def drain(context_id: int) -> int:
    """Waits for the latest steps of all local contexts; returns the least one."""

def abort(context_id: int, reason: str = "abort() was called") -> None:
    """Ends every exchange of the local contexts."""

def check(context_id: int) -> None:
    """Raises the sticky error of a local context, if there is one."""

def reset_table_binding(context_id: int) -> None:
    """Makes the local contexts forget which table their steps work on."""

def stats(context_id: int) -> dict[int, dict[str, Any]]:
    """The counters of the local contexts by device key."""

def group_ids(
    ids: NDArray[np.int32] | NDArray[np.int64],
    mask: NDArray[np.bool_] | None,
    vocab_rows: int,
    unique_tokens: NDArray[np.int32],
    segment_ids: NDArray[np.int32],
) -> tuple[int, int, int]:
    """Groups the tokens `ids` [N] by row into `unique_tokens` [U] and `segment_ids` [N].

    Returns the number of distinct rows, the number of ids out of range, and the position of the
    first of these or -1.
    """

def plan_shared_rows(
    unique_tokens: NDArray[np.int32],
    segment_ids: NDArray[np.int32],
    num_rows: int,
    next_ids: NDArray[np.int32] | NDArray[np.int64],
    vocab_rows: int,
    num_ranks: int,
    clip: bool,
    rows: NDArray[np.int32],
    tokens: NDArray[np.int32],
    segments: NDArray[np.int32],
    rest_unique: NDArray[np.int32],
    rest_segments: NDArray[np.int32],
    next_index: NDArray[np.int32],
) -> tuple[int, int, int, bool]:
    """Plans into the last six arrays, as the fields of SharedRows of the same names say.

    Returns the number of shared rows, of tokens in them, the most of these on one rank, and whether
    there was room; without it the arrays mean nothing.
    """

def nccl_version() -> int:
    """The version of the NCCL library in use, as NCCL encodes it."""

def nccl_library_path() -> str:
    """The path of the NCCL library in use."""

def ffi_handlers(platform: str) -> dict[str, Any]:
    """The FFI handlers of a platform by target name; empty if this build has not got it."""

def _test_snapshot(context_id: int, region: str, device: int | None = None) -> bytes: ...
