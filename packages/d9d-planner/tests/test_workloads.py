"""Workloads of jobs: lengths, widths, effects of strategies, and shares of stages; and the lines of ``d9d plan``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from d9d_core.config import PartConfig, ScheduleConfig
from d9d_core.cost import BlockCost, OptimizerCost, Share, StageCost, StrategyCost
from d9d_core.data import SampleLengths
from d9d_core.errors import BuildError, JobError
from d9d_core.job_file.job import Mesh
from d9d_core.kernel import Decision, OpSignature
from d9d_core.plugin import KernelSpec, Ref
from d9d_core.registry.entries import Entry, Origin
from d9d_planner import command, options, report, search
from d9d_planner import workload as module
from d9d_planner.costs.update import Updates
from d9d_planner.layout import Layout
from d9d_planner.live import Moment
from d9d_planner.memory import Memory
from d9d_planner.network import Group
from d9d_planner.search import Found
from d9d_planner.step_time import StepTime
from d9d_planner.workload import Workload
from rich.console import Console

GIB = 2**30
Lengths = Mapping[str, SampleLengths | None]


class Spec:
    """Stand-in of any record: its costs, and its simulation."""

    def __init__(self, cost: Any = None, simulate: Any = None, composite: bool = False) -> None:
        self.composite = composite
        self.cost = cost if cost is None else SimpleNamespace(load=lambda: cost)
        self.simulate = simulate if simulate is None else SimpleNamespace(load=lambda: simulate)


class Case:
    """A workload of stand-ins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **job: Any) -> None:
        self.shares: list[tuple[Any, Share]] = []
        self.specs: dict[str, Any] = {"model": Spec(self.stage), "optimizer": Spec()}
        self.lengths: dict[str, SampleLengths | None] = {}
        for name in ("ModelSpec", "OptimizerSpec", "StrategySpec", "ScheduleSpec"):
            monkeypatch.setattr(module, name, Spec)
        monkeypatch.setattr(module, "choose", self.choose)
        monkeypatch.setattr(module, "sample_lengths", lambda data: self.lengths.get(getattr(data, "name", "")))
        defaults: dict[str, Any] = {
            "model": SimpleNamespace(), "data": SimpleNamespace(name="data"), "peft": None, "evaluation": None,
            "optimizer": "adamw", "precision": SimpleNamespace(parameters="float32", autocast=None),
            "gradients": SimpleNamespace(accumulate=None),
        }  # fmt: skip
        self.job = SimpleNamespace(**{**defaults, **job})
        registry = SimpleNamespace(find=lambda _kind, name: SimpleNamespace(spec=self.specs[name]))
        self.make = lambda: Workload(cast("Any", self.job), cast("Any", registry), {})

    def choose(self, _registry: object, kind: str, *_: object) -> Any:
        return SimpleNamespace(entry=f"the {kind}", spec=self.specs[kind])

    def stage(self, _model: object, stage: Any, share: Share) -> StageCost:
        self.shares.append((stage, share))
        return StageCost((BlockCost("b", (), names=(f"layers.{stage.index}",)),), boundary=1.0)


def layout(pipeline: Any = None, microbatch: int = 2, size: int = 8, **mesh: int) -> Layout:
    return Layout(Mesh(**mesh), (), pipeline, size, microbatch)


def lengths(multiple: int, most: int | None, texts: int = 1) -> SampleLengths:
    return SampleLengths(multiple, most, texts)


