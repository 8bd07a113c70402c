"""Processes of a launch as the launcher sees them: stop requests, failures and deadlines.

No processes are started: each one is a socket and an exit status, and each look of the launcher takes a second.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from d9d_engine.launch import agent
from d9d_engine.launch import ranks as module
from d9d_engine.launch.agent import Launch, Machines, cause
from d9d_engine.launch.link import VARIABLE, Link
from d9d_engine.launch.ranks import Ended, Rank, Ranks
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import STOPPED, Interrupts
from d9d_engine.supervision.failure import Failure

Script = dict[int, Callable[[], object]]


class Process:
    """Stand-in of a launched process: the other end of its link, and its exit status."""

    def __init__(self, command: list[str], env: dict[str, str], pass_fds: list[int], **options: Any) -> None:
        self.command, self.env, self.options = command, env, options
        assert pass_fds == [int(env[VARIABLE])]
        self.end = socket.socket(fileno=socket.dup(pass_fds[0]))
        self.returncode: int | None = None
        self.signals: list[int] = []

    def say(self, **message: Any) -> None:
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def exit(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self.asked = self.heard()
            self.end.close()

    def heard(self) -> list[Any]:
        self.end.setblocking(False)
        data = b""
        with suppress(BlockingIOError, ConnectionError):
            data = self.end.recv(65536)
        return [json.loads(line) for line in data.splitlines()]

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        if self.returncode is None:
            self.signals.append(signal.SIGKILL)
        self.exit(-signal.SIGKILL)


class World:
    """Launcher of some stand-ins; each of its looks takes a second, before which the script's action happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.now, self.script = 0.0, cast("Script", {})
        self.processes: list[Process] = []
        self.signals: list[int] = []
        world = self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                if timeout:
                    world.now += 1
                    world.script.get(int(world.now), lambda: None)()
                    assert world.now < 1000
                return super().select(0)

        def start(command: list[str], **options: Any) -> Process:
            self.processes.append(Process(command, **options))
            return self.processes[-1]

        monkeypatch.setattr(
            module, "selectors", SimpleNamespace(DefaultSelector=Selector, EVENT_READ=selectors.EVENT_READ)
        )
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=start))
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _seconds: None))
        self.ranks = Ranks(["-m", "job"], [{"RANK": str(rank)} for rank in range(count)])

    def wait(self, script: Script, patience: float = 10.0) -> Ended:
        self.script = script
        return self.ranks.wait(self.signals, patience)

    def train(self) -> None:
        for process in self.processes:
            process.say(training=True)

    def exit(self, *codes: int) -> None:
        for process, code in zip(self.processes, codes, strict=True):
            process.say(done=True)
            process.exit(code)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], World]]:
    worlds: list[World] = []

    def make(count: int) -> World:
        worlds.append(World(monkeypatch, count))
        return worlds[-1]

    yield make
    for made in worlds:
        for process in made.processes:
            process.end.close()


def test_each_process_has_its_environment_and_a_session_of_its_own(world: Callable[[int], World]) -> None:
    made = world(2)
    ended = made.wait({1: made.train, 3: lambda: made.exit(0, 0)})
    assert (ended.failed, ended.asked, ended.training, ended.insisted) == ([], None, True, False)
    assert made.now == 3
    assert [process.env["RANK"] for process in made.processes] == ["0", "1"]
    assert [process.command[-2:] for process in made.processes] == [["-m", "job"]] * 2
    assert all(process.options["start_new_session"] is True for process in made.processes)
    assert [rank.ended for rank in made.ranks.ranks] == [1, 2]
    assert [(rank.number, rank.done, rank.done_at) for rank in made.ranks.ranks] == [(0, True, 3.0), (1, True, 3.0)]
    assert all(rank.link.connection.fileno() == -1 for rank in made.ranks.ranks)


