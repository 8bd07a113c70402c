from __future__ import annotations

import os
import signal
import threading

import pytest
from d9d_core.cli.interrupts import interrupts_deferred


def test_an_interrupt_comes_at_the_end_of_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():  # noqa: PT012 - the block is what is tested
        os.kill(os.getpid(), signal.SIGINT)
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_replaces_the_failure_of_the_block() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():  # noqa: PT012 - the block is what is tested
        os.kill(os.getpid(), signal.SIGINT)
        raise AttributeError("half imported")


def test_a_handler_of_somebody_else_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    try:
        with interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
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
