"""A run that stands still ends with a report that names the rank to blame."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.registry.manifest import Manifest
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.world import joined
from d9d_engine.process_env import ProcessEnv
from d9d_engine.supervision import hang_report
from d9d_engine.supervision.failure import Failure, FailureReporter
from d9d_engine.supervision.hang_report import Alarm, Status, report
from d9d_engine.supervision.identity import Identity
from d9d_engine.supervision.watchdog import Watchdog
from d9d_testing.world import RankFailedError
from torch import distributed as dist

# --- in a world ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """Listener of a rank: a file as long as it tells a cause."""

    path: Path

    def failed(self, failure: Failure) -> None:
        self.path.write_text(json.dumps(asdict(failure)))

    def echoes(self, first: str) -> None:
        self.path.unlink()


def read_data() -> None:
    time.sleep(60)


def train(directory: Path, what: str) -> int:
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": size, "cp": 1, "tp": 1, "ep": 1}
    here = ProcessEnv(rank, size, rank, size, "node-a", "torchrun")
    identity = Identity.of(Manifest({}), {})
    limits = {"startup": 10.0, "step": 0.6, "checkpoint": 4.0}
    reporter = FailureReporter(f"rank {rank}", Told(directory / str(rank)))
    total = torch.ones(1)
    with joined(here, torch.device("cpu"), identity, sizes, limits, reporter) as world:
        for step in range(3):
            world.watchdog.phase("step", step)
            if step == 1 and rank == 1:
                _misbehave(what, world.watchdog)
            dist.all_reduce(total)
    return step


def _misbehave(what: str, watchdog: Watchdog) -> None:
    if what == "sleeps":
        read_data()
    elif what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "saves":
        watchdog.phase("checkpoint", 1)
        time.sleep(2.0)
    elif what == "beats":
        for _ in range(10):
            time.sleep(0.2)
            watchdog.beat()
    elif what == "receives":
        dist.recv(torch.ones(1), 0)


def told(directory: Path) -> list[str]:
    """Cause that ranks told."""
    return [json.loads(file.read_text())["text"] for file in directory.glob("[0-9]*")]


def hang(world: Callable[..., Any], size: int, directory: Path, what: str) -> list[str]:
    with pytest.raises(RankFailedError):
        world(size, timeout=40).run(train, directory, what)
    (text,) = told(directory)
    return text.splitlines()


@pytest.mark.thorough
def test_the_rank_that_sleeps_elsewhere_is_named_first_with_its_stack(
    world: Callable[..., Any], tmp_path: Path
) -> None:
    lines = hang(world, 3, tmp_path, "sleeps")
    assert lines[0] == "error: no progress for 1 s in phase 'step' (timeouts.step); the odd one out first"
    assert lines[1].startswith("  rank 1 (dp_shard=1) on node-a: step 1: not in a collective, but at ")
    assert lines[1].endswith("(read_data)")
    assert lines[2].startswith("  ranks 0, 2: step 1: waits in all_reduce, called at ")
    assert lines[2].endswith("(train)")
    assert lines[3] == "stack of rank 1 (dp_shard=1) on node-a:"
    assert "time.sleep(60)" in lines[-1]


@pytest.mark.thorough
def test_ranks_in_different_collectives_are_told_apart(world: Callable[..., Any], tmp_path: Path) -> None:
    lines = hang(world, 3, tmp_path, "receives")
    assert "rank 1 (dp_shard=1) on node-a: step 1: waits in recv, called at" in lines[1]
    assert "ranks 0, 2: step 1: waits in all_reduce" in lines[2]


@pytest.mark.full
def test_a_process_that_does_not_answer_is_named(world: Callable[..., Any], tmp_path: Path) -> None:
    lines = hang(world, 2, tmp_path, "stopped")
    assert lines[1] == "  rank 1: no answer; the process is gone, or blocked inside native code"
    assert "rank 0 (dp_shard=0) on node-a: step 1: waits in all_reduce" in lines[2]


@pytest.mark.full
@pytest.mark.parametrize("what", ["saves", "beats"])
def test_a_rank_with_time_left_is_waited_for(world: Callable[..., Any], tmp_path: Path, what: str) -> None:
    assert world(2, timeout=40).run(train, tmp_path, what) == [2, 2]
    assert told(tmp_path) == []


# --- alone -----------------------------------------------------------------------------------------------------------


def status(rank: int, where: str, waits: bool, step: int = 5) -> Status:
    return Status(f"rank {rank} (tp={rank})", "step", step, where, waits, f"  the stack of {rank}\n", 600.4, -1.0)


def test_a_rank_that_is_a_step_behind_is_the_odd_one() -> None:
    answers = {rank: status(rank, "waits in all_reduce", True) for rank in range(4)}
    answers[2] = status(2, "waits in all_reduce", True, step=4)
    assert report(answers, 4, answers[0]).splitlines() == [
        "error: no progress for 600 s in phase 'step' (timeouts.step); the odd one out first",
        "  rank 2 (tp=2): step 4: waits in all_reduce",
        "  ranks 0-1, 3: step 5: waits in all_reduce",
        "stack of rank 2 (tp=2):",
        "  the stack of 2",
    ]


def test_of_two_ranks_the_one_that_waits_for_nobody_is_the_odd_one() -> None:
    answers = {0: status(0, "waits in all_reduce", True), 1: status(1, "not in a collective", False)}
    assert "rank 1" in report(answers, 2, answers[0]).splitlines()[1]


def test_silent_ranks_come_first() -> None:
    answers = {0: status(0, "waits in all_reduce", True)}
    assert report(answers, 3, answers[0]).splitlines()[1].startswith("  ranks 1-2: no answer")


def test_without_limits_a_watchdog_takes_any_phase_and_with_limits_only_those() -> None:
    Watchdog().phase("anything")
    with pytest.raises(KeyError, match="stpe"):
        Watchdog({"step": 1.0}).phase("stpe")


def test_a_change_of_phase_is_told_once() -> None:
    changes: list[str] = []
    watchdog = Watchdog({"step": 1.0, "checkpoint": 1.0}, changed=lambda: changes.append("changed"))
    for name in ("step", "step", "checkpoint", "step"):
        watchdog.phase(name)
    assert len(changes) == 3


def test_a_thread_at_rest_is_in_no_phase() -> None:
    watchdog = Watchdog({"step": 1.0})
    watchdog.phase("step", 3)
    watchdog.rest()
    watchdog.beat()  # of the caller's code
    assert watchdog._phase is None


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The end of the process is an exception; its exit statuses."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    return codes


def raised(moved: bool, other: Status | None) -> list[Failure]:
    """What rank 0 tells after it was late, given what rank 1 answers."""
    told: list[Failure] = []
    store = dist.HashStore()  # type: ignore[attr-defined]
    if other is not None:
        store.set("alarm/0/status/1", json.dumps(asdict(other)))
    alarm = Alarm(store, 0, 2, told.append, grace=0.2)
    alarm.look(True, lambda: status(0, "waits in all_reduce", True), lambda: moved)
    assert store.get("alarm/0/verdict") == (b"7.0" if other else b"0.0")
    return told


@pytest.mark.usefixtures("ends")
def test_an_alarm_of_a_rank_that_moves_on_meanwhile_is_withdrawn() -> None:
    assert raised(moved=True, other=None) == []


@pytest.mark.usefixtures("ends")
def test_an_alarm_is_withdrawn_while_another_rank_has_time_left() -> None:
    assert raised(moved=False, other=replace(status(1, "saves", False), remaining=7.0)) == []


@pytest.mark.usefixtures("ends")
def test_who_answers_an_alarm_waits_for_the_verdict_longer_than_that_for_the_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(hang_report, "wait_until", lambda _true, timeout, _pause: waits.append(timeout))
    for rank in (1, 2):
        store = dist.HashStore()  # type: ignore[attr-defined]
        store.set("alarm/0", "1")
        alarm = Alarm(store, rank, 3, lambda _: None, grace=60.0)
        with pytest.raises(SystemExit):
            alarm.look(False, lambda: status(1, "sleeps", False), lambda: False)
    judges, answers = waits
    assert answers > 2 * judges == 120


@pytest.mark.thorough
@pytest.mark.usefixtures("ends")
def test_an_alarm_that_nobody_can_explain_ends_the_process() -> None:
    with pytest.raises(SystemExit, match="1"):
        raised(moved=False, other=status(1, "sleeps", False))


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(("rank", "pauses"), [(0, [1.0]), (1, [])])
def test_only_the_process_that_may_serve_the_store_leaves_others_time_to_read_the_verdict(
    monkeypatch: pytest.MonkeyPatch, rank: int, pauses: list[float]
) -> None:
    slept: list[float] = []
    told: list[Failure] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr(hang_report, "time", clock)
    monkeypatch.setattr(hang_report, "wait_until", lambda *_: True)
    store = dist.HashStore()  # type: ignore[attr-defined]
    alarm = Alarm(store, rank, 2, told.append, grace=0.2)
    with pytest.raises(SystemExit, match="1"):
        alarm.look(True, lambda: status(rank, "sleeps", False), lambda: False)
    assert (slept, len(told)) == (pauses, 1)
    assert store.get("alarm/0/verdict") == b"end"


class _Gone:
    """A store whose process has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection closed")


