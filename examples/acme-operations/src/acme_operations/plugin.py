"""Declarations of acme-operations."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import (
    CommandSpec,
    HealthCheckSpec,
    JobCheckSpec,
    LauncherSpec,
    Ref,
    SubscriberSpec,
    ViewDim,
    ViewSpec,
    hookimpl,
)

D9D_API = 2


@hookimpl
def d9d_subscribers() -> Iterator[SubscriberSpec]:
    """Declare the subscriber ``heartbeat``."""
    yield SubscriberSpec(
        name="heartbeat",
        summary="A file that says which step a run reached, and when.",
        config=Ref("acme_operations.config:HeartbeatConfig"),
        build=Ref("acme_operations.heartbeat:Heartbeat"),
    )


@hookimpl
def d9d_health_checks() -> Iterator[HealthCheckSpec]:
    """Declare the health check ``shared_memory``."""
    yield HealthCheckSpec(
        name="shared_memory",
        summary="Space for tensors that processes share.",
        run=Ref("acme_operations.shared_memory:run"),
    )


@hookimpl
def d9d_job_checks() -> Iterator[JobCheckSpec]:
    """Declare the job check ``token_budget``."""
    yield JobCheckSpec(
        name="token_budget",
        summary="A job reads no more tokens than ACME_TOKEN_BUDGET.",
        run=Ref("acme_operations.token_budget:check"),
    )


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the command ``job_diff``."""
    yield CommandSpec(
        name="job_diff",
        summary="Print the fields in which two job files differ.",
        app=Ref("acme_operations.job_diff:app"),
    )


@hookimpl
def d9d_launchers() -> Iterator[LauncherSpec]:
    """Declare the launcher ``background``."""
    yield LauncherSpec(
        name="background",
        summary="Processes on this machine that outlive the terminal.",
        config=Ref("acme_operations.config:BackgroundConfig"),
        build=Ref("acme_operations.background:Background"),
    )


@hookimpl
def d9d_views() -> Iterator[ViewSpec]:
    """Declare the view ``hosts``."""
    yield ViewSpec(
        name="hosts",
        summary="Pipeline stages, replicas, and ranks that hold one replica.",
        dims=(
            ViewDim("stage", ("pp",)),
            ViewDim("replica", ("dp_replicate",)),
            ViewDim("within", ("dp_shard", "cp", "tp")),
        ),
    )
