"""Saved by one layout of ranks, loaded by another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.distributed.mesh import Topology
from d9d_testing.world import World
from d9d_weights.sharding.shards import Owners
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MESHES = {1: [[1]], 2: [[2]], 4: [[4], [2, 2]]}
DTYPES = ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"]


def topology() -> Topology:
    return Topology(rank=dist.get_rank(), world_size=dist.get_world_size())


def whole(index: int, shape: list[int], dtype: str) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(-3, 3, shape, generator=generator).to(getattr(torch, dtype))


def layouts(ranks: int, dims: int) -> st.SearchStrategy[dict[str, Any] | None]:
    """No layout (a plain tensor), or a mesh and what happens to the tensor along each of its dimensions."""
    placement = st.none() | st.integers(0, dims - 1) if dims else st.none()
    of_mesh = lambda mesh: st.lists(placement, min_size=len(mesh), max_size=len(mesh))  # noqa: E731
    meshes = st.sampled_from(MESHES[ranks])
    laid = meshes.flatmap(lambda mesh: st.fixed_dictionaries({"mesh": st.just(mesh), "placements": of_mesh(mesh)}))
    return st.none() | laid


@st.composite
def tensors(draw: st.DrawFn, save: int, load: int) -> dict[str, Any]:
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    return {
        "shape": shape,
        "dtype": draw(st.sampled_from(DTYPES)),
        "save": draw(layouts(save, len(shape))),
        "load": draw(layouts(load, len(shape))),
    }


def lay_out(tensor: Tensor, layout: dict[str, Any] | None) -> Tensor:
    if layout is None:
        return tensor
    mesh = init_device_mesh("cpu", tuple(layout["mesh"]))
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in layout["placements"]]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)  # gloo cannot send every dtype


def save(directory: str, cases: list[dict[str, Any]]) -> None:
    store = CheckpointStore(Path(directory), topology=topology())
    laid = {f"t/{i}": lay_out(whole(i, c["shape"], c["dtype"]), c["save"]) for i, c in enumerate(cases)}
    store.save(1, laid, {"rank": dist.get_rank()}, {})


def load(directory: str, cases: list[dict[str, Any]]) -> dict[str, int]:
    store = CheckpointStore(Path(directory), topology=topology())
    laid = {}
    for i, case in enumerate(cases):
        laid[f"t/{i}"] = lay_out(torch.zeros(case["shape"], dtype=getattr(torch, case["dtype"])), case["load"])
    checkpoint = store.newest(print)
    assert checkpoint is not None
    checkpoint.load_into(laid)
    for i, case in enumerate(cases):
        expected = lay_out(whole(i, case["shape"], case["dtype"]), case["load"])
        here, there = (t.to_local() if isinstance(t, DTensor) else t for t in (laid[f"t/{i}"], expected))
        same = here.contiguous().view(-1).view(torch.uint8).equal(there.contiguous().view(-1).view(torch.uint8))
        assert same, f"{case}: {here} instead of {there}"
    return checkpoint.values()


@pytest.mark.full
@settings(
    max_examples=6,
    phases=[Phase.explicit, Phase.generate],  # a world for every step of shrinking would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_any_layout_loads_what_any_other_saved(
    world: type[World], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, before: int, after: int
) -> None:
    cases = data.draw(st.lists(tensors(before, after), min_size=8, max_size=12))
    directory = str(tmp_path_factory.mktemp("store"))
    world(before).run(save, directory, cases)
    assert world(after).run(load, directory, cases) == [{"rank": 0}] * after


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 6, bias=False)


def two() -> Two:
    torch.manual_seed(3)
    return Two()


def save_two_dimensional(directory: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(two(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    assert "_StridedShard" in str([type(p).__name__ for p in module.up.weight.placements])
    store = CheckpointStore(Path(directory), topology=topology())
    store.save(1, dict(module.named_parameters()), {}, {})


@pytest.mark.thorough
def test_tensor_parallel_and_fsdp_on_one_dimension_load_on_one_process(world: type[World], tmp_path: Path) -> None:
    world(4).run(save_two_dimensional, str(tmp_path))
    expected = dict(two().named_parameters())
    loaded = {name: torch.zeros_like(parameter) for name, parameter in expected.items()}
    checkpoint = CheckpointStore(tmp_path).newest(print)
    assert checkpoint is not None
    checkpoint.load_into(loaded)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def save_replicated(directory: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    laid = {f"{i}": distribute_tensor(torch.ones(40, 5), mesh, [Replicate(), Shard(0)]) for i in range(6)}
    plain = {f"plain/{i}": torch.ones(20, 5) for i in range(12)}
    CheckpointStore(Path(directory), topology=topology()).save(
        1, {**laid, **plain, "scalar": torch.tensor(1.0)}, {}, {}
    )


@pytest.mark.thorough
def test_replicas_are_written_once_and_by_all_ranks_equally(world: type[World], tmp_path: Path) -> None:
    world(4).run(save_replicated, str(tmp_path))
    manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    assert [len(manifest["tensors"][name]["pieces"]) for name in ("0", "plain/0", "scalar")] == [2, 1, 1]
    files = sorted((tmp_path / "step-00000001").glob("tensors-*.safetensors"))
    assert [file.name for file in files] == [f"tensors-0000{rank}.safetensors" for rank in range(4)]
    payload = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert sum(payload) == 6 * 800 + 12 * 400 + 4
    assert max(payload) - min(payload) <= 400


@pytest.mark.thorough
def test_a_rank_with_nothing_to_write_writes_no_file(world: type[World], tmp_path: Path) -> None:
    world(2).run(save_one, str(tmp_path))
    names = sorted(path.name for path in (tmp_path / "step-00000001").iterdir())
    assert names == ["manifest.json", "state.json", "tensors-00000.safetensors"]


def save_one(directory: str) -> None:
    CheckpointStore(Path(directory), topology=topology()).save(1, {"a": torch.ones(3)}, {}, {})


PIECE = st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 9))


@given(st.lists(st.lists(PIECE, unique_by=lambda p: p[:2]), min_size=1, max_size=4))
def test_every_piece_has_one_owner_among_its_holders(held: list[list[tuple[str, int, int]]]) -> None:
    sizes = {piece[:2]: piece[2] for pieces in held for piece in pieces}  # the same on every rank
    signatures = [[[n, "int8", [99], [[[o], [sizes[n, o]]]]] for n, o, _ in pieces] for pieces in held]
    owner = Owners(signatures)._owner
    assert owner.keys() == {(name, (offset,)) for name, offset in sizes}
    assert all((name, offset[0]) in [p[:2] for p in held[rank]] for (name, offset), rank in owner.items())


def save_partial(directory: str) -> None:
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    CheckpointStore(Path(directory), topology=topology()).save(1, {"sum": partial}, {}, {})


def test_a_partial_sum_is_refused(world: type[World], tmp_path: Path) -> None:
    from d9d_testing.world import RankFailedError

    with pytest.raises(RankFailedError, match="tensor 'sum' is a partial sum"):
        world(2).run(save_partial, str(tmp_path))


def test_the_names_that_torch_asks_a_tensor_for_are_still_those() -> None:
    """``__create_chunk_list__`` is how torch's own checkpoints learn of a tensor's shards; it is not documented."""
    from torch.distributed.checkpoint import planner_helpers

    assert callable(DTensor.__create_chunk_list__)
    assert callable(DTensor.__get_tensor_shard__)
    assert "create_read_items_for_chunk_list" in planner_helpers.__all__
