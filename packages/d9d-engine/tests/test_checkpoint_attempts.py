"""A storage that fails for a while: training goes on, and the save is tried again."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError, SaveError
from d9d_core.events import SaveReport
from d9d_engine.checkpoint import attempts
from d9d_engine.checkpoint import save as dcp_save
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job
from d9d_testing.toy.runs import assert_identical, final_tensors, noted, quiet
from d9d_testing.world import World
from torch import distributed as dist

MakeJob = Callable[..., Job]
W = {"w": torch.ones(2)}


class Disk:
    """Storage that fails as often as it is told to."""

    def __init__(self) -> None:
        self.faults = 0
        self.number = errno.ENOSPC
        self.failed = threading.Event()
        self._write = dcp_save.write_tensors

    def __call__(self, *arguments: Any) -> Any:
        if self.faults:
            self.faults -= 1
            self.failed.set()
            raise OSError(self.number, os.strerror(self.number))
        return self._write(*arguments)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(dcp_save, "write_tensors", disk)
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 0.0)
    yield disk
    disk.faults = 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_save_in_the_background_is_tried_again_and_the_failure_is_said_once(
    tmp_path: Path, disk: Disk, number: int
) -> None:
    said: list[str] = []
    store = CheckpointStore(tmp_path, asynchronous=True, tolerate=3, warn=said.append)
    disk.faults, disk.number = 3, number
    assert store.save(1, W, {}, {})
    store.wait()
    assert [report.step for report in store.poll()] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    (text,) = said
    assert f"step-00000001 could not be written: [Errno {number}] {os.strerror(number)}; earlier" in text
    assert "until 4 attempts in a row have failed (checkpoint.tolerate_failures)" in text
    disk.faults = 3  # failures are counted in a row
    store.save(2, W, {}, {}, wait=True)
    assert (store.steps(), store.failures, len(said)) == ([2, 1], 0, 2)


class Pauses(threading.Event):
    """Event whose waiting takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False


def test_each_pause_is_twice_as_long_up_to_the_longest() -> None:
    faults = iter(range(5))

    def save() -> SaveReport:
        for _ in faults:
            raise SaveError("no")
        return SaveReport(step=1, location="", stall_seconds=0, write_seconds=0, bytes=0, warning=None)

    pauses = Pauses()
    trying = attempts.Attempts(tolerated=9, longest_pause=6.0, group=None, warn=lambda _: None)
    assert trying.run(save, pauses)
    assert pauses.seconds == [1, 2, 4, 6, 6]


@pytest.mark.parametrize("wait", [False, True])
def test_one_failure_too_many_is_an_error_that_restarts_are_made_for(tmp_path: Path, disk: Disk, wait: bool) -> None:
    store = CheckpointStore(tmp_path, asynchronous=True, tolerate=2)
    disk.faults = 3

    def save() -> None:
        store.save(1, W, {}, {}, wait=wait)
        store.wait()

    with pytest.raises(
        SaveError, match=r"No space left .*; 3 attempts in a row have failed \(checkpoint.tol"
    ) as caught:
        save()
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_the_next_save_takes_the_place_of_one_that_waits_for_its_next_attempt(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 3600.0)
    store = CheckpointStore(tmp_path, asynchronous=True, tolerate=1)
    disk.faults = 1
    store.save(1, W, {}, {})
    assert disk.failed.wait(30)
    store.save(2, W, {}, {})
    store.wait()
    assert store.steps() == [2]


def test_a_run_that_ends_for_another_reason_does_not_wait_for_the_next_attempt(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 3600.0)
    said = threading.Event()
    store = CheckpointStore(tmp_path, asynchronous=True, tolerate=1, warn=lambda _: said.set())
    store.prepare()
    disk.faults = 1

    def train() -> None:
        with store.opened():
            store.save(1, W, {}, {})
            assert said.wait(30)
            raise KeyError("w")

    with pytest.raises(KeyError):
        train()


def test_a_save_after_failures_is_finished_although_the_run_ends(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 3600.0)
    writing, may_go_on = threading.Event(), threading.Event()
    store = CheckpointStore(tmp_path, asynchronous=True, tolerate=1)
    store.prepare()

    def write_later(*arguments: Any) -> Any:
        writing.set()
        assert may_go_on.wait(30)
        return disk(*arguments)

    def train() -> None:
        with store.opened():
            disk.faults = 1
            store.save(1, W, {}, {})
            assert disk.failed.wait(30)
            monkeypatch.setattr(dcp_save, "write_tensors", write_later)
            store.save(2, W, {}, {})
            assert writing.wait(30)
            threading.Timer(0.1, may_go_on.set).start()
            raise KeyError("w")

    with pytest.raises(KeyError):
        train()
    assert store.steps() == [2]


