"""Values that tasks and subscribers log: all kinds, at the present step, as they were when they were logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core import events as ev
from d9d_core.metric import Table
from d9d_core.tracker import Histogram, RunInfo, RunLog, SeriesName, flatten, split_tags
from d9d_engine.job import Job
from d9d_engine.trackers.hub import TrackerHub
from d9d_engine.trackers.run_log import HubLog
from d9d_testing.toy.runs import noted
from d9d_testing.toy.task import ToyTask

MakeJob = Callable[..., Job]


class Keeps:
    """Tracker that keeps every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, Any]]] = []
        self.info: RunInfo | None = None

    def open(self, run: RunInfo, _: object) -> Keeps:
        self.info = run
        return self

    def flush(self) -> None: ...
    def state(self) -> dict[str, Any]:
        return {}

    def close(self, status: str) -> None: ...

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self.calls.append(("write", step, dict(values)))

    def write_histograms(self, step: int, values: Mapping[str, Any]) -> None:
        self.calls.append(("write_histograms", step, dict(values)))

    def write_texts(self, step: int, values: Mapping[str, Any]) -> None:
        self.calls.append(("write_texts", step, dict(values)))

    def write_pictures(self, step: int, values: Mapping[str, Any]) -> None:
        self.calls.append(("write_pictures", step, dict(values)))

    def write_tables(self, step: int, values: Mapping[str, Any]) -> None:
        self.calls.append(("write_tables", step, dict(values)))

    def write_files(self, step: int, values: Mapping[str, Any]) -> None:
        self.calls.append(("write_files", step, dict(values)))

    def of(self, kind: str, name: str) -> dict[int, Any]:
        return {step: values[name] for call, step, values in self.calls if call == kind and name in values}


class Logs:
    """Subscriber that logs in each step and between two."""

    def __init__(self) -> None:
        self.log: Any = None
        self.value = torch.zeros(())

    def subscriptions(self) -> Any:
        return [(ev.TrainingStarts, self.start), (ev.StepEnds, self.step), (ev.ValuesLogged, self.between)]

    def start(self, event: ev.TrainingStarts) -> None:
        self.log = event.log
        self.log.text("said", "starts")

    def step(self, event: ev.StepEnds) -> None:
        self.value.fill_(event.step)
        self.log.scalar("mine", self.value, {"stage": "train"})
        self.log.scalar("loss_again", event.result.loss)
        self.value.fill_(-1)

    def between(self, event: ev.ValuesLogged) -> None:
        self.log.scalar("between", 0.5)


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Keeps, HubLog]:
    tracker = Keeps()
    hub = TrackerHub({"keeps": tracker}, print, patience=20.0)  # type: ignore[dict-item]
    hub.open(RunInfo("run", tmp_path, "", {}, 10, 0), {})
    log = HubLog(hub, lambda: 3, 0)
    close = log.drain

    def drain() -> None:
        close()
        hub.close("finished")

    log.drain = drain  # type: ignore[method-assign]
    return tracker, log


def test_every_kind_reaches_a_tracker_that_takes_it(kept: tuple[Keeps, HubLog], tmp_path: Path) -> None:
    tracker, log = kept
    (path := tmp_path / "file").write_text("x")
    log.scalar("scalar", 2)
    log.scalar("half", torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True))
    counts = torch.tensor([1, 2])
    log.histogram("histogram", Histogram(counts, torch.tensor(-1.0), 2.0))
    log.text("text", "said")
    picture = torch.zeros(2, 3, 3, dtype=torch.uint8)
    log.picture("picture", picture)
    log.table("table", Table(torch.eye(2), row="layer"))
    log.file("file", path)
    picture.fill_(9)
    counts.fill_(9)
    log.drain()
    assert {(kind, step) for kind, step, _ in tracker.calls} == {
        (f"write{kind}", 3) for kind in ("", "_histograms", "_texts", "_pictures", "_tables", "_files")
    }
    assert tracker.of("write", "scalar") == {3: 2.0}
    assert tracker.of("write", "half") == {3: 0.5}
    histogram = tracker.of("write_histograms", "histogram")[3]
    assert (histogram.counts.tolist(), histogram.low, histogram.high) == ([1.0, 2.0], -1.0, 2.0)
    assert not tracker.of("write_pictures", "picture")[3].any()
    assert tracker.of("write_tables", "table")[3].row == "layer"
    assert tracker.of("write_files", "file") == {3: path}


@pytest.mark.thorough
def test_values_belong_to_the_step_in_which_they_are_logged(
    job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"dir": str(tmp_path), "hparams": {"a": {"b": 1}}, "tags": ["x"]}
    subscriber = Logs()
    trainer = job(steps=3, logging={"every": 1}, run=run).build(lambda _: None, observers=[subscriber])
    tracker = Keeps()
    monkeypatch.setattr(trainer.trackers, "_trackers", {"keeps": tracker})
    assert trainer.train().status == "finished"
    assert subscriber.log is trainer.log
    assert tracker.of("write", "train/mine") == {1: 0.0, 2: 1.0, 3: 2.0}
    assert tracker.of("write", "between") == {1: 0.5, 2: 0.5, 3: 0.5}
    assert tracker.of("write_texts", "said") == {0: "starts"}
    losses = tracker.of("write", "loss")
    assert tracker.of("write", "loss_again") == losses
    assert tracker.info is not None
    assert (tracker.info.hparams, tracker.info.tags) == ({"a": {"b": 1}}, ("x",))


