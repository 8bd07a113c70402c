"""Layouts of jobs, and the groups of ranks that they have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.job_file.job import Mesh
from d9d_core.plugin import ViewSpec
from d9d_engine import plugin
from d9d_planner.device import Device
from d9d_planner.layout import DataGroups, Layout, axis_group, view_group
from d9d_planner.network import Group
from pydantic import ValidationError

VIEWS: dict[str, ViewSpec] = {view.key: view for view in plugin.d9d_views()}


def test_the_layout_of_a_job_can_be_put_on_another() -> None:
    job: Any = SimpleNamespace(
        mesh=Mesh(dp_shard=2), parallel=["fsdp"], pipeline="1f1b", batch=SimpleNamespace(size=12), microbatch_size=3
    )
    layout = Layout.of(job)
    assert (layout.mesh, layout.parallel, layout.pipeline) == (Mesh(dp_shard=2), ("fsdp",), "1f1b")
    assert (layout.size, layout.microbatch, layout.microbatches) == (12, 3, 2)
    changed: list[Any] = []
    batch = SimpleNamespace(model_copy=lambda update: update)

    def copy(update: Any) -> None:
        changed.append(update)

    other: Any = SimpleNamespace(batch=batch, model_copy=copy)
    layout.on(other)
    assert changed == [
        {"mesh": layout.mesh, "parallel": ["fsdp"], "pipeline": "1f1b", "batch": {"size": 12, "microbatch": 3}}
    ]


def test_groups_of_a_view_have_the_stride_of_the_dimensions_inside() -> None:
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=4, cp=5, tp=7)
    dense = VIEWS["dense"]
    assert view_group(mesh, dense, "fsdp") == Group(4 * 5, 7)
    assert view_group(mesh, dense, "dp_replicate") == Group(3, 4 * 5 * 7)


def test_experts_are_sharded_as_other_parameters_without_expert_parallelism_and_over_their_own_ranks_with_it() -> None:
    without = DataGroups.of(Mesh(dp_replicate=2, dp_shard=4), VIEWS)
    assert without == DataGroups(Group(4, 1), Group(2, 4), Group(4, 1), Group(2, 4))
    found = DataGroups.of(Mesh(dp_replicate=2, dp_shard=4, ep=2), VIEWS)
    assert (found.shards, found.replicas) == (Group(4, 1), Group(2, 4))
    assert (found.expert_shards.size, found.expert_replicas.size) == (2, 2)
    assert found.expert_shards.stride == 2
    assert axis_group(Mesh(dp_replicate=2, dp_shard=4, ep=2), "ep") == Group(2, 1)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_of_a_device_are_positive_and_finite(rate: float) -> None:
    values = Device.named("h100").model_dump()
    assert Device(**{**values, "link": 0.5}).link == 0.5
    with pytest.raises(ValidationError):
        Device(**{**values, "link": rate})
