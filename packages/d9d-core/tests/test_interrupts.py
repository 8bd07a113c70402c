from __future__ import annotations

import signal  # raise_signal: os.kill may reach another thread first, and this one only after the block
import subprocess
import sys
import threading

import pytest
from d9d_core.cli.interrupts import interrupts_deferred
from d9d_core.registry.collect import _handler, contained


def test_an_interrupt_comes_at_the_end_of_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():  # noqa: PT012 - the test is about the block
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_replaces_the_failure_of_the_block() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():  # noqa: PT012 - the test is about the block
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


@pytest.mark.parametrize("importing", ["d9d_core.cli.app", "d9d_core.cli.plugins"])
def test_an_interrupt_while_a_class_is_made_is_one_line(importing: str) -> None:
    """Python 3.11 makes a RuntimeError of it."""
    program = f"""
import signal, sys

class Attribute:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGINT)

class Importer:
    def find_spec(self, name, path=None, target=None):
        if name == {importing!r}:
            type("Made", (), {{"attribute": Attribute()}})

sys.meta_path.insert(0, Importer())
sys.argv = ["d9d", "plugins", "list"]
from d9d_core.cli.main import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_an_interrupt_in_a_class_of_a_plugin_is_the_users() -> None:
    class Attribute:
        def __set_name__(self, _owner: type, _name: str) -> None:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), contained("a plugin"):
        type("Made", (), {"attribute": Attribute()})


def test_a_signal_that_other_code_handles_keeps_its_handler() -> None:
    def own(_number: int, _frame: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with _handler("SIGUSR1", own, signal.SIG_DFL) as installed:
            assert (installed, signal.getsignal(signal.SIGUSR1)) == (True, own)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with _handler("SIGUSR1", own, signal.SIG_DFL) as installed:
            assert (installed, signal.getsignal(signal.SIGUSR1)) == (False, signal.SIG_IGN)
        with _handler("SIGNONE", own, None) as installed:
            assert not installed
    finally:
        signal.signal(signal.SIGUSR1, before)
