"""Options of an embedding context."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

OutOfRange = Literal["clip", "zero"]
Transport = Literal["auto", "nccl", "lsa"]

# The native side refuses more: int32, and a year.
_MAX_CTAS = 2**31 - 1
_MAX_TIMEOUT_SECS = 366 * 24 * 3600


@dataclasses.dataclass(frozen=True)
class AsyncEmbOptions:
    """How a context treats bad ids, sums, resources and waits. Validated when made.

    Attributes:
        out_of_range: what an id outside [0, V) (after negative ids wrapped once) means. "clip": the
            lookup reads the nearest row and the update skips the id, as JAX's `table[ids]` and its
            gradient do. "zero": the lookup gives a row of zeros, the update skips the id.
        deterministic: fixes the order of all sums, so that results are equal bit for bit from run
            to run and for every power-of-two number of ranks.
        check_inputs: spends device time on checking that the slots of an update are distinct. The
            host backend always checks.
        min_ctas: least number of thread blocks the communicator may take on a GPU.
        max_ctas: greatest number of thread blocks the communicator may take on a GPU.
        transport: how ranks on GPUs exchange data: "nccl", "lsa" (direct stores over NVLink, for
            ranks of one host), or "auto" for the best one there is. CPU devices take "auto" only.
        timeout_secs: seconds from arming a step to giving it up. None: the environment variable
            XAI_ASYNC_EMB_TIMEOUT_SECONDS, and without it the backend's default.
        any_world_size: allows a number of ranks that is not a power of two.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has a value outside its range.
    """

    out_of_range: OutOfRange = "clip"
    deterministic: bool = False
    check_inputs: bool = False
    min_ctas: int = 1
    max_ctas: int = 4
    transport: Transport = "auto"
    timeout_secs: int | None = None
    any_world_size: bool = False

    def __post_init__(self) -> None:
        _require_choice("out_of_range", self.out_of_range, get_args(OutOfRange))
        _require_choice("transport", self.transport, get_args(Transport))
        for name in ("deterministic", "check_inputs", "any_world_size"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(
                    f"AsyncEmbOptions: {name}={value!r} is a {type(value).__name__}; "
                    "it is a switch: give True or False"
                )
        _require_int("min_ctas", self.min_ctas)
        _require_int("max_ctas", self.max_ctas)
        if not 1 <= self.min_ctas <= self.max_ctas <= _MAX_CTAS:
            raise ValueError(
                f"AsyncEmbOptions: min_ctas={self.min_ctas}, max_ctas={self.max_ctas}; the rule is "
                f"1 <= min_ctas <= max_ctas <= {_MAX_CTAS}: give counts of thread blocks in this "
                "order, or leave both out"
            )
        if self.timeout_secs is not None:
            _require_int("timeout_secs", self.timeout_secs)
            if not 1 <= self.timeout_secs <= _MAX_TIMEOUT_SECS:
                raise ValueError(
                    f"AsyncEmbOptions: timeout_secs={self.timeout_secs}; the rule is "
                    f"1 <= timeout_secs <= {_MAX_TIMEOUT_SECS}: give whole seconds, or None for "
                    "the default"
                )


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"AsyncEmbOptions: {name}={value!r} is unknown; choose one of {', '.join(choices)}"
        )


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"AsyncEmbOptions: {name}={value!r} is a {type(value).__name__}; give a whole number"
        )