def watched(store: Any) -> Watchdog:
    watchdog = Watchdog({"step": 60.0})
    watchdog.start(Alarm(store, 0, 2, print, grace=0.2), pause=0.05)
    return watchdog


class _Asked:
    """Answers as an alarm does; ends the watchdog's questions after five."""

    grace = 0.01

    def __init__(self, left: float) -> None:
        self.left, self.late = left, []

    def look(self, late: bool, *_: object, **__: object) -> float | None:
        self.late.append(late)
        if len(self.late) == 5:
            return None
        return self.left if late else 0.0

    def follow(self) -> None:
        pass


def questions(limit: float, left: float) -> list[bool]:
    watchdog, asked = Watchdog({"step": limit}), _Asked(left)
    watchdog.phase("step")
    watchdog._watch(asked, 0.01)  # type: ignore[arg-type]
    return asked.late


def test_nobody_is_late_within_its_limit() -> None:
    assert questions(limit=60, left=0) == [False] * 5


def test_who_is_late_gives_another_rank_the_time_that_it_has_left() -> None:
    assert questions(limit=1e-6, left=60) == [True, False, False, False, False]
    assert questions(limit=1e-6, left=0) == [True] * 5


def with_failure() -> Any:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("failed", "rank 1")
    return store


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("store", [_Gone, with_failure])
def test_a_rank_that_does_not_notice_another_ones_failure_is_ended(ends: list[int], store: Callable[[], Any]) -> None:
    watchdog = watched(store())
    time.sleep(0.6)
    assert ends == [1]
    watchdog.stop()


