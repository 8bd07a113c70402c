"""Components that raise whatever they like: named, saved where the state is sound, and never the end with status 0."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from d9d_core import events as ev
from d9d_core.errors import TrainingError
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.job import Job
from d9d_testing.toy.data import ToyStream
from d9d_testing.toy.observers import ToyRecorder
from d9d_testing.toy.runs import assert_identical, final_tensors, noted, quiet
from d9d_testing.toy.task import ToyTask

MakeJob = Callable[..., Job]
ENDS = [SystemExit(0), SystemExit("bye"), GeneratorExit(), KeyboardInterrupt()]
ERRORS = [*ENDS[:3], ValueError("no"), RecursionError()]
EVENTS = [ev.TrainingStarts, ev.StepEnds, ev.ValuesLogged, ev.ForwardBackwardEnds]


class Fails:
    """Subscriber that raises when an event comes for the ``nth`` time."""

    def __init__(self, event: type[Any], nth: int, error: BaseException) -> None:
        self.event, self.left, self.error = event, nth, error
        self.calls = 0

    def subscriptions(self) -> Any:
        return [(self.event, self.handle)]

    def handle(self, _event: object) -> None:
        self.left -= 1
        self.calls += 1
        if not self.left:
            raise copy(self.error)  # raising adds to an exception's traceback


def steps_of(job: Job) -> list[int]:
    return CheckpointStore(job.run.directory / "checkpoints", None).steps()


def finished(job: Job) -> Any:
    """Run the rest of a job without observers, and return its weights."""
    quiet(job).train()
    return final_tensors(job)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("event", "error"),
    [
        *zip([*EVENTS, ev.StepEnds], ERRORS, strict=True),
        *(pytest.param(*x, marks=pytest.mark.full) for x in product(EVENTS, ERRORS)),
    ],
)
def test_a_subscriber_that_fails_ends_the_run_after_a_save(
    job: MakeJob, event: type[Any], error: BaseException
) -> None:
    subscriber = Fails(event, 1, error)
    failing = job("run.name=failing", "checkpoint.every=null")
    trainer = failing.build(lambda _: None, observers=[subscriber])
    expected = type(error) if isinstance(error, Exception) else TrainingError
    with pytest.raises(expected) as caught:
        trainer.train()
    assert subscriber.calls == 1
    if isinstance(caught.value, TrainingError):
        assert f"{__file__}:" in str(caught.value)
        assert f"raised {error!r}, which would end the process" in str(caught.value)
        assert caught.value.exit_code == 1
    assert len(steps_of(failing)) == 1
    assert 0 < steps_of(failing)[0] < 4
    assert_identical(finished(failing), finished(job("run.name=calm", "checkpoint.every=null")))


def test_an_interrupt_that_a_subscriber_raises_is_no_ctrl_c(job: MakeJob) -> None:
    trainer = job().build(lambda _note: None, observers=[Fails(ev.CheckpointStarts, 1, KeyboardInterrupt())])
    with pytest.raises(TrainingError, match="raised KeyboardInterrupt"):
        trainer.train()


@pytest.mark.thorough
@pytest.mark.parametrize("error", [*ENDS, OSError("gone")])
def test_a_dataset_that_fails_leaves_a_checkpoint_of_the_steps_before(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    calls = 0
    next_pack = ToyStream.next_pack

    def fail(self: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise copy(error)  # raising adds to an exception's traceback
        return next_pack(self)

    with monkeypatch.context() as patch:
        patch.setattr(ToyStream, "next_pack", fail)
        trainer, notes = noted(failing := job("run.name=failing"))
        with pytest.raises(OSError if isinstance(error, OSError) else TrainingError):
            trainer.train()
    assert steps_of(failing)[0] == 7
    assert any("saved after step 7, before this error" in note for note in notes)
    assert_identical(finished(failing), finished(job("run.name=calm")))


@pytest.mark.parametrize("error", ENDS)
def test_a_task_that_exits_in_the_middle_of_a_step_is_named_and_saves_nothing_of_it(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise copy(error)  # raising adds to an exception's traceback

    monkeypatch.setattr(ToyTask, "losses", fail)
    with pytest.raises(TrainingError, match="test_plugin_exits.py") as caught:
        quiet(failing := job()).train()
    assert caught.value.exit_code == 1
    assert steps_of(failing) == []


@pytest.mark.parametrize("error", ENDS[:3])
def test_a_component_that_exits_while_it_is_built_is_named(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise copy(error)  # raising adds to an exception's traceback

    monkeypatch.setattr(ToyRecorder, "__init__", fail)
    with pytest.raises(TrainingError, match="which would end the process"):
        job(subscribers=[{"name": "toy_recorder", "path": str(tmp_path / "events")}]).build()
