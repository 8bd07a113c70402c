"""Whole parameters only while they are needed; number formats as stated; tied weights where they are possible."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.job_file.job import Mesh
from d9d_core.plugin import ViewSpec
from d9d_core.registry.registry import Registry
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.simulate import simulated_world
from d9d_parallel.data_parallel.config import FsdpConfig, HsdpConfig, ReplicateConfig
from d9d_parallel.data_parallel.strategy import Fsdp, Hsdp, Replicate
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.operators import OperatorCounter
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.smoke
VIEWS = {e.spec.key: e.spec for e in Registry.of().entries("view") if isinstance(e.spec, ViewSpec)}
STRATEGIES = {"fsdp": (Fsdp, FsdpConfig), "hsdp": (Hsdp, HsdpConfig), "replicate": (Replicate, ReplicateConfig)}


class Model(nn.Module):
    """Blocks, and an embedding whose weight may be the head's too."""

    def __init__(self, depth: int = 2, tied: bool = False, tied_blocks: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(depth))
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if tied_blocks:
            self.layers[1].weight = self.layers[0].weight

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def wrapped(name: str, mesh: Mapping[str, int], model: nn.Module, **settings: Any) -> Any:
    """Apply a strategy, and return its error."""
    sizes = Mesh(**mesh).sizes()
    topology = Topology(sizes=sizes, rank=dist.get_rank(), world_size=dist.get_world_size(), views=VIEWS)
    strategy, config = STRATEGIES[name]
    return strategy(config(**settings)).apply(model, topology)


def seeded(**settings: bool) -> Model:
    torch.manual_seed(1)
    return Model(**settings)


# --- when parameters are whole


def held(name: str, mesh: Mapping[str, int], settings: Mapping[str, Any], train: bool) -> list[dict[str, bool]]:
    """Whether the whole parameter of each module has memory: after the forward and after the backward."""
    model = seeded()
    wrapped(name, mesh, model, **settings)
    wholes: dict[str, Tensor] = {}
    names = ("embed", "layers.0", "layers.1")
    for module in names:
        model.get_submodule(module).register_forward_pre_hook(
            lambda m, *_, module=module: wholes.update({module: m.weight})
        )

    def memory() -> dict[str, bool]:
        for module in names:
            assert wholes[module].shape == (4, 4)
            shards = isinstance(model.get_submodule(module).weight, DTensor)
            assert shards == (wholes[module].untyped_storage().size() == 0), module
        return {module: wholes[module].untyped_storage().size() > 0 for module in names}

    with torch.set_grad_enabled(train):
        loss = model(torch.ones(2, 4)).sum()
    after_forward = memory()
    if train:
        loss.backward()
    return [after_forward, memory()]


def all_held(cases: list[Any]) -> list[Any]:
    return [held(*case) for case in cases]


@pytest.mark.thorough
def test_whole_parameters_have_memory_only_as_long_as_stated(world: Any) -> None:
    shard, copy = {"dp_shard": 2}, {"dp_replicate": 2}
    cases: list[tuple[str, Any, Any, bool]] = [
        ("fsdp", shard, {}, True),
        ("hsdp", shard, {}, True),
        ("fsdp", shard, {"reshard_after_forward": False}, True),
        ("replicate", copy, {"forward_prefetch": 1}, True),
        ("fsdp", shard, {}, False),
        ("fsdp", shard, {"reshard_after_forward": False}, False),
        ("replicate", copy, {"forward_prefetch": 1}, False),
    ]
    freed = {"embed": True, "layers.0": False, "layers.1": False}  # the root keeps its own for the backward
    kept, nothing = dict.fromkeys(freed, True), dict.fromkeys(freed, False)
    after_forward = [freed, freed, kept, kept, nothing, nothing, nothing]
    for found in world(2).run(all_held, cases):
        assert found == [[state, nothing] for state in after_forward]


def units_of_replicate(mesh: Mapping[str, int], settings: Mapping[str, Any]) -> int:
    """Number of units of FSDP2 that ``replicate`` makes of a model on the meta device."""
    with torch.device("meta"):
        model = Model()
    applied = wrapped("replicate", mesh, model, **settings)
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    owners = {owner.owner for owner in applied.gradients if owner.axis == "dp_replicate"}
    assert owners == {"fsdp" if units else "sync"}
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters()) == bool(units)
    return units


