"""Hooks of a ``plugin.py``. Each has no arguments and yields frozen records.

pluggy only collects these declarations, once, at start-up; it is not used in training steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import pluggy

from d9d_core import plugin as records

if TYPE_CHECKING:
    from d9d_core.plugin import (
        CapabilitySpec,
        CommandSpec,
        DatasetSpec,
        HeadSpec,
        HealthCheckSpec,
        InferenceTaskSpec,
        JobCheckSpec,
        KernelSpec,
        LauncherSpec,
        LrScheduleSpec,
        MetricSpec,
        ModelSpec,
        OptimizerSpec,
        PeftSpec,
        ScheduleSpec,
        StrategySpec,
        SubscriberSpec,
        TaskSpec,
        TrackerSpec,
        ViewSpec,
        WriterSpec,
    )

__all__ = ["API_RELEASES", "KINDS", "NEWEST_API", "OLDEST_API", "Kind"]

#: pluggy's project name, and the entry-point group.
PROJECT = "d9d"
#: Plugin API -> first release with it, for the APIs that this release supports (docs/api-policy.md). A plugin module
#: states the API that it was written for as ``D9D_API``.
API_RELEASES: Mapping[int, str] = MappingProxyType({2: "0.1"})
#: Oldest plugin API that a plugin may state.
OLDEST_API = min(API_RELEASES)
#: Newest plugin API that a plugin may state.
NEWEST_API = max(API_RELEASES)

hookspec = pluggy.HookspecMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Kind:
    """Extension point: its hook, its record and its section of the job file.

    Attributes:
        name: name in messages, for example ``strategy``.
        hook: hook that yields the records.
        record: type of the records.
        section: job file section that selects a record; ``None`` if no section does.
    """

    name: str
    hook: str
    record: type
    section: str | None


#: Extension points: every kind of record, with its hook and its section of the job file.
KINDS = (
    Kind("model", "d9d_models", records.ModelSpec, "model"),
    Kind("strategy", "d9d_strategies", records.StrategySpec, "parallel"),
    Kind("schedule", "d9d_schedules", records.ScheduleSpec, "pipeline"),
    Kind("task", "d9d_tasks", records.TaskSpec, "task"),
    Kind("inference task", "d9d_inference_tasks", records.InferenceTaskSpec, "task"),
    Kind("writer", "d9d_writers", records.WriterSpec, "writer"),
    Kind("dataset", "d9d_datasets", records.DatasetSpec, "data"),
    Kind("metric", "d9d_metrics", records.MetricSpec, "metrics"),
    Kind("tracker", "d9d_trackers", records.TrackerSpec, "trackers"),
    Kind("peft method", "d9d_peft_methods", records.PeftSpec, "peft"),
    Kind("optimizer", "d9d_optimizers", records.OptimizerSpec, "optimizer"),
    Kind("lr schedule", "d9d_lr_schedules", records.LrScheduleSpec, "lr_schedule"),
    Kind("kernel", "d9d_kernels", records.KernelSpec, "kernels"),
    Kind("subscriber", "d9d_subscribers", records.SubscriberSpec, "subscribers"),
    Kind("head", "d9d_heads", records.HeadSpec, None),
    Kind("launcher", "d9d_launchers", records.LauncherSpec, None),
    Kind("view", "d9d_views", records.ViewSpec, None),
    Kind("health check", "d9d_health_checks", records.HealthCheckSpec, None),
    Kind("job check", "d9d_job_checks", records.JobCheckSpec, None),
    Kind("command", "d9d_commands", records.CommandSpec, None),
    Kind("capability", "d9d_capabilities", records.CapabilitySpec, None),
)


@hookspec
def d9d_models() -> Iterable[ModelSpec]:  # type: ignore[empty-body]
    """Yield the records of model families, which section ``model`` of a job file selects."""


@hookspec
def d9d_strategies() -> Iterable[StrategySpec]:  # type: ignore[empty-body]
    """Yield the records of parallel strategies, which section ``parallel`` of a job file selects."""


@hookspec
def d9d_schedules() -> Iterable[ScheduleSpec]:  # type: ignore[empty-body]
    """Yield the records of pipeline schedules, which section ``pipeline`` of a job file selects."""


@hookspec
def d9d_tasks() -> Iterable[TaskSpec]:  # type: ignore[empty-body]
    """Yield the records of tasks, which section ``task`` of a job file selects."""


@hookspec
def d9d_inference_tasks() -> Iterable[InferenceTaskSpec]:  # type: ignore[empty-body]
    """Yield the records of inference tasks, which section ``task`` of an inference job selects."""


@hookspec
def d9d_writers() -> Iterable[WriterSpec]:  # type: ignore[empty-body]
    """Yield the records of output formats, which section ``writer`` of an inference job selects."""


@hookspec
def d9d_datasets() -> Iterable[DatasetSpec]:  # type: ignore[empty-body]
    """Yield the records of datasets, which section ``data`` of a job file selects."""


@hookspec
def d9d_metrics() -> Iterable[MetricSpec]:  # type: ignore[empty-body]
    """Yield the records of metrics, which section ``metrics`` of a job file selects."""


@hookspec
def d9d_trackers() -> Iterable[TrackerSpec]:  # type: ignore[empty-body]
    """Yield the records of trackers, which section ``trackers`` of a job file selects."""


@hookspec
def d9d_peft_methods() -> Iterable[PeftSpec]:  # type: ignore[empty-body]
    """Yield the records of fine-tuning methods, which section ``peft`` of a job file selects."""


@hookspec
def d9d_optimizers() -> Iterable[OptimizerSpec]:  # type: ignore[empty-body]
    """Yield the records of optimizers, which section ``optimizer`` of a job file selects."""


@hookspec
def d9d_lr_schedules() -> Iterable[LrScheduleSpec]:  # type: ignore[empty-body]
    """Yield the records of learning-rate schedules, which section ``lr_schedule`` of a job file selects."""


@hookspec
def d9d_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Yield the records of kernels (backends of ops), which section ``kernels`` of a job file selects."""


@hookspec
def d9d_subscribers() -> Iterable[SubscriberSpec]:  # type: ignore[empty-body]
    """Yield the records of subscribers to events, which section ``subscribers`` of a job file selects."""


@hookspec
def d9d_heads() -> Iterable[HeadSpec]:  # type: ignore[empty-body]
    """Yield the records of kinds of heads, which ``model.heads`` of a job file selects by ``kind``."""


@hookspec
def d9d_launchers() -> Iterable[LauncherSpec]:  # type: ignore[empty-body]
    """Yield the records of launchers, which ``d9d launch --engine`` selects."""


@hookspec
def d9d_views() -> Iterable[ViewSpec]:  # type: ignore[empty-body]
    """Yield the records of views of the mesh, which strategies use."""


@hookspec
def d9d_health_checks() -> Iterable[HealthCheckSpec]:  # type: ignore[empty-body]
    """Yield the records of health checks, which ``d9d doctor`` runs."""


@hookspec
def d9d_job_checks() -> Iterable[JobCheckSpec]:  # type: ignore[empty-body]
    """Yield the records of job checks, which ``d9d check`` runs in addition to its own checks."""


@hookspec
def d9d_commands() -> Iterable[CommandSpec]:  # type: ignore[empty-body]
    """Yield the records of additional sub-commands of ``d9d``."""


@hookspec
def d9d_capabilities() -> Iterable[CapabilitySpec]:  # type: ignore[empty-body]
    """Yield the records of capability tokens in the plugin's own namespace."""
