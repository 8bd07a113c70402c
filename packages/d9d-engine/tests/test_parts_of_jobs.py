"""Data, statistics, series and evaluation sets of a job. Components are stand-ins."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.config import ModelConfig
from d9d_core.errors import JobError
from d9d_core.job_file.job import JobConfig
from d9d_engine.compose import root as root_module
from d9d_engine.compose.parts import data, evaluator, series, statistics
from d9d_engine.compose.parts.data import count_steps, documents_of, open_data, split_of, summary_of
from d9d_engine.compose.parts.statistics import build_statistics, unique_name
from d9d_engine.compose.root import Root, build_task, circumstances
from d9d_engine.step.metrics import Statistics


def test_documents_are_those_of_all_datasets() -> None:
    construct: Any = JobConfig.model_construct

    def packs(value: bool | None) -> Any:
        return SimpleNamespace(packs_documents=value)

    alone = construct(data=packs(False), evaluation=None)
    assert documents_of(alone) is False
    with_sets = construct(data=packs(False), evaluation=SimpleNamespace(datasets={"a": packs(False), "b": packs(True)}))
    assert documents_of(with_sets) is True
    other: Any = SimpleNamespace(data=packs(None), evaluation=SimpleNamespace(datasets={"a": packs(True)}))
    assert documents_of(other) is None  # an inference job has no evaluation


def test_positions_are_split_over_several_ranks() -> None:
    task: Any = SimpleNamespace(split=lambda share: (share.ranks, share.rank))
    for sizes, found in (({}, None), ({"cp": 1}, None), ({"cp": 4}, (4, 3))):
        topology: Any = SimpleNamespace(sizes=sizes, coordinate={"cp": 3})
        assert split_of(task, topology) == found  # type: ignore[comparison-overlap]


class Model(ModelConfig):
    name: str = "m"


def test_a_dataset_is_opened_for_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "instantiate", lambda *given: given)
    job: Any = SimpleNamespace(
        seed=7, batch=SimpleNamespace(size=24), microbatch_size=3, run=SimpleNamespace(cache=Path("cache")),
        model=Model(pretrained="there"),
    )  # fmt: skip
    topology: Any = SimpleNamespace(data_parallel_rank=2, data_parallel_size=4)
    chosen: Any = "chosen"
    found: Any = open_data(job, topology, chosen, "config", print, True, "whole")  # type: ignore[arg-type]
    assert found[:2] == ("chosen", "config")
    context = found[2]
    assert (context.seed, context.batch_size, context.microbatch_size, context.cache_dir) == (7, 24, 3, Path("cache"))
    assert (context.rank, context.ranks, context.note, context.pretrained) == (2, 4, print, "there")
    assert (context.one_pass, context.inputs) == (True, "whole")
    job.model = object()
    context = open_data(job, topology, chosen, "config", print)[2]  # type: ignore[index]
    assert (context.pretrained, context.one_pass, context.inputs) == (None, False, "own")


@pytest.mark.parametrize(
    ("epochs", "samples", "batch", "steps"), [(1.1, 10, 1, 11), (1.0, 10, 4, 3), (0.5, 10, 5, 1), (2.0, 1000, 7, 286)]
)
def test_steps_of_epochs_are_rounded_up_exactly(epochs: float, samples: int, batch: int, steps: int) -> None:
    notes: list[str] = []
    job: Any = SimpleNamespace(steps=None, epochs=epochs, batch=SimpleNamespace(size=batch))
    dataset: Any = SimpleNamespace(entry="'d'")
    assert count_steps(job, dataset, {"samples": samples}, notes.append) == steps
    assert notes == [f"epochs: {epochs:g} of {samples:,} samples each are {steps:,} steps of {batch}"]
    job.steps = 5
    assert count_steps(job, dataset, {}, notes.append) == 5
    assert len(notes) == 1
    job.steps = None
    for given, said in (
        ({}, "does not give the number of samples in an epoch"), ({"samples": True}, "gives True as the number"),
        ({"samples": 0}, "gives 0 as the number"), ({"samples": 2.0}, "gives 2.0 as the number"),
    ):  # fmt: skip
        with pytest.raises(JobError, match=f"^epochs: dataset 'd' {said}.*; replace 'epochs' by 'steps'"):
            count_steps(job, dataset, given, notes.append)  # type: ignore[arg-type]
    assert count_steps(job, dataset, {"samples": 1}, notes.append) >= 1


# --- statistics -------------------------------------------------------------------------------------------------------


def part(key: str, where: str) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(key=key), where=where), f"config of {where}"


def test_metrics_of_one_name_are_told_apart_by_their_field() -> None:
    parts = [part("a", "metrics[0]"), part("b", "metrics[1]"), part("a", "metrics[2]")]
    assert [unique_name(chosen, parts) for chosen, _ in parts] == ["a[metrics[0]]", "b", "a[metrics[2]]"]


@pytest.mark.parametrize(
    ("when", "group", "device", "twins"),
    [
        ("training", "group", "cuda", True),
        ("training", None, "cuda", False),
        ("training", "group", "cpu", False),
        ("evaluation", "group", "cuda", False),
    ],
)
def test_metrics_merge_beside_the_training_on_devices_with_streams(
    monkeypatch: pytest.MonkeyPatch, when: Any, group: Any, device: str, twins: bool
) -> None:
    did: list[Any] = []

    class Statistics:
        def __init__(self, metrics: Any, **more: Any) -> None:
            did.append((list(metrics), more.pop("twins") is not None, more))

        def attach(self, model: Any) -> None:
            did.append(("attached", model))

    class Module:
        def on_demand(self) -> list[str]:
            return ["z", "x", "unread"]

        def observe(self, name: str, at: str) -> None:
            did.append(("observe", name, at))

    monkeypatch.setattr(statistics, "Statistics", Statistics)
    monkeypatch.setattr(statistics, "instantiate", lambda _chosen, config: f"metric of {config}")
    monkeypatch.setattr(statistics, "check_metric", lambda chosen, metric: did.append((chosen.where, metric)))
    monkeypatch.setattr(
        statistics, "observations_read", lambda chosen, _config: {"a": {"x"}, "b": {"z"}}[chosen.spec.key]
    )
    monkeypatch.setattr(statistics, "modules_with", lambda stage, _trait: {"m": Module()} if stage == "stage" else {})
    assembly: Any = SimpleNamespace(full_model="model", stages={0: "stage", 1: "other"})
    topology: Any = SimpleNamespace(device=torch.device(device))
    parts = [part("a", "metrics[0]"), part("b", "metrics[1]")]
    build_statistics(parts, assembly, topology, group, True, when, lambda: {"a": "own a", "c": "own c"})  # type: ignore[dict-item]
    assert did == [
        (["a", "b", "task/a", "c"], twins, {"gated": True, "group": group, "device": torch.device(device)}),
        ("observe", "x", when),
        ("observe", "z", when),
        ("attached", "model"),
        ("metrics[0]", "metric of config of metrics[0]"),
        ("metrics[1]", "metric of config of metrics[1]"),
    ]


# --- series -----------------------------------------------------------------------------------------------------------


def check_series(monkeypatch: pytest.MonkeyPatch, name: str, **more: Any) -> None:
    auxiliary = more.get("auxiliary", {})
    monkeypatch.setattr(series, "AuxiliaryLosses", lambda *_: SimpleNamespace(coefficients=auxiliary))
    evaluation = more.get("evaluation")
    job: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(best=SimpleNamespace(series=name)),
        evaluation=None if evaluation is None else SimpleNamespace(datasets=evaluation, metrics=more.get("of", [])),
    )
    selection: Any = SimpleNamespace(subscribers=[], metrics=more.get("metrics", []))
    assembly: Any = SimpleNamespace(stages={}, full_model=None)
    task: Any = SimpleNamespace(coefficients={"main": 1.0}, own_metrics=lambda: more.get("own", {}))
    series.check_series(job, selection, assembly, task, object())


def test_series_that_are_logged_may_choose_the_best_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "skipped_steps"):
        check_series(monkeypatch, name)
    check_series(monkeypatch, "loss/balance", auxiliary={"balance": 1.0})
    check_series(monkeypatch, "eval/loss", evaluation={"": 1})
    check_series(monkeypatch, "eval/a/loss", evaluation={"a": 1, "b": 2})
    check_series(monkeypatch, "anything", metrics=["m"])
    check_series(monkeypatch, "anything", own={"m": 1})
    check_series(monkeypatch, "eval/anything", evaluation={"": 1}, of=["m"])
    check_series(monkeypatch, "eval/a/anything", evaluation={"a": 1}, own={"m": 1})


@pytest.mark.parametrize(
    ("name", "more", "hint"),
    [
        ("loss/main", {}, ""),
        ("eval/loss", {}, "; the job has no evaluation section"),
        ("los", {}, "; did you mean 'loss'?"),
        ("zzz", {}, "; there are: grad_norm, loss, lr, skipped_steps, tokens, tokens_per_second"),
        ("eval/loss", {"evaluation": {"a": 1}}, "; did you mean 'eval/a/loss'?"),
        ("eval/c/anything", {"evaluation": {"a": 1}, "of": ["m"]}, ""),
        ("eval/zzz", {"metrics": ["m"], "evaluation": {"": 1}}, ""),
    ],
)
def test_series_that_are_never_logged_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, Any], hint: str
) -> None:
    with pytest.raises(JobError) as caught:
        check_series(monkeypatch, name, **more)
    assert str(caught.value).startswith(f"checkpoint.best.series: '{name}' is never logged{hint}")


# --- evaluation sets --------------------------------------------------------------------------------------------------


class Stream:
    facts = {"samples": 10}


@pytest.mark.parametrize(("packs", "expected"), [(5, 5), (None, 4)])
def test_an_evaluation_set_has_its_data_and_metrics(
    monkeypatch: pytest.MonkeyPatch, packs: int | None, expected: int
) -> None:
    did: list[Any] = []

    @contextmanager
    def main_first(per_machine: bool) -> Any:
        did.append(("first", per_machine))
        yield

    topology: Any = SimpleNamespace(
        main_first=main_first, device="device", watchdog=SimpleNamespace(waiting_for="waiting", beat="beat")
    )
    stream = Stream()
    task: Any = SimpleNamespace(
        check=lambda model, facts: did.append(("checked", model, facts)), own_metrics=lambda: {"m": 1}
    )
    monkeypatch.setattr(evaluator, "open_data", lambda *given: did.append(given[2:]) or stream)
    monkeypatch.setattr(
        evaluator, "build_statistics", lambda *given: did.append(given[3:]) or SimpleNamespace(tallied=False)
    )
    real = SimpleNamespace(samples=10)
    monkeypatch.setattr(evaluator, "RealSamples", lambda *given: did.append(("real", *given)) or real)
    monkeypatch.setattr(evaluator, "DevicePrefetcher", lambda *given, **more: (given, more))
    monkeypatch.setattr(evaluator, "split_of", lambda *_: "split")
    job: Any = SimpleNamespace(model="model", batch=SimpleNamespace(size=3))
    around: Any = evaluator.Surroundings(job, "assembly", topology, task, "group", print)  # type: ignore[arg-type]
    first: Any = SimpleNamespace(over=lambda given, where: (given is stream, where))
    chosen: Any = SimpleNamespace(where="evaluation.data")
    found = evaluator.build_set(around, "a", (chosen, "config"), packs, [], first, 7)
    assert did[:3] == [
        ("first", True), (chosen, "config", print, packs is None), ("checked", "model", Stream.facts),
    ]  # fmt: skip
    assert did[3] == ("group", False, "evaluation", task.own_metrics)
    assert did[4:] == ([] if packs else [("real", stream, "evaluation.data", 7)])
    assert (found.packs, found.name, found.first_pass) == (expected, "a", (True, "evaluation.data"))
    source = stream if packs else real
    assert found.prefetcher == ((source, "device"), {"waiting_for": "waiting", "split": "split"})  # type: ignore[comparison-overlap]
    monkeypatch.setattr(evaluator, "build_statistics", lambda *_: SimpleNamespace(tallied=True))
    with pytest.raises(JobError, match="^evaluation.metrics: one of these metrics reads tallies"):
        evaluator.build_set(around, "a", (chosen, "config"), packs, [], first, 7)
    task.own_metrics = dict
    assert evaluator.build_set(around, "a", (chosen, "config"), packs, [], first, 7).statistics is None


# --- the root ---------------------------------------------------------------------------------------------------------


def test_a_task_that_communicates_gets_the_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uses:
        topology = None

        def attach(self, topology: Any) -> None:
            self.topology = topology

    monkeypatch.setattr(root_module, "UsesTopology", Uses)
    monkeypatch.setattr(root_module, "instantiate", lambda _chosen, config: config)
    selection: Any = SimpleNamespace(task="chosen")
    topology: Any = "topology"
    uses = Uses()
    for task in (uses, object()):
        job: Any = SimpleNamespace(task=task)
        assert build_task(job, selection, topology) is task  # type: ignore[comparison-overlap]
    assert uses.topology == "topology"


def test_circumstances_are_the_mesh_and_the_device() -> None:
    job: Any = SimpleNamespace(mesh=SimpleNamespace(sizes=lambda: {"tp": 2}))
    here, elsewhere = circumstances(job, torch.device("cpu")), circumstances(job, None)
    assert (here.mesh, here.device, here.compute_capability) == ({"tp": 2}, "cpu", None)
    assert (elsewhere.device, elsewhere.compute_capability) == (None, None)


def test_data_is_opened_by_one_process_of_a_machine_first(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []

    @contextmanager
    def main_first(per_machine: bool) -> Any:
        did.append(per_machine)
        yield

    monkeypatch.setattr(root_module, "open_data", lambda *given: did.append(given) or "stream")
    times = iter([10.0, 12.34])
    monkeypatch.setattr(root_module.time, "perf_counter", lambda: next(times))
    topology: Any = SimpleNamespace(main_first=main_first)
    job: Any = SimpleNamespace(data="config")
    resolution: Any = SimpleNamespace(selection=SimpleNamespace(dataset="chosen"))
    root: Any = Root(job, None, topology, resolution, print)  # type: ignore[arg-type]
    assert root.open_data(True, "whole") == ("stream", "2.3 s")
    assert did == [True, (job, topology, "chosen", "config", print, True, "whole")]


def test_an_error_of_a_metric_names_the_metric_and_its_method() -> None:
    class Metric:
        reductions = {"a": "sum"}

        def state(self) -> dict[str, torch.Tensor]:
            return {"a": torch.ones(1)}

        def load_state(self, state: Any) -> None: ...

        def reset(self) -> None: ...

        def update(self, _observations: Any) -> None:
            raise ValueError("x")

    made: Any = Statistics({"mine": Metric()}, gated=False, group=None, device=torch.device("cpu"))  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="x") as caught:
        made.update({})
    assert caught.value.__notes__ == ["raised in update() of metric 'mine'"]


@pytest.mark.parametrize(
    ("facts", "every", "text"),
    [
        ({}, None, "text; no evaluation"),
        (
            {"samples": 5451, "tokens": 697746, "sequence_length": 128, "unused_positions": 0.0, "vocab_size": 2048},
            100,
            "text, 5,451 samples, 697,746 tokens; length 128; evaluated every 100 steps",
        ),
        (
            {"tokens": 9000, "learned_tokens": 1234, "sequence_length": 4096, "unused_positions": 0.042},
            None,
            "text, 9,000 tokens, 1,234 learned; length 4,096, 4.2% padding; no evaluation",
        ),
        ({"samples": "many", "tokens": True}, None, "text; no evaluation"),
    ],
)
def test_a_line_about_the_data_has_size_length_and_evaluation(
    facts: dict[str, Any], every: int | None, text: str
) -> None:
    evaluation = None if every is None else SimpleNamespace(every=every, datasets={})
    job: Any = SimpleNamespace(data=SimpleNamespace(selector="text"), evaluation=evaluation)
    assert summary_of(job, facts) == text
