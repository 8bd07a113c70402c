"""Faulty components of a job are refused before anything is allocated, with the plugin named."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
import torch
from d9d_core.errors import BuildError, DataError, JobError
from d9d_core.plugin import Ref, hookimpl
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_testing.toy.data import ToyStream
from d9d_testing.toy.model import ToyModel
from d9d_testing.toy.modifiers import ToyPeft, ToyStrategy
from d9d_testing.toy.observers import ToyRecorder, ToyTracker
from d9d_testing.toy.optimizer import ToyOptimizer
from d9d_testing.toy.runs import noted, quiet
from d9d_testing.toy.task import ToyMetric, ToyTask

MakeJob = Callable[..., Job]


def changed(hook: str, **fields: Any) -> Registry:
    """The toy plugin's records; the records of one hook come from another plugin, `acme`, with other fields."""
    records = [replace(record, **fields) for record in getattr(toy, hook)()]

    def yields() -> list[Any]:
        return records

    yields.__name__ = hook
    others = {name: value for name, value in vars(toy).items() if name.startswith("d9d_") and name != hook}
    return Registry.of(SimpleNamespace(__name__="acme", **{hook: hookimpl(yields)}), SimpleNamespace(**others))


def test_a_metric_that_reads_what_the_task_does_not_observe_is_refused_by_name(job: MakeJob) -> None:
    run = job().use(changed("d9d_metrics", reads={"absolute", "logits"}))
    with pytest.raises(JobError) as error:
        run.check(1)
    assert str(error.value).startswith("metrics[0]: metric 'toy_metric' (acme) reads logits, which task 'toy_task' (")
    assert str(error.value).endswith("does not observe; the task observes: absolute")


def test_a_metric_may_read_less_and_a_task_need_not_say_what_it_observes(job: MakeJob) -> None:
    job().use(changed("d9d_tasks", observes={"absolute", "more"})).check(1)
    job().use(changed("d9d_tasks", observes=None)).check(1)


def test_a_task_that_reads_what_a_dataset_does_not_give_is_refused_by_name(job: MakeJob) -> None:
    run = job(data="toy_tokens", evaluation={"every": 4, "sets": {"a": "toy_data", "b": "toy_tokens"}})
    with pytest.raises(JobError) as error:
        run.check(1)
    text = (
        "task 'toy_task' (d9d_testing.toy.plugin) reads mask, x, y, which dataset 'toy_tokens' "
        "(d9d_testing.toy.plugin) does not give; 'toy_data' does"
    )
    assert str(error.value).splitlines() == [f"data: {text}", f"evaluation.sets.b: {text}"]


def test_tensors_that_records_do_not_name_are_undecided(job: MakeJob) -> None:
    job(data="toy_tokens").use(changed("d9d_datasets", gives=None)).check(1)
    job(data="toy_tokens").use(changed("d9d_tasks", reads={})).check(1)


@pytest.mark.parametrize(("hook", "field"), [("d9d_tasks", "reads"), ("d9d_datasets", "gives")])
@pytest.mark.parametrize("tensors", [{"x"}, "x", {"x": "2"}])
def test_tensors_of_records_have_numbers_of_dims(hook: str, field: str, tensors: Any) -> None:
    with pytest.raises(TypeError, match=f"{field} is .*; map each tensor to its number of dims, such as"):
        changed(hook, **{field: tensors})


def test_a_task_that_reads_a_tensor_of_other_dims_is_refused(job: MakeJob) -> None:
    with pytest.raises(
        JobError, match=r"data: task 'toy_task' .* reads mask of 2 dims, but dataset .* mask of 1 dim; "
    ):
        job().use(changed("d9d_tasks", reads={"mask": 2})).check(1)


@pytest.mark.parametrize(("hook", "field"), [("d9d_tasks", "observes"), ("d9d_metrics", "reads")])
def test_a_string_is_no_set_of_observations(hook: str, field: str) -> None:
    with pytest.raises(TypeError, match="expected a set of observations, got the string 'absolute'"):
        changed(hook, **{field: "absolute"})


# --- components against their protocols ------------------------------------------------------------------------------


