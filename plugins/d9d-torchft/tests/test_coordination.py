"""The client of the lighthouse, and the command that serves it, over a stand-in of torchft."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import JobError, TrainingError
from d9d_torchft import coordination
from d9d_torchft.commands import lighthouse
from d9d_torchft.members import Member
from d9d_torchft.replicas import lighthouse_of
from d9d_torchft.settings import Settings
from typer.testing import CliRunner, Result

MINE = Member("b", "1", 7, "line", 0, "10.0.0.1:1", ("10.0.0.1:10", "10.0.0.1:11", "10.0.0.1:12"))
OTHER = Member("a", "2", 7, "line", 0, "10.0.0.2:1", ("10.0.0.2:10", "10.0.0.2:11", "10.0.0.2:12"))


class Client:
    """Stand-in of torchft's client; notes all calls."""

    def __init__(self, library: Library, address: str, connect_timeout: timedelta) -> None:
        assert connect_timeout.total_seconds() >= 1
        library.addresses.append(address)
        self._library = library

    def quorum(self, *words: Any, **named: Any) -> Any:
        self._library.asked.append((words, named))
        if self._library.failures:
            raise self._library.failures.pop()
        return SimpleNamespace(participants=self._library.participants)

    def heartbeat(self, replica: str) -> None:
        self._library.beats.append(replica)
        self._library.beaten.set()


class Server:
    """Stand-in of torchft's server."""

    def __init__(self, library: Library, **options: Any) -> None:
        if library.refuses:
            raise RuntimeError("address in use")
        library.served = options

    def address(self) -> str:
        return "http://host:4321"