def test_a_model_needs_a_cost_description(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    for spec in (Spec(), object()):
        case.specs["model"] = spec
        with pytest.raises(JobError, match="model: the model has no cost description for a prediction"):
            case.make()


def test_the_length_of_samples_is_that_of_the_data_or_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.lengths["data"] = lengths(64, 1000, texts=2)
    made = case.make()
    assert (made.length, made.texts) == (1000, 2)
    assert made.notes == ["samples have up to 1,000 positions; all are counted with this length"]
    case.lengths["data"] = lengths(1000, 1000)
    assert (case.make().length, case.make().notes) == (1000, [])
    case.lengths["data"] = lengths(8, None)
    case.job.model.max_positions = 4096
    case.job.data.sequence_length = 512
    assert (case.make().length, case.make().texts) == (512, 1)
    del case.lengths["data"], case.job.data.sequence_length
    made = case.make()
    assert (made.length, made.texts) == (4096, 1)
    assert made.notes == ["the data does not say how long samples are; counted with max_positions, 4,096"]
    del case.job.model.max_positions
    with pytest.raises(
        JobError,
        match="the length of samples is unknown; set data.sequence_length",
    ):
        _ = case.make().length


@pytest.mark.parametrize(
    ("parameters", "accumulate", "autocast", "compute", "widths"),
    [
        ("float32", None, None, None, (4, 4, 4)),
        ("bfloat16", None, None, None, (2, 2, 2)),
        ("bfloat16", "float32", None, None, (2, 4, 2)),
        ("float32", None, "bfloat16", 4, (4, 4, 2)),
        ("float32", None, None, 2, (4, 4, 2)),
    ],
)
def test_widths_are_those_of_parameters_gradients_and_computation(
    monkeypatch: pytest.MonkeyPatch, parameters: str, accumulate: Any, autocast: Any, compute: Any, widths: Any
) -> None:
    precision = SimpleNamespace(parameters=parameters, autocast=autocast)
    made = Case(monkeypatch, precision=precision, gradients=SimpleNamespace(accumulate=accumulate)).make()
    found = made.parameter_width, made.gradient_width, made.compute_width(StrategyCost(compute_width=compute))
    assert found == widths


def kernel(op: str, name: str) -> Entry:
    """Registry entry of a kernel whose plugin is not installed."""
    spec = KernelSpec(name=name, summary="Absent.", op=op, supports=Ref("no_such_module:supports"), build=Ref("a:b"))
    return Entry("kernel", spec, Origin("acme", "1", "acme.plugin"))


def test_costs_are_told_which_backend_a_job_would_use_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"slow": (True, 5), "quick": (True, 9), "refusing": (False, 20), "named": (True, 0)}
    asked: list[OpSignature] = []

    def answer(spec: KernelSpec, signature: OpSignature) -> Decision:
        asked.append(signature)
        return Decision(answers[spec.name][0], "measured", answers[spec.name][1])

    case = Case(monkeypatch, kernels={"swiglu": "fastest", "rope": [SimpleNamespace(match=["a"], backend="b")]})
    case.lengths["data"] = lengths(16, 16)
    entries = [kernel("rms_norm", name) for name in answers]
    registry = SimpleNamespace(
        find=case.make().registry.find, kernels=lambda op: entries if op == "rms_norm" else [kernel(op, "named")]
    )
    made = Workload(cast("Any", case.job), cast("Any", registry), {})
    made.stages(layout(), 80 * GIB)
    ((_, share),) = case.shares
    assert share.backend("silu_mul", {}) == "reference"  # the plugin fails
    monkeypatch.setattr(module, "asked", answer)
    assert share.backend("rms_norm", {"features": 4}) == "quick"
    assert replace(share, compiled=True, width=2).backend("rms_norm", {"features": 4}) == "quick"
    assert {(one.device, one.dtype, one.compiled) for one in asked} == {
        ("cuda", "float32", False),
        ("cuda", "bfloat16", True),
    }
    assert share.backend("swiglu", {}) == "fastest"
    assert share.backend("rope", {}) == "reference"  # the only backend is used by name
    assert Share(1, 1).backend("swiglu", {}) == "reference"


def test_an_entry_for_a_part_of_a_model_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.specs |= {"optimizer": Spec(lambda *_: OptimizerCost()), "fsdp": Spec(lambda _config: StrategyCost())}
    case.specs |= {"expert_parallel": Spec(None)}  # a strategy without a cost needs the note, too
    made = case.make()
    made.strategy(replace(layout(), parallel=(PartConfig(name="fsdp"), PartConfig(name="expert_parallel"))))
    assert made.notes == []
    names = "fsdp", "expert_parallel"
    for size in (2, 4):
        parts = tuple(PartConfig(name=name, match=("layers.*",)) for name in names)
        made.strategy(replace(layout(dp_shard=size), parallel=parts))
    assert made.notes == [
        f"strategy {name} with 'match' is counted as if it acted on the whole model" for name in names
    ]