def test_a_process_that_cannot_start_takes_the_others_along(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(1)

    def failing(command: list[str], **options: Any) -> Process:
        if len(made.processes) == 3:
            raise OSError("no more processes")
        made.processes.append(Process(command, **options))
        return made.processes[-1]

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=failing))
    with pytest.raises(OSError, match="no more processes"):
        Ranks([], [{}] * 3)
    assert [process.signals for process in made.processes] == [[], [signal.SIGKILL], [signal.SIGKILL]]
    made.ranks.kill()


def test_a_stop_signal_before_training_kills_all(world: Callable[[int], World]) -> None:
    made = world(2)
    ended = made.wait({2: lambda: made.signals.append(signal.SIGTERM)})
    assert (ended.asked, ended.training, ended.insisted, made.now) == ("SIGTERM", False, False, 3)
    assert [process.signals for process in made.processes] == [[signal.SIGKILL]] * 2


def test_a_stop_signal_in_training_is_passed_on_to_all_and_they_get_time_to_save(
    world: Callable[[int], World],
) -> None:
    made = world(2)
    ended = made.wait(
        {1: made.train, 2: lambda: made.signals.append(signal.SIGINT), 200: lambda: made.exit(0, 0)}, patience=1
    )
    assert (ended.failed, ended.asked, ended.training, ended.insisted) == ([], "SIGINT", True, False)
    assert [process.signals for process in made.processes] == [[], []]
    assert [process.asked for process in made.processes] == [[{"stop": "SIGINT"}]] * 2


def test_a_process_that_was_asked_to_stop_passes_that_on(world: Callable[[int], World]) -> None:
    made = world(2)
    ended = made.wait({1: made.train, 2: lambda: made.processes[1].say(asked="SIGHUP"), 4: lambda: made.exit(0, 0)})
    assert (ended.asked, ended.failed) == ("SIGHUP", [])
    assert [process.asked for process in made.processes] == [[{"stop": "SIGHUP"}]] * 2


def test_a_process_that_a_stop_signal_ends_before_training_means_to_stop_all(world: Callable[[int], World]) -> None:
    made = world(2)
    ended = made.wait({2: lambda: made.processes[1].exit(-signal.SIGTERM)})
    assert ended.asked == "SIGTERM"
    assert made.processes[0].signals == [signal.SIGKILL]
    both = world(2)
    ended = both.wait({2: lambda: [both.processes[0].exit(-signal.SIGTERM), both.processes[1].exit(1)]})
    assert ended.asked == "SIGTERM"
    trained = world(2)
    ended = trained.wait({1: trained.train, 2: lambda: trained.processes[1].exit(-signal.SIGTERM)})
    assert (ended.asked, [rank.number for rank in ended.failed]) == (None, [1])


def test_a_second_ctrl_c_is_passed_on_and_leaves_two_seconds(world: Callable[[int], World]) -> None:
    made = world(2)

    def again() -> None:
        made.signals.append(signal.SIGINT)

    ended = made.wait({1: made.train, 2: again, 5: again})
    assert (ended.asked, ended.training, ended.insisted) == ("SIGINT", True, True)
    assert made.now == 8
    assert [process.signals for process in made.processes] == [[signal.SIGINT, signal.SIGKILL]] * 2
    assert ended.failed == []


def test_two_signals_at_once_are_a_request_and_a_second_one(world: Callable[[int], World]) -> None:
    made = world(1)
    ended = made.wait({1: made.train, 2: lambda: made.signals.extend([signal.SIGINT, signal.SIGINT])})
    assert (ended.insisted, made.now) == (True, 5)
    assert made.processes[0].signals == [signal.SIGINT, signal.SIGKILL]


def test_the_third_request_kills_at_once_and_a_second_sigterm_changes_nothing(world: Callable[[int], World]) -> None:
    made = world(2)

    def again() -> None:
        made.signals.append(signal.SIGTERM)

    ended = made.wait({1: made.train, 2: again, 3: again, 90: again})
    assert (ended.asked, ended.insisted, made.now) == ("SIGTERM", True, 91)
    assert [process.signals for process in made.processes] == [[signal.SIGKILL]] * 2


