import pytest

from xrex.train.phase_timer import PhaseTimer


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_seconds_are_added_up_by_phase() -> None:
    clock = FakeClock()
    timer = PhaseTimer(clock)
    for seconds in (1.0, 2.0):
        with timer.phase("step"):
            clock.now += seconds
        clock.now += 0.5
    assert timer.report() == {"step": 3.0, "other": 1.0, "total": 4.0}


def test_phase_inside_a_phase_is_refused() -> None:
    timer = PhaseTimer(FakeClock())
    with (
        timer.phase("step"),
        pytest.raises(RuntimeError, match="phase 'data' started inside phase 'step'"),
        timer.phase("data"),
    ):
        pass


def test_time_of_a_failed_phase_counts() -> None:
    clock = FakeClock()
    timer = PhaseTimer(clock)

    def fail_late() -> None:
        with timer.phase("step"):
            clock.now += 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fail_late()
    assert timer.report()["step"] == 1.0
