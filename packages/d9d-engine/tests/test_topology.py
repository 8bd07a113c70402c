"""The process grid: arithmetic without processes, groups with them, and thousands of ranks in one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, JobError
from d9d_core.grid import AXES, Grid
from d9d_core.job_file.job import Mesh
from d9d_core.layout.check import covers
from d9d_core.plugin import ViewDim, ViewSpec, hookimpl
from d9d_core.registry.registry import Registry
from d9d_engine.compose.assemble import check_divisibility
from d9d_engine.distributed.devices import load_kernels_eagerly, share_hardware_queues
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.simulate import simulated_world
from d9d_engine.process_env import ProcessEnv
from d9d_testing.layouts import job_of
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

VIEWS = {str(e.spec.key): e.spec for e in Registry.of().entries("view") if isinstance(e.spec, ViewSpec)}
sizes = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


def topology(rank: int = 0, **mesh: int) -> Topology:
    axes = Mesh(**mesh)
    return Topology(sizes=axes.sizes(), rank=rank, world_size=axes.world_size, views=VIEWS, simulated=True)


@given(sizes, st.data())
def test_coordinates_number_ranks_row_by_row(axes: dict[str, int], data: st.DataObject) -> None:
    grid = Grid(axes)
    rank = data.draw(st.integers(0, grid.size - 1))
    assert grid.rank(grid.coordinate(rank)) == rank
    assert list(grid.coordinate(0).values()) == [0] * len(axes)
    assert list(grid.coordinate(grid.size - 1).values()) == [size - 1 for size in axes.values()]


@given(sizes, st.data())
def test_the_groups_of_a_dimension_are_a_partition(axes: dict[str, int], data: st.DataObject) -> None:
    grid = Grid(axes)
    dims = data.draw(st.sets(st.sampled_from(AXES)))
    groups = {grid.group(rank, dims) for rank in range(grid.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
    assert {len(group) for group in groups} == {math.prod(axes[dim] for dim in dims)}


@given(sizes, st.integers(1, 64))
def test_every_view_covers_every_rank_once(axes: dict[str, int], ep: int) -> None:
    mesh = Mesh(**axes, ep=ep)
    if not covers(ep, mesh):
        mesh = Mesh(**axes)  # these expert groups would straddle an axis
    for view in VIEWS.values():
        assert Grid.of_view(view, mesh.sizes()).size == mesh.world_size


def test_views_have_the_dimensions_of_the_design() -> None:
    axes = Mesh(pp=2, dp_replicate=3, dp_shard=4, cp=2, tp=2, ep=8).sizes()
    found = {name: dict(Grid.of_view(view, axes).sizes) for name, view in VIEWS.items()}
    assert found == {
        "dense": {"pp": 2, "dp_replicate": 3, "fsdp": 8, "tp": 2},
        "expert": {"pp": 2, "expert_replicate": 3, "expert_fsdp": 2, "ep": 8},
        "batch": {"pp": 2, "dp": 12, "cp": 2, "tp": 2},
        "world": {"world": 96},
    }


def test_experts_reach_over_replicas_once_they_cover_all_shards() -> None:
    sizes = Grid.of_view(VIEWS["expert"], Mesh(dp_replicate=4, dp_shard=2, ep=4).sizes()).sizes
    assert sizes == {"pp": 1, "expert_replicate": 2, "expert_fsdp": 1, "ep": 4}
    assert not covers(2, Mesh(dp_replicate=4, dp_shard=3))


def test_a_view_that_does_not_cover_all_ranks_is_refused() -> None:
    partial = ViewSpec(name="partial", summary="forgets tp", dims=(ViewDim("dp", ("dp_replicate", "dp_shard")),))
    with pytest.raises(JobError, match=r"mesh: the view 'partial' has dp=4 = 4 ranks, but the mesh has 8"):
        Grid.of_view(partial, Mesh(dp_shard=4, tp=2).sizes())


def test_a_view_that_does_not_divide_is_refused() -> None:
    uneven = ViewSpec(name="uneven", summary="cuts", dims=(ViewDim("a", ("dp_shard",), over=("ep",)),))
    with pytest.raises(JobError, match=r"view 'uneven' cannot lay ep=2 over dp_shard=3"):
        Grid.of_view(uneven, Mesh(dp_shard=3).sizes() | {"ep": 2})


def test_ranks_are_named_by_their_coordinates() -> None:
    assert str(topology(5, dp_replicate=2, dp_shard=3)) == "rank 5 (dp_replicate=1, dp_shard=2)"
    assert str(topology()) == "rank 0"


def test_data_parallel_ranks_ignore_the_other_axes() -> None:
    found = [topology(rank, pp=2, dp_replicate=2, dp_shard=2, tp=2).data_parallel_rank for rank in range(16)]
    assert found == [0, 0, 1, 1, 2, 2, 3, 3] * 2


def test_an_unknown_view_names_the_known_ones() -> None:
    with pytest.raises(
        BuildError, match="no view 'dens' of the mesh is declared; there are: batch, dense, expert, world"
    ):
        topology().grid("dens")


def test_a_mesh_outside_of_a_process_group_says_how_to_get_one() -> None:
    with pytest.raises(BuildError, match="rank 0 has no process group.*d9d train or torchrun"):
        Topology(views=VIEWS).mesh("dense")


@pytest.mark.thorough
def test_a_purpose_has_a_group_of_its_own(world: Any) -> None:
    assert world(2).run(groups_by_purpose) == [[2, 1.0]] * 2


def groups_by_purpose() -> list[float]:
    here = Topology(sizes=Mesh(pp=2).sizes(), rank=dist.get_rank(), world_size=2)
    groups = [here.axes_group("pp", purpose=purpose, blocks=4) for purpose in ("up", "down", "up")]
    total = torch.full((1,), 0.5)
    dist.all_reduce(total, group=groups[0])
    return [len({id(group) for group in (*groups, here.world)}) - 1, total.item()]


@pytest.mark.thorough
def test_ranks_without_a_copy_make_a_group_too_even_if_they_know_one_of_the_same_ranks(world: Any) -> None:
    assert world(3).run(groups_of_places) == [3.0] * 3


def groups_of_places() -> float:
    here = Topology(sizes=Mesh(pp=3).sizes(), rank=dist.get_rank(), world_size=3)
    here.axes_group("dp_shard")  # each rank alone, as the middle one is below
    here.positions_group("pp", [0, 2])
    total = torch.ones(1)
    dist.all_reduce(total, group=here.axes_group("pp", purpose="up"))
    return total.item()


@pytest.mark.parametrize(
    ("choose", "variable", "chosen"),
    [
        (load_kernels_eagerly, "CUDA_MODULE_LOADING", "EAGER"),
        (share_hardware_queues, "CUDA_DEVICE_MAX_CONNECTIONS", "2"),
    ],
)
@pytest.mark.parametrize(("device", "applies"), [("cuda", True), ("auto", True), ("cpu", False)])
def test_what_pipelines_choose_of_cuda_gives_way_to_the_environment(
    choose: Callable[[str], None],
    variable: str,
    chosen: str,
    device: str,
    applies: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, "mine")
    choose(device)
    assert os.environ[variable] == "mine"
    monkeypatch.delenv(variable)
    choose(device)
    assert os.environ.get(variable) == (chosen if applies else None)


@pytest.mark.thorough
@pytest.mark.parametrize(("axis", "found"), [("pp", "EAGER"), ("dp_replicate", None)])
def test_jobs_of_several_stages_load_kernels_eagerly(world: Any, axis: str, found: str | None) -> None:
    assert world(2).run(kernels_loaded, axis) == [found] * 2


def kernels_loaded(axis: str) -> str | None:
    os.environ.pop("CUDA_MODULE_LOADING", None)
    values = {"steps": 1, "mesh": {axis: 2}, "model": "toy_model", "data": "toy_data", "task": "toy_task"}
    job = job_of({**values, "run": {"name": "kernels"}, "optimizer": "toy_optimizer"}, ["d9d_testing.toy.plugin"])
    with job.joined(ProcessEnv(dist.get_rank(), 2, dist.get_rank(), 2)):
        return os.environ.get("CUDA_MODULE_LOADING")


@pytest.mark.thorough
def test_4096_ranks_exist_in_one_process() -> None:
    # If anything were quadratic, this would take hours.
    here = topology(1234, pp=4, dp_replicate=8, dp_shard=8, cp=2, tp=8, ep=32)
    with simulated_world(4096, 1234):
        meshes = {view: here.mesh(view) for view in VIEWS}
        sharded = here.mesh("dense", "dp_replicate", "fsdp")
    assert {view: mesh.size() for view, mesh in meshes.items()} == dict.fromkeys(VIEWS, 4096)
    assert tuple(sharded.shape) == (8, 16)
    assert not dist.is_initialized()


def test_dimensions_that_join_the_same_ranks_share_one_group() -> None:
    here = topology(0, dp_replicate=2, dp_shard=4)
    with simulated_world(8):
        assert here.group("dense", "fsdp") is here.axes_group("dp_shard")
        assert here.group("batch", "dp") is here.world
        assert here.mesh("dense").get_group("fsdp") is here.group("dense", "fsdp")


@pytest.mark.parametrize("ask", ["group", "mesh"])
def test_a_dimension_that_a_view_lacks_is_an_error_and_no_group_of_one(ask: str) -> None:
    here = topology(0, dp_shard=2, cp=2)
    said = "view 'dense' of the mesh has no dimension 'cp', only pp, dp_replicate, fsdp, tp; .* axes_group"
    with simulated_world(4), pytest.raises(BuildError, match=said):
        getattr(here, ask)("dense", "fsdp", "cp")


def test_an_axis_that_there_is_not_is_an_error() -> None:
    here = topology(0, dp_shard=2, cp=2)
    with simulated_world(4), pytest.raises(BuildError, match="no dimension 'fsdp'; use one of pp, dp_replicate, dp_s"):
        here.axes_group("fsdp")


def test_a_plugin_brings_a_view_of_its_own(registry: Any) -> None:
    class Plugin:
        D9D_API = 2

        @hookimpl
        def d9d_views(self) -> Any:
            yield ViewSpec(
                name="pairs",
                summary="Neighbours.",
                dims=(ViewDim("rest", ("pp", "dp_replicate", "dp_shard", "cp")), ViewDim("pair", ("tp",))),
            )

    views = {entry.spec.key: entry.spec for entry in registry(Plugin()).entries("view")}
    here = Topology(sizes=Mesh(dp_shard=4, tp=2).sizes(), rank=5, world_size=8, views=views)
    assert here.grid("pairs").group(5, ["pair"]) == (4, 5)


def communicate(mesh: dict[str, int]) -> dict[str, Any]:
    here = Topology(sizes=Mesh(**mesh).sizes(), rank=dist.get_rank(), world_size=dist.get_world_size(), views=VIEWS)
    sums = {}
    for view, dim in (("dense", "fsdp"), ("dense", "dp_replicate"), ("expert", "ep"), ("batch", "dp")):
        value = torch.tensor([float(here.rank)])
        dist.all_reduce(value, group=here.group(view, dim))
        sums[dim] = value.item()
    order: list[str] = []
    with here.main_first():
        order.append("inside")
    here.barrier()
    return sums


@pytest.mark.smoke
def test_ranks_communicate_along_the_dimensions_of_views(world: Any) -> None:
    found = world(4).run(communicate, {"dp_replicate": 2, "dp_shard": 2, "ep": 2})
    assert [sums["fsdp"] for sums in found] == [1, 1, 5, 5]
    assert [sums["dp_replicate"] for sums in found] == [2, 4, 2, 4]
    assert [sums["ep"] for sums in found] == [1, 1, 5, 5]
    assert [sums["dp"] for sums in found] == [6] * 4


def main_goes_first(directory: str) -> bool:
    from pathlib import Path

    here = Topology(sizes=Mesh(dp_shard=2).sizes(), rank=dist.get_rank(), world_size=2, views=VIEWS)
    prepared = Path(directory) / "prepared"
    with here.main_first():
        there = prepared.exists()
        if here.is_main:
            time.sleep(0.3)
            prepared.touch()
    return there


@pytest.mark.parametrize(
    ("rank", "local_rank", "per_machine", "expected"),
    [
        (0, 0, False, ["inside", "barrier"]), (2, 0, False, ["barrier", "inside"]), (2, 0, True, ["inside", "barrier"]),
        (3, 1, True, ["barrier", "inside"]),
    ],
)  # fmt: skip
def test_the_first_process_of_all_or_of_each_machine_goes_first(
    monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, per_machine: bool, expected: list[str]
) -> None:
    order: list[str] = []
    monkeypatch.setattr(Topology, "barrier", lambda _: order.append("barrier"))
    sizes = Mesh(dp_shard=4).sizes()
    here = Topology(sizes=sizes, rank=rank, world_size=4, local_rank=local_rank, views=VIEWS)
    with here.main_first(per_machine):
        order.append("inside")
    assert order == expected


@pytest.mark.thorough
def test_the_main_process_prepares_what_the_others_find(world: Any, tmp_path: Any) -> None:
    assert world(2).run(main_goes_first, str(tmp_path)) == [False, True]


class Heads(torch.nn.Module):
    """Says what cannot be cut."""

    def divisibility(self) -> dict[str, dict[str, int]]:
        return {"tp": {"key/value heads": 6}}


def test_an_axis_that_does_not_divide_what_a_module_shares_out_is_refused() -> None:
    model = torch.nn.Sequential(Heads(), Heads())
    check_divisibility(model, Mesh(tp=3).sizes())
    with pytest.raises(JobError) as caught:
        check_divisibility(model, Mesh(tp=4).sizes())
    assert (
        str(caught.value) == "mesh.tp is 4, which does not divide the 6 key/value heads of Heads; use a divisor of 6"
    )  # once