def test_after_a_failure_the_others_have_two_seconds_to_tell_theirs(world: Callable[[int], World]) -> None:
    made = world(3)

    def fails() -> None:
        made.processes[1].say(failure={"text": "error: disk", "exit_code": 3, "second_hand": False})
        made.processes[1].exit(3)

    def follows() -> None:
        made.processes[2].say(failure=None, first="rank 1")
        made.processes[2].exit(1)

    ended = made.wait({1: made.train, 3: fails, 4: follows})
    assert made.now == 6
    assert [(rank.number, rank.exit_code, rank.ended) for rank in ended.failed] == [(1, 3, 1), (2, 1, 2)]
    assert ended.failed[0].failure == Failure("error: disk", 3, False)
    assert (ended.failed[1].failure, ended.failed[1].echoes, ended.failed[0].echoes) == (None, "rank 1", "")
    assert made.processes[0].signals == [signal.SIGKILL]
    assert cause(ended.failed, str) == Failure("error: disk", 3)


def test_the_last_process_has_to_end_soon_after_the_first(world: Callable[[int], World]) -> None:
    made = world(2)

    def ends() -> None:
        made.processes[0].say(done=True)
        made.processes[0].exit(0)

    ended = made.wait({2: ends}, patience=10)
    assert made.now == 13
    (rank,) = ended.failed
    assert rank.number == 1
    assert rank.failure == Failure("error: rank 1 did not end within 10 s (timeouts.startup) after another rank")
    assert made.processes[1].signals == [signal.SIGKILL]


def test_a_process_that_is_done_but_does_not_exit_is_killed_with_a_warning(
    world: Callable[[int], World], capsys: pytest.CaptureFixture[str]
) -> None:
    made = world(1)
    ended = made.wait({2: lambda: made.processes[0].say(done=True), 3: lambda: made.processes[0].say(done=True)})
    seconds = module._DONE_SECONDS
    assert made.now == 2 + seconds + 2  # noticed in the look after the kill
    assert ended.failed == []
    told = f"warning: rank 0 has been done for {seconds:g} s, but did not exit; killed it\n"
    assert capsys.readouterr().err == told


def rank_that_failed(number: int, ended: int, code: int, failure: Failure | None = None, echoes: str = "") -> Rank:
    nothing: Any = None
    return Rank(number, nothing, nothing, failure=failure, echoes=echoes, exit_code=code, ended=ended)


def test_the_cause_is_a_failure_of_its_own_then_a_signal_then_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "host")
    echo = rank_that_failed(0, 1, 1, echoes="rank 3")
    second_hand = rank_that_failed(1, 2, 1, Failure("connection closed", second_hand=True))
    exited = rank_that_failed(2, 3, 7)
    killed = rank_that_failed(3, 4, -signal.SIGKILL)
    segfault = rank_that_failed(4, 5, -signal.SIGSEGV)
    told, later = rank_that_failed(5, 6, 2, Failure("mine", 2)), rank_that_failed(6, 7, 1, Failure("later"))

    def name_of(rank: int) -> str:
        return f"rank {rank} (dp 0)"

    found = []
    failed = [echo, second_hand, exited, segfault, killed, later, told]
    while failed:
        chosen = cause(failed, name_of)
        found.append((chosen.text, chosen.exit_code))
        failed = failed[:-1] if len(failed) > 1 else []
    text = "rank 3 (dp 0) on host was killed by SIGKILL; the system does that when memory runs out"
    assert found == [
        ("mine", 2),
        ("later", 1),
        (text, 1),
        ("rank 4 (dp 0) on host was killed by SIGSEGV", 1),
        ("rank 2 (dp 0) on host ended with exit status 7, without an error of its own", 7),
        ("connection closed", 1),
        (
            "rank 0 (dp 0) on host ended with exit status 1, because rank 3 failed; the launcher of that rank says why",
            1,
        ),
    ]


