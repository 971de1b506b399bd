"""Grouping of a batch's ids and the plan of shared rows, on one core of the host.

What a training program does with every batch before a step: `group_ids` against `make_segments`,
which is its equal in NumPy, and `plan_shared_rows` for two batches drawn alike. Units: milliseconds
a call, N tokens in the global batch, V rows, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import measure
from xrex.cuda.async_emb.id_groups import group_ids, plan_shared_rows
from xrex.cuda.async_emb.segments import make_segments

_TOKENS = flags.DEFINE_integer("tokens", 524_288, "N, tokens of the global batch.")
_ROWS = flags.DEFINE_integer("rows", 4_000_000, "V, rows of the table.")
_RANKS = flags.DEFINE_integer("ranks", 8, "R, ranks that share the batch.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 15, "Timed calls of each form.")

_SEED = 0


def _run(kind: str, ids: np.ndarray, next_ids: np.ndarray) -> dict[str, Any]:
    """Times both calls on one pair of batches and returns the record to print."""
    num_tokens, num_rows = _TOKENS.value, _ROWS.value
    groups = group_ids(ids, num_rows, num_tokens)

    def plan() -> Any:
        return plan_shared_rows(
            groups,
            next_ids,
            num_rows,
            num_ranks=_RANKS.value,
            row_capacity=num_tokens,
            token_capacity=num_tokens // _RANKS.value,
            out_of_range="clip",
        )

    times = measure.time_in_turn(
        {
            "group_ids": lambda: group_ids(ids, num_rows, num_tokens)[:2],
            "make_segments": lambda: make_segments(ids, num_rows, num_tokens),
            "plan_shared_rows": lambda: plan()[4:],
        },
        repetitions=_REPETITIONS.value,
    )
    shared = plan()
    return {
        "case": f"ids of a batch, {kind}",
        "distinct": groups.num_rows,
        "shared_rows": shared.num_rows,
        "tokens_in_shared_rows": shared.num_tokens,
        "ms": {name: round(ms, 2) for name, ms in times.items()},
        "group_ids_speedup": round(times["make_segments"] / times["group_ids"], 1),
    }


def main(argv: Sequence[str]) -> None:
    """Prints the machine, the sizes, and a record for each kind of ids."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    rng = np.random.default_rng(_SEED)
    measure.print_json(measure.describe_machine())
    measure.print_json({"N": _TOKENS.value, "V": _ROWS.value, "R": _RANKS.value})
    size = 2 * _TOKENS.value
    draws = {
        "Zipf(1.2)": measure.zipf_ids(rng, size, _ROWS.value),
        "uniform": measure.uniform_ids(rng, size, _ROWS.value),
        "ascending": np.arange(size, dtype=np.int32) // 2 % _ROWS.value,
        "one row": np.zeros(size, np.int32),
    }
    for kind, ids in draws.items():
        measure.print_json(_run(kind, *np.split(ids, 2)))


if __name__ == "__main__":
    app.run(main)