def test_an_optimizer_without_a_cost_description_counts_as_one_with_two_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch)
    made = case.make()
    assert made.optimizer == OptimizerCost(state=8, traffic=28)
    assert made.notes == ["optimizer the optimizer has no cost description; counted as one with two moments"]
    case.specs["optimizer"] = Spec(lambda config, width: (config, width))
    assert cast("Any", case.make().optimizer) == ("adamw", 4)
    costs = {"adamw": 2.0, "inner": 3.0}

    def cost(config: str, width: int, inner: Any) -> float:
        return costs[config] * width + (inner("inner", 1) if config == "adamw" else 0)

    case.specs["optimizer"] = Spec(cost, composite=True)
    assert cast("Any", case.make().optimizer) == 2.0 * 4 + 3.0


@pytest.mark.parametrize(("mesh", "most"), [({}, 1), ({"tp": 4}, 4), ({"cp": 2}, 4), ({"cp": 2, "tp": 3}, 12)])
def test_lengths_are_split_over_tensor_and_context_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], most: int
) -> None:
    datasets = {"": SimpleNamespace(name="one"), "held_out": SimpleNamespace(name="other")}
    case = Case(monkeypatch, evaluation=SimpleNamespace(datasets=datasets))
    case.lengths = {"data": None, "one": lengths(24, 24), "other": lengths(most, 24)}
    case.make()._check_lengths(Mesh(**mesh))
    if most == 1:
        return
    case.lengths["other"] = lengths(most + 1, 24)
    tp, cp = mesh.get("tp", 1), mesh.get("cp", 1)
    said = f"mesh.tp {tp} and mesh.cp {cp} need sequence lengths that are multiples of {most}, but evaluation held_out"
    with pytest.raises(JobError, match=f"^{said} has multiples of {most + 1}; use other sizes"):
        case.make()._check_lengths(Mesh(**mesh))


def config(name: str) -> Any:
    return SimpleNamespace(selector=name)


def test_effects_of_strategies_add_up_and_some_only_with_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    sharded = StrategyCost(shards=True, gathers="twice", reduces="each", in_place=True)
    case.specs |= {"fsdp": Spec(lambda _config: sharded), "odd": object(), "free": Spec()}
    case.specs["compile"] = Spec(lambda _config: StrategyCost(compiled=True))
    parallel = tuple(map(config, ("fsdp", "odd", "free", "compile")))
    made = case.make()

    def effect(**mesh: int) -> StrategyCost:
        return made.strategy(Layout(Mesh(**mesh), parallel, None, 8, 1))

    both = StrategyCost(shards=True, gathers="twice", reduces="each", in_place=True, compiled=True)
    assert [effect(**{axis: 2}) for axis in ("dp_shard", "cp", "pp")] == [both] * 3
    alone = StrategyCost(shards=True, gathers="never", reduces="last", in_place=True, compiled=True)
    assert [effect(), effect(tp=2), effect(dp_replicate=2)] == [alone] * 3
    sharded = StrategyCost(shards=True, gathers="twice", reduces="each")
    assert case.make().strategy(Layout(Mesh(), parallel[:1], None, 8, 1)) == sharded


def test_stages_get_the_share_of_a_rank_and_equal_ones_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.lengths["data"] = lengths(16, 16, texts=2)
    made = case.make()
    first, second = made.stages(layout(tp=2, microbatch=3, size=12), 7.5, count=2)
    assert first is second
    assert first.blocks[0].names == ()
    assert [(stage.index, stage.count) for stage, _ in case.shares] == [(0, 2), (1, 2)]
    assert case.shares[0][1] == Share(6, 16, 2, 1, 1, 4, False, 7.5)
    made.stages(layout(tp=2, microbatch=3, size=12), 7.5, count=2)
    assert len(case.shares) == 2
    made.stages(layout(tp=2, microbatch=3, size=12), 8.5, count=2)
    assert len(made.stages(layout(), 7.5)) == 1
    assert len(case.shares) == 5


