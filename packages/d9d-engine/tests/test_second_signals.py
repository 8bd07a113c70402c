"""Second stop signals: only a second Ctrl-C stops at once."""

from __future__ import annotations

import os
import signal

import pytest
from d9d_engine.run.interrupt import Interrupts


def test_a_second_interrupt_stops_at_once_and_a_second_termination_does_not() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.requested == "SIGTERM"
        with pytest.raises(KeyboardInterrupt, match="ended at once"):
            signal.raise_signal(signal.SIGINT)
    assert interrupts.requested is None


@pytest.mark.parametrize(
    ("number", "effect"), [(signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)]
)
def test_a_signal_to_a_forked_child_has_its_default_effect(
    monkeypatch: pytest.MonkeyPatch, number: int, effect: object
) -> None:
    did: list[object] = []
    interrupts = Interrupts()
    monkeypatch.setattr(interrupts, "_process", os.getpid() + 1)
    monkeypatch.setattr("signal.signal", lambda *given: did.append(given))
    monkeypatch.setattr("os.kill", lambda *given: did.append(given))
    interrupts._request(number, None)
    interrupts._note(number, None)
    assert did == [(number, effect), (os.getpid(), number)] * 2
    assert interrupts.requested is None
