"""Composition of inference runs and evaluations: refusals, parts, loaded weights and counts. Parts are stand-ins."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
import torch
from d9d_core import events as ev
from d9d_core.config import ModelConfig
from d9d_core.errors import BuildError, CheckpointError, D9dError, JobError
from d9d_core.metric import Table
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_inference import compose
from d9d_inference import job as job_module
from d9d_inference import position_parts as positions_module
from d9d_inference.commands import infer, model_files
from d9d_inference.evaluation import compose as evaluation
from d9d_inference.evaluation import library
from d9d_inference.evaluation.compose import Options, evaluate
from d9d_inference.evaluation.result import Report
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


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_two_models_are_compared_by_the_losses_of_single_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    @dataclass
    class Losses:
        of: str

        def difference(self, other: Losses, name: str) -> Any:
            return (self.of, other.of, name)

    def evaluated(subject: Any, topology: Any, note: Any, options: Options) -> Any:
        asked.append((subject, topology, note, options))
        return f"values of {subject}", {"": Losses(subject), "set": Losses(subject)}

    monkeypatch.setattr(evaluation, "_evaluated", evaluated)
    first, second, topology, note = "first", "second", "topology", print
    one: Any = evaluate(first, topology, note, 3)  # type: ignore[arg-type]
    assert one == Report("values of first")  # type: ignore[arg-type]
    both: Any = evaluate(first, topology, note, None, second)  # type: ignore[arg-type]
    assert both == Report(  # type: ignore[arg-type]
        "values of first",  # type: ignore[arg-type]
        "values of second",  # type: ignore[arg-type]
        {"": ("first", "second", ""), "set": ("first", "second", "set")},  # type: ignore[dict-item]
    )
    assert asked == [
        ("first", "topology", print, Options(3, False)),
        ("first", "topology", print, Options(None, True)),
        ("second", "topology", print, Options(None, True)),
    ]


def test_values_of_a_set_lose_its_prefix() -> None:
    assert evaluation._under("eval/a/", {"eval/a/loss": 1, "eval/b/loss": 2, "eval/a/x/y": 3}) == {"loss": 1, "x/y": 3}
    names = ["a", "b"]
    recorder: Any = SimpleNamespace(gather=lambda name, group: (name, group))
    group: Any = "group"
    assert evaluation._losses(recorder, names, group) == {"a": ("a", "group"), "b": ("b", "group")}
    assert evaluation._losses(None, names, group) == {}


def test_metrics_of_modules_are_left_out_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfStages:
        pass

    monkeypatch.setattr(evaluation, "StageMetric", OfStages)
    monkeypatch.setattr(evaluation, "instantiate", lambda chosen, _config: chosen())
    selection: Any = SimpleNamespace(evaluation_metrics=[(OfStages, 1), (list, 2)])
    assert evaluation._over_outputs(selection) == [(list, 2)]


def test_the_checkpoint_of_an_evaluation_is_chosen_by_step_or_word(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    found: dict[str, Any] = {"checkpoint": "checkpoint"}

    def choose(store: Any, which: Any, note: Any) -> Any:
        asked.append((store, which))
        return found["checkpoint"]

    monkeypatch.setattr(evaluation, "choose_checkpoint", choose)
    monkeypatch.setattr(evaluation, "open_store", lambda *given, write: (given, write))
    topology: Any = "topology"

    def of(run: str | None, checkpoint: str) -> Any:
        subject: Any = SimpleNamespace(run=run, checkpoint=checkpoint, job="job", name="a model")
        return evaluation._checkpoint(subject, topology, print)

    assert of(None, "newest") is None
    assert of("run", "best") == "checkpoint"
    assert of("run", "100") == "checkpoint"
    assert asked == [((("job", "topology", print), False), which) for which in ("best", 100)]
    found["checkpoint"] = None
    with pytest.raises(CheckpointError, match=r"^a model: the run has no checkpoint; train first \(d9d train\)"):
        of("run", "newest")


@dataclass
class Saved:
    """Checkpoint with the given tensors."""

    tensors: dict[str, torch.Tensor]
    manifest: dict[str, Any] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)

    def load_into(self, wanted: Any, scope: str, left_out: Any = frozenset(), only: bool = False) -> None:
        self.asked.append((sorted(wanted), scope, set(left_out), only))
        for name, tensor in wanted.items():
            if name not in left_out:
                tensor.detach().copy_(self.tensors[name])


def test_weights_of_a_checkpoint_are_loaded_and_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    tied: list[Any] = []
    monkeypatch.setattr(evaluation, "find_ties", lambda *given: SimpleNamespace(copy_values=lambda: tied.append(given)))
    model = nn.Linear(2, 1)
    assembly = SimpleNamespace(stages=1, shared=2, trainable=3, pipeline=4)
    forward: Any = SimpleNamespace(assembly=assembly, model=model)
    slots = {"optimizer/weight/average": {"dtype": "float64"}}
    saved: Any = Saved(
        {
            "model/weight": torch.tensor([[1.0, 2.0]]),
            "model/bias": torch.tensor([3.0]),
            "optimizer/weight/average": torch.tensor([[5.0, 10.0]], dtype=torch.float64),
        },
        {"tensors": slots, "average": {"slot": "average", "weight": 0.25}, "left_out": ["model/bias", "model/other"]},
    )
    nn.init.constant_(model.bias, 7.0)
    topology: Any = "topology"
    evaluation._load(saved, forward, topology)
    assert model.weight.tolist() == [[2.0, 4.0]]
    assert model.bias.tolist() == [7.0]
    assert saved.asked == [
        (["model/bias", "model/weight"], "model/", {"model/bias"}, False),
        (["optimizer/weight/average"], "optimizer/", set(), True),
    ]
    assert tied == [(1, 2, 3, 4, "topology")]
    plain: Any = Saved(saved.tensors, {"tensors": {}})
    evaluation._load(plain, forward, topology)
    assert (model.weight.tolist(), model.bias.tolist()) == ([[1.0, 2.0]], [3.0])


def test_an_evaluated_model_is_named_with_its_step() -> None:
    subject: Any = SimpleNamespace(name="a run")
    checkpoint: Any = SimpleNamespace(step=5)
    assert evaluation._origin(subject, None) == "a run"
    assert evaluation._origin(subject, checkpoint) == "a run, step 5"


class Task:
    inputs = "inputs"


class TwoPass(Task):
    pass


@pytest.mark.parametrize(
    ("manifest", "task", "drawn"),
    [(None, Task(), True), ({}, Task(), False), ({"left_out": ["x"]}, Task(), True), ({}, TwoPass(), True)],
)
def test_an_evaluation_measures_each_set_once_with_the_weights_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, manifest: dict[str, Any] | None, task: Any, drawn: bool
) -> None:
    """Pretrained weights are read only if a checkpoint does not replace them all, or a first pass needs them."""
    did: list[Any] = []
    notes: list[str] = []
    checkpoint = None if manifest is None else SimpleNamespace(step=5, manifest=manifest)
    assembly = SimpleNamespace(stages="stages", full_model="full", ownership=None, reducers=())

    @dataclass
    class Root:
        job: Any
        made: tuple[Any, ...] = ()

    @dataclass
    class OfJob:
        loading: Any
        evaluation: Any
        batch: Any

        def model_copy(self, update: dict[str, Any]) -> Any:
            return OfJob(**{**vars(self), **update})

    class Bar:
        def __init__(self, what: str, total: int, shown: bool) -> None:
            did.append(("bar", what, total, shown))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def add(self, count: int) -> None:
            did.append(("add", count))

    class Evaluator:
        def __init__(self, *given: Any) -> None:
            did.append(("evaluator", *given[:5], *given[6:]))
            self._beat = given[5]
            self.counted = {"a": 11, "b": 12}

        def run(self, tables: Any) -> dict[str, float]:
            self._beat()
            tables({"eval/a/t": Table(torch.tensor([[1.0, 2.0]])), "eval/b/t": Table(torch.tensor([[3.0]]))})
            return {"eval/a/loss": 1.0, "eval/b/loss": 2.0}

    @dataclass
    class Loading:
        weights: bool = True

        def model_copy(self, update: dict[str, Any]) -> Any:
            return Loading(**update)

    job = OfJob(Loading(), SimpleNamespace(datasets={"a": 1, "b": 2}), SimpleNamespace(size=4))
    selection = SimpleNamespace(task="chosen", evaluation=["part a", "part b"], evaluation_metrics=[])
    subject_job = SimpleNamespace(check_layout=lambda ranks: did.append(("ranks", ranks)) or selection, registry="r")
    watchdog = SimpleNamespace(phase=lambda *given: did.append(("phase", *given)), beat=lambda: did.append("beat"))
    topology: Any = SimpleNamespace(
        world_size=2, is_main=True, device="cpu", watchdog=watchdog, axes_group=lambda *axes: ("group", *axes)
    )

    def build_set(surroundings: Any, name: str, part: Any, *rest: Any) -> Any:
        did.append(("set", name, part, *rest))
        close = lambda: did.append(("closed", name))  # noqa: E731
        return SimpleNamespace(
            name=name, prefix=f"eval/{name}/", packs={"a": 3, "b": 5}[name], prefetcher=SimpleNamespace(close=close)
        )

    def build_forward(root: Any, *given: Any) -> Any:
        did.append(("weights", root.job.loading.weights))
        return SimpleNamespace(executor="executor", model="model", assembly=assembly)

    of: dict[str, Any] = {
        "compose_root": lambda *given: Root(given[0], given),
        "build_task": lambda *_: task,
        "CheckedTask": lambda *_: SimpleNamespace(inputs="inputs"),
        "assemble_forward": lambda _root: assembly,
        "_checkpoint": lambda *_: checkpoint,
        "TwoPassTask": TwoPass,
        "build_forward": build_forward,
        "AuxiliaryLosses": lambda *_: None,
        "Tallies": lambda *_: None,
        "Gradients": lambda *_, **__: None,
        "Statistics": lambda *_, **more: did.append(("statistics", more)),
        "build_first_pass": lambda *_: "first pass",
        "Surroundings": lambda *given: given,
        "build_set": build_set,
        "_load": lambda *given: did.append(("loaded", given[0].step)),
        "SampleBar": Bar,
        "Evaluator": Evaluator,
        "likelihood_of": lambda _task: "likelihood",
        "SampleRecorder": lambda _task: SimpleNamespace(gather=lambda name, _group: f"losses of {name}"),
    }
    for name, value in of.items():
        monkeypatch.setattr(evaluation, name, value)
    subject: Any = SimpleNamespace(job=subject_job, name="a run")
    monkeypatch.setattr(evaluation, "Subject", SimpleNamespace)
    subject.job.__dict__.update(vars(job))
    subject.job.model_copy = job.model_copy
    found, losses = evaluation._evaluated(subject, topology, notes.append, Options(7, True))
    group = ("group", "pp", "dp_replicate", "dp_shard", "cp")
    assert did[0] == ("ranks", 2)
    assert ("weights", drawn) in did
    assert ("statistics", {"gated": False, "group": group, "device": "cpu"}) in did
    sets = [one for one in did if one[0] == "set"]
    assert sets == [
        ("set", "a", "part a", None, [], "first pass", 7),
        ("set", "b", "part b", None, [], "first pass", 7),
    ]
    loaded = [] if checkpoint is None else [("loaded", 5)]
    rest = did[did.index(sets[-1]) + 1 :]
    assert rest[: len(loaded) + 2] == [*loaded, ("phase", "step", 0), ("bar", "evaluation", 32, True)]
    assert [one for one in rest if one == "beat" or one[0] in ("add", "closed")] == [
        "beat", ("add", 4), ("closed", "a"), ("closed", "b"),
    ]  # fmt: skip
    assert notes == [f"model: {'a run' if checkpoint is None else 'a run, step 5'} on cpu"]
    assert (found.name, found.step) == ("a run", None if checkpoint is None else 5)  # type: ignore[attr-defined]
    assert list(vars(found).values())[2:] == [
        {"a": {"loss": 1.0}, "b": {"loss": 2.0}},
        {"a": 11, "b": 12},
        {"a": {"t": [[1.0, 2.0]]}, "b": {"t": [[3.0]]}},
    ]
    assert losses == {"a": "losses of a", "b": "losses of b"}


# --- the library call, and commands -----------------------------------------------------------------------------------


def test_a_library_call_evaluates_on_the_data_of_the_first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    checked: list[int] = []

    def find(target: Any, request: Any, registry: Any) -> Any:
        asked.append((target, request.like, request.checkpoint, request.world_size, registry))
        return SimpleNamespace(job=SimpleNamespace(check=checked.append), name=target)

    monkeypatch.setattr(library, "find_subject", find)
    monkeypatch.setattr(library, "discover", lambda _policy: "discovered")
    monkeypatch.setattr(library, "same_data", lambda other, first: ("same data", other.name, first.name))
    monkeypatch.setattr(library, "exits_are_errors", nullcontext)
    measured: list[Any] = []
    monkeypatch.setattr(evaluation, "evaluate", lambda *given: measured.append(given) or "report")
    notes: list[str] = []
    topology: Any = SimpleNamespace(world_size=3, is_main=True)
    found: Any = library.evaluate(
        Path("run"), like="like.yaml", checkpoint=100, limit=5, compare="other", note=notes.append, topology=topology
    )
    assert found == "report"
    first, second = asked
    assert first == ("run", Path("like.yaml"), "100", 3, "discovered")
    assert (second[0], second[2], second[3]) == ("other", None, 3)
    assert second[1] is not None
    assert checked == [3]
    ((subject, given, note, limit, other),) = measured
    assert (subject.name, given, limit, other) == ("run", topology, 5, ("same data", "other", "run"))
    note("x")
    assert notes == ["x"]
    topology.is_main = False
    library.evaluate("run", topology=topology, note=notes.append)
    (_, _, note, limit, other) = measured[1]
    note("y")
    assert (notes, limit, other) == (["x"], None, None)


@pytest.mark.parametrize(
    ("status", "main", "lines"), [("finished", True, 2), ("stopped", True, 0), ("finished", False, 0)]
)
def test_the_main_process_tells_the_values_and_rows_of_a_finished_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, main: bool, lines: int
) -> None:
    built: list[Any] = []
    outcome = SimpleNamespace(status=status, values={"accuracy": 0.123456789}, samples=12_345)
    inference = SimpleNamespace(run=lambda: outcome, store=SimpleNamespace(output="there/output.jsonl"))
    loaded = SimpleNamespace(build=lambda **given: built.append(given) or inference)
    topology = SimpleNamespace(is_main=main)

    @contextmanager
    def joined(*given: Any) -> Any:
        assert given[4] == "computed"
        yield loaded, topology, "start", True

    monkeypatch.setattr(infer, "joined_process", joined)
    monkeypatch.setattr(infer, "start_up", lambda *_: nullcontext())
    process, interrupts, load = SimpleNamespace(stop_status=75), "interrupts", print
    ended = infer._infer(process, interrupts, load)  # type: ignore[arg-type]
    assert ended == (75 if status == "stopped" else 0)
    assert built == [{"topology": topology, "observers": ["start"], "interrupts": "interrupts", "owning": True}]
    assert capsys.readouterr().out.splitlines() == [
        "accuracy 0.123457", "finished 12,345 samples; rows in there/output.jsonl",
    ][:lines]  # fmt: skip


def test_a_checkpoint_is_exported_with_the_tokenizer_of_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conversions: list[Any] = []
    copied: list[Any] = []
    place = {"run": tmp_path}
    monkeypatch.setattr(model_files, "Place", SimpleNamespace(of=lambda _checkpoint: SimpleNamespace(**place)))
    monkeypatch.setattr(model_files, "convert_state", lambda asked, registry: conversions.append((asked, registry)))
    monkeypatch.setattr(model_files, "_copy_tokenizer", lambda *given: copied.append(given))
    monkeypatch.setattr(model_files, "_origin", lambda run: f"origin of {run}")
    registry: Any = "registry"
    model_files._export("checkpoint", tmp_path / "target", registry, print)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model_files._export("checkpoint", tmp_path / "target", registry, print)
    assert [(one.source, one.target, one.keep_from, given) for one, given in conversions] == [
        ("checkpoint", str(tmp_path / "target"), f"origin of {tmp_path}", "registry"),
        ("checkpoint", str(tmp_path / "target"), str(tmp_path / "model"), "registry"),
    ]
    assert copied == [(tmp_path / model_files.TOKENIZER, tmp_path / "target", print)] * 2
    place["run"] = None  # type: ignore[assignment]
    model_files._export("checkpoint", tmp_path / "target", registry, print)
    assert conversions[-1][0].keep_from == "origin of None"
    assert len(copied) == 2

    def fails(*_: object) -> None:
        raise D9dError("no tensors")

    monkeypatch.setattr(model_files, "convert_state", fails)
    with pytest.raises(CheckpointError, match="^checkpoint cannot be exported: no tensors$"):
        model_files._export("checkpoint", tmp_path / "target", registry, print)


def test_an_inference_job_is_checked_with_its_forward_only_program(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    resolution = SimpleNamespace(selection="selection")
    pipeline = SimpleNamespace(forward_program=lambda *given: asked.append(given))
    (base,) = InferenceJob.__bases__[:1]
    monkeypatch.setattr(base, "check", lambda _job, world_size: asked.append(world_size) or resolution)
    monkeypatch.setattr(job_module, "plan_pipeline", lambda *given: asked.append(given) or pipeline)
    monkeypatch.setattr(InferenceJob, "microbatches", 7)
    job: Any = InferenceJob.model_construct()
    assert job.check(3) is resolution
    assert asked == [3, (job, "selection"), (0, 7)]


def test_an_inference_job_is_built_from_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "build_inference", lambda *given: given)
    job: Any = InferenceJob.model_construct()
    monkeypatch.setattr(InferenceJob, "composed", lambda _job, *given: nullcontext(("root", *given)))
    assert job.build("note", "topology", "observers", "interrupts", True) == (
        ("root", "note", "topology"), "observers", "interrupts", True,
    )  # fmt: skip
