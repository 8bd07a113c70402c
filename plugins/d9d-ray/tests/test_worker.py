"""The parts of a worker that need no Ray: requests to stop, reports of saves, and causes of failures."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import DataError, JobError, PluginError
from d9d_core.events import CheckpointSaved, SaveReport, ValuesLogged
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.supervision.failure import Failure, FailureReporter
from d9d_ray import worker
from d9d_ray.causes import Causes, all_causes, clear_causes
from d9d_ray.order import Order
from d9d_ray.worker import Reports, load, passed_on


def test_a_request_to_stop_is_passed_on_from_a_thread() -> None:
    interrupts, requests = Interrupts(), iter([None, None, "a preemption"])
    asked = threading.Event()

    def look() -> str | None:
        cause = next(requests)
        if cause is not None:
            asked.set()
        return cause

    with passed_on(look, interrupts, pause=0.001):
        assert asked.wait(30)
    assert interrupts.requested == "a preemption"
    with passed_on(lambda: None, Interrupts(), pause=0.001):
        assert threads("d9d-ray-stop") == [True]
    assert threads("d9d-ray-stop") == []  # the thread ends with the block


def threads(name: str) -> list[bool]:
    return [thread.daemon for thread in threading.enumerate() if thread.name == name]


def test_reports_that_an_error_leaves_behind_keep_no_process_alive() -> None:
    reported: list[Mapping[str, Any]] = []
    with Reports(reported.append) as reports:  # without a flush, as after an error
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "d9d-ray-reports")
        assert thread.daemon
        reports.saved(saved(2))
    thread.join(30)
    assert not thread.is_alive()
    assert [one["step"] for one in reported] == [2]


@pytest.mark.parametrize(("file", "announced", "cause"), [
    (True, True, "d9d launch cancel"), (True, False, "d9d launch cancel"), (False, True, "a preemption"),
    (False, False, None),
])  # fmt: skip
def test_a_request_to_stop_is_a_file_or_an_announcement_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: bool, announced: bool, cause: str | None
) -> None:
    names = ["ray", "train", "v2", "_internal", "execution", "context"]
    for count in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:count]), ModuleType(names[count - 1]))
    known = SimpleNamespace(preemption_info={"deadline": 3} if announced else None)
    context = vars(sys.modules[".".join(names)])
    context["get_train_context"] = lambda: SimpleNamespace(preemption_context=known)
    if file:
        (tmp_path / "stop").touch()
    assert worker._request(tmp_path / "stop") == cause
    del context["get_train_context"]  # another release of Ray
    assert worker._request(tmp_path / "stop") == ("d9d launch cancel" if file else None)


def saved(step: int) -> CheckpointSaved:
    return CheckpointSaved(SaveReport(step, f"checkpoints/step-{step}", 0.0, 0.0, 10, None))


def test_each_save_is_one_report_with_the_newest_values_and_waits_for_no_other_rank() -> None:
    reported: list[Mapping[str, Any]] = []
    others = threading.Event()

    def report(values: Mapping[str, Any]) -> None:
        assert others.wait(30)
        reported.append(values)

    with Reports(report) as reports:
        reports.values(ValuesLogged(2, {"loss": 3.0}))
        reports.saved(saved(2))
        reports.values(ValuesLogged(4, {"loss": 2.0}))
        reports.saved(saved(4))  # training goes on while the first report waits
        assert reported == []
        others.set()
        reports.flush()
    assert [(one["step"], one["loss"]) for one in reported] == [(2, 3.0), (4, 2.0)]
    assert Path(reported[0]["checkpoint"]) == Path("checkpoints/step-2").absolute()


@pytest.mark.parametrize(("ended", "status"), [("finished", 0), ("stopped", 75)])
def test_a_rank_ends_with_its_status_after_all_saves_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str, status: int
) -> None:
    order = Order(
        name="a", job="", options=[], folder=str(tmp_path), working_directory="", processes=1, resources={},
        restarts=0, startup=1, address=None, export=[],
    )  # fmt: skip
    reported: list[Mapping[str, Any]] = []

    def report(values: Mapping[str, Any]) -> None:
        time.sleep(0.05)  # longer than the rest of the run
        reported.append(values)

    def build(observers: list[Reports], **named: Any) -> Any:
        assert named["owning"]

        def train() -> Any:
            observers[0].saved(saved(3))
            return SimpleNamespace(status=ended)

        return SimpleNamespace(train=train)

    def joined(env: Any, reporter: FailureReporter) -> Any:
        assert (env.rank, type(reporter)) == (0, FailureReporter)
        return nullcontext(SimpleNamespace(is_main=True))

    job = SimpleNamespace(joined=joined, build=build)
    monkeypatch.setattr(worker, "load", lambda *_: job)
    monkeypatch.setattr(worker, "_report", report)
    env: Any = SimpleNamespace(rank=0, world_size=1, node="here")
    assert worker._train(order, env, Causes(tmp_path, 0)) == status
    assert [one["step"] for one in reported] == [3]


@pytest.mark.parametrize(
    ("error", "for_good"),
    [(DataError("record 7 is damaged"), True), (RuntimeError("connection closed by peer"), False)],
)
def test_an_error_that_a_restart_would_repeat_ends_all_ranks_for_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, for_good: bool
) -> None:
    ranks = [Causes(tmp_path, 0), Causes(tmp_path, 1)]
    FailureReporter("rank 1", ranks[1]).raised(error, claim=lambda name: name)
    FailureReporter("rank 0", ranks[0]).raised(RuntimeError("connection reset"), claim=lambda _: "rank 1")
    assert [causes.ends_for_good(error) for causes in ranks] == [for_good, for_good]
    told = capsys.readouterr().err
    assert str(error) in told
    assert "connection reset" not in told, "only the rank that failed first tells its failure"
    ((text, status),) = all_causes(tmp_path)
    assert str(error) in text
    assert status == (2 if for_good else 1)
    ranks[1].clear()
    assert all_causes(tmp_path) == []


def test_a_failure_before_the_ranks_have_met_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    causes = Causes(tmp_path, 3)
    assert causes.ends_for_good(JobError("no such file"))
    assert "no such file" in capsys.readouterr().err
    clear_causes(tmp_path)
    assert all_causes(tmp_path) == []


def test_errors_of_the_job_come_before_consequences_of_other_failures(tmp_path: Path) -> None:
    Causes(tmp_path, 0).failed(Failure("a rank was lost", 1, second_hand=True))
    Causes(tmp_path, 1).failed(Failure("crash", 1))
    Causes(tmp_path, 2).failed(Failure("no data", 2))
    (tmp_path / "ray-cause-3.json").write_text("{")
    assert [text for text, _ in all_causes(tmp_path)] == ["no data", "crash", "a rank was lost"]


def test_the_job_is_loaded_with_the_plugins_of_the_submission(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("steps: 1\n")
    order = Order(
        name="a", job=str(job), options=["--plugin", str(tmp_path / "absent.py"), "--strict-plugins"], folder="",
        working_directory="", processes=1, resources={}, restarts=0, startup=1, address=None, export=[],
    )  # fmt: skip
    with pytest.raises(PluginError, match=r"absent\.py"):
        load(order, 1)
