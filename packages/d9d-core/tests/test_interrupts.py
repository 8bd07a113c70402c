from __future__ import annotations

import signal  # raise_signal: os.kill may reach another thread first, and this one only after the block
import threading

import pytest
from d9d_core.cli.interrupts import interrupts_deferred


def test_an_interrupt_comes_at_the_end_of_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():  # noqa: PT012 - the block is what is tested
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_replaces_the_failure_of_the_block() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():  # noqa: PT012 - the block is what is tested
        signal.raise_signal(signal.SIGINT)
        raise AttributeError("half imported")


def test_a_handler_of_somebody_else_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone() -> None:
    entered: list[bool] = []

    def work() -> None:
        with interrupts_deferred():
            entered.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]
