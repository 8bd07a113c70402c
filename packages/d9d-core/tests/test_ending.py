"""End of a process whose threads or children still run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.cli import ending


class Threads:
    """Stand-in of threads that are started: keeps their function and settings."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []

    def __call__(self, **settings: Any) -> Threads:
        self.settings = settings
        return self

    def start(self) -> None:
        self.started.append(self.settings)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    made = Threads()
    monkeypatch.setattr(ending.threading, "Thread", made)
    return made


def test_a_process_with_nothing_left_is_not_watched(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_left", lambda: iter(()))
    ending.end_in_time(0)
    assert threads.started == []


def test_the_watch_does_not_itself_keep_the_process_and_ends_it_with_its_children(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([["thread a"], ["thread a", "process b"]])
    monkeypatch.setattr(ending, "_left", lambda: iter(next(left)))
    ending.end_in_time(7)
    (watch,) = threads.started
    assert watch["daemon"] is True
    done: list[object] = []

    class Child:
        def kill(self) -> None:
            done.append("killed")

    class Main:
        def join(self) -> None:
            done.append("joined")

    monkeypatch.setattr(ending.threading, "main_thread", Main)
    monkeypatch.setattr(ending.time, "sleep", done.append)
    monkeypatch.setattr(ending, "_children", lambda: [Child()])
    calls = {"write": lambda *given: done.append(given), "_exit": lambda status: done.append(("exit", status))}
    monkeypatch.setattr(ending, "os", SimpleNamespace(**calls))
    run: Callable[[], None] = watch["target"]
    run()
    text = b"warning: all was done 30 s ago, but thread a, process b still runs; this process ends without it\n"
    assert done == ["joined", ending.PATIENCE, (2, text), "killed", ("exit", 7)]


def test_threads_that_the_interpreter_waits_for_are_described() -> None:
    release = threading.Event()
    threads = [threading.Thread(target=release.wait, name=f"mine-{daemon}", daemon=daemon) for daemon in (True, False)]
    for thread in threads:
        thread.start()
    try:
        found = list(ending._left())
    finally:
        release.set()
        for thread in threads:
            thread.join()
    assert any("mine-False" in text for text in found)
    assert not any("mine-True" in text for text in found)


def test_the_place_of_a_thread_is_the_code_that_waits_not_the_library_in_which_it_waits() -> None:
    seen: list[str] = []
    threading.Timer(0, lambda: seen.append(ending._place(sys._getframe(1)))).run()  # here, in no thread of its own
    place, _, line = seen[0].rpartition(":")
    assert place == __file__
    assert "threading.Timer(" in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert ending._place(sys._getframe()).rpartition(":")[0] == __file__
