"""Evaluation during training: sets, whole sets, metrics, the best checkpoint and early stopping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from d9d_core.errors import DataError, JobError
from d9d_core.events import StepEnds, ValuesLogged
from d9d_core.types import State
from d9d_engine.job import Job
from d9d_engine.run.evaluation import series_of_sets
from d9d_engine.run.real_samples import only
from d9d_engine.subscribers.config import EarlyStoppingConfig
from d9d_engine.subscribers.early_stopping import EarlyStopping
from d9d_testing.suites.subscriber import SubscriberSuite
from d9d_testing.toy.runs import metrics_of, noted, quiet

MakeJob = Callable[..., Job]


def whole(samples: int) -> dict[str, Any]:
    return {"name": "toy_data", "samples": samples}


def stopping(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "early_stopping", "patience": 2, "min_delta": 1e9, **fields}]


def saved_steps(job: Job) -> set[int]:
    return {int(path.name[5:]) for path in (job.run.directory / "checkpoints").glob("step-*")}


@pytest.mark.thorough
@pytest.mark.parametrize("samples", [3, 8, 21])
def test_a_whole_set_is_measured_sample_by_sample(job: MakeJob, samples: int) -> None:
    """Fillers count neither in the terms nor in the metrics, of which each has its own number of samples."""
    run = job(evaluation={"every": 4, "packs": "all", "data": whole(samples), "metrics": ["toy_metric"]})
    trainer = quiet(run)
    assert trainer.evaluator is not None
    found = trainer.evaluator.run()
    assert trainer.evaluator.run() == found
    # The same numbers by hand: the toy's samples are a function of the pack.
    x = torch.cat([torch.randn(8, 4, generator=torch.Generator().manual_seed(p)) for p in range(3)])[:samples]
    with torch.no_grad():
        y = trainer.stage(x=x)["y"]
    error = (y - torch.sin(x)).square().mean(-1)
    assert found["eval/error"] == pytest.approx(error.mean().item(), rel=1e-5)
    assert found["eval/decay"] == pytest.approx(y.square().mean().item(), rel=1e-5)
    assert found["eval/loss"] == pytest.approx(found["eval/error"] + 0.01 * found["eval/decay"])
    assert found["eval/absolute_error"] == pytest.approx((y - torch.sin(x)).abs().mean().item(), rel=1e-5)


@pytest.mark.thorough
def test_several_sets_have_series_of_their_own(job: MakeJob) -> None:
    sets = {"small": whole(5), "large": whole(30)}
    run = job(evaluation={"every": 6, "packs": "all", "sets": sets}, checkpoint={"best": {"series": "eval/large/loss"}})
    quiet(run).train()
    lines = [line for line in metrics_of(run) if "eval/small/loss" in line]
    assert [line["step"] for line in lines] == [6, 12]
    assert set(lines[0]) >= {f"eval/{name}/{series}" for name in sets for series in ("loss", "error", "decay")}
    assert lines[0]["eval/small/loss"] != lines[0]["eval/large/loss"]


def test_a_dataset_that_makes_no_pass_is_refused(job: MakeJob) -> None:
    with pytest.raises(DataError, match=r"^evaluation\.data: this dataset cannot make one pass .* such as 'packs: 8'"):
        quiet(job(evaluation={"every": 4, "packs": "all", "data": "toy_data"}))


def test_an_evaluation_without_a_number_is_told_and_never_the_best(job: MakeJob) -> None:
    data = {"name": "toy_data", "nan_at": 0}
    run = job(
        evaluation={"every": 4, "data": data}, checkpoint={"every": 4, "keep": 1, "best": {"series": "eval/loss"}}
    )
    trainer, notes = noted(run)
    trainer.train()
    told = [note for note in notes if "is not finite: eval/loss is nan, eval/error is nan" in note]
    assert len(told) == 3
    assert saved_steps(run) == {12}


@pytest.mark.parametrize(
    ("series", "evaluation", "message"),
    [
        ("eval/los", {"data": "toy_data"}, r"'eval/los' is never logged; did you mean 'eval/loss'\?"),
        ("eval/loss", {"sets": {"a": "toy_data"}}, r"'eval/loss' is never logged; did you mean 'eval/a/loss'\?"),
        (
            "eval/1234567890",
            {"data": "toy_data"},
            r"'eval/1234567890' is never logged; there are: eval/decay, eval/error, eval/loss",
        ),
    ],
)
def test_a_series_that_is_never_logged_is_an_error_at_start(
    job: MakeJob, series: str, evaluation: Mapping[str, Any], message: str
) -> None:
    section = {"every": 4, **evaluation}
    with pytest.raises(JobError, match=r"^checkpoint\.best\.series: " + message):
        quiet(job(evaluation=section, checkpoint={"best": {"series": series}}))
    with pytest.raises(JobError, match=r"^subscribers\[0\]\.series: " + message):
        quiet(job(evaluation=section, subscribers=stopping(series=series)))
    with pytest.raises(JobError, match=r"^checkpoint\.best\.series: " + message):
        job(evaluation=section, checkpoint={"best": {"series": series}}).plan(1)
    with pytest.raises(JobError, match=r"^subscribers\[0\]\.series: " + message):
        job(evaluation=section, subscribers=stopping(series=series)).plan(1)


@pytest.mark.parametrize("check", [quiet, lambda made: made.plan(1)])
def test_an_error_of_a_composed_job_names_the_place_of_its_field(job: MakeJob, check: Callable[[Job], object]) -> None:
    made = job("checkpoint.best={series: eval/los}", evaluation={"every": 4, "data": "toy_data"})
    with pytest.raises(JobError, match=r"^--set checkpoint\.best: checkpoint\.best\.series: 'eval/los' is never"):
        check(made)


def test_series_that_are_sure_to_come_are_those_that_an_evaluation_logs(job: MakeJob) -> None:
    run = job(evaluation={"every": 4, "sets": {"a": "toy_data", "b": "toy_data"}})
    quiet(run).train()
    logged = {name for line in metrics_of(run) for name in line if name.startswith("eval/")}
    assert logged == set(series_of_sets(["a", "b"], ["error", "decay"], None))


def test_a_series_of_a_metric_may_choose_the_best(job: MakeJob) -> None:
    evaluation = {"every": 4, "data": "toy_data", "metrics": ["toy_metric"]}
    quiet(job(evaluation=evaluation, checkpoint={"best": {"series": "eval/absolute_error"}})).train()


@pytest.mark.thorough
def test_a_run_that_gets_no_better_is_saved_and_finished(job: MakeJob) -> None:
    evaluation = {"every": 2, "data": "toy_data"}
    run = job(evaluation=evaluation, subscribers=stopping(), checkpoint={})
    trainer, notes = noted(run)
    outcome = trainer.train()
    assert (outcome.status, outcome.step) == ("finished", 6)
    assert any("ended after step 6 of 12 and saved: early_stopping: eval/loss has not improved" in n for n in notes)
    assert saved_steps(run) == {6}
    assert (run.run.directory / "model").is_dir()
    again, notes = noted(job(evaluation=evaluation, subscribers=stopping(), checkpoint={}))
    assert again.train().step == 6
    assert any("nothing left to train: the run ended at step 6 of 12, early_stopping" in note for note in notes)
    longer = noted(job(evaluation=evaluation, subscribers=stopping(patience=3), checkpoint={}))[0]
    assert longer.train().step == 8


@pytest.mark.thorough
def test_the_count_of_early_stopping_survives_a_resume(job: MakeJob) -> None:
    evaluation = {"every": 2, "data": "toy_data"}
    straight = job("run.name=straight", evaluation=evaluation, subscribers=stopping(patience=4))
    assert quiet(straight).train().step == 10
    quiet(job("run.name=cut", "steps=4", evaluation=evaluation, subscribers=stopping(patience=4))).train()
    resumed = job("run.name=cut", evaluation=evaluation, subscribers=stopping(patience=4))
    assert quiet(resumed).train().step == 10


def test_early_stopping_compares_as_it_is_told() -> None:
    def ends(values: list[float], **fields: Any) -> list[bool]:
        subscriber = EarlyStopping(EarlyStoppingConfig(patience=2, **fields))
        handler = next(handler for _, handler in subscriber.subscriptions())
        found = []
        for step, value in enumerate(values):
            handler(ValuesLogged(step, {"eval/loss": value}))
            handler(ValuesLogged(step, {"loss": 0.0}))
            found.append(subscriber.reason_to_end is not None)
        return found

    assert ends([3, 2, 2.5, 1, 1, 1]) == [False, False, False, False, False, True]
    assert ends([3, 2.9, 2.8, 2.0], min_delta=0.5) == [False, False, True, False]
    assert ends([1, 2, 1, 1.5], mode="max") == [False, False, False, True]
    assert ends([float("nan"), float("nan"), 1.0]) == [False, True, False]


def test_a_state_of_another_series_starts_the_count_anew() -> None:
    subscriber = EarlyStopping(EarlyStoppingConfig(patience=1))
    subscriber.load_state({"series": "loss", "mode": "min", "best": 1.0, "since": 9})
    assert subscriber.reason_to_end is None
    subscriber.load_state({"series": "eval/loss", "mode": "min", "best": 1.0, "since": 9})
    assert subscriber.reason_to_end is not None


def test_places_are_taken_of_rows_and_of_samples() -> None:
    microbatch = {"rows": torch.tensor([4, 5, 6, 7, -1, -1]), "samples": torch.arange(3), "x": torch.arange(6)}
    taken = only(microbatch, microbatch, [2, 3])
    assert taken["x"].tolist() == [2, 3]
    assert taken["samples"].tolist() == [1]
    scalar = only({"loss": torch.tensor(1.0), "other": torch.zeros(7)}, microbatch, [0, 1])
    assert (scalar["loss"].item(), len(scalar["other"])) == (1.0, 7)


def test_a_best_checkpoint_without_anything_to_choose_by_is_warned_about(job: MakeJob) -> None:
    trainer, notes = noted(
        job("steps=4", evaluation={"every": 4, "data": "toy_data"}, checkpoint={"every": 2, "best": {}})
    )
    trainer.train()
    assert any("'eval/loss' was not logged yet" in note for note in notes)


@pytest.mark.thorough
class TestEarlyStopping(SubscriberSuite):
    target = "early_stopping"


@pytest.mark.thorough
def test_an_observer_may_end_a_run_and_keeps_its_state(job: MakeJob) -> None:
    class Ends:
        """Ends the run after a number of steps over all starts."""

        def __init__(self, steps: int) -> None:
            self.steps, self.seen = steps, 0

        def subscriptions(self) -> Any:
            return [(StepEnds, self._step)]

        def _step(self, _event: StepEnds) -> None:
            self.seen += 1

        @property
        def reason_to_end(self) -> str | None:
            return "enough" if self.seen >= self.steps else None

        def state(self) -> State:
            return {"seen": self.seen}

        def load_state(self, state: State) -> None:
            self.seen = int(str(state["seen"]))

    def run(steps: int) -> int:
        return job().build(lambda _: None, observers=[Ends(steps)]).train().step

    assert [run(3), run(3), run(5)] == [3, 3, 5]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["eval/\ud800", "eval/a\x00b", "eval/" + "x" * 10_000])
def test_a_name_that_is_no_text_ends_neither_the_run_nor_its_checkpoints(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("d9d_engine.run.evaluation.Evaluator.run", lambda *_: {"eval/loss": 1.0, name: 2.0})
    run = job("steps=8", evaluation={"every": 2, "data": whole(8)})
    assert quiet(run).train().status == "finished"
    assert saved_steps(run) == {4, 8}
    longer = quiet(job("steps=12", evaluation={"every": 2, "data": whole(8)}))
    assert longer.train().step == 12
    assert longer.progress.logged["eval/loss"] == 1.0