class Library:
    """Stand-in of ``torchft.coordination`` with the calls that it got."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.failures: list[Exception] = []
        self.participants = [SimpleNamespace(data={"member": one.to_json()}) for one in (MINE, OTHER)]
        self.beats: list[str] = []
        self.beaten = threading.Event()
        self.served: dict[str, Any] = {}
        self.refuses = False


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found, module = Library(), ModuleType("torchft.coordination")
    vars(module).update(
        LighthouseClient=lambda *words: Client(found, *words), LighthouseServer=lambda **named: Server(found, **named)
    )
    monkeypatch.setitem(sys.modules, "torchft", ModuleType("torchft"))
    monkeypatch.setitem(sys.modules, "torchft.coordination", module)
    return found


@pytest.fixture
def client(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[coordination.Coordinator]:
    monkeypatch.setattr(coordination, "HEARTBEAT", 0.001)
    monkeypatch.setattr(coordination, "_PAUSE", 0.01)
    found = lighthouse_of(Settings("http://10.0.0.9:29510", "b", b"a secret of this job"))
    yield found
    found.close()


def never() -> bool:
    return False


def test_a_quorum_is_asked_for_with_this_replica_and_the_time_that_is_left(
    library: Library, client: coordination.Coordinator
) -> None:
    assert client.quorum(MINE, 60.0, never) == [OTHER, MINE]
    ((words, named),) = library.asked
    name, left = words
    assert name == "b"
    assert timedelta(seconds=50) < left <= timedelta(seconds=60)
    assert named == {
        "address": "10.0.0.1:10",  # of the replica's first rank
        "store_address": "10.0.0.1:1",
        "step": 7,
        "world_size": 3,
        "shrink_only": False,
        "data": {"member": MINE.to_json()},
    }
    client.quorum(MINE, 60.0, never)
    assert library.addresses.count("http://10.0.0.9:29510") == len(library.addresses) <= 2  # quorums, and heartbeats


def test_a_replica_beats_from_its_first_quorum_until_it_leaves(
    library: Library, client: coordination.Coordinator
) -> None:
    assert not library.beats
    client.quorum(MINE, 60.0, never)
    assert library.beaten.wait(30)
    hearts = [thread for thread in threading.enumerate() if thread.name == "d9d-torchft-heartbeat"]
    assert [heart.daemon for heart in hearts] == [True]
    client.close()
    assert not hearts[0].is_alive()
    count = len(library.beats)
    assert set(library.beats) == {"b"}
    time.sleep(0.02)
    assert len(library.beats) == count


def test_a_replica_that_never_beat_leaves_too(library: Library) -> None:
    lighthouse_of(Settings("http://10.0.0.9:29510", "b", b"a secret of this job")).close()
    assert not library.addresses


def test_a_lighthouse_that_is_lost_for_a_while_is_connected_again(
    library: Library, client: coordination.Coordinator
) -> None:
    library.failures = [OSError("refused"), RuntimeError("lost")]
    assert client.quorum(MINE, 60.0, never) == [OTHER, MINE]
    assert len(library.asked) == 3
    assert len(library.addresses) >= 3  # each failure needs a new connection


def test_a_lighthouse_without_an_answer_in_time_is_an_error(library: Library, client: coordination.Coordinator) -> None:
    library.failures = [TimeoutError("no answer")]
    with pytest.raises(TrainingError, match=r"no quorum within 0 s \(quorum_timeout\): no answer; is it running"):
        client.quorum(MINE, 0.0, never)
    (words, _) = library.asked[0]
    assert words[1] == timedelta(seconds=0.01)  # never less than a pause, however late it is


def test_a_replica_that_is_to_stop_connects_no_more(library: Library, client: coordination.Coordinator) -> None:
    library.failures = [RuntimeError("lost")] * 2
    assert client.quorum(MINE, 60.0, lambda: True) is None
    assert len(library.asked) == 1


@pytest.mark.parametrize("data", [None, {}, {"member": {"name": "a"}}])
def test_a_replica_of_another_version_is_an_error(
    library: Library, client: coordination.Coordinator, data: Any
) -> None:
    library.participants = [SimpleNamespace(data=data)]
    with pytest.raises(TrainingError, match="has a replica that d9d-torchft cannot understand"):
        client.quorum(MINE, 60.0, never)


# --- d9d torchft lighthouse


def test_a_lighthouse_without_torchft_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    problem = CliRunner().invoke(lighthouse.app, []).exception
    assert isinstance(problem, JobError)
    assert str(problem).startswith("torchft cannot be imported (")
    assert str(problem).endswith("); install it: pip install 'torchft==0.2.*'")


class Asleep(Exception):
    """Raised instead of sleeping: the command serves."""


@pytest.fixture
def serve(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run the command until it sleeps for the first time; its standard error is restored afterwards."""
    kept = os.dup(2)

    def sleep(seconds: float) -> None:
        raise Asleep(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(signal, "signal", lambda number, action: None)
    yield lambda *words: CliRunner().invoke(lighthouse.app, words)
    os.dup2(kept, 2)
    os.close(kept)


def serves(result: Result) -> bool:
    return isinstance(result.exception, Asleep)


def test_a_lighthouse_waits_for_slow_replicas_and_drops_silent_ones(library: Library, serve: Any) -> None:
    result = serve()
    assert serves(result)
    assert result.output == "lighthouse: http://127.0.0.1:4321\n"  # with the port that torchft has chosen
    assert library.served == {
        "bind": "127.0.0.1:29510",
        "min_replicas": 1,  # d9d-torchft itself waits for the replicas that a job needs
        "join_timeout_ms": 300_000,
        "quorum_tick_ms": 50,
        "heartbeat_timeout_ms": 2000,
    }
    serve("--address", "10.0.0.9:0", "--heartbeat-timeout", "0.5", "--join-timeout", "1.5")
    assert library.served["bind"] == "10.0.0.9:0"
    assert (library.served["heartbeat_timeout_ms"], library.served["join_timeout_ms"]) == (500, 1500)


def test_an_address_that_cannot_be_listened_on_is_an_error(library: Library, serve: Any) -> None:
    for address in ("here", "a b:1", "here:"):
        problem = serve("--address", address).exception
        assert isinstance(problem, JobError)
        assert f"--address: '{address}' is not HOST:PORT" in str(problem)
    library.refuses = True
    before = os.fstat(2)
    problem = serve().exception
    assert os.path.samestat(os.fstat(2), before)  # the error is printed
    assert isinstance(problem, JobError)
    assert "cannot listen on 127.0.0.1:29510 (address in use); choose another" in str(problem)


def test_lines_of_torchft_go_to_the_log(tmp_path: Path, serve: Any) -> None:
    log = tmp_path / "log"
    kept = os.umask(0)
    serve("--log", str(log))
    os.umask(kept)
    assert log.stat().st_mode & 0o777 == 0o644
    log.write_text("before\n")
    os.write(2, b"a step\n")
    assert log.read_text() == "before\na step\n"


def test_a_lighthouse_of_d9d_torchft_run_ends_with_it(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([5, 5])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    waiting = serve("--child")
    assert serves(waiting)
    assert waiting.exception.args == (1,)  # seconds after which it looks for its parent again
    parents = iter([5, 1])
    result = serve("--child")
    assert (result.exit_code, result.exception) == (0, None)
    parents = iter([5, 1])
    assert serves(serve())  # its own master: the process that started it may end


def test_signals_end_a_lighthouse_at_once(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", found.__setitem__)
    serve()
    assert found == {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.SIG_DFL}
