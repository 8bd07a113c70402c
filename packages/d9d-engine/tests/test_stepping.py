from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import BuildError, TrainingError
from d9d_core.subscriber import subscribe
from d9d_engine.job import Job
from d9d_testing.toy.runs import assert_identical, final_tensors, metrics_of, noted, quiet
from safetensors.torch import load_file

MakeJob = Callable[..., Job]
EVALUATION = {"every": 6, "packs": 1, "data": "toy_data"}
TIMES = ("tokens_per_second", "time")


def without_times(job: Job) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics_of(job)]


def saved_steps(job: Job) -> list[str]:
    return sorted(path.name for path in (job.run.directory / "checkpoints").glob("step-*"))


@pytest.mark.thorough
def test_steps_in_parts_are_those_of_one_training(job: MakeJob) -> None:
    straight, parts = job("run.name=straight", evaluation=EVALUATION), job("run.name=parts", evaluation=EVALUATION)
    quiet(straight).train()
    with quiet(parts) as trainer:
        first = [result.loss.item() for result in trainer.steps(5)]
        torch.rand(7)  # draws of the caller change nothing
        rest = [result.loss.item() for result in trainer.steps()]
    assert (len(first), len(rest), trainer.progress.step) == (5, 7, 12)
    assert_identical(final_tensors(straight), final_tensors(parts))
    assert without_times(straight) == without_times(parts)
    assert saved_steps(straight) == saved_steps(parts)
    assert (parts.run.directory / "finished.json").exists()


def test_the_generators_of_the_caller_stay_as_they_are(job: MakeJob) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with quiet(job()) as trainer:
        for _result in trainer.steps(1):
            assert torch.equal(torch.rand(3), expected)


def test_a_run_that_is_left_early_is_saved_and_goes_on(job: MakeJob) -> None:
    straight, parts = job("run.name=straight"), job("run.name=parts")
    quiet(straight).train()
    trainer, notes = noted(parts)
    for _result in trainer.steps(3):
        pass
    assert trainer.finish().status == "stopped"
    assert "stopped after step 3 of 12 and saved; start again to continue" in notes
    assert saved_steps(parts) == ["step-00000003"]
    assert not (parts.run.directory / "finished.json").exists()
    again, notes = noted(parts)
    assert again.train().status == "finished"
    assert "resumed at step 3 of 12" in notes
    assert_identical(final_tensors(straight), final_tensors(parts))


def test_a_save_in_the_middle_is_where_a_kill_leads_back_to(job: MakeJob) -> None:
    run = job(checkpoint={"every": None})
    trainer = quiet(run)
    for _result in trainer.steps(2):
        pass
    trainer.save()
    trainer.save()  # it is saved already
    assert saved_steps(run) == ["step-00000002"]
    for _result in trainer.steps(1):
        pass
    trainer.finish()
    assert saved_steps(run) == ["step-00000002", "step-00000003"]


def test_an_evaluation_at_any_step_is_logged_once(job: MakeJob) -> None:
    run = job(evaluation=EVALUATION)
    with quiet(run) as trainer:
        start = trainer.evaluate()
        for _result in trainer.steps(6):
            pass
        assert trainer.evaluate() == trainer.evaluate()  # the one that was due
        assert trainer.evaluate()["eval/loss"] < start["eval/loss"]
    logged = [line["step"] for line in metrics_of(run) if "eval/loss" in line]
    assert logged == [0, 6]


def test_an_export_in_the_middle_is_the_model_of_that_step(job: MakeJob, tmp_path: Path) -> None:
    run, shorter = job("run.name=run"), job("run.name=shorter", "steps=4")
    with quiet(run) as trainer:
        for _result in trainer.steps(4):
            pass
        assert trainer.export(tmp_path / "draft") == [tmp_path / "draft"]
        assert not (run.run.directory / "model").exists()
        for _result in trainer.steps(1):
            pass
    quiet(shorter).train()
    first, second = tmp_path / "draft", shorter.run.directory / "model"
    assert_identical(load_file(first / "model.safetensors"), load_file(second / "model.safetensors"))


def test_what_the_job_lacks_is_named(job: MakeJob, tmp_path: Path) -> None:
    trainer = quiet(job())
    with pytest.raises(BuildError, match="no section 'evaluation'"):
        trainer.evaluate()
    with pytest.raises(BuildError, match="no 'peft' method that writes adapter files"):
        trainer.export(tmp_path / "adapter", kind="adapter")


def test_a_run_of_which_nothing_is_left_says_so(job: MakeJob) -> None:
    trainer, notes = noted(job("steps=2"))
    assert [len(list(trainer.steps(5))), len(list(trainer.steps(5)))] == [2, 0]
    assert notes[-1] == "nothing left to train: all 2 steps are done"
    assert trainer.finish().status == "finished"