def test_attention_over_several_ranks_has_the_cost_of_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = Case(monkeypatch), list[Any]()
    case.lengths["data"] = lengths(16, 16)
    case.specs |= {"ring": Spec(lambda _config: StrategyCost(context="cost"))}  # type: ignore[arg-type]
    monkeypatch.setattr(module, "shared", lambda cost, context, ranks: asked.append((context, ranks)) or cost)
    made = case.make()
    for size in (1, 2):
        made.stages(Layout(Mesh(cp=size), (config("ring"),), None, 8, 2), 1.0)
    assert asked == [("cost", 2)]


def test_the_layers_of_stages_and_the_adapters_of_a_job_are_those_of_its_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layers(ScheduleConfig):
        name: str = "schedule"

    monkeypatch.setattr(module, "adapter_costs", lambda peft, _registry: f"costs of {peft}")
    tuned: list[Any] = []
    monkeypatch.setattr(module, "tuned", lambda costs, adapters, share: tuned.append((adapters, share)) or costs)
    case = Case(monkeypatch, peft="lora")
    case.lengths["data"] = lengths(16, 16)
    case.make().stages(layout(Layers(layers=(3, 1)), pp=2), 1.0, count=2)
    assert [stage.layers for stage, _ in case.shares] == [(3, 1)] * 2
    assert tuned == [("costs of lora", case.shares[0][1])]


def test_updates_of_shards_have_the_ranks_of_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.specs |= {"fsdp": Spec(lambda _config: StrategyCost(shards=True)), "optimizer": Spec(lambda *_: "cost")}
    groups = SimpleNamespace(shards=Group(4), expert_shards=Group(2))
    asked: list[Any] = []
    of = SimpleNamespace(of=lambda mesh, views: asked.append((mesh, views)) or groups)
    monkeypatch.setattr(module, "DataGroups", of)
    made, mesh = case.make(), Mesh(dp_shard=2, tp=3)
    sharded, whole = (Layout(mesh, parallel, None, 8, 1) for parallel in ((config("fsdp"),), ()))
    assert made.updates(sharded) == Updates(cast("Any", "cost"), 4, 2, 3)
    assert made.updates(whole) == Updates(cast("Any", "cost"), 1, 1, 3)
    assert asked == [(mesh, {})]


class Schedule:
    """Config of a schedule."""

    selector, layers = "schedule", None

    def model_dump_json(self) -> str:
        return "{}"


def test_a_layout_without_stages_has_one_host_and_gradients_from_the_second_microbatch_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Case(monkeypatch).make()
    assert made.hosts(layout()) == [0]
    assert made.moments(layout(size=2)) == [[Moment(((0, 1),), 0, frozenset())]]
    assert made.moments(layout(size=4)) == [[Moment(((0, 1),), 0, frozenset({0}))]]


def test_schedules_are_looked_at_for_a_few_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = Case(monkeypatch), list[tuple[int, int]]()
    case.specs["schedule"] = Spec(simulate="simulate")

    def programs(ranks: int, microbatches: int) -> Any:
        asked.append((ranks, microbatches))
        if microbatches < 3:
            raise ValueError("too few")
        return f"{microbatches} on {ranks}"

    monkeypatch.setattr(module, "instantiate", lambda *_: programs)
    monkeypatch.setattr(module, "placement", lambda found: {"4 on 2": [[1, 2], [0]], "3 on 2": [[0], [1]]}[found])
    monkeypatch.setattr(module, "moments", lambda program: f"moments of {program}")
    made, schedule = case.make(), cast("Any", Schedule())
    long = layout(schedule, microbatch=1, size=9, pp=2)
    assert made.hosts(long) == [1, 0, 0]
    assert made.moments(long) == [f"moments of {letter}" for letter in "4 on 2"]
    assert made.hosts(layout(schedule, microbatch=1, size=3, pp=2)) == [0, 1]
    assert asked == [(2, 4), (2, 3)]
    with pytest.raises(BuildError, match="^pipeline: too few$"):
        made.hosts(layout(schedule, microbatch=1, size=2, pp=2))
    assert cast("Any", made.simulator(long)) == "simulate"
    case.specs["schedule"] = Spec()
    with pytest.raises(JobError, match="has no simulator"):
        made.simulator(long)


