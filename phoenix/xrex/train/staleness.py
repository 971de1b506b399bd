"""The staleness modes of a training step, by name: which updates the rows of a step have seen."""

from __future__ import annotations

import dataclasses
import numbers

ONE_STEP, EXACT, SYNCHRONOUS = "one_step", "exact", "synchronous"
MODES = (ONE_STEP, EXACT, SYNCHRONOUS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCapacity:
    """How much the mode `exact` can take over its short way, in sizes that are compiled in.

    The short way carries the rows that a step updates and the next step reads. A pair of batches
    with more of them takes the long way: right, and as slow as a synchronous step.

    Attributes:
      rows: such rows of a pair of batches.
      tokens_per_rank: tokens of a step in such rows, on one rank.
    """

    rows: int
    tokens_per_rank: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            is_count = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if not is_count or value < 1:
                raise ValueError(
                    f"SharedCapacity got {name}={value!r}; it is a count of at least 1"
                )


def require_mode(name: str) -> str:
    """Returns the name of a mode.

    Raises:
      ValueError: there is no mode of this name.
    """
    if name not in MODES:
        raise ValueError(f"there is no staleness mode {name!r}; choose one of {', '.join(MODES)}")
    return name
