from typing import Any

import jax
import pytest

from xrex.train.process_group import ProcessGroup, connect_processes
from xrex.train.share_exchange import Alone

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each jax.distributed.initialize, which connects nothing."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given: made.append(given))
    return made


def test_flags_connect_the_processes(calls: list[tuple[Any, ...]]) -> None:
    assert connect_processes("host:1234", 4, 2, {}) == ProcessGroup(2, 4)
    assert calls == [("host:1234", 4, 2)]


def test_slurm_job_needs_no_flags(calls: list[tuple[Any, ...]]) -> None:
    assert connect_processes(None, None, None, SLURM) == ProcessGroup(0, 1)
    assert calls == [()]


def test_without_flags_and_slurm_both_ways_are_named(calls: list[tuple[Any, ...]]) -> None:
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_PROCID"}
    with pytest.raises(
        ValueError, match=r"--coordinator_address.* SLURM's SLURM_PROCID not set: give the flags"
    ):
        connect_processes(None, None, None, environ)
    assert calls == []


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ((None, 2, 0), "--coordinator_address missing beside --num_processes, --process_id"),
        (("host:1", None, None), "--num_processes, --process_id missing beside"),
    ],
)
def test_missing_flags_are_named(
    calls: list[tuple[Any, ...]], given: tuple[Any, ...], missing: str
) -> None:
    with pytest.raises(ValueError, match=missing):
        connect_processes(*given, SLURM)
    assert calls == []


@pytest.mark.parametrize("process_id", [-1, 2])
def test_process_out_of_range_is_refused(calls: list[tuple[Any, ...]], process_id: int) -> None:
    with pytest.raises(ValueError, match=f"--process_id={process_id} with --num_processes=2"):
        connect_processes("host:1", 2, process_id, {})
    assert calls == []


def test_single_process_is_the_first_and_exchanges_nothing() -> None:
    alone = ProcessGroup()
    assert alone.is_first
    assert isinstance(alone.exchange("train"), Alone)
    assert not ProcessGroup(1, 2).is_first
