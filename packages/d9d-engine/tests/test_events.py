from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from d9d_core import events as ev
from d9d_core.errors import NonFiniteError
from d9d_core.subscriber import OwnEvent, Subscribes, subscribe
from d9d_engine.job import Job
from d9d_engine.subscribers.event_bus import Events
from d9d_testing.toy.runs import quiet

MakeJob = Callable[..., Job]
pytestmark = pytest.mark.smoke


@pytest.mark.thorough
def test_events_arrive_in_the_documented_order(job: MakeJob, tmp_path: Path) -> None:
    recorder = {"name": "toy_recorder", "path": str(tmp_path / "events")}
    evaluation = {"every": 2, "data": "toy_data"}
    quiet(
        job(
            "steps=2",
            "checkpoint.every=1",
            "checkpoint.asynchronous=false",
            subscribers=[recorder],
            evaluation=evaluation,
        )
    ).train()
    names = (tmp_path / "events").read_text().split()
    step = [
        "StepStarts", "ForwardBackwardStarts", "ForwardBackwardEnds",
        "OptimizerStepStarts", "OptimizerStepEnds", "StepEnds",
    ]  # fmt: skip
    assert names == [
        "EventsReady", "JobConfigured", "ModelPlanned", "DataReady", "ModelReady", "OptimizerReady", "ForwardReady",
        "TrainingStarts",
        *step, "ValuesLogged", "CheckpointStarts", "CheckpointSaved",
        *step, "ValuesLogged", "EvaluationStarts", "ValuesLogged", "EvaluationEnds",
        "CheckpointStarts", "CheckpointSaved",
        "TrainingFinished",
    ]  # fmt: skip


def test_a_subscriber_to_something_that_is_no_event_is_refused() -> None:
    class Wrong:
        def subscriptions(self) -> Any:
            return [(int, print)]

    with pytest.raises(TypeError, match="Wrong subscribes to <class 'int'>; events are: EventsReady"):
        Events([Wrong()])


def test_what_a_subscriber_raised_is_told_beside_what_ends_the_block() -> None:
    class Fails:
        def subscriptions(self) -> Any:
            return [(ev.TrainingStarts, self.fail)]

        def fail(self, _event: object) -> None:
            raise ValueError("mine")

    events = Events([Fails()])

    def block() -> None:
        with events.deferring():
            events.emit(ev.TrainingStarts(0, 4, None))
            raise OSError("disk")

    with pytest.raises(OSError, match="disk") as caught:
        block()
    assert caught.value.__notes__ == ["besides, a subscriber had raised ValueError('mine')"]


def test_a_failing_subscriber_to_a_failure_does_not_hide_it(
    job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = {"name": "toy_recorder", "path": str(tmp_path / "events")}
    trainer = quiet(job(data={"name": "toy_data", "nan_at": 1}, subscribers=[recorder]))
    emit = trainer.events.emit

    def fail(event: object) -> None:
        if isinstance(event, ev.TrainingFailed):
            raise ZeroDivisionError
        emit(event)

    monkeypatch.setattr(trainer.events, "emit", fail)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    assert caught.value.__notes__ == ["besides, a subscriber to TrainingFailed raised ZeroDivisionError()"]


@dataclass(frozen=True)
class Halfway(OwnEvent):
    step: int


class Announces(Subscribes):
    """Emits an event of its own after the second step."""

    @subscribe(ev.EventsReady)
    def ready(self, event: ev.EventsReady) -> None:
        self.emit = event.emit

    @subscribe(ev.StepEnds)
    def stepped(self, event: ev.StepEnds) -> None:
        if event.step == 1:
            self.emit(Halfway(event.step))


def test_events_of_ones_own_reach_methods_functions_and_lambdas(job: MakeJob) -> None:
    seen: list[object] = []

    @subscribe(Halfway, ev.TrainingFinished)
    def note(event: object) -> None:
        seen.append(event)

    whole = subscribe(Halfway)(lambda event: seen.append(event.step))
    trainer = job("steps=4").build(lambda _note: None, observers=[Announces(), note, whole])
    trainer.train()
    trainer.events.emit(Halfway(7))
    assert seen == [Halfway(1), 1, ev.TrainingFinished(4), Halfway(7), 7]


def test_handlers_of_a_base_class_come_first_and_once() -> None:
    class More(Announces):
        @subscribe(ev.StepStarts)
        def starts(self, event: ev.StepStarts) -> None: ...

        def stepped(self, event: ev.StepEnds) -> None: ...  # not marked: no handler any more

    assert [event for event, _ in More().subscriptions()] == [ev.EventsReady, ev.StepStarts]


def test_what_is_no_observer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"is not an observer; give it subscriptions\(\), or decorate a function"):
        Events([print])
