"""A bare ``pytest`` runs on all cores and ends with the ten slowest tests; one with a path stays in its process."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Triton reads it when it is imported. Without a GPU, its kernels run in Python, here and in the processes of worlds.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Choose for a whole suite what its caller left open; who debugs names a path, and gets plain pytest."""
    # A shell's background jobs ignore Ctrl-C, and those of nohup SIGHUP; so would all that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Workers come here too, and would start workers of their own.
    inside = "PYTEST_XDIST_WORKER" in os.environ
    if inside or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    option = config.option
    if option.durations is None:
        option.durations = 10
    # Without pytest-xdist, tests still run, one after the other.
    if config.pluginmanager.hasplugin("xdist") and option.numprocesses is None and option.capture != "no":
        option.numprocesses, option.dist = "auto", "loadfile"
        # In worlds of many processes, threads that spin while they wait make each other four times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure() -> None:
    """Let examples of hypothesis take any time: on a busy machine, its deadline would fail correct tests."""
    settings.register_profile("any time", settings.default, deadline=None)
    settings.load_profile("any time")


def pytest_runtest_setup() -> None:
    """Spare what lies about from the collection of garbage that each training begins with: half a second each."""
    # A command that was interrupted inside of a test leaves the signal blocked, as is right for a process that ends.
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.enable()  # a run that the test before has left open collects at its own pace
    gc.collect()  # what the test before has left; all older objects are frozen
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: with tiny tensors, threads that wait for each other cost more than they give."""
    torch = sys.modules.get("torch")  # most commands and declarations are tested without it
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def loops_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of one number be bounds of loops: Triton 3.6 asks NumPy for what it has since refused."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor  # noqa: SLF001 - there is no public way in

    def patch(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
