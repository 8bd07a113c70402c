"""Core's own declarations, loaded like any plugin's: what the loop cannot start without."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin.hooks import API_VERSION, hookimpl
from d9d_core.plugin.records import HealthCheckSpec, TrackerSpec, ViewDim, ViewSpec
from d9d_core.plugin.ref import Ref

D9D_API = API_VERSION


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    """Console and jsonl."""
    yield TrackerSpec(
        name="console",
        summary="One line of text per logged step.",
        config=Ref("d9d_core.config.trackers:ConsoleConfig"),
        build=Ref("d9d_core.trackers.console:ConsoleTracker"),
    )
    yield TrackerSpec(
        name="jsonl",
        summary="One JSON object per logged step in <run>/metrics.jsonl.",
        config=Ref("d9d_core.config.trackers:JsonlConfig"),
        build=Ref("d9d_core.trackers.jsonl:JsonlTracker"),
    )


@hookimpl
def d9d_views() -> Iterator[ViewSpec]:
    """The views that strategies share."""
    pipeline, replicate, tensor = (ViewDim(axis, (axis,)) for axis in ("pp", "dp_replicate", "tp"))
    yield ViewSpec(
        name="dense",
        summary="Parameters that every token uses: replicas of shards.",
        dims=(pipeline, replicate, ViewDim("fsdp", ("dp_shard", "cp")), tensor),
    )
    yield ViewSpec(
        name="expert",
        summary="Parameters that only some tokens use.",
        dims=(
            pipeline,
            ViewDim("expert_replicate", ("dp_replicate",), over=("ep",)),
            ViewDim("expert_fsdp", ("dp_shard", "cp", "tp"), over=("ep",)),
            ViewDim("ep", ("ep",)),
        ),
    )
    yield ViewSpec(
        name="batch",
        summary="Who sees which samples.",
        dims=(pipeline, ViewDim("dp", ("dp_replicate", "dp_shard")), ViewDim("cp", ("cp",)), tensor),
    )
    yield ViewSpec(
        name="world",
        summary="All ranks in one row.",
        dims=(ViewDim("world", ("pp", "dp_replicate", "dp_shard", "cp", "tp")),),
    )


@hookimpl
def d9d_health_checks() -> Iterator[HealthCheckSpec]:
    """Is this machine ready?"""
    yield HealthCheckSpec(name="torch", summary="torch imports", run=Ref("d9d_core.cli.health:check_torch"))
    yield HealthCheckSpec(name="device", summary="which device trains", run=Ref("d9d_core.cli.health:check_device"))
