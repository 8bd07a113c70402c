"""Tensors of one model that pipeline ranks hold different ones of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_testing.world import World
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.graph.mappers import Identity
from d9d_weights.graph.merging import Concatenate
from d9d_weights.hugging_face.export import ModelFiles, export_model
from d9d_weights.hugging_face.writer import ModelWriter
from d9d_weights.sharding.model_tensors import gathered
from d9d_weights.sharding.stage_holders import StageHolders
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

CPU = torch.device("cpu")
#: Names in the model's order; which pipeline ranks of two hold them.
STAGES = {"embedding": (0, 1), "layer.0": (0,), "layer.1": (0,), "layer.2": (1,), "norm": (1,), "scale": (1,)}


def model() -> dict[str, Tensor]:
    """The whole model: of two dtypes, and one tensor without dimensions."""
    numbers = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (4, 4), (3, 5), (4, 4), (4,), ()]
    whole = {name: torch.randn(shape, generator=numbers) for name, shape in zip(STAGES, shapes, strict=True)}
    return whole | {"layer.1": whole["layer.1"].bfloat16()}


def mesh_of(pp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))


def held(mesh: DeviceMesh) -> dict[str, Tensor]:
    """What this rank holds: matrices are sharded along dp, the rest is plain."""
    rank = mesh["pp"].get_local_rank()
    mine = {name: tensor for name, tensor in model().items() if rank in STAGES[name]}
    shard = [Shard(0)]
    return {
        name: distribute_tensor(tensor, mesh["dp"], shard, src_data_rank=None) if tensor.ndim == 2 else tensor
        for name, tensor in mine.items()
    }


def holders_of(mesh: DeviceMesh) -> StageHolders:
    holders = {name: ranks[0] for name, ranks in STAGES.items()}
    return StageHolders(specs_of(model()), holders, mesh["pp"].get_group(), CPU)


def every_rank_gets_every_tensor() -> None:
    mesh = mesh_of(2)
    holders, mine = holders_of(mesh), held(mesh)
    holders.check(mine)
    for name, expected in model().items():
        found = holders.full(name, mine)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), name


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_every_tensor(world: type[World], ranks: int) -> None:
    world(ranks).run(every_rank_gets_every_tensor)


def send_odd_tensors() -> None:
    odd = {
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "transposed": torch.arange(6.0).view(2, 3).T,
    }
    assert dist.group.WORLD is not None
    holders = StageHolders(specs_of(odd), dict.fromkeys(odd, 1), dist.group.WORLD, CPU)
    for name, tensor in odd.items():
        found = holders.full(name, odd if dist.get_rank() == 1 else {})
        assert found.shape == tensor.shape
        assert found.float().equal(tensor.float()), name


def test_tensors_of_any_kind_travel(world: type[World]) -> None:
    world(2).run(send_odd_tensors)


def gather_all_and_some() -> list[Any]:
    mesh = mesh_of(2)
    holders, mine, main = holders_of(mesh), held(mesh), dist.get_rank() == 0
    everything = gathered(mine, main, holders)
    if main:
        assert all(torch.equal(everything[name], tensor) for name, tensor in model().items())
    # As gradients are: some are missing, and formats may be others.
    some = {name: tensor.double() for name, tensor in mine.items() if name not in ("layer.1", "norm")}
    gradients = gathered(some, main, holders)
    return [list(everything), {name: str(tensor.dtype) for name, tensor in gradients.items()}]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_ranks_have_is_gathered_in_the_models_order_on_those_that_keep_it(world: type[World], ranks: int) -> None:
    first, *others = world(ranks).run(gather_all_and_some)
    some = dict.fromkeys(["embedding", "layer.0", "layer.2", "scale"], "torch.float64")
    assert first == [list(STAGES), some]
    assert others == [[[], {}]] * (ranks - 1)


def contradict() -> list[str]:
    mesh = mesh_of(2)
    holders, rank = holders_of(mesh), dist.get_rank()
    texts = []
    for mine in ({"layer.9": torch.ones(1)} if rank else {}, {"embedding": torch.ones(6 + rank)}):
        with pytest.raises(CheckpointError) as caught:
            gathered(mine, True, holders)
        texts.append(str(caught.value))
    return texts


def test_parts_of_another_model_are_refused_on_all_ranks(world: type[World]) -> None:
    first, second = world(2).run(contradict)
    assert first == second
    assert "pipeline rank 1 holds 'layer.9', which the model does not have" in first[0]
    assert "'embedding' is float32 [6] on pipeline rank 0, and float32 [7] on 1" in first[1]


# --- export


def mapper() -> Mapper:
    """Merges tensors of two stages."""
    return Parallel(Concatenate(["layer.0", "layer.2"], "merged"), Identity())


def write(directory: str, tensors: Mapping[str, Tensor], holders: StageHolders | None) -> None:
    graph = StateGraph(mapper(), specs_of(model()))
    writer = ModelWriter(directory, graph.specs, shard_bytes=100)
    assert len(writer.files) > 2
    export_model(writer, graph, tensors, ModelFiles({"model_type": "x"}), dist.group.WORLD, holders)


def export_whole(directory: str) -> None:
    write(directory, model(), None)


def export_from_stages(directory: str) -> None:
    mesh = mesh_of(2)
    write(directory, held(mesh), holders_of(mesh))


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@pytest.mark.thorough
def test_stages_export_the_bytes_of_the_whole_model(world: type[World], tmp_path: Path) -> None:
    world(1).run(export_whole, str(tmp_path / "1"))
    for ranks in (2, 4):
        world(ranks).run(export_from_stages, str(tmp_path / f"{ranks}"))
    assert digests(tmp_path / "1") == digests(tmp_path / "2") == digests(tmp_path / "4")


def _no_space(_file: str) -> Any:
    raise CheckpointError("there is no space left")


def export_badly(directory: str, bad: int) -> list[str]:
    mesh = mesh_of(2)
    here = dist.get_rank() == bad
    graph, texts = StateGraph(Identity(), specs_of(model())), []
    writer = ModelWriter(directory, graph.specs, 16)
    if here:
        writer.open_shard = _no_space  # type: ignore[method-assign]
    lacking = {name: tensor for name, tensor in held(mesh).items() if not (here and name == "layer.2")}
    changed = held(mesh) | ({"layer.2": torch.ones(4, 5)} if here else {})
    for tensors in (held(mesh), lacking, changed):
        with pytest.raises(CheckpointError) as caught:
            export_model(writer, graph, tensors, ModelFiles({}), dist.group.WORLD, holders_of(mesh))
        texts.append(str(caught.value))
    return texts


def test_a_rank_that_cannot_write_or_lacks_a_tensor_fails_all_and_leaves_nothing(
    world: type[World], tmp_path: Path
) -> None:
    texts = world(4).run(export_badly, str(tmp_path / "model"), 3)
    assert texts == texts[:1] * 4
    assert "no space left" in texts[0][0]
    assert "the tensors of pipeline rank 1 differ from those assigned to it: 'layer.2' is missing" in texts[0][1]
    assert "'layer.2' is float32 [4, 5], not float32 [4, 4]" in texts[0][2]
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_nobody_holds_is_found_before_anyone_waits_for_it(world: type[World]) -> None:
    world(2).run(leave_one_out)


def leave_one_out() -> None:
    mesh = mesh_of(2)
    complete = holders_of(mesh)
    holders = {name: holder for name, holder in complete.holders.items() if name != "norm"}
    with pytest.raises(CheckpointError, match="no rank holds 'norm'"):
        StageHolders(complete.specs, holders, complete.group, CPU).check(held(mesh))