def memory(parameters: float = 0.0, workspace: float = 0.0, outside: float = 0.0, **parts: float) -> Memory:
    names = ("gradients", "optimizer", "activations", "logits", "communication")
    values = {name: parts.get(name, 0.0) * GIB for name in names}
    return Memory(parameters * GIB, workspace=workspace * GIB, outside=outside * GIB, fragmentation=0.0, **values)


def prediction(*ranks: Memory, time: StepTime | None = None, device: float = 10.0, name: str = "pp=2, fsdp") -> Any:
    class Laid(str):
        microbatches, microbatch = 4, 2

    fullest = max(ranks, key=lambda rank: rank.needed)
    return SimpleNamespace(
        ranks=list(ranks), memory=fullest, device=SimpleNamespace(memory=device * GIB), layout=Laid(name),
        time=time or StepTime(2.0, {"products": 1.5, "bubble": 0.4, "host": 0.01}), tokens_per_second=12345.6,
    )  # fmt: skip


def test_lines_about_memory_name_its_parts_and_the_fullest_rank() -> None:
    small, large = memory(1.0, optimizer=0.04), memory(2.0, workspace=0.5, outside=1.0, gradients=0.06)
    assert report.memory_line(prediction(small)) == "1.0 GiB (parameters 1.0)"
    parts = "parameters 2.0, gradients 0.1, temporary 0.5, driver and gaps 1.0"
    line = report.memory_line(prediction(small, large))
    assert line == f"3.6 GiB on pipeline rank 1, 1.0 on the emptiest ({parts})"
    many = memory(1.0, activations=4.0, optimizer=2.0, logits=3.0, workspace=11.0)
    assert report.largest(prediction(many)) == "activations 4.0, logits 3.0, optimizer 2.0, temporary 11.0"
    even = memory(1.0, activations=4.0, optimizer=2.0, logits=3.0, workspace=10.0)
    assert report.largest(prediction(even)) == "activations 4.0, logits 3.0, optimizer 2.0"
    assert report.advice(prediction(large, device=1.5), "usual") == "usual"
    hopeless = "the driver and libraries alone need 1.0 GiB, so use a device with more memory"
    assert report.advice(prediction(large, device=1.0), "usual") == hopeless


def test_the_table_of_layouts_marks_those_that_no_other_one_beats() -> None:
    rows = [
        prediction(memory(9.5), time=StepTime(2.0, {"products": 1.5, "bubble": 0.4})),
        prediction(memory(9.5), time=StepTime(2.5, {"products": 2.5}), name="one device, no strategy"),
        prediction(memory(9.0), time=StepTime(3.0, {"products": 3.0})),
    ]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report.plan_table(Found(rows, 3, None), rows))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert lines == [
        "seconds tokens/s GiB mesh strategies microbatch bound by",
        "1 2.000 12,346 9.5 * pp=2 fsdp 4 x 2 bubble 20%, memory 95% full",
        "2 2.500 12,346 9.5 one device no strategy 4 x 2 compute, memory 95% full",
        "3 3.000 12,346 9.0 * pp=2 fsdp 4 x 2 compute",
    ]
    assert report.time_line(rows[0]) == "2 s, 12,346 tokens/s on each device (products 75%, bubble 20%)"
    assert "host" not in report.time_line(prediction(memory(1.0), time=StepTime(1.0, {"products": 0.9, "host": 0.01})))


def test_a_job_file_keeps_its_other_values_and_gets_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "written", lambda value: f"written {value}")
    # Lines have at most 120 characters before the word that goes to the next one.
    note = "x" * (121 - len("note: "))
    values = {"seed": 3, "mesh": {"tp": 8}, "pipeline": "old", "batch": 1, "note": f"{note} y"}
    job: Any = SimpleNamespace(source=SimpleNamespace(document=SimpleNamespace(values=values)))

    def text(pipeline: str | None) -> str:
        laid_out = SimpleNamespace(mesh="m", batch="b", parallel="p", pipeline=pipeline)
        mesh = SimpleNamespace(sizes=lambda: {"pp": 2, "tp": 1, "cp": 4})
        layout = SimpleNamespace(on=lambda given: laid_out, mesh=mesh)
        time, need = SimpleNamespace(total=1.2345), SimpleNamespace(needed=2.5 * GIB)
        return command.job_text(job, cast("Any", SimpleNamespace(layout=layout, time=time, memory=need)))

    first, _, rest = text("1f1b").partition("\n")
    assert first == "# Layout by d9d plan; predicted: 1.23 s a step, 2.5 GiB."
    assert yaml.safe_load(rest) == {
        "seed": 3, "mesh": {"pp": 2, "cp": 4}, "pipeline": "written 1f1b", "batch": "written b",
        "parallel": "written p", "note": f"{note} y",
    }  # fmt: skip
    assert f"note: {note}\n" in rest
    assert "pipeline" not in text(None)
    assert values["pipeline"] == "old"