@pytest.mark.thorough
def test_replicas_stay_as_they_are_where_nothing_asks_for_more() -> None:
    with simulated_world(2):
        assert units_of_replicate({"dp_replicate": 2}, {}) == 0
        assert units_of_replicate({"dp_replicate": 2}, {"defer": "everything"}) == 0
        for settings in ({"compute_dtype": "bfloat16"}, {"offload": True}, {"ignore": ["head.*"]}):
            assert units_of_replicate({"dp_replicate": 2}, settings) == 3
    with simulated_world(4):
        for axis in ("cp", "pp"):
            assert units_of_replicate({"dp_replicate": 2, axis: 2}, {}) == 3


def train(directory: str, evaluation: bool) -> None:
    job = job_of(
        {
            "run": {"name": "toy", "dir": directory},
            "steps": 4,
            "device": "cpu",
            "mesh": {"dp_shard": 2},
            "parallel": ["fsdp"],
            "batch": {"size": 4},
            "model": {"name": "toy_model", "features": 4},
            "data": "toy_data",
            "task": "toy_task",
            "optimizer": "toy_optimizer",
            "trackers": [],
            "checkpoint": {"every": 2, "keep": 2},
            **({"evaluation": {"data": "toy_data", "every": 1, "packs": 1}} if evaluation else {}),
        },
        ["d9d_testing.toy.plugin", "d9d_parallel.plugin"],
    )
    job.build(lambda _text: None, topology_here(job)).train()


@pytest.mark.thorough
def test_a_checkpoint_right_after_an_evaluation_holds_the_same_as_without(world: Any, tmp_path: Path) -> None:
    found = []
    for evaluation in (False, True):
        world(2).run(train, str(tmp_path / str(evaluation)), evaluation)
        checkpoint = CheckpointStore(tmp_path / str(evaluation) / "toy" / "checkpoints").newest(print)
        shapes = {"layers.0.weight": (4, 4), "layers.1.weight": (4, 4), "unused": (1,), "scale": (1,)}
        tensors = {f"model/{name}": torch.zeros(shape) for name, shape in shapes.items()}
        checkpoint.load_into(tensors, "model/")
        found.append(tensors)
    assert found[0]["model/layers.0.weight"].any()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# --- communication


def reductions(name: str, mesh: Mapping[str, int], defer: str) -> dict[str, int]:
    """Collectives of three microbatches that reduce gradients."""
    model = seeded()
    reducer = wrapped(name, mesh, model, defer=defer).reducers[0]
    with OperatorCounter() as seen:
        for index in range(3):
            loss = model(torch.ones(2, 4)).sum()
            reducer.before_backward(last=index == 2)
            loss.backward()
    scattered = ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")  # from a buffer, or from the gradients
    scatter = sum(seen.counts[f"c10d.{operator}"] for operator in scattered)
    return {"scatter": scatter, "reduce": seen.counts["c10d.allreduce_"]}


def all_reductions(cases: list[Any]) -> list[Any]:
    return [reductions(*case) for case in cases]


@pytest.mark.thorough
def test_deferring_communicates_less(world: Any) -> None:
    once, each = 3, 9  # units; units times microbatches
    fsdp, hsdp = ("fsdp", {"dp_shard": 2}), ("hsdp", {"dp_replicate": 2, "dp_shard": 2})
    table = [
        (*fsdp, "nothing", {"scatter": each, "reduce": 0}),
        (*fsdp, "everything", {"scatter": once, "reduce": 0}),
        (*hsdp, "nothing", {"scatter": each, "reduce": each}),
        (*hsdp, "all_reduce", {"scatter": each, "reduce": once}),
        (*hsdp, "everything", {"scatter": once, "reduce": once}),
    ]
    for ranks in (2, 4):
        rows = [row for row in table if ranks == 2 * len(row[1])]
        for found in world(ranks).run(all_reductions, [row[:3] for row in rows]):
            assert found == [counts for *_, counts in rows]


def test_prefetching_names_the_next_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[list[nn.Module]]] = {"forward": [], "backward": []}
    for way, found in seen.items():
        monkeypatch.setattr(
            FSDPModule,
            f"set_modules_to_{way}_prefetch",
            lambda module, ahead, found=found: found.append([module, *ahead]),
        )
    with torch.device("meta"):
        model = Model(depth=4)
    with simulated_world(2):
        wrapped("fsdp", {"dp_shard": 2}, model, forward_prefetch=2, backward_prefetch=1)
    numbers = {id(layer): index for index, layer in enumerate(model.layers)}
    named = {way: [[numbers[id(module)] for module in row] for row in found] for way, found in seen.items()}
    assert named == {"forward": [[0, 1, 2], [1, 2, 3], [2, 3]], "backward": [[3, 2], [2, 1], [1, 0]]}