@pytest.mark.parametrize(
    ("state", "why"),
    [({"seen": 10**400}, "number"), ({"file": "\udcff"}, "surrogate")],
    ids=["large number", "surrogate"],
)
def test_a_state_that_no_resume_could_read_is_refused_when_it_is_saved(
    tmp_path: Path, state: dict[Any, Any], why: str
) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=f"a component's state cannot be saved as JSON: .*{why}"):
        store.save(1, W, state, {})
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_fault_of_the_storage_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(dcp_save, "write_tensors", fail)
    store = CheckpointStore(tmp_path, tolerate=5)
    with pytest.raises(CheckpointError, match="ValueError: no") as caught:
        store.save(1, W, {}, {}, wait=True)
    assert not isinstance(caught.value, SaveError)


@pytest.mark.thorough
@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_goes_on_over_faults_of_the_storage(
    job: MakeJob, tmp_path: Path, disk: Disk, asynchronous: bool
) -> None:
    settings = f"checkpoint.asynchronous={str(asynchronous).lower()}"
    quiet(calm := job(settings, "run.name=calm")).train()
    trainer, notes = noted(disturbed := job(settings, "run.name=disturbed"))
    disk.faults = 3
    assert trainer.train().status == "finished"
    assert_identical(final_tensors(disturbed), final_tensors(calm))
    assert len([note for note in notes if "could not be written" in note]) == 1
    checkpoints = {path.name for path in (disturbed.run.directory / "checkpoints").iterdir()}
    assert checkpoints - {".lock"} == {"step-00000008", "step-00000012"}


@pytest.mark.thorough
def test_a_synchronous_save_is_tried_again_after_growing_numbers_of_steps(job: MakeJob, disk: Disk) -> None:
    trainer, notes = noted(job("checkpoint.asynchronous=false", "checkpoint.every=4", "checkpoint.keep=null"))
    disk.faults = 2
    trainer.train()
    saved = [note.split()[3].rstrip(":") for note in notes if note.startswith("checkpoint at")]
    assert saved == ["7", "8", "12"]  # 4 and 5 failed


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_ends_when_its_tolerance_is_used_up(job: MakeJob, disk: Disk, asynchronous: bool) -> None:
    settings = f"checkpoint.asynchronous={str(asynchronous).lower()}"
    trainer = quiet(job(settings, "checkpoint.tolerate_failures=2"))
    disk.faults = 1000
    with pytest.raises(SaveError, match="3 attempts in a row have failed"):
        trainer.train()


def save_over_faults(directory: str, rank: int, tolerate: int) -> list[Any]:
    attempts.FIRST_PAUSE = 0.01
    disk = Disk()
    dcp_save.write_tensors = disk  # type: ignore[assignment]
    said: list[str] = []
    topology = Topology(rank=dist.get_rank(), world_size=dist.get_world_size())
    store = CheckpointStore(Path(directory), None, topology, True, tolerate=tolerate, warn=said.append)
    tensors = {f"w{dist.get_rank()}": torch.ones(2)}
    disk.faults = 2 if dist.get_rank() == rank else 0
    store.save(1, tensors, {}, {})
    store.save(2, tensors, {}, {})  # on one rank, perhaps, before the first attempt at 1 has failed
    store.wait()
    return [store.steps()[0], store.failures, len(said)]


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_try_again_together(world: type[World], tmp_path: Path, rank: int) -> None:
    assert world(2).run(save_over_faults, str(tmp_path), rank, 2) == [[2, 0, 1], [2, 0, 0]]


@pytest.mark.parametrize(("timeout", "longest"), [(40.0, 10.0), (100_000.0, 600.0)])
def test_the_longest_pause_is_a_quarter_of_the_timeout_and_ten_minutes_at_most(
    tmp_path: Path, timeout: float, longest: float
) -> None:
    store = CheckpointStore(tmp_path, timeout=timedelta(seconds=timeout))
    assert store._attempts._longest_pause == longest