def test_a_task_gets_the_log(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[RunLog] = []

    class LoggingTask(ToyTask):
        def take_log(self, log: RunLog) -> None:
            got.append(log)

    monkeypatch.setattr("d9d_testing.toy.task.ToyTask", LoggingTask)
    trainer, _ = noted(job())
    assert got == [trainer.log]


def test_without_trackers_nothing_is_kept(tmp_path: Path) -> None:
    log = HubLog(TrackerHub({}, print), lambda: 1, 0)
    log.scalar("loss", torch.ones(()))
    assert not log._pending


def test_values_wait_for_as_many_steps_as_the_device_may_lag(kept: tuple[Keeps, HubLog]) -> None:
    tracker, log = kept
    log._step, log._lag = lambda: 5, 2
    log.scalar("loss", 1.0)
    for present in (6, 7):
        assert len(log._pending) == 1
        log._step = lambda present=present: present  # type: ignore[misc]
        log.deliver()
    assert not log._pending
    log.drain()
    assert tracker.of("write", "loss") == {5: 1.0}


def test_wrong_values_are_refused_where_they_are_logged(kept: tuple[Keeps, HubLog], tmp_path: Path) -> None:
    _, log = kept
    wrong: Mapping[str, Callable[[], object]] = {
        "scalar 'x' has shape [2]; log a single value": lambda: log.scalar("x", torch.ones(2)),
        "picture 'x' is torch.float32 [2, 2]; log uint8 [height, width, 3]": lambda: log.picture("x", torch.ones(2, 2)),
        "no file; write the file before logging it": lambda: log.file("x", tmp_path / "none"),
        "counts of a histogram have shape [1, 2]": lambda: Histogram(torch.ones(1, 2), 0.0, 1.0),
    }
    for text, call in wrong.items():
        with pytest.raises(ValueError, match=text.split("[", maxsplit=1)[0]) as caught:
            call()
        assert text in str(caught.value)
    log.drain()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_logged_is_an_error_of_the_call_on_all_ranks(tmp_path: Path, rank: int) -> None:
    hub = TrackerHub({} if rank else {"keeps": Keeps()}, print, patience=20.0)  # type: ignore[dict-item]
    hub.open(RunInfo("run", tmp_path, "", {}, 10, 0), {})
    log: Any = HubLog(hub, lambda: 3, 0)
    counts = torch.ones(2)
    wrong: dict[str, Callable[[], None]] = {
        "scalar 'x' is None, which is no number": lambda: log.scalar("x", None),
        "scalar 'x' is 'many', which is no number": lambda: log.scalar("x", "many"),
        "scalar 'x' is complex": lambda: log.scalar("x", torch.tensor(1j)),
        "low of histogram 'x' has shape [2]": lambda: log.histogram("x", Histogram(counts, torch.zeros(2), 1.0)),
        "high of histogram 'x' is None": lambda: log.histogram("x", Histogram(counts, 0.0, None)),  # type: ignore[arg-type]
        "histogram 'x' is a Tensor": lambda: log.histogram("x", counts),
        "table 'x' is a Tensor": lambda: log.table("x", counts),
        "picture 'x' is a NoneType": lambda: log.picture("x", None),
        "a value was logged as 'x' with tags {'stage': 1}": lambda: log.scalar("x", 1.0, {"stage": 1}),
    }
    for text, call in wrong.items():
        with pytest.raises(ValueError, match="'x'") as caught:
            call()
        assert text in str(caught.value)
    log.drain()
    hub.close("finished")


def test_a_file_that_is_gone_is_said_and_switches_nothing_off(tmp_path: Path) -> None:
    said: list[str] = []
    tracker = Keeps()
    hub = TrackerHub({"keeps": tracker}, said.append, patience=20.0)  # type: ignore[dict-item]
    hub.open(RunInfo("run", tmp_path, "", {}, 10, 0), {})
    hub.write_files(2, {"notes": tmp_path / "gone"})
    hub.write(3, {"loss": 1.0})
    hub.close("finished")
    assert ["file 'notes' of step 2 is missing" in text for text in said] == [True]
    assert tracker.calls == [("write", 3, {"loss": 1.0})]


def test_names_with_tags_are_plain_text_that_remembers() -> None:
    name = SeriesName("loss", {"stage": "train", "part": "a"})
    assert (name, split_tags(name)) == ("train/a/loss", ("loss", {"stage": "train", "part": "a"}))
    assert split_tags("eval/loss") == ("eval/loss", {})
    nested = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}, 3], "f": [1, 2]}
    assert flatten(nested) == {"a/b": 1, "a/c": {}, "d/0/e": 2, "d/1": 3, "f": [1, 2]}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_device_tensors_are_copied_without_waiting(kept: tuple[Keeps, HubLog]) -> None:
    tracker, log = kept
    value = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        log.scalar("loss", value)
        log.histogram("weights", Histogram(torch.ones(4, device="cuda"), value, value + 1))
        value.fill_(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    log.drain()
    assert tracker.of("write", "loss") == {3: 1.0}
    assert tracker.of("write_histograms", "weights")[3].high == 2.0
