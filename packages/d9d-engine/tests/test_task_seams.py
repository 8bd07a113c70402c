"""Protocols that a task may follow besides: stateful, aware of steps and ranks, weighing its outputs, and more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import BuildError
from d9d_core.task import StageInputs
from d9d_core.tracker import RunInfo
from d9d_core.types import Microbatch, State
from d9d_engine.job import Job
from d9d_engine.trackers.hub import TrackerHub
from d9d_testing.toy.runs import assert_identical, final_tensors, metrics_of, quiet
from d9d_testing.toy.task import ToyMetric, ToyTask
from torch import Tensor

MakeJob = Callable[..., Job]
PLAIN: dict[str, Any] = {"task": {"name": "toy_task"}}


@pytest.fixture
def with_task(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> Callable[[type[ToyTask]], MakeJob]:
    def use(kind: type[ToyTask]) -> MakeJob:
        monkeypatch.setattr("d9d_testing.toy.task.ToyTask", kind)
        return job

    return use


class Adapts(ToyTask):
    """A coefficient that doubles the loss from the third step on, and a count of the steps it has seen."""

    seen: list[int] = []
    finished: list[int] = []
    attached: list[Any] = []
    starts: list[int] = []
    count_of_steps = 0
    factor = 1.0

    def begin_step(self, step: int) -> None:
        self.factor = 2.0 if step >= 2 else 1.0
        self.count_of_steps += 1
        self.seen.append(step)

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        error = (outputs["y"] - microbatch["y"]).float().square().mean(-1) * microbatch["mask"]
        return {"error": self.factor * error.sum()}

    def state(self) -> State:
        return {"steps": self.count_of_steps}

    def load_state(self, state: State) -> None:
        self.count_of_steps = state["steps"]

    def finalize(self) -> None:
        self.finished.append(self.count_of_steps)

    def attach(self, topology: Any) -> None:
        self.attached.append(topology)

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        yield ev.TrainingStarts, lambda event: self.starts.append(event.total_steps)


@pytest.mark.thorough
def test_a_task_follows_the_training_and_continues_its_state(with_task: Callable[..., MakeJob]) -> None:
    for seen in (Adapts.seen, Adapts.finished, Adapts.attached, Adapts.starts):
        seen.clear()
    job = with_task(Adapts)
    run = job("steps=4", "checkpoint.every=1", **PLAIN)
    with quiet(run) as trainer:
        losses = [result.loss.item() for result in trainer.steps(3)]
    assert (Adapts.seen, Adapts.finished, Adapts.starts) == ([0, 1, 2], [], [4])
    trainer = quiet(run)
    trainer.train()
    assert (Adapts.seen, Adapts.finished) == ([0, 1, 2, 3], [4])  # three of them before the resume
    assert Adapts.attached[-1] is trainer.topology
    plain = with_task(ToyTask)("run.name=plain", "steps=4", **PLAIN)
    with quiet(plain) as trainer:
        expected = [result.loss.item() for result in trainer.steps(3)]
    assert losses[:2] == expected[:2]
    assert losses[2] == pytest.approx(2 * expected[2])


class KeepsValues(ToyTask):
    """The mask as a value that is computed with the inputs."""

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        inputs = StageInputs(first={"x": microbatch["x"]})
        return replace(inputs, kept={"weight_of_sample": microbatch["mask"] * 1.0})

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        error = (outputs["y"] - microbatch["y"]).float().square().mean(-1) * outputs["weight_of_sample"]
        return {"error": error.sum()}


def test_values_computed_with_the_inputs_reach_the_loss(job: MakeJob, with_task: Callable[..., MakeJob]) -> None:
    evaluation = {"every": 6, "packs": "all", "data": {"name": "toy_data"}} | {"packs": 1}
    plain, keeps = (job(f"run.name={name}", evaluation=evaluation, **PLAIN) for name in ("plain", "keeps"))
    quiet(plain).train()
    with_task(KeepsValues)
    quiet(keeps).train()
    assert_identical(final_tensors(plain), final_tensors(keeps))
    losses = [[line.get("eval/loss", line.get("loss")) for line in metrics_of(run)] for run in (plain, keeps)]
    assert losses[0] == losses[1]


class KeepsAnOutput(ToyTask):
    def inputs(self, microbatch: Microbatch) -> StageInputs:
        return StageInputs(first={"x": microbatch["x"]}, kept={"y": microbatch["x"]})


def test_a_kept_value_does_not_hide_an_output(with_task: Callable[..., MakeJob]) -> None:
    with pytest.raises(BuildError, match="kept inputs and the model's outputs both have the name y"):
        quiet(with_task(KeepsAnOutput)(**PLAIN)).train()


class WeighsLate(ToyTask):
    """The weight of the plain task, told after the forward."""

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        raise AssertionError(microbatch)

    def weight(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Tensor:
        assert outputs["y"].requires_grad == torch.is_grad_enabled()
        return microbatch["mask"].sum()


def test_a_weight_that_only_outputs_tell_gives_the_same_training(
    job: MakeJob, with_task: Callable[..., MakeJob]
) -> None:
    evaluation = {"every": 6, "packs": 1, "data": "toy_data"}
    plain, late = (job(f"run.name={name}", evaluation=evaluation, **PLAIN) for name in ("plain", "late"))
    quiet(plain).train()
    with_task(WeighsLate)
    quiet(late).train()
    for key, expected in final_tensors(plain).items():
        torch.testing.assert_close(final_tensors(late)[key], expected, rtol=1e-5, atol=1e-6)
    for line, expected_line in zip(metrics_of(late), metrics_of(plain), strict=True):
        for series in line.keys() & {"loss", "eval/loss", "grad_norm"}:
            assert line[series] == pytest.approx(expected_line[series], rel=1e-5), series


class WeighsWrongly(WeighsLate):
    def weight(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Tensor:
        return microbatch["mask"].sum(0, keepdim=True)


def test_a_late_weight_of_another_shape_is_refused(with_task: Callable[..., MakeJob]) -> None:
    with pytest.raises(BuildError, match=r"weight\(\) returned a tensor \[1\]; return a 0-d tensor"):
        quiet(with_task(WeighsWrongly)(**PLAIN)).train()


class WeighsTwo(WeighsLate):
    @property
    def coefficients(self) -> Mapping[str, float]:
        return {"error": 1.0, "decay": 1.0}


def test_a_late_weight_is_for_one_term(with_task: Callable[..., MakeJob]) -> None:
    with pytest.raises(BuildError, match="which allows exactly one loss term, but coefficients has: error, decay"):
        quiet(with_task(WeighsTwo)(**PLAIN))


class HasMetrics(ToyTask):
    def hparams(self) -> State:
        return {"temperature": 0.5, "named": "by the task"}

    def metrics(self) -> Mapping[str, Any]:
        return {"mine": ToyMetric(None), "toy_metric": ToyMetric(None)}  # type: ignore[arg-type]


def test_a_task_brings_metrics_of_its_own(with_task: Callable[..., MakeJob]) -> None:
    evaluation = {"every": 6, "packs": 1, "data": "toy_data"}
    run = with_task(HasMetrics)("steps=6", evaluation=evaluation, **PLAIN)
    quiet(run).train()
    lines = metrics_of(run)
    training = next(line for line in lines if "loss" in line)
    names = {"mine/absolute_error", "task/toy_metric/absolute_error", "toy_metric/absolute_error"}
    assert names <= training.keys()
    assert len({training[name] for name in names}) == 1
    evaluated = next(line for line in lines if "eval/loss" in line)
    assert "eval/mine/absolute_error" in evaluated


def test_hyperparameters_of_a_task_reach_the_trackers_below_those_of_the_job(
    with_task: Callable[..., MakeJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[RunInfo] = []
    monkeypatch.setattr(TrackerHub, "open", lambda _self, run, _states: opened.append(run))
    quiet(with_task(HasMetrics)("steps=1", "run.hparams={named: by the job}", **PLAIN)).train()
    assert opened[0].hparams == {"temperature": 0.5, "named": "by the job"}
