"""Declarations of the engine: trackers, subscribers, views of the mesh, health checks, commands. Always loaded."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import (
    CommandSpec,
    HealthCheckSpec,
    JobCheckSpec,
    Ref,
    SubscriberSpec,
    TrackerSpec,
    ViewDim,
    ViewSpec,
    hookimpl,
)

D9D_API = 2
#: Requirement of plugin records that need torch. Without torch (as in a CI that only checks job files), using such a
#: record is an error that says how to install torch.
TORCH = frozenset({"import:torch"})


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    """Declare the trackers ``console`` and ``jsonl``."""
    yield TrackerSpec(
        name="console",
        summary="One line of text per logged step.",
        config=Ref("d9d_engine.trackers.config:ConsoleConfig"),
        build=Ref("d9d_engine.trackers.console:ConsoleTracker"),
    )
    yield TrackerSpec(
        name="jsonl",
        summary="One JSON object per logged step in <run>/metrics.jsonl.",
        config=Ref("d9d_engine.trackers.config:JsonlConfig"),
        build=Ref("d9d_engine.trackers.jsonl:JsonlTracker"),
    )


@hookimpl
def d9d_subscribers() -> Iterator[SubscriberSpec]:
    """Declare the subscriber ``early_stopping``."""
    yield SubscriberSpec(
        name="early_stopping",
        summary="Ends the run when a logged series gets no better.",
        config=Ref("d9d_engine.subscribers.config:EarlyStoppingConfig"),
        build=Ref("d9d_engine.subscribers.early_stopping:EarlyStopping"),
    )


@hookimpl
def d9d_views() -> Iterator[ViewSpec]:
    """Declare the views of the mesh that strategies share."""
    pipeline, replicate, tensor = (ViewDim(axis, (axis,)) for axis in ("pp", "dp_replicate", "tp"))
    yield ViewSpec(
        name="dense",
        summary="Parameters that every token uses: replicas of shards.",
        dims=(pipeline, replicate, ViewDim("fsdp", ("dp_shard", "cp")), tensor),
    )
    yield ViewSpec(
        name="expert",
        summary="Parameters of experts, each of which only some tokens use.",
        dims=(
            pipeline,
            ViewDim("expert_replicate", ("dp_replicate",), over=("ep",)),
            ViewDim("expert_fsdp", ("dp_shard", "cp", "tp"), over=("ep",)),
            ViewDim("ep", ("ep",)),
        ),
    )
    yield ViewSpec(
        name="batch",
        summary="Distribution of samples and sequences over ranks.",
        dims=(pipeline, ViewDim("dp", ("dp_replicate", "dp_shard")), ViewDim("cp", ("cp",)), tensor),
    )
    yield ViewSpec(
        name="world",
        summary="All ranks in one row.",
        dims=(ViewDim("world", ("pp", "dp_replicate", "dp_shard", "cp", "tp")),),
    )


@hookimpl
def d9d_health_checks() -> Iterator[HealthCheckSpec]:
    """Declare the health checks of torch, of the device and of the network."""
    yield HealthCheckSpec(
        name="torch",
        summary="torch imports",
        requires=TORCH,
        run=Ref("d9d_engine.cli.health:check_torch"),
    )
    yield HealthCheckSpec(
        name="device",
        summary="which device trains",
        requires=TORCH,
        run=Ref("d9d_engine.cli.health:check_device"),
    )
    yield HealthCheckSpec(
        name="network",
        summary="on which network interfaces runs of several processes listen",
        run=Ref("d9d_engine.cli.health:check_network"),
    )


@hookimpl
def d9d_job_checks() -> Iterator[JobCheckSpec]:
    """Declare the job check ``plan``: builds the model on the meta device, with strategies and kernels."""
    yield JobCheckSpec(
        name="plan",
        summary="Model, strategies and kernels, without a GPU.",
        requires=TORCH,
        run=Ref("d9d_engine.cli.plan:check_plan"),
    )


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the commands ``train`` and ``explain``."""
    yield CommandSpec(
        name="train",
        summary="Train a job, or resume it from its newest checkpoint.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.train:app"),
    )
    yield CommandSpec(
        name="explain",
        summary="Show a job's components, its strategies in order, and the reasons.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.plan:explain_app"),
    )
