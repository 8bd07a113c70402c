"""Composition of inference runs and evaluations: refusals, parts, loaded weights and counts. Parts are stand-ins."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
import torch
from d9d_core import events as ev
from d9d_core.config import ModelConfig
from d9d_core.errors import BuildError, JobError
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_inference import compose
from d9d_inference import position_parts as positions_module
from d9d_inference.forwards import ManyForwards, OneForward
from d9d_inference.generation import tokenizer_files
from d9d_inference.job import InferenceJob
from d9d_inference.position_parts import PositionParts
from torch import nn

# --- an inference job over a training job -----------------------------------------------------------------------------

JOB = {
    "steps": 3,
    "model": {"name": "toy_model", "blocks": 7},
    "data": "toy_data",
    "task": "toy_task",
    "optimizer": "toy_optimizer",
    "run": {"name": "mine", "dir": "there", "tags": ["x"]},
    "loading": {"weights": False, "threads": 3},
    "batch": {"size": 8},
    "seed": 5,
}


def test_an_inference_job_over_a_training_job_loads_the_weights_of_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InferenceJob, "from_values", classmethod(lambda _cls, values, registry: (values, registry)))
    registry = Registry.of(toy)
    job = Job.from_values(JOB, registry=registry)
    values, given = InferenceJob.over(job, task={"name": "embed"}, limit=3)  # type: ignore[misc]
    assert given is registry
    assert values["loading"] == {"weights": True, "threads": 3, "read": "each"}
    assert values["model"] == {**job.resolved()["model"], "pretrained": str(Path("there/mine"))}
    assert values["run"]["name"] == "mine-embed"
    assert values["run"]["tags"] == ["x"]
    assert (values["task"], values["limit"], values["seed"]) == ({"name": "embed"}, 3, 5)
    assert not {"batch", "subscribers", "peft", "nonfinite", "optimizer", "steps"} & values.keys()
    assert InferenceJob.over(job, task="embed")[0]["run"]["name"] == "mine-embed"  # type: ignore[index]
    assert InferenceJob.over(job)[0]["run"]["name"] == "mine-inference"  # type: ignore[index]


# --- checks -----------------------------------------------------------------------------------------------------------


class Model(ModelConfig):
    name: str = "m"


def inference_job(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "model": Model(pretrained="weights"),
        "loading": SimpleNamespace(weights=True),
        "task": SimpleNamespace(selector="embed"),
        "peft": None,
        "nonfinite": "keep",
    }
    return SimpleNamespace(**{**fields, **changes})


def test_inference_needs_trained_weights() -> None:
    compose._check_weights(inference_job())
    for model in (Model(), object()):
        with pytest.raises(JobError, match="^model: inference needs trained weights; set 'model.pretrained'"):
            compose._check_weights(inference_job(model=model))
    with pytest.raises(JobError, match="^loading.weights: inference needs trained weights"):
        compose._check_weights(inference_job(loading=SimpleNamespace(weights=False)))


def test_a_fine_tuning_method_needs_an_adapter_to_start_from(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Format:
        init_from: str | None

    monkeypatch.setattr(compose, "AdapterFormat", Format)
    for method in (None, Format("there")):
        made: Any = SimpleNamespace(peft=method)
        compose._check_peft(made)
    for method in (Format(None), object()):
        made = SimpleNamespace(peft=method)
        with pytest.raises(JobError, match="peft: inference trains nothing, and the method starts from no adapter"):
            compose._check_peft(made)


@dataclass
class Observes:
    events: tuple[Any, ...]

    def subscriptions(self) -> list[tuple[Any, Any]]:
        return [(event, print) for event in self.events]


def test_a_subscriber_of_training_events_alone_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    both, training = Observes((ev.StepEnds, ev.PackEnds)), Observes((ev.StepEnds,))
    chosen = SimpleNamespace(where="subscribers[1]", entry="'x' (acme)")
    monkeypatch.setattr(compose, "instantiate", lambda _chosen, config: config)
    selection: Any = SimpleNamespace(subscribers=[(chosen, both)])
    assert compose._subscribers(selection) == [both]
    selection = SimpleNamespace(subscribers=[(chosen, both), (chosen, training)])
    with pytest.raises(JobError, match=r"^subscribers\[1\]: 'x' \(acme\) observes training only"):
        compose._subscribers(selection)


class Joins:
    """Task that joins positions."""


class Continues(Joins):
    """Task that continues texts."""

    logits = "logits"

    def __init__(self, stop: frozenset[int] | None) -> None:
        self.continuation = SimpleNamespace(stop=stop)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "JoinsPositions", Joins)
    monkeypatch.setattr(compose, "ContinuesRows", Continues)
    monkeypatch.setattr(compose, "PositionParts", lambda *given: given)


@pytest.mark.usefixtures("tasks")
def test_positions_are_split_only_for_tasks_that_join_them() -> None:
    alone: Any = SimpleNamespace(sizes={"cp": 1})
    split: Any = SimpleNamespace(sizes={"cp": 2})
    joins: Any = Joins()
    assert compose._parts(inference_job(), joins, alone) is None
    assert compose._parts(inference_job(), joins, split) == (joins, split)
    others: list[Any] = [object(), Continues(None)]
    for task in others:
        assert compose._parts(inference_job(), task, alone) is None
        with pytest.raises(BuildError, match="mesh.cp: inference task 'embed' needs full samples"):
            compose._parts(inference_job(), task, split)


@pytest.mark.parametrize(
    ("reads", "ranks", "fails"), [(True, (1, 2), True), (True, (1, 1), False), (False, (2,), False)]
)
def test_outputs_of_modules_are_read_only_where_ranks_have_them_whole(
    reads: bool, ranks: tuple[int, ...], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reads:
        columns = {"row": "number"}

    class Plain(Reads): ...

    monkeypatch.setattr(compose, "ReadsModules", Reads if reads else Joins)
    monkeypatch.setattr(compose, "instantiate", lambda _chosen, _config: Plain())
    applied = [("strategy", SimpleNamespace(sequence_ranks=count)) for count in ranks]
    monkeypatch.setattr(compose, "assemble_forward", lambda _root: SimpleNamespace(applied=applied, peft=None))
    emitted: list[Any] = []
    monkeypatch.setattr(compose, "Events", lambda _several: SimpleNamespace(emit=emit))

    def emit(event: object) -> None:
        emitted.append(type(event))
        if isinstance(event, ev.ModelPlanned):
            raise KeyError("planned")

    selection = SimpleNamespace(subscribers=[], task="task", writer="writer")
    root: Any = SimpleNamespace(
        job=inference_job(writer="jsonl"), selection=selection, note=print, topology=SimpleNamespace(sizes={"cp": 1})
    )
    with pytest.raises(BuildError if fails else KeyError, match="'embed' reads outputs" if fails else "planned"):
        compose.build_inference(root)
    assert emitted == [ev.JobConfigured] + [ev.ModelPlanned] * (not fails)
    Reads.columns = {"x": "number"}
    with pytest.raises(JobError, match="must begin with 'row'"):
        compose.build_inference(root)


def test_weights_of_a_checkpoint_are_recognised_by_its_location(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "is_checkpoint", lambda location: location == "run")
    monkeypatch.setattr(
        compose, "CheckpointTensors", lambda *given: nullcontext(SimpleNamespace(location="s3://" + "/".join(given)))
    )
    assert compose.weights_identity("run") == "s3://run/model/"


def test_files_of_tokenizers_are_looked_for_beside_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def of(location: str) -> Any:
        return SimpleNamespace(of_the_model=lambda: (Path(location), Path(location) / "none"))

    monkeypatch.setattr(tokenizer_files, "Place", SimpleNamespace(of=of))
    assert tokenizer_files._directories(inference_job(model=Model(pretrained=str(tmp_path)))) == [tmp_path]
    assert tokenizer_files._directories(inference_job(model=Model())) == []
    assert tokenizer_files._directories(inference_job(model=object())) == []


@pytest.mark.parametrize(("owning", "main", "split"), [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("kind", ["plain", "texts", "modules", "writes"])
def test_an_inference_run_is_composed_of_its_parts_in_order(
    kind: str, owning: bool, main: bool, split: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    did: list[Any] = []

    class OfKind:
        columns, inputs, text_inputs = {"row": "number"}, "outputs", "texts"

        def check(self, *given: object) -> None:
            did.append(("checked", *given))

        def modules(self, names: Any) -> list[str]:
            return [f"{name} read" for name in names]

        def use_text_of(self, decode: Any) -> None:
            did.append(("decodes", decode))

    protocols = {"texts": "ReadsTexts", "modules": "ReadsModules", "writes": "WritesText"}
    for name, protocol in protocols.items():
        monkeypatch.setattr(compose, protocol, OfKind if name == kind else Joins)
    task, stream = OfKind(), SimpleNamespace(facts={"rows": 12_345, "samples": 9})
    parts = SimpleNamespace(split="split") if split else None
    model = nn.Linear(300, 100, bias=False)
    assembly = SimpleNamespace(
        applied=[], peft=None, all_stages="stages", full_model=model, stage_holders=lambda of: ("holders", of),
        pipeline=SimpleNamespace(least_microbatches=lambda count: count + 1),
    )  # fmt: skip
    topology = SimpleNamespace(
        sizes={"cp": 1}, is_main=main, world="world", device="cpu", watchdog=SimpleNamespace(waiting_for="waiting")
    )
    job = inference_job(
        writer="jsonl", run=SimpleNamespace(directory=tmp_path), batch=SimpleNamespace(prefetch=3), microbatches=4,
        limit=1234, too_long="error",
    )  # fmt: skip
    stream.facts["samples"] = 2345
    store = SimpleNamespace(own=lambda: did.append("owned"))
    for name, value in {
        "instantiate": lambda chosen, _config: task if chosen == "task" else "a writer",
        "assemble_forward": lambda _root: assembly,
        "_parts": lambda *given: parts if given == (job, task, topology) else None,
        "module_names": lambda stages: [stages],
        "PartStore": lambda *given: did.append(given) or store,
        "on_main": lambda run, world: did.append(world) or run(),
        "tokenizer_of": lambda *given: SimpleNamespace(decode=given),
        "build_forward": lambda *given: SimpleNamespace(model="model", given=given),
        "_forwards": lambda *given: given,
        "DevicePrefetcher": lambda *given, **more: (*given, more),
        "_record": lambda *given: {"record": given},
        "Interrupts": lambda: "no interrupts",
        "Inference": lambda **given: given,
        "_subscribers": lambda _selection: ["of the job"],
        "Events": lambda several: SimpleNamespace(emit=did.append, of=several),
    }.items():  # fmt: skip
        monkeypatch.setattr(compose, name, value)
    notes: list[str] = []
    root: Any = SimpleNamespace(
        job=job, selection=SimpleNamespace(task="task", writer="writer"), topology=topology, note=notes.append,
        open_data=lambda **given: did.append(given) or (stream, "2 s"),
    )  # fmt: skip
    given: Any = compose.build_inference(root, ["observer"], None, owning)  # type: ignore[list-item]
    events = [one for one in did if type(one).__module__ == ev.__name__]
    assert [type(one) for one in events] == [ev.JobConfigured, ev.ModelPlanned, ev.DataReady, ev.ModelReady]
    assert events[3] == ev.ModelReady("model", ("holders", topology))  # type: ignore[arg-type]
    assert [one for one in did if one not in events] == [
        (tmp_path, "a writer"), *(["world", "owned"] if owning else []),
        {"one_pass": True, "inputs": "texts" if kind == "texts" else "own"}, ("checked", job.model, stream.facts),
        *([("decodes", (job, stream, "task 'embed'"))] if kind == "writes" else []),
    ]  # fmt: skip
    assert notes == ["data: 1,234 samples, 12,345 rows (2 s)", "model: 30,000 parameters on cpu"]
    bus = given.pop("events")
    assert bus.of == ["of the job", "observer"]
    forward = given["forwards"][2]
    assert forward.given == (root, assembly, "outputs")
    reads = ["stages read"] if kind == "modules" else ()
    assert given == {
        "job": job, "topology": topology, "task": task, "forwards": (job, task, forward, reads, stream, topology),
        "model": "model", "least": 5, "samples": 1234, "facts": stream.facts, "store": store,
        "prefetcher": (stream, "cpu", 3, {"waiting_for": "waiting", "split": "split" if split else None}),
        "record": {"record": (job, task, stream)} if main else {}, "interrupts": "no interrupts",
        "note": root.note, "parts": parts,
    }  # fmt: skip


@pytest.mark.usefixtures("tasks")
def test_a_task_has_one_forward_or_one_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "Captures", lambda *given: ("captures", *given))
    monkeypatch.setattr(compose, "OneForward", lambda *given: ("one", *given))
    monkeypatch.setattr(compose, "ManyForwards", lambda *given: ("many", *given))
    monkeypatch.setattr(compose, "Decoder", lambda forward, **more: (forward, more))
    monkeypatch.setattr(compose, "ends_of_text", lambda _job, facts: facts)
    assembly = SimpleNamespace(stages="stages", pipeline="pipeline")
    forward: Any = SimpleNamespace(assembly=assembly, executor="executor", holds_last=True)
    topology, stream, task = "topology", SimpleNamespace(facts="facts"), object()
    given: tuple[Any, ...] = (forward, ["a"], stream, topology)
    plain: Any = compose._forwards(inference_job(), task, *given)  # type: ignore[arg-type]
    assert plain == ("one", "executor", ("captures", ["a"], "stages", "pipeline", "topology"))
    for stop, ends in ((None, "facts"), (frozenset(), frozenset()), (frozenset({3}), frozenset({3}))):
        continues: Any = Continues(stop)
        many: Any = compose._forwards(inference_job(), continues, *given)
        assert (*many[:4], many[5]) == ("many", "executor", "pipeline", "topology", True)
        assert many[4]("forward") == (
            "forward",
            {
                "topology": "topology",
                "continuation": continues.continuation,
                "stop": ends,
                "logits": "logits",
                "nonfinite": "keep",
            },
        )


def test_rows_are_decided_by_the_job_without_its_layout_the_data_and_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compose, "weights_identity", lambda location: f"identity of {location}")
    resolved = {"run": 1, "mesh": 2, "loading": 3, "seed": 4, "task": "embed"}
    job = inference_job(resolved=lambda: resolved, peft=SimpleNamespace(init_from="adapter"))
    task: Any = SimpleNamespace(columns={"row": "int"})
    stream: Any = SimpleNamespace(state=lambda: {"pack": 0})
    assert compose._record(job, task, stream) == {
        "job": {"seed": 4, "task": "embed"},
        "columns": {"row": "int"},
        "data": {"pack": 0},
        "weights": ["identity of weights", "identity of adapter"],
    }
    job.peft = None
    assert compose._record(job, task, stream)["weights"] == ["identity of weights"]


# --- forwards ---------------------------------------------------------------------------------------------------------


def test_each_group_of_captures_runs_once() -> None:
    ran: list[Any] = []
    captures: Any = SimpleNamespace(groups=lambda pack: [pack[:2], pack[2:]], run=lambda *given: ran.append(given))
    executor, outputs, pack = "executor", print, [1, 2, 3]
    OneForward(executor, captures).run(pack, outputs)  # type: ignore[arg-type]
    assert ran == [("executor", [1, 2], print), ("executor", [3], print)]


def test_a_forward_of_a_decoder_is_a_sign_of_progress() -> None:
    did: list[Any] = []
    executor: Any = SimpleNamespace(evaluate=lambda *given: did.append(given))
    topology: Any = SimpleNamespace(watchdog=SimpleNamespace(beat=lambda: did.append("beat")))
    pipeline: Any = SimpleNamespace(ranks=1)
    forwards = ManyForwards(executor, pipeline, topology, lambda forward: forward, False)  # type: ignore[arg-type, return-value]
    forwards._decoder("pack", "outputs")  # type: ignore[operator]
    assert did == ["beat", ("pack", "outputs")]


@pytest.mark.parametrize("rank", [0, 1])
def test_positions_of_all_ranks_are_joined_on_the_first(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    whole = torch.arange(8).reshape(1, 8)
    parts = [whole[:, [0, 1, 6, 7]], whole[:, [2, 3, 4, 5]]]
    sent: list[Any] = []

    def gather(tensor: Any, into: Any = None, *, group: Any, group_dst: int) -> None:
        sent.append((tensor.tolist(), group, group_dst))
        for one, part in zip(into or [], parts, strict=False):
            one.copy_(part)

    monkeypatch.setattr(positions_module.dist, "gather", gather)
    task: Any = SimpleNamespace(of_positions={"b", "missing"}, split_positions=lambda microbatch, at: (microbatch, at))
    topology: Any = SimpleNamespace(sizes={"cp": 2}, coordinate={"cp": rank}, axes_group=lambda *axes: axes)
    split = PositionParts(task, topology)
    found = split.join({"a": torch.ones(1), "b": parts[rank]})
    assert sent == [(parts[rank].tolist(), ("cp",), 0)]
    if rank:
        assert found is None
    else:
        assert found is not None
        assert (found["a"].tolist(), found["b"].tolist()) == ([1.0], whole.tolist())
    microbatch: Any = "microbatch"
    given, at = split.split(microbatch)  # type: ignore[misc]
    assert (given, at.ranks, at.rank) == ("microbatch", 2, rank)  # type: ignore[attr-defined]