def test_meshes_divide_the_devices_and_the_batch() -> None:
    found = options.divisors(36)
    assert found == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert search._divisors_up_to(12, 4) == [1, 2, 3, 4]
    assert search._shards(64, 8) == [1, 8, 32, 64]
    usable = SimpleNamespace(
        schedules=[], fixed={}, strategies=lambda axis: ["tp"] if axis == "tp" else [], expert_groups=lambda _mesh: [1],
        parallel=lambda mesh, waits: [[f"{mesh.dp_shard} {waits}"]], kept=["kept"], recomputing=[["again"]],
    )  # fmt: skip
    load: Any = SimpleNamespace(job=SimpleNamespace(batch=SimpleNamespace(size=6)), options=usable)
    found_layouts = list(search.layouts(load, 4, 2))
    meshes = {(one.mesh.tp, one.mesh.dp_shard, one.mesh.dp_replicate) for one in found_layouts}
    assert meshes == {(2, 1, 2), (2, 2, 1)}  # 4 data-parallel ranks do not divide a batch of 6
    assert {(one.microbatch, one.parallel) for one in found_layouts if one.mesh.dp_shard == 2} == {
        (1, ("kept", "2 True")), (1, ("kept", "again", "2 True")), (3, ("kept", "2 False")),
        (3, ("kept", "again", "2 False")),
    }  # fmt: skip
    assert all(one.size == 6 and one.pipeline is None for one in found_layouts)
    assert math.prod(found_layouts[0].mesh.sizes().values()) == 4
    load.job.batch.size = 8
    for plugins, sizes in (
        ((), {(1, 1, 1)}),
        (("tp",), {(1, 1, 1), (1, 2, 1)}),
        (("cp",), {(1, 1, n) for n in (1, 2, 4)}),
    ):
        usable.strategies = plugins.__contains__
        assert {(one.mesh.pp, one.mesh.tp, one.mesh.cp) for one in search.layouts(load, 4, 2)} == sizes
    # Shards on the devices of one machine of 8, of which tp uses two.
    usable.strategies = ("tp",).__contains__
    shards = {(one.mesh.tp, one.mesh.dp_shard) for one in search.layouts(load, 16, 8)}
    assert shards == {(2, 1), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2)}
    usable.strategies = ("cp",).__contains__
    shards = {(one.mesh.cp, one.mesh.dp_shard) for one in search.layouts(load, 16, 8) if one.mesh.cp > 1}
    assert shards == {(2, 1), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (16, 1)}
    # Ranks of cp on all devices of a machine and more leave one for the shards.
    load.job.batch.size = 16
    found_shards = [one.mesh.dp_shard for one in search.layouts(load, 64, 2) if one.mesh.cp == 4]
    assert sorted(set(found_shards)) == [1, 4, 16]
    load.job.batch.size = 8
    usable.fixed, usable.strategies = {"dp_replicate": 2, "tp": 2}, ("tp",).__contains__
    fixed = {(one.mesh.tp, one.mesh.dp_shard, one.mesh.dp_replicate) for one in search.layouts(load, 16, 8)}
    assert fixed == {(2, 4, 2)}
    usable.fixed = {}
    usable.schedules = ["1f1b"]
    usable.strategies = ().__contains__
    assert {(one.mesh.pp, one.mesh.tp, one.mesh.cp) for one in search.layouts(load, 4, 2)} == {
        (n, 1, 1) for n in (1, 2, 4)
    }
