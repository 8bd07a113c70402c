"""The thread of a launched process that passes stop requests and signals on, and ends with the launcher."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_engine.launch import process
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import Interrupts


class Link:
    """Link to a launcher: one byte of the pipe is one message; it ends with the launcher."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.connection = SimpleNamespace(fileno=lambda: self.reading)
        self.sent: list[dict[str, Any]] = []

    def send(self, **message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> list[dict[str, str]]:
        content = os.read(self.reading, 64)
        if not content:
            raise EOFError
        return [{"stop": chr(byte)} for byte in content]


def wait_for(found: list[Any], count: int) -> None:
    end = time.monotonic() + 10
    while len(found) < count and time.monotonic() < end:
        time.sleep(0.001)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: Any = Link()
    made.wakeup, made.ended, made.forks = [], [], []
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda descriptor, **more: made.wakeup.append((descriptor, more)))
    monkeypatch.setattr(os, "register_at_fork", lambda **given: made.forks.append(given))
    monkeypatch.setattr(os, "_exit", made.ended.append)
    before = set(threading.enumerate())
    made.threads = lambda name: [one for one in threading.enumerate() if one.name == name and one not in before]
    yield made
    if made.threads("d9d-launcher-watch") and not made.ended:
        os.close(made.writing)
        wait_for(made.ended, 1)


def test_requests_and_signals_are_passed_on_until_the_launcher_ends(link: Any) -> None:
    requests: list[str] = []
    interrupts: Any = SimpleNamespace(request=requests.append, entered=None)
    process._follow(link, interrupts)
    os.write(link.writing, b"a")
    wait_for(requests, 1)
    os.write(link.writing, b"bc")
    wait_for(requests, 3)
    assert requests == ["a", "b", "c"]
    ((descriptor, more),) = link.wakeup
    assert more == {"warn_on_full_buffer": False}
    assert not os.get_blocking(descriptor)
    os.write(descriptor, bytes([signal.SIGINT, signal.SIGUSR1, signal.SIGTERM]))
    wait_for(link.sent, 2)
    assert link.sent == [{"asked": "SIGINT"}, {"asked": "SIGTERM"}]
    interrupts.entered()
    assert link.sent[2:] == [{"training": True}]
    (watch,) = link.threads("d9d-launcher-watch")
    assert watch.daemon
    link.forks[0]["after_in_child"]()
    assert link.wakeup[1] == (-1, {})
    os.close(link.writing)
    wait_for(link.ended, 1)
    assert link.ended == [process.ENDED]
    watch.join(10)


class Early:
    """A rank that no launcher of d9d started, in its start-up."""

    def __init__(self, rank: int, requested: str | None = None, status: int = 75) -> None:
        self.interrupts: Any = SimpleNamespace(requested=requested, entered=None)
        self.process: Any = SimpleNamespace(
            env=SimpleNamespace(rank=rank), stop_status=status, failed_elsewhere=lambda: False
        )

    def stops(self) -> Any:
        return process._early_stops(self.process, self.interrupts)


def test_a_stop_signal_ends_a_rank_at_once_until_it_has_progress_to_save(
    link: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    early = Early(rank=0)
    with early.stops():
        descriptor = link.wakeup[0][0]
        os.write(descriptor, bytes([signal.SIGINT, signal.SIGUSR1, signal.SIGTERM]))
        wait_for(link.ended, 1)
        assert link.ended == [75]
        assert capfd.readouterr().err == "SIGTERM: stopped during start-up; nothing was trained\n"
        early.interrupts.entered()
        os.write(descriptor, bytes([signal.SIGTERM]))
    for thread in link.threads("d9d-early-stop"):
        thread.join(10)
    assert link.ended == [75] * len(link.ended)


def test_an_earlier_request_ends_a_rank_and_only_the_first_rank_says_so(
    link: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with Early(rank=3, requested="SIGHUP", status=0).stops():
        wait_for(link.ended, 1)
    assert link.ended[:1] == [0]
    assert capfd.readouterr().err == ""


def test_signals_after_the_block_end_nothing(link: Any) -> None:
    with Early(rank=0).stops():
        descriptor = link.wakeup[0][0]
    os.write(descriptor, bytes([signal.SIGTERM]))
    for thread in link.threads("d9d-early-stop"):
        thread.join(10)
    assert link.ended == []


@pytest.mark.parametrize(("environ", "status"), [({}, 75), ({"TORCHELASTIC_RUN_ID": "none"}, 0)])
def test_a_stopped_rank_does_not_look_like_a_failure_to_the_agent_of_torch(
    link: Any, environ: dict[str, str], status: int
) -> None:
    env = ProcessEnv(0, 2, 0, 2, node="here", launcher="torchrun")
    with process.running(env, environ, Interrupts()) as running:
        assert running.stop_status == status
