import signal

import pytest

from xrex.train.stop_signal import SIGNALS, StopSignal


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_noted_and_kills_nothing(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopSignal() as stop:
        assert (stop.requested(), stop.name) == (False, None)
        signal.raise_signal(number)
        assert (stop.requested(), stop.name) == (True, number.name)
    assert f"{number.name}: saving after this step" in capfd.readouterr().err


def test_second_signal_does_what_it_did_before() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.name == "SIGTERM"


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignal():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