# --- formats


def formats(settings: Mapping[str, Any], stored: str) -> dict[str, str]:
    model = seeded().to(getattr(torch, stored))
    applied = wrapped("fsdp", {"dp_shard": 2}, model, **settings)
    seen: dict[str, torch.dtype] = {}
    model.layers[0].register_forward_pre_hook(
        lambda layer, inputs: seen.update(block_input=inputs[0].dtype, whole=layer.weight.dtype)
    )
    reduced: set[torch.dtype] = set()
    for unit in (model, *model.layers):
        unit.set_all_reduce_hook(lambda sums: reduced.add(sums.dtype))  # sees sums before they are converted
    output = model(torch.ones(2, 4, dtype=getattr(torch, stored)))
    output.float().sum().backward()
    (sums,) = reduced
    gradients = {parameter.grad.dtype for parameter in model.parameters()}
    shards = {parameter.dtype for parameter in model.parameters()}
    seen |= {"output": output.dtype, "sums": sums, "gradient": gradients.pop(), "shard": shards.pop()}
    assert not gradients
    assert applied.compute_dtype == (getattr(torch, settings["compute_dtype"]) if "compute_dtype" in settings else None)
    return {what: str(dtype).removeprefix("torch.") for what, dtype in seen.items()}


def all_formats(cases: list[Any]) -> list[Any]:
    return [formats(*case) for case in cases]


def test_formats_are_those_that_the_settings_state(world: Any) -> None:
    narrow, wide = "bfloat16", "float32"
    names = ("block_input", "whole", "output", "sums", "gradient", "shard")
    table: list[tuple[dict[str, str], str, list[str]]] = [
        ({}, wide, [wide, wide, wide, wide, wide, wide]),
        ({}, narrow, [narrow, narrow, narrow, narrow, narrow, narrow]),
        ({"compute_dtype": narrow}, wide, [narrow, narrow, narrow, wide, wide, wide]),
        ({"compute_dtype": narrow, "reduce_dtype": wide}, wide, [narrow, narrow, narrow, wide, wide, wide]),
        ({"compute_dtype": narrow, "reduce_dtype": narrow}, wide, [narrow, narrow, narrow, narrow, wide, wide]),
        ({"compute_dtype": narrow, "output_dtype": wide}, wide, [narrow, narrow, wide, wide, wide, wide]),
        ({"reduce_dtype": wide}, narrow, [narrow, narrow, narrow, wide, narrow, narrow]),
    ]
    for found in world(2).run(all_formats, [(settings, stored) for settings, stored, _ in table]):
        assert found == [dict(zip(names, row, strict=True)) for *_, row in table]


# --- ties


def tied_gradients(sharded: bool) -> Tensor:
    model = seeded(tied=True)
    if sharded:
        wrapped("fsdp", {"dp_shard": 2}, model)
        assert model.head.weight is model.embed.weight
    model(torch.arange(8.0).view(2, 4)).square().sum().backward()
    grad = model.embed.weight.grad
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def test_tied_weights_outside_of_blocks_get_the_sum_of_both_gradients(world: Any) -> None:
    expected = 2 * tied_gradients(sharded=False)  # both ranks see the same sample
    for found in world(2).run(tied_gradients, True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["fsdp", "replicate"])
def test_weights_tied_across_blocks_are_refused(name: str) -> None:
    with torch.device("meta"):
        model = Model(tied_blocks=True)
    message = f"'{name}': 'layers.0.weight' and 'layers.1.weight' are one parameter, but blocks"
    with simulated_world(2), pytest.raises(BuildError, match=message):
        wrapped(name, {"dp_shard": 2}, model)


def test_a_second_strategy_of_data_parallelism_is_refused() -> None:
    with torch.device("meta"):
        model = Model()
    with simulated_world(2):
        wrapped("fsdp", {"dp_shard": 2}, model)
        with pytest.raises(BuildError, match="'replicate' acts on the whole model, on which another"):
            wrapped("replicate", {"dp_shard": 2}, model)