def with_part(hook: str, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Records of the toy plugin; the records of one hook build something else."""
    monkeypatch.setitem(sys.modules, "stand_ins", SimpleNamespace(build=build))
    return changed(hook, build=Ref("stand_ins:build"))


def sections(hook: str) -> dict[str, Any]:
    """Sections of a job file that select the component of that hook."""
    return {
        "d9d_trackers": {"trackers": ["toy_tracker"]},
        "d9d_subscribers": {"subscribers": [{"name": "toy_recorder", "path": "nowhere"}]},
        "d9d_peft_methods": {"peft": "toy_peft"},
        "d9d_strategies": {"parallel": ["toy_strategy"]},
    }.get(hook, {})


def without(cls: type, member: str) -> type:
    kept = {name: value for name, value in vars(cls).items() if name not in (member, "__dict__", "__weakref__")}
    return type(cls.__name__, (), kept)


@pytest.mark.parametrize("how", ["plan", "build"])
@pytest.mark.parametrize(
    ("hook", "build", "text"),
    [
        ("d9d_tasks", without(ToyTask, "observations"), "task: task 'toy_task' (acme): ToyTask lacks observations()"),
        ("d9d_metrics", without(ToyMetric, "reset"), "metrics[0]: metric 'toy_metric' (acme): ToyMetric lacks reset()"),
        ("d9d_metrics", without(ToyMetric, "reductions"), "ToyMetric lacks reductions of d9d_core.metric"),
        ("d9d_trackers", without(ToyTracker, "open"), "tracker 'toy_tracker' (acme): ToyTracker lacks open()"),
        ("d9d_subscribers", without(ToyRecorder, "subscriptions"), "(acme): ToyRecorder lacks subscriptions() of"),
        ("d9d_optimizers", without(ToyOptimizer, "state"), "'toy_optimizer' (acme): ToyOptimizer lacks state()"),
        ("d9d_peft_methods", without(ToyPeft, "merge"), "peft method 'toy_peft' (acme): ToyPeft lacks merge() of"),
        ("d9d_strategies", without(ToyStrategy, "apply"), "strategy 'toy_strategy' (acme): ToyStrategy lacks apply()"),
        ("d9d_tasks", lambda _config: None, "task 'toy_task' (acme): build returned nothing; return the component"),
        ("d9d_models", lambda _config, _stage: 5, "(acme): build returned an int, which is not a torch.nn.Module"),
        ("d9d_tasks", lambda: None, "(acme): stand_ins:build cannot be called with (config): "),
    ],
)  # fmt: skip
def test_a_component_that_is_not_what_its_kind_must_be_is_refused(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, hook: str, build: Any, text: str, how: str
) -> None:
    run = job(**sections(hook)).use(with_part(hook, build, monkeypatch))
    with pytest.raises(BuildError) as error:
        run.plan() if how == "plan" else quiet(run)
    assert text in str(error.value)


WRONG: list[tuple[str, type, str, Any, str]] = [
    (
        "d9d_tasks",
        ToyTask,
        "losses",
        lambda self, outputs: {},
        "ToyTask.losses takes (outputs); it is called with (out",
    ),
    (
        "d9d_tasks",
        ToyTask,
        "coefficients",
        lambda self: {},
        "ToyTask.coefficients is a method; d9d_core.task:Task has",
    ),
    (
        "d9d_tasks",
        ToyTask,
        "coefficients",
        {"error": "much"},
        "coefficients, for 'error', returned a str, not Real",
    ),
    ("d9d_tasks", ToyTask, "coefficients", {}, "coefficients is empty; a task has at least one loss term"),
    ("d9d_tasks", ToyTask, "check", 5, "ToyTask.check is not a method; make it one"),
    (
        "d9d_metrics",
        ToyMetric,
        "reductions",
        {"sum": "sum", "count": "mean"},
        "gives 'count' the unknown 'mean'; choose from: sum, m",
    ),
    ("d9d_metrics", ToyMetric, "reductions", {"sum": "sum"}, "must have the same names; only one has: count"),
    ("d9d_metrics", ToyMetric, "state", lambda self: [1], "(acme): state() returned a list, not Mapping"),
    (
        "d9d_optimizers",
        ToyOptimizer,
        "state",
        lambda self: {"a": 1},
        "state(), for 'a', returned an int, not Tensor",
    ),
    (
        "d9d_subscribers",
        ToyRecorder,
        "subscriptions",
        lambda self: None,
        "subscriptions() returned nothing, not Iterable",
    ),
    (
        "d9d_subscribers",
        ToyRecorder,
        "subscriptions",
        lambda self: [int],
        "contains <class 'int'>; return pairs of an event type",
    ),
    (
        "d9d_subscribers",
        ToyRecorder,
        "subscriptions",
        lambda self: [(int, print)],
        "subscribes to <class 'int'>; events are",
    ),
    (
        "d9d_strategies",
        ToyStrategy,
        "apply",
        lambda self, stage, topology: None,
        "apply() returned nothing, not Applied",
    ),
    (
        "d9d_peft_methods",
        ToyPeft,
        "inject",
        lambda self, stage: ["layers.0.weight"],
        "inject() returned a list, not Set",
    ),
]


@pytest.mark.parametrize("how", ["plan", "build"])
@pytest.mark.parametrize(("hook", "cls", "member", "value", "text"), WRONG)
def test_a_wrong_member_or_return_type_is_refused(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, hook: str, cls: type, member: str, value: Any, text: str, how: str
) -> None:
    broken = type(cls.__name__, (cls,), {member: value})
    run = job(**sections(hook)).use(with_part(hook, broken, monkeypatch))
    with pytest.raises(BuildError) as error:
        run.plan() if how == "plan" else quiet(run)
    assert text in str(error.value)
    assert "(acme)" in str(error.value)


@pytest.mark.parametrize("how", ["plan", "build"])
def test_a_wrong_optional_member_of_a_model_or_optimizer_is_refused(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    cases = {
        "d9d_models": (
            "boundary",
            "takes (); it is called with (microbatch), as d9d_core.traits:PipelineStage says",
        ),
        "d9d_optimizers": (
            "average",
            "has average of d9d_core.optimizer:AveragesWeights, but lacks evaluation_weights",
        ),
    }
    for hook, (member, text) in cases.items():
        cls = ToyModel if hook == "d9d_models" else ToyOptimizer
        with monkeypatch.context() as patch:
            patch.setattr(cls, member, lambda self: {}, raising=False)
            with pytest.raises(BuildError, match=re.escape(f"{cls.__name__}")) as error:
                job().plan() if how == "plan" else quiet(job())
        assert text in str(error.value)


def test_planning_opens_no_run_and_writes_nothing(job: MakeJob, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    tracker, recorder = {"name": "toy_tracker", "path": str(calls)}, {"name": "toy_recorder", "path": str(calls)}
    job(trackers=[tracker], subscribers=[recorder]).plan()
    assert not calls.exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_a_tracker_that_opens_nothing_is_reported_and_not_taken_for_one(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyTracker, "open", lambda *_: None)
    trainer, notes = noted(job("steps=1", trackers=["toy_tracker"]))
    trainer.train()
    (note,) = [note for note in notes if note.startswith("tracker 'toy_tracker' failed")]
    assert "open() returned a NoneType without the methods write, flush, state, close" in note


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("member", "value", "text"),
    [
        ("losses", lambda *_: torch.zeros(()), "losses() returned a Tensor, not Mapping"),
        ("losses", lambda *_: {"error": 1.0, "decay": 1.0}, "losses(), for 'error', returned a float, not Tensor"),
        (
            "losses",
            lambda *_: {"error": torch.zeros(())},
            "losses() lacks the loss terms decay, which are in its coefficients",
        ),
        ("weights", lambda *_: {}, "weights() lacks the loss terms decay, error, which are in its coefficients"),
        (
            "weights",
            lambda *_: dict.fromkeys(("error", "decay"), torch.ones(2)),
            "'error' of shape [2]; return a 0-d tensor",
        ),
        ("inputs", lambda _, microbatch: microbatch, "inputs() returned a dict, not StageInputs"),
        ("observations", lambda *_: {}, "observations() lacks absolute, which its record declares with 'observes'"),
        ("observations", lambda *_: None, "observations() returned nothing, not Mapping"),
        ("count", lambda *_: "many", "count() returned a str, not Integral"),
        ("count", lambda *_: torch.ones(2), "count() returned a tensor [2]; return a 0-d tensor"),
    ],
)
def test_a_task_that_returns_something_else_is_refused_in_the_first_step(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, member: str, value: Any, text: str
) -> None:
    broken = type("ToyTask", (ToyTask,), {member: value})
    run = job("steps=1", "trackers=[]").use(with_part("d9d_tasks", broken, monkeypatch))
    with pytest.raises(BuildError) as error:
        quiet(run).train()
    assert str(error.value).startswith("task: task 'toy_task' (acme): ")
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("pack", "text"),
    [
        ({"x": torch.zeros(1)}, "ToyStream.next_pack() returned a dict; return a list of microbatches"),
        ([torch.zeros(1)], "returned a list of Tensor; a microbatch maps names to tensors"),
        ([{"x": [1.0]}], "'x' of a microbatch is a list, not a tensor"),
    ],
)
def test_a_stream_that_yields_something_else_is_refused(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, pack: Any, text: str
) -> None:
    monkeypatch.setattr(ToyStream, "next_pack", lambda _self: pack)
    with pytest.raises(DataError, match=re.escape(text)):
        quiet(job("steps=1", "trackers=[]")).train()


@pytest.mark.parametrize("method", ["update", "compute"])
def test_a_failure_in_a_metric_names_metric_and_step(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("absent")

    monkeypatch.setattr(ToyMetric, method, fail)
    with pytest.raises(KeyError, match="absent") as caught:
        quiet(job()).train()
    assert caught.value.__notes__[0] == f"raised in {method}() of metric 'toy_metric'"
    assert method == "compute" or caught.value.__notes__[1] == "raised in step 1"