class Attempts:
    """Outcomes of launch attempts, in place of processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: Ended) -> None:
        self.outcomes, self.given = list(outcomes), list[Any]()

        def run_ranks(
            arguments: Any, processes: int, signals: list[int], patience: float, _environ: Any, machines: Any
        ) -> Ended:
            self.given.append((arguments, processes, list(signals), patience))
            return self.outcomes.pop(0)

        monkeypatch.setattr(agent, "run_ranks", run_ranks)


def failed_with(code: int) -> Ended:
    return Ended([rank_that_failed(0, 1, code, Failure(f"status {code}", code))], None, True, False)


def launched(restarts: int, interrupts: Interrupts | None = None) -> int:
    return Launch(("-m", "job"), 2, restarts, lambda rank: f"rank {rank}", 30.0).run(interrupts)


def test_a_failed_launch_starts_again_until_it_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = Attempts(monkeypatch, failed_with(3), failed_with(1), Ended([], None, True, False))
    assert launched(2) == 0
    assert attempts.given == [(("-m", "job"), 2, [], 30.0)] * 3
    assert capsys.readouterr().err.splitlines() == [
        "status 3", "starting all 2 processes again (restart 1 of 2)",
        "status 1", "starting all 2 processes again (restart 2 of 2)",
    ]  # fmt: skip


@pytest.mark.parametrize(("codes", "restarts", "status"), [([3], 0, 3), ([1, 4], 1, 4), ([2], 5, 2), ([1, 2], 5, 2)])
def test_a_launch_gives_up_after_its_restarts_or_an_error_of_the_job(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], restarts: int, status: int
) -> None:
    attempts = Attempts(monkeypatch, *map(failed_with, codes))
    assert launched(restarts) == status
    assert attempts.outcomes == []


@pytest.mark.parametrize(
    ("ended", "status", "told"),
    [
        (Ended([], "SIGTERM", True, False), 0, ""),
        (Ended([], "SIGTERM", True, False, True), STOPPED, ""),
        (Ended([rank_that_failed(0, 1, 5, Failure("no room", 5))], "SIGTERM", True, False), 5, "no room\n"),
        (Ended([], "SIGINT", True, True), 130, "interrupted\n"),
        (Ended([], "SIGTERM", True, True), 130, "interrupted\n"),
        (Ended([], "SIGINT", False, False), 130, "interrupted: during start-up; nothing was trained\n"),
        (Ended([], "SIGTERM", False, False), STOPPED, "SIGTERM: stopped during start-up; nothing was trained\n"),
    ],
)
def test_a_launch_that_was_asked_to_stop_tells_what_became_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: Ended, status: int, told: str
) -> None:
    Attempts(monkeypatch, ended)
    assert launched(3) == status
    assert capsys.readouterr().err == told


def test_after_a_restart_nothing_is_said_about_what_was_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Attempts(monkeypatch, failed_with(1), Ended([], "SIGTERM", False, False))
    assert launched(3) == STOPPED
    assert capsys.readouterr().err.splitlines()[-1] == "SIGTERM: stopped during start-up"
    Attempts(monkeypatch, failed_with(1), Ended([], "SIGINT", False, False))
    assert launched(3) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def test_a_stop_request_from_before_the_launch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(monkeypatch, Ended([], "SIGTERM", False, False))
    interrupts = Interrupts()
    interrupts.requested = "SIGTERM"
    assert launched(1, interrupts) == STOPPED
    assert attempts.given[0][2] == [signal.SIGTERM]


@pytest.mark.parametrize(("processes", "threads"), [(1, "6"), (4, "1"), (3, "2"), (7, "1")])
def test_processes_share_the_processors_and_meet_on_the_loopback(
    monkeypatch: pytest.MonkeyPatch, processes: int, threads: str
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(6), raising=False)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    found = {"OMP_NUM_THREADS": threads, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    assert agent._environment(processes) == {**found, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert agent._environment(processes) == found


def test_each_process_knows_its_rank_and_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Recorded:
        def __init__(self, arguments: Any, environments: Any, output: Any) -> None:
            given.extend([arguments, environments, output])

        def wait(self, signals: list[int], patience: float) -> Any:
            given.extend([signals, patience])
            return "ended"

    monkeypatch.setattr(agent, "Ranks", Recorded)
    monkeypatch.setattr(agent, "_loopback_store", lambda: SimpleNamespace(port=77))
    monkeypatch.setattr(agent, "_environment", lambda _count: {"OMP_NUM_THREADS": "9", "X": "default"})
    ended: Any = agent.run_ranks(("-m", "x"), 2, [3], 5.0, {"X": "own", "RANK": "8", "MASTER_PORT": "1"})
    assert ended == "ended"
    common = {
        "OMP_NUM_THREADS": "9", "X": "own", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "77",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    each = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    assert given == [("-m", "x"), each, None, [3], 5.0]


def test_processes_of_several_machines_meet_at_the_first_machine() -> None:
    machines = Machines(3, 1, "node-a", 1234)
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "9", "OMP_NUM_THREADS": "5"}
    with agent.rank_environments(2, given, machines) as each:
        common = {
            "OMP_NUM_THREADS": "5", "MASTER_ADDR": "node-a", "MASTER_PORT": "1234", "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "3", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        assert each == [{**common, "RANK": rank, "LOCAL_RANK": local} for rank, local in (("2", "0"), ("3", "1"))]
    for environ, rank in zip(each, (2, 3), strict=True):
        env = ProcessEnv.from_environment(environ)
        assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (rank, rank - 2, 6, 2)
        assert (env.node_rank, env.num_nodes, env.master) == (1, 3, ("node-a", 1234))


def test_a_failure_is_named_by_its_rank_among_all_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Attempts(monkeypatch, Ended([rank_that_failed(1, 1, -9, None)], None, True, False))
    machines = Machines(2, 1, "node-a")
    assert Launch(("-m", "job"), 4, 0, lambda rank: f"rank {rank}", 30.0, machines=machines).run() == 1
    assert capsys.readouterr().err.startswith("rank 5 on ")


def test_messages_of_a_link_arrive_whole_and_in_order() -> None:
    here, there = socket.socketpair()
    with here, there:
        link, far = Link(here), Link(there)
        link.send(a=1)
        link.send(b="x\ny")
        assert list(far.receive()) == [{"a": 1}, {"b": "x\ny"}]
        here.sendall(b'{"c": 2}\n{"d"')
        assert list(far.receive()) == [{"c": 2}]
        here.sendall(b": 3}\n")
        assert list(far.receive()) == [{"d": 3}]
        link.failed(Failure("text", 3, True))
        link.echoes("rank 1")
        assert list(far.receive()) == [
            {"failure": {"text": "text", "exit_code": 3, "second_hand": True}}, {"failure": None, "first": "rank 1"},
        ]  # fmt: skip
        here.close()
        with pytest.raises(EOFError):
            list(far.receive())
        far.send(late=True)  # without an error


def test_a_link_is_made_of_the_inherited_socket_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Link.from_environment({}) is None
    here, there = socket.socketpair()
    there.set_inheritable(True)
    number = there.detach()
    monkeypatch.setenv(VARIABLE, str(number))
    link = Link.from_environment({VARIABLE: str(number)})
    assert link is not None
    with here, link.connection:
        assert VARIABLE not in os.environ
        assert (link.connection.fileno(), link.connection.get_inheritable()) == (number, False)
        link.send(x=1)
        assert list(Link(here).receive()) == [{"x": 1}]