def test_an_interrupt_in_a_step_saves_it_and_the_next_steps_follow(job: MakeJob) -> None:
    straight, stopped = job("run.name=straight"), job("run.name=stopped")
    quiet(straight).train()
    trainer = quiet(stopped)
    forward = trainer.step.executor.run

    def interrupt(step: int, pack: Any, *others: Any) -> Any:
        if step == 1 and not saved_steps(stopped):
            signal.raise_signal(signal.SIGINT)
        return forward(step, pack, *others)

    trainer.step.executor.run = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt, match="SIGINT: stopped after step 2 of 12 and saved"):
        list(trainer.steps())
    assert saved_steps(stopped) == ["step-00000002"]
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    with trainer:
        assert len(list(trainer.steps())) == 10
    assert_identical(final_tensors(straight), final_tensors(stopped))


def test_an_error_of_the_caller_loses_no_step(job: MakeJob) -> None:
    run = job(checkpoint={"every": None})
    with pytest.raises(ZeroDivisionError), quiet(run) as trainer:  # noqa: PT012
        for _result in trainer.steps(3):
            pass
        raise ZeroDivisionError
    assert saved_steps(run) == ["step-00000003"]


@pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt])
def test_an_end_of_the_process_between_steps_saves_too(job: MakeJob, ends: type[BaseException]) -> None:
    run = job(checkpoint={"every": None})
    with pytest.raises(ends), quiet(run) as trainer:  # noqa: PT012
        list(trainer.steps(2))
        raise ends
    assert saved_steps(run) == ["step-00000002"]


def test_a_second_ctrl_c_in_a_step_has_no_effect_on_a_later_run(job: MakeJob) -> None:
    trainer = quiet(job(checkpoint={"every": None}))
    forward = trainer.step.executor.run

    def strike(step: int, pack: Any, *others: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return forward(step, pack, *others)

    list(trainer.steps(2))
    trainer.save()
    trainer.step.executor.run = strike  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt, match="ended at once"):
        list(trainer.steps(2))
    trainer.step.executor.run = forward  # type: ignore[method-assign]
    assert len(list(trainer.steps(3))) == 3


def test_a_failure_of_a_subscriber_ends_one_run_only(job: MakeJob) -> None:
    def fail(event: ev.StepEnds) -> None:
        raise ZeroDivisionError(event.step)

    trainer = job().build(lambda _note: None, observers=[subscribe(ev.StepEnds)(fail)])
    with pytest.raises(ZeroDivisionError):
        list(trainer.steps(5))
    assert len(list(trainer.steps(5))) == 5  # it is not called any more


def test_time_between_steps_is_not_in_the_speed(job: MakeJob) -> None:
    now = [0.0]
    run = job(logging={"every": 1})
    with pytest.MonkeyPatch.context() as patch, quiet(run) as trainer:
        patch.setattr("d9d_engine.run.clock.time.perf_counter", lambda: now[0])
        forward = trainer.step.executor.run

        def take_a_second(step: int, pack: Any, *others: Any) -> Any:
            now[0] += 1.0
            return forward(step, pack, *others)

        trainer.step.executor.run = take_a_second  # type: ignore[method-assign]
        for _ in range(3):
            for _result in trainer.steps(1):
                now[0] += 50.0
            now[0] += 100.0
        list(trainer.steps(2))
    speeds = [line["tokens_per_second"] for line in metrics_of(run)]
    assert speeds[1:] == pytest.approx([8.0] * 4)


def test_a_run_without_a_step_says_that_nothing_was_trained(job: MakeJob) -> None:
    trainer, notes = noted(job())
    with trainer:
        pass
    assert notes[-1] == "stopped before the first step; nothing was trained"
    assert saved_steps(trainer.job) == []


def test_an_export_begins_with_the_newest_checkpoint(job: MakeJob, tmp_path: Path) -> None:
    run = job("steps=3")
    quiet(run).train()
    again = quiet(run)
    again.export(tmp_path / "draft")
    again.finish()
    files = [directory / "model.safetensors" for directory in (run.run.directory / "model", tmp_path / "draft")]
    assert_identical(*map(load_file, files))


def test_ctrl_c_between_steps_saves_too(job: MakeJob) -> None:
    run = job(checkpoint={"every": None})
    with pytest.raises(KeyboardInterrupt), quiet(run) as trainer:  # noqa: PT012
        for _result in trainer.steps():
            if trainer.progress.step == 2:
                signal.raise_signal(signal.SIGINT)
    assert saved_steps(run) == ["step-00000002"]


class Calls:
    """Calls a method of the trainer inside a step."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.trainer: Any = None

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        return [(ev.StepEnds, lambda _event: list(getattr(self.trainer, self.method)() or ()))]


@pytest.mark.parametrize("method", ["steps", "save", "evaluate", "finish", "train"])
def test_calls_inside_a_step_are_refused(job: MakeJob, method: str) -> None:
    observer = Calls(method)
    trainer = job(evaluation=EVALUATION).build(lambda _note: None, observers=[observer])
    observer.trainer = trainer
    with pytest.raises(TrainingError, match=rf"{method}\(\) was called inside a step"):
        trainer.train()
