"""Second stop signals: only a second Ctrl-C stops at once."""

from __future__ import annotations

import signal

import pytest
from d9d_engine.run.interrupt import Interrupts


def test_a_second_interrupt_stops_at_once_and_a_second_termination_does_not() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.requested == "SIGTERM"
        with pytest.raises(KeyboardInterrupt, match="a second time"):
            signal.raise_signal(signal.SIGINT)
    assert interrupts.requested is None