@pytest.mark.thorough
def test_a_rank_that_ends_by_itself_after_another_ones_failure_is_left_alone(ends: list[int]) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    watchdog = watched(store)
    store.set("failed", "rank 1")
    time.sleep(0.1)
    watchdog.stop()
    time.sleep(0.4)
    assert ends == []


@pytest.mark.thorough
def test_while_the_main_thread_waits_for_another_one_that_one_is_shown_whatever_it_is_called() -> None:
    watchdog = Watchdog({"step": 60.0})
    reader = threading.Thread(target=read_briefly, name="any name")
    found: list[str] = []

    def look() -> None:
        time.sleep(0.1)
        found.append(watchdog._status().where)

    looks = threading.Thread(target=look)
    reader.start()
    looks.start()
    with watchdog.waiting_for(reader):
        reader.join()
    looks.join()
    assert found[0].startswith("not in a collective, but at ")
    assert found[0].endswith("(read_briefly)")
    assert "(read_briefly)" not in watchdog._status().where


def read_briefly() -> None:
    time.sleep(0.4)


@pytest.mark.thorough
def test_the_data_loader_says_whom_it_waits_for(job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from d9d_testing.toy.data import ToyStream
    from d9d_testing.toy.runs import quiet

    found: list[str] = []
    trainer = quiet(job("steps=1", evaluation={"every": 1, "data": "toy_data"}))
    original = ToyStream.next_pack

    def read_slowly(self: Any) -> Any:
        time.sleep(0.1)  # until the main thread waits for it
        found.append(trainer.topology.watchdog._status().where)
        return original(self)

    monkeypatch.setattr(ToyStream, "next_pack", read_slowly)
    trainer.train()
    assert sum("(read_slowly)" in where for where in found) >= 2


def test_a_limit_can_be_changed_and_counts_from_now_on() -> None:
    changes: list[float] = []
    watchdog = Watchdog({"step": 60.0, "checkpoint": 90.0}, changed=lambda: changes.append(watchdog.longest))
    watchdog.phase("step", 3)
    watchdog.set_limit("step", 600.0)
    assert watchdog._phase is not None
    assert watchdog._phase.step == 3
    assert 590.0 < watchdog._phase.deadline - time.monotonic() <= 600.0
    assert changes == [90.0, 600.0]
    with pytest.raises(KeyError, match="stpe"):
        watchdog.set_limit("stpe", 1.0)


def test_the_topology_says_which_limits_there_are() -> None:
    topology = Topology(watchdog=Watchdog({"startup": 1.0, "step": 1.0, "checkpoint": 1.0}))
    topology.set_timeout("checkpoint", 50.0)
    assert topology.watchdog.longest == 50.0
    Topology().set_timeout("step", 5.0)
    with pytest.raises(BuildError, match=r"set_timeout\('stpe', 5\): name one of the phases startup, step, checkpoint"):
        topology.set_timeout("stpe", 5)  # type: ignore[arg-type]
    with pytest.raises(BuildError, match="a time above 0"):
        topology.set_timeout("step", 0)
