"""Collectives of a step from declarations: rows, totals, transfers, placements and warnings. Parts are stand-ins."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.data import SampleLengths
from d9d_core.plugin import Ref, StrategySpec
from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    InputBackward,
    Overlap,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from d9d_core.strategy import Collective, Kind
from d9d_core.types import TensorSpec
from d9d_engine.compose.communication import nodes, placements, step
from d9d_engine.compose.communication.nodes import node_warning, processes_of_node
from d9d_engine.compose.communication.placements import placed_parameters, without_numbers
from d9d_engine.compose.communication.rows import Row, grouped
from d9d_engine.compose.communication.step import Entry, StepCollectives, Unread, shape_of
from torch import nn


def entry(
    purpose: str = "x",
    size: int | None = 100,
    count: int = 1,
    kind: Kind = "all_gather",
    group: str = "tp",
    source: str = "fsdp",
    **more: Any,
) -> Entry:
    return Entry(source, Collective(kind, group, (0, 1), size, count, purpose, **more))


def test_a_row_has_the_calls_and_bytes_of_its_collectives() -> None:
    found = entry("p", 12_345, 3, approximate=True, at_most=True)
    assert Row("fsdp", found, 7, "what").cells() == ("all_gather", "tp", "2", "up to 7", "~12,345", "what")
    assert Row("fsdp", entry(size=None), 1, "what").cells() == ("all_gather", "tp", "2", "1", "?", "what")
    assert Row("fsdp", entry(size=0), 1, "what").cells()[4] == "0"


def test_collectives_that_differ_only_in_layers_share_a_row() -> None:
    rows = grouped(
        [
            entry("parameters of layers.0", count=2),
            entry("parameters of layers.1", count=3),
            entry("parameters of head"),
            entry("parameters of layers.10", count=4),
            entry("parameters of layers.2", size=101),
            entry("parameters of layers.3", approximate=True),
            entry("parameters of layers.4", source="tp"),
        ]
    )
    assert [(row.source, row.calls, row.what) for row in rows] == [
        ("fsdp", 9, "parameters of layers.*"),
        ("fsdp", 1, "parameters of head"),
        ("fsdp", 1, "parameters of layers.2"),
        ("fsdp", 1, "parameters of layers.3"),
        ("tp", 1, "parameters of layers.4"),
    ]


def test_the_totals_of_a_step_are_sums_over_calls() -> None:
    found = StepCollectives(
        0, [entry(count=2), entry(size=7, count=3), entry(size=None, count=5), entry(kind="send", size=11)], [], []
    )
    assert found.total == {"all_gather": (10, 221), "send": (1, 11)}


# --- machines ---------------------------------------------------------------------------------------------------------


def test_the_processes_of_a_machine_come_from_the_launcher_or_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {"cuda": 8, "cpu": 1}
    monkeypatch.setattr(nodes, "count_devices", devices.__getitem__)
    assert processes_of_node("cuda", {"LOCAL_WORLD_SIZE": "4"}) == 4
    assert processes_of_node("cuda", {"LOCAL_WORLD_SIZE": "0"}) == 8
    assert processes_of_node("cuda", {"LOCAL_WORLD_SIZE": "x"}) == 8
    assert processes_of_node("cpu", {}) is None
    devices["cpu"] = 2
    assert processes_of_node("cpu", {}) == 2


def test_tensor_parallelism_within_a_machine_is_no_warning() -> None:
    nothing = StepCollectives(0, [], [], [])
    for tp, per_node in ((1, 3), (2, 8), (8, 8), (4, None)):
        assert node_warning(tp, per_node, nothing) is None


def test_tensor_parallelism_across_machines_is_a_warning_with_its_bytes() -> None:
    found = StepCollectives(
        0, [entry(size=2**20, count=2), entry(size=2**19, count=3), entry(size=2**30, group="world")], [], []
    )
    assert node_warning(16, 8, found) == (
        "mesh.tp is 16, wider than the 8 processes of a node: 5 calls with 3.5 MiB (3,670,016 bytes) a step and rank "
        "cross the network between nodes, where a link carries about a tenth of the bytes a second, and every "
        "layer waits for them; use a tp that divides 8, and dp_shard, cp or pp for the rest"
    )
    found = StepCollectives(0, [entry(size=None), entry()], [], [])
    text = node_warning(3, 8, found)
    assert text is not None
    assert text.startswith(
        "mesh.tp is 3, no divisor of the 8 processes of a node: 2 calls with bytes that depend on the data a step"
    )


# --- placements -------------------------------------------------------------------------------------------------------


def test_parameters_of_one_shape_and_pattern_are_one_group() -> None:
    model = nn.ModuleDict(
        {"layers": nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 2)), "head": nn.Linear(2, 1)}
    )
    cast("nn.Sequential", model["layers"])[1].requires_grad_(False)
    found = [(one.pattern, one.count, one.shape, one.placement, one.trained) for one in placed_parameters(model)]
    assert found == [
        ("layers.0.weight", 1, (3, 2), "whole", True),
        ("layers.0.bias", 1, (3,), "whole", True),
        ("layers.1.weight", 1, (3, 2), "whole", False),
        ("layers.1.bias", 1, (3,), "whole", False),
        ("layers.2.weight", 1, (2, 3), "whole", True),
        ("layers.2.bias", 1, (2,), "whole", True),
        ("head.weight", 1, (1, 2), "whole", True),
        ("head.bias", 1, (1,), "whole", True),
    ]
    layers = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))})
    assert [(one.pattern, one.count) for one in placed_parameters(layers)] == [("layers.*.weight", 3)]
    assert without_numbers("a.10.b2.3 and c.4") == "a.*.b2.* and c.*"


def test_a_placement_names_the_mesh_dimensions_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "is_dtensor", lambda _tensor: True)
    mesh = SimpleNamespace(mesh_dim_names=("replica", "shard", "tp"), size=[2, 4, 1].__getitem__)
    of = [SimpleNamespace(), SimpleNamespace(dim=0), SimpleNamespace(dim=1)]
    parameter: Any = SimpleNamespace(device_mesh=mesh, placements=of)
    assert placements.placement_of(parameter) == "replicated over replica=2, dim 0 sharded over shard=4"
    mesh.size = [1, 1, 1].__getitem__
    assert placements.placement_of(parameter) == "whole"


# --- a step -----------------------------------------------------------------------------------------------------------


def job(lengths: SampleLengths | None = None, autocast: str | None = None, cp: int = 2) -> Any:
    return SimpleNamespace(
        data=SimpleNamespace(sample_lengths=lengths),
        precision=SimpleNamespace(parameters="float32", autocast=autocast),
        microbatch_size=3,
        mesh=SimpleNamespace(cp=cp),
    )


def test_the_shape_of_a_step_has_the_passes_and_sizes_of_one_stage() -> None:
    program = (
        Forward(0, 0), Forward(1, 0), Overlap(Forward(0, 1), InputBackward(0, 0)), SendActivation(0, 1), Backward(0, 1),
    )  # fmt: skip
    assembly: Any = SimpleNamespace(compute_dtype=None)
    shape = shape_of(job(SampleLengths(8, 8, texts=2)), assembly, program, 0)
    assert shape.passes == ("forward", "forward", "input_backward", "backward")
    assert (shape.samples, shape.positions, shape.itemsize, shape.approximate) == (6, 4, 4, False)
    assert (shape.forwards, shape.backwards, shape.split_backward) == (2, 2, True)
    assert shape_of(job(), assembly, program, 1).passes == ("forward",)
    assembly.compute_dtype = torch.bfloat16
    padded = shape_of(job(SampleLengths(4, 8)), assembly, program, 0)
    assert (padded.samples, padded.positions, padded.itemsize, padded.approximate) == (3, 4, 2, True)
    unknown = shape_of(job(), assembly, program, 0)
    assert (unknown.samples, unknown.positions, unknown.approximate) == (3, None, False)
    assembly.compute_dtype = None
    cast_down = shape_of(job(SampleLengths(8, 8), "bfloat16"), assembly, program, 0)
    assert (cast_down.itemsize, cast_down.approximate) == (2, True)


def test_bytes_of_a_tensor_are_those_of_its_positions() -> None:
    shape = shape_of(job(SampleLengths(8, 8)), cast("Any", SimpleNamespace(compute_dtype=None)), (), 0)
    assert (shape.bytes_of(2.5), shape.bytes_of(2, 1), shape.bytes_of(2, 0)) == (120, 24, 0)
    assert shape_of(job(), cast("Any", SimpleNamespace(compute_dtype=None)), (), 0).bytes_of(1) is None


def test_forwards_in_checkpointed_blocks_are_listed_again() -> None:
    def chosen(name: str, anchor: str) -> Any:
        ref = Ref("nowhere:x")
        return SimpleNamespace(spec=StrategySpec(name=name, summary="x", config=ref, build=ref, anchor=anchor))

    fsdp, checkpointing = chosen("fsdp", "data"), chosen("activation_checkpointing", "checkpointing")

    def declared(shape: Any) -> list[Collective]:
        return [
            entry(f"{shape}, forward", module="layers.1.mlp").collective,
            entry("a", module="layers.10").collective,
            entry("b").collective,
        ]

    assembly: Any = SimpleNamespace(
        applied=[
            (fsdp, SimpleNamespace(modules=("layers.10",))),
            (checkpointing, SimpleNamespace(modules=("layers.1",))),
        ],
        communication={0: [(checkpointing, None), (fsdp, declared)]},
    )
    found = [
        (one.source, one.collective.purpose, one.collective.at_most)
        for one in step._of_strategies(assembly, cast("Any", {0: "shape"}))
    ]
    assert found == [
        ("fsdp", "shape, forward", False),
        ("fsdp", "shape, recomputation", True),
        ("fsdp", "a", False),
        ("fsdp", "b", False),
    ]


TOPOLOGY: Any = SimpleNamespace(
    rank=3, sizes={"pp": 3, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}, world_size=6
)


def transfers(program: tuple[Action, ...], specs: Any, monkeypatch: pytest.MonkeyPatch, lengths: Any) -> list[Any]:
    """Rank 3 of 6 has pipeline rank 1; its neighbours are ranks 1 and 5."""
    asked: list[int] = []

    def handed_on(_job: object, _assembly: object, stage: int) -> Any:
        asked.append(stage)
        return specs

    monkeypatch.setattr(step, "handed_on", handed_on)
    assembly: Any = SimpleNamespace(pipeline=SimpleNamespace(hosts=(0, 1, 2)))
    found = list(step._of_program(job(lengths), assembly, TOPOLOGY, program))
    return [
        (c.kind, c.group, c.ranks, c.bytes, c.count, c.purpose, c.approximate) for c in (e.collective for e in found)
    ]


def test_transfers_of_a_program_are_counted_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        ReceiveActivation(1, 0), Forward(1, 0), SendActivation(1, 0), ReceiveActivation(1, 1), SendActivation(1, 1),
        ReceiveGradient(1, 0), Backward(1, 0), SendGradient(1, 0),
    )  # fmt: skip
    specs = {"x": TensorSpec((2, 5), torch.bfloat16), "ids": TensorSpec((2, 5), torch.int64)}
    assert transfers(program, specs, monkeypatch, SampleLengths(8, 8)) == [
        ("receive", "pp", (1, 3), 20, 2, "outputs of stage 0: x", False),
        ("receive", "pp", (1, 3), 80, 2, "outputs of stage 0: ids", False),
        ("send", "pp", (3, 5), 20, 2, "outputs of stage 1: x", False),
        ("send", "pp", (3, 5), 80, 2, "outputs of stage 1: ids", False),
        ("receive", "pp", (3, 5), 20, 1, "gradients of outputs of stage 1: x", False),
        ("send", "pp", (1, 3), 20, 1, "gradients of outputs of stage 0: x", False),
    ]
    assert transfers((SendActivation(1, 0),), None, monkeypatch, None) == [
        ("send", "pp", (3, 5), None, 1, "outputs of stage 1", True)
    ]
    assert transfers((SendActivation(1, 0),), specs, monkeypatch, SampleLengths(4, 8))[0][-1] is True


def test_tensors_that_a_stage_passes_on_are_known_if_lengths_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Boundaries:
        def __init__(self, outlines: object, dtype: object) -> None:
            seen.append((outlines, dtype))

        def announced(self, stage: int, microbatch: Unread) -> Any:
            if stage == 9:
                raise KeyError("x")
            seen.append((stage, microbatch["anything"]))
            return {"x": TensorSpec((1,), torch.float32)}

    monkeypatch.setattr(step, "Boundaries", Boundaries)
    assembly: Any = SimpleNamespace(outlines="outlines", compute_dtype="dtype")
    assert step.handed_on(job(), assembly, 0) is None
    assert step.handed_on(job(SampleLengths(4)), assembly, 0) is None
    assert step.handed_on(job(SampleLengths(4, 8, texts=5)), assembly, 2) == {"x": TensorSpec((1,), torch.float32)}
    assert seen == [("outlines", "dtype"), (2, TensorSpec((15, 4), torch.int64))]
    assert step.handed_on(job(SampleLengths(8, 8)), assembly, 9) is None
    unread = Unread(TensorSpec((1, 2), torch.int64))
    assert (list(unread), len(unread)) == ([], 0)


@dataclass(frozen=True)
class Declares:
    """Optimizer that declares the given collectives."""

    found: list[Collective] | None

    def collectives(self) -> Any:
        return self.found


def test_an_optimizers_declared_collectives_are_listed_and_missing_ones_are_told() -> None:
    selection: Any = SimpleNamespace(
        optimizer=SimpleNamespace(spec=SimpleNamespace(name="muon"), entry="'muon' (acme)"),
        task=SimpleNamespace(entry="'lm' (acme)"),
    )
    silent: Any = SimpleNamespace(entry="'quiet' (acme)")
    assembly: Any = SimpleNamespace(communication={0: [(silent, None)], 1: [(silent, None), (silent, print)]})
    one = entry("momentum").collective
    assert list(step._of_optimizer(selection, cast("Any", Declares([one])))) == [Entry("muon", one)]
    assert list(step._of_optimizer(selection, cast("Any", Declares(None)))) == []
    quiet = "strategy 'quiet' (acme) does not declare its collectives"
    loud = "optimizer 'muon' (acme) does not declare its collectives"
    task: Any = object()
    assert list(step._unknown(selection, assembly, task, cast("Any", Declares([])))) == [quiet]
    assert list(step._unknown(selection, assembly, task, cast("Any", Declares(None)))) == [quiet, loud]
    assert list(step._unknown(selection, assembly, task, cast("Any", object()))) == [quiet, loud]


def test_metrics_are_merged_by_one_reduction_for_each_operation_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(5, dtype=torch.int64)}
    metric = SimpleNamespace(state=lambda: state, reductions={"a": "sum", "b": "sum", "c": "max"})
    monkeypatch.setattr(step, "instantiate", lambda chosen, _config: {"mine": metric}[chosen])
    selection: Any = SimpleNamespace(metrics=[("mine", None)])
    topology: Any = SimpleNamespace(axes_group=lambda *axes: axes)
    task: Any = object()
    monkeypatch.setattr(step, "_ranks", lambda axes: (0, 2) if axes[0] == "pp" else (0,))
    found = [one.collective for one in step._of_metrics(selection, topology, task)]
    assert [(one.kind, one.group, one.ranks, one.bytes, one.count, one.purpose) for one in found] == [
        ("all_reduce", "pp x data", (0, 2), 20, 1, "sum of states"),
        ("all_reduce", "pp x data", (0, 2), 40, 1, "max of states"),
    ]
    monkeypatch.setattr(step, "_ranks", lambda _axes: (0,))
    assert list(step._of_metrics(selection, topology, task)) == []


def test_ranks_are_named_by_the_axes_along_which_they_differ() -> None:
    assert [step._dims(TOPOLOGY, ranks) for ranks in ((0, 1), (1, 3, 5), (0, 3), (2,))] == [
        "dp_shard", "pp", "pp x dp_shard", "",
    ]  # fmt: skip
    assert step._ranks(None) == (0,)
